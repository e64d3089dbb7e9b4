"""The static model: what it may claim is order, from rules that can be checked."""

from __future__ import annotations

import pytest

from autotune.model import LABEL, Modelled, model, waves
from autotune.space import Candidate, Problem
from deepinfer.errors import TargetError
from deepinfer.ir.op import Attrs
from deepinfer.targets.base import Schedule

LAUNCH = {"grid": ["T.Cast(\"int64\", (N + 63) // 64)", 8, 1], "threads": 128,
          "dynamic_smem": 50_000}


def linear(target: str) -> Problem:
    """linear_fp8 of 1024 inputs and outputs."""
    return Problem(target, "linear_fp8", Attrs({"out": "bf16"}), (
        ("temp", "e4m3", (("rows", 1), 1024)), ("temp", "ue8m0", (("rows", 1), 32)),
        ("weight", "e4m3", (1024, 1024)), ("weight", "ue8m0", (32, 32))))


def candidate(target: str, **knobs: int) -> Candidate:
    return Candidate(linear(target), 0, Schedule(tuple(sorted(knobs.items()))))


def sm100(rows: int, launch=None, **knobs: int) -> Modelled:
    return model(candidate("sm100", **knobs), (("rows", rows),), launch or LAUNCH)


def test_waves():
    assert waves(10, 10) == waves(20, 10) == 1 and waves(5, 10) == 0.5 and waves(11, 10) == 0.55
    assert waves(0, 10) == 1


def test_more_rows_take_longer():
    ns = [sm100(r, tokens=64, stages=4).ns for r in (4096, 8192, 16384)]
    assert ns == sorted(ns) and ns[0] < ns[2]


def test_weights_that_are_read_again_cost():
    assert sm100(4096, tokens=32, stages=4).ns > sm100(4096, tokens=128, stages=4).ns


def test_padding_costs():
    """One row in a tile of 128 does 128 times the arithmetic."""
    big = sm100(1, launch={**LAUNCH, "grid": [1, 1, 1]}, tokens=128, stages=4)
    small = sm100(1, launch={**LAUNCH, "grid": [1, 1, 1]}, tokens=1, stages=4)
    assert big.ns >= small.ns


def test_a_single_buffer_does_not_overlap():
    assert sm100(4096, tokens=64, stages=1).ns > sm100(4096, tokens=64, stages=2).ns


def test_shared_memory_limits_what_is_resident():
    fat = sm100(1 << 16, launch={**LAUNCH, "dynamic_smem": 200_000}, tokens=64, stages=4)
    assert fat.use <= 1 and fat.ns >= 0
    with pytest.raises(TargetError, match="more than the machine has"):
        sm100(64, launch={**LAUNCH, "dynamic_smem": 500_000}, tokens=64, stages=4)


def test_ascend_divides_rows_among_its_cores():
    got = model(candidate("ascend950", tokens=64), (("rows", 256),),
                {"grid": 32, "cores": "mixed", "memory": {}})
    assert got.use == 1.0 and got.bound in ("memory", "arithmetic")


def test_the_label():
    assert LABEL == "modelled"
