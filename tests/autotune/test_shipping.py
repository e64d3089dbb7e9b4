"""schedules.json: written by apply, read by select; exact kernels only, nothing by nearness."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autotune.effort import Effort
from autotune.results import Result, results
from autotune.shipping import file_text, propose, undo, write
from autotune.stats import Timing
from autotune.verify import verify
from deepinfer.codegen import schedules
from deepinfer.codegen.schedules import Entry, choose, kernel_key, read_entries
from deepinfer.errors import TargetError
from tests.autotune.fakes import (
    MACHINE,
    SPACE,
    FakeRunner,
    Heard,
    fake_target,
    problem,
    run_search,
    task,
    temporary,
    use_space,
)

BODY = MACHINE.to_json()


@pytest.fixture(autouse=True)
def space(monkeypatch):
    use_space(monkeypatch)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Where the target "fake" keeps its schedules."""
    monkeypatch.setattr(schedules, "TARGETS", tmp_path)
    (tmp_path / "fake").mkdir()
    return tmp_path / "fake" / "schedules.json"


def result(small: dict[int, float], large: dict[int, float], width: int = 64) -> Result:
    """Times of schedules at one row and at 256."""
    timings = {i: (Timing(small[i], 0, 0, 9, 3), Timing(large[i], 0, 0, 9, 3)) for i in small}
    return Result("k", problem(width), MACHINE.id, "s", {i: str(SPACE[i]) for i in small},
                  dict.fromkeys(small, "text"), task().points, timings)


def proposed(path, *found: Result, source="text"):
    return propose(found, path, BODY, lambda r, i: source)


def choice(phase: str, width: int = 64):
    made = problem(width)
    return choose(fake_target(SPACE).kernels[made.op], made.spec(), "fake", phase)


def test_the_default_where_there_is_no_file(path):
    assert choice("decode") == SPACE[0] and read_entries(path) == {}


def test_apply_then_select(path, tmp_path):
    """A schedule that is better everywhere is one entry, for all phases of exactly this kernel."""
    made = proposed(path, result({0: 100, 3: 50}, {0: 900, 3: 450}))
    (change,) = made.changes
    assert change.text().endswith("a=0,b=3, expected x2.000") and change.text().startswith("+ ")
    assert made.gain == pytest.approx(2)
    write(path, made.entries, temporary(tmp_path), 1)
    assert choice("decode") == choice("prefill") == choice("draft") == SPACE[3]
    assert choice("decode", width=65) == choice("decode", width=128) == SPACE[0]
    assert proposed(path, result({0: 100, 3: 50}, {0: 900, 3: 450})).changes == ()


def test_phases_may_differ(path, tmp_path):
    made = proposed(path, result({0: 100, 3: 50, 4: 100}, {0: 900, 3: 990, 4: 600}))
    write(path, made.entries, temporary(tmp_path), 1)
    assert choice("decode") == choice("verify") == SPACE[3] and choice("prefill") == SPACE[4]


@pytest.mark.parametrize("measured", ["small", "large"])
def test_a_phase_that_was_not_measured_keeps_the_default(path, tmp_path, measured):
    both = result({0: 100, 3: 50}, {0: 100, 3: 50})
    at = 0 if measured == "small" else 1
    both.points = both.points[at:at + 1]
    both.times = {i: t[at:at + 1] for i, t in both.times.items()}
    write(path, proposed(path, both).entries, temporary(tmp_path), 1)
    assert (choice("decode") == SPACE[3]) == (measured == "small")
    assert (choice("prefill") == SPACE[3]) == (measured == "large")


def test_the_file_is_sorted_and_reviewable(path, tmp_path):
    found = [result({0: 100, 3: 50}, {0: 100, 3: 50}, width) for width in (128, 64, 256)]
    made = proposed(path, *found)
    write(path, made.entries, temporary(tmp_path), 1)
    text = path.read_text()
    assert text == file_text(made.entries) == file_text(proposed(path, *found[::-1]).entries)
    held = json.loads(text)["schedules"]
    assert [e["kernel"] for e in held] == sorted(e["kernel"] for e in held)
    assert len(text.splitlines()) == len(held) + 2  # an entry a line
    assert held[0]["schedule"] == {"a": 0, "b": 3} and held[0]["gain"] == 2.0
    assert held[0]["points"] == [{"sizes": {"rows": 1}, "default_us": 0.1, "tuned_us": 0.05}]


def test_entries_of_other_kernels_stay_and_losers_go(path, tmp_path):
    store = temporary(tmp_path)
    write(path, proposed(path, result({0: 9, 3: 5}, {0: 9, 3: 5}),
                         result({0: 9, 3: 5}, {0: 9, 3: 5}, 128)).entries, store, 1)
    made = proposed(path, result({0: 9, 3: 9}, {0: 9, 3: 9}))
    assert [c.text()[0] for c in made.changes] == ["-"] and len(made.entries) == 1
    write(path, made.entries, store, 2)
    assert choice("decode") == SPACE[0] and choice("decode", 128) == SPACE[3]


def test_undo(path, tmp_path):
    store, texts = temporary(tmp_path), []
    for at, ns in ((1, 50), (2, 25)):
        write(path, proposed(path, result({0: 100, at: ns}, {0: 100, at: ns})).entries, store, at)
        texts.append(path.read_text())
    undo(path, store)
    assert path.read_text() == texts[0]
    path.write_text(texts[0] + "\n")
    with pytest.raises(TargetError, match="changed since"):
        undo(path, store)
    path.write_text(texts[0])
    undo(path, store)
    assert not path.exists()
    with pytest.raises(TargetError, match="nothing was applied"):
        undo(path, store)


def test_stale_results_are_not_applied(path):
    """The source changed, or the space: what was measured is not what would be built."""
    found = result({0: 100, 3: 50}, {0: 100, 3: 50})
    made = proposed(path, found, source="edited")
    assert made.changes == () and made.stale == (problem().key,)
    found.schedules[3] = "a=0,b=7"
    assert proposed(path, found).stale == (problem().key,)


@pytest.mark.parametrize(("text", "message"), [
    ("{", "no schedules file"), ("[]", "no schedules file"), ('{"format": 9}', "format is 9"),
    ('{"format": 1, "schedules": [{"kernel": "k"}]}', "no schedules file: KeyError"),
    ('{"format": 1, "schedules": [{"kernel": "k", "phase": "", "schedule": {"a": "1"}}]}',
     "holds ints"),
    ('{"format": 1, "schedules": [' + ",".join(
        ['{"kernel": "k", "phase": "", "schedule": {"a": 1}}'] * 2) + "]}", "two schedules"),
])
def test_a_broken_file_is_an_error_not_a_default(path, text, message):
    path.write_text(text)
    with pytest.raises(TargetError, match=message) as caught:
        choice("decode")
    assert str(path) in caught.value.where


def test_a_schedule_outside_the_space_is_an_error(path):
    entry = Entry(problem().key, "", replace(SPACE[0], items=(("a", 77), ("b", 0))), {})
    path.write_text(file_text({(entry.kernel, ""): entry}))
    with pytest.raises(TargetError, match="schedule a=77,b=0 is not in the kernel's space"):
        choice("decode")
    assert choice("decode", width=128) == SPACE[0]


def test_keys_leave_out_the_schedule_only():
    spec = problem().spec()
    assert kernel_key(spec) == kernel_key(problem().spec(SPACE[5])) == problem().key
    assert spec.op.order.digest() in problem().key and "@" not in problem().key


def checked(path, tmp_path, runner, problems=None):
    known = {problem().key: problem()} if problems is None else problems
    return verify(dict(read_entries(path)), known, runner, temporary(tmp_path, "v.db"), "v",
                  Effort("exhaustive", fresh=True), Heard())


@pytest.mark.parametrize(("factor", "bits", "state"), [
    (0.5, {}, "ok"), (1.0, {}, "ok"), (1.2, {}, "slower"), (0.5, {3: "other"}, "bits")])
def test_verify(path, tmp_path, factor, bits, state):
    write(path, proposed(path, result({0: 100, 3: 50}, {0: 100, 3: 50})).entries,
          temporary(tmp_path), 1)
    runner = FakeRunner(lambda c, s: 1e4 * (factor if c.index == 3 else 1), bits=bits)
    (got,) = checked(path, tmp_path, runner)
    assert got.state == state and got.good == (state == "ok")
    assert {i for _, i in runner.calls} == {0, 3}
    if state == "slower":
        assert got.gain == pytest.approx(1 / 1.2, rel=0.01) and "rows=1" in got.detail


def test_verify_says_what_it_cannot_find(path, tmp_path, monkeypatch):
    write(path, proposed(path, result({0: 100, 3: 50}, {0: 100, 3: 50})).entries,
          temporary(tmp_path), 1)
    runner = FakeRunner(lambda c, s: 1e4)
    (got,) = checked(path, tmp_path, runner, {})
    assert (got.state, got.good, runner.calls) == ("unknown", True, [])
    use_space(monkeypatch, SPACE[:2])
    (got,) = checked(path, tmp_path, runner)
    assert (got.state, got.good, runner.calls) == ("gone", False, [])


def test_from_measurements_to_the_file(path, tmp_path):
    store = temporary(tmp_path)
    run_search(FakeRunner(lambda c, s: 1e4 * (0.5 if c.index == 6 else 1)), store)
    found = results(store, MACHINE.id)
    made = propose(found, path, BODY, lambda r, i: f"edited{i}")
    assert made.changes == ()  # not the digests that were measured
    made = propose(found, path, BODY, lambda r, i: r.sources[i])
    write(path, made.entries, store, 1)
    assert choice("decode") == SPACE[6]
