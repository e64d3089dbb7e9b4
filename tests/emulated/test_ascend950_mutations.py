"""Mutation campaigns over the generated text of the ascend950 kernels.

A survivor is either equivalent on the shape run, or a hole of the emulator. When the kernels were
written all mutants were noticed (norm_quant 47, rope_window_write 51, topk 30, linear_fp8 85,
linear_fp4 103, sparse_attention 203) but for three whose change says nothing: a gap after the only
burst of a copy.
"""

from __future__ import annotations

import pytest

from deepinfer.testing.emulators.ascend950.mutate import Survey, survey
from tests.emulated import (
    test_ascend950_attention,
    test_ascend950_linear,
    test_ascend950_rows,
    test_ascend950_topk,
)
from tests.emulated.ascend950_harness import Case, Compare, emulate, fault, same_bits


def kernels() -> dict[str, tuple[Case, Compare]]:
    """A small case of each kernel in which every core or stage comes back."""
    eight = test_ascend950_linear.case("fp8", 37, 160, 320, 3)
    four = test_ascend950_linear.case("fp4", 37, 160, 320, 3)
    attention = test_ascend950_attention.case(12, 64, 100, [(0, 0, 33)], [170], 80, 3)
    return {"norm_quant": (test_ascend950_rows.norm(131, 160, 1), same_bits),
            "rope_window_write": (test_ascend950_rows.rope_write([(2, 0, 131)], [5], 160, 48, 1),
                                  same_bits),
            "topk": (test_ascend950_topk.case(131, 700, 12, 2, 1), same_bits),
            "linear_fp8": (eight, test_ascend950_linear.bound(eight)),
            "linear_fp4": (four, test_ascend950_linear.bound(four)),
            "sparse_attention": (attention, test_ascend950_attention.bound(attention))}


def campaign(name: str) -> Survey:
    """All single mutants of one kernel."""
    c, compare = kernels()[name]
    text = emulate(c).lowered.text
    assert fault(c, text, compare) == ""
    return survey(text, lambda mutant: fault(c, mutant, compare))


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(kernels()))
def test_most_mutants_are_noticed(name: str) -> None:
    found = campaign(name)
    run = found.outcomes.total() - found.outcomes["does not compile"]
    survivors = "\n".join(f"{m.kind}, line {m.line}: {m.was}" for m in found.survivors)
    print(f"{name}: {dict(found.outcomes)}\n{survivors}")
    assert len(found.survivors) <= run // 20, survivors
