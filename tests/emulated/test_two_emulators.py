"""The emulators of two targets in one process: instrumented code must reach its own runtime."""

from __future__ import annotations

from tests.emulated import ascend950_harness, sm100_harness, test_ascend950_rows, test_sm100_rows


def test_they_do_not_answer_for_each_other() -> None:
    """Both runtimes define the names that the compiler's instrumentation calls. Whichever is
    loaded first, a kernel of the other is clean and has the reference's bits."""
    for _ in range(2):
        ascend950_harness.check(test_ascend950_rows.norm(3, 160, 1))
        sm100_harness.check(test_sm100_rows.norm(3, 160, 1), schedules=("eager", "lazy"))
