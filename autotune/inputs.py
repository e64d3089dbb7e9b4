"""Arrays to run a problem on: random, and the same on every machine for the same problem."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from autotune.space import Problem, Sizes, canonical
from autotune.step_inputs import STEP_RULES
from deepinfer.errors import TargetError
from deepinfer.ir.types import DTYPES, E2M1, E4M3, I32, I64, U8, U64, UE8M0, DType
from deepinfer.numerics.formats import dequantize_fp8, quantize_fp8
from deepinfer.ops.moe import group_rows

Array = np.ndarray[Any, Any]
Made = dict[str, Array]
SCALES = (122, 130)  # codes of 2^-5 .. 2^2: products stay far from the ends of the range


def _grouped(made: Made, rng: np.random.Generator) -> Made:
    """Rows that are sorted by expert: what ``group_rows`` makes of an even router's choice."""
    experts, tokens = len(made["offsets"]) - 1, len(made["weight"])
    keys = rng.random((tokens, experts))
    chosen = np.sort(np.argsort(keys, axis=1)[:, :made["weight"].shape[1]], axis=1)
    order, offsets = group_rows(chosen.astype(np.int32), experts=experts)
    return {"order": order, "offsets": offsets}


def _down(made: Made, rng: np.random.Generator) -> Made:
    experts, rows = len(made["offsets"]) - 1, len(made["order"])
    expert = rng.integers(0, experts, rows)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(expert, minlength=experts))])
    return {"order": np.argsort(expert, kind="stable").astype(np.int32),
            "offsets": offsets.astype(np.int32)}


def _reduce(made: Made, rng: np.random.Generator) -> Made:
    return {"idx": np.sort(rng.integers(0, 1 << 10, made["idx"].shape).astype(np.int32), axis=1)}


# What integer operands mean, by op: without a rule here they cannot be made up.
RULES: dict[str, Callable[[Made, np.random.Generator], Made]] = {
    "grouped_gate_up": _grouped,
    "grouped_gate_up_fake_quant": _grouped,
    "grouped_down": _down,
    "expert_reduce": _reduce,
    "hyper_start": lambda made, rng: {},
    "hyper_gather": lambda made, rng: {
        "rows": rng.integers(0, max(1, len(made["x"])), len(made["rows"])).astype(np.int32)},
}

# Their rows come from ``fake_quantize_fp8``, and a kernel may be faster on such rows.
OF_FP8_ROWS = ("grouped_gate_up", "grouped_gate_up_fake_quant", "grouped_down",
               "packed_linear_fp4", "packed_linear_fp8", "packed_linear_fp8_fake_quant")


def can_make(problem: Problem) -> bool:
    """Whether inputs are known for the problem's integer operands."""
    integer = any(DTYPES[dtype] in (I32, I64, U64) for _, dtype, _ in problem.inputs)
    return problem.op in RULES or problem.op in STEP_RULES or not integer


def make(problem: Problem, sizes: Sizes) -> tuple[Array, ...]:
    """Arrays for the operands, in order.

    Raises:
        TargetError: an operand's integers mean something that is not known here.
    """
    if not can_make(problem):
        raise TargetError(f"no inputs are known for the integer operands of '{problem.op}'",
                          where="tuning", next="give autotune/inputs.py a rule for them")
    seed = hashlib.sha256(canonical([problem.key, sizes]).encode()).digest()
    rng = np.random.default_rng(int.from_bytes(seed[:8], "little"))
    node, made = problem.node(), {}
    for value in node.inputs:
        made[value.name] = _random(value.type.dtype, value.type.storage(dict(sizes)), rng)
    if problem.op in RULES:
        made.update(RULES[problem.op](made, rng))
    if problem.op in STEP_RULES:
        made.update(STEP_RULES[problem.op](made, rng, problem.attrs))
    if problem.op in OF_FP8_ROWS:
        x = node.inputs[0].name
        made[x] = dequantize_fp8(*quantize_fp8(made[x]))
    return tuple(np.ascontiguousarray(made[v.name]) for v in node.inputs)


def _random(dtype: DType, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    if dtype in (I32, I64, U64):
        return np.zeros(shape, dtype.numpy)
    if dtype is UE8M0:
        return rng.integers(*SCALES, shape, np.uint8).view(dtype.numpy)
    if dtype is E2M1:
        return rng.integers(0, 256, shape, np.uint8)
    if dtype is E4M3:  # every code but the two NaNs
        codes: Array = rng.integers(0, 0x7F, shape, np.uint8)
        codes |= rng.integers(0, 2, shape, np.uint8) << 7
        return codes.view(dtype.numpy)
    if dtype is U8:
        return rng.integers(0, 2, shape, np.uint8)
    return rng.standard_normal(shape, np.float32).astype(dtype.numpy)
