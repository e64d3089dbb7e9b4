"""Mutation campaigns over the generated text of the asynchronous sm100 kernels.

A survivor is either equivalent on the shape run, or a hole of the emulator. When the kernels were
written: linear_fp8 and linear_fp4 54 of 63 noticed, sparse_attention 44 of 60. All but two of the
survivors are fences and barriers that TileLang writes twice, each of which covers for the other.
"""

from __future__ import annotations

import pytest

from deepinfer.testing.emulators.sm100.mutate import Survey, survey
from tests.emulated import test_sm100_attention, test_sm100_linear
from tests.emulated.sm100_harness import emulate, fault


def campaign(name: str) -> Survey:
    """All single mutants of one kernel on a small shape."""
    if name == "sparse_attention":
        c = test_sm100_attention.case(16, 64, 128, [(0, 0, 1)], [200], 80, 3)
        compare, schedule = test_sm100_attention.bound(c), None
    else:
        c = test_sm100_linear.case(name, 37, 160, 640, 3)
        compare, schedule = test_sm100_linear.bound(c), test_sm100_linear.SHORT
    text = emulate(c, schedule).lowered.text
    assert fault(c, text, compare, schedule=schedule) == ""
    return survey(text, lambda mutant: fault(c, mutant, compare, schedule=schedule))


@pytest.mark.full
@pytest.mark.parametrize("name", ["fp8", "fp4", "sparse_attention"])
def test_most_mutants_are_noticed(name: str) -> None:
    found = campaign(name)
    run = found.outcomes.total() - found.outcomes["does not compile"]
    survivors = "\n".join(f"{m.kind}, line {m.line}: {m.was}" for m in found.survivors)
    print(f"{name}: {dict(found.outcomes)}\n{survivors}")
    assert len(found.survivors) <= run // 3, survivors
