"""The launch tables of a phase."""

from __future__ import annotations

import re

import pytest

from deepinfer.codegen.emit import plan_phase
from deepinfer.errors import TargetError, ToolchainError
from deepinfer.ir import ELEMENTWISE, Builder, Op, Sym, TensorType
from deepinfer.ir.signature import parse_signature
from deepinfer.ir.types import F32, U8
from deepinfer.targets.base import LoweredKernel
from deepinfer.targets.cpu.step_tables import MAX_ARGS, MAX_DIMS, phase_tables, step_text
from deepinfer.targets.cpu.toolchain import MICRO, thunk_text
from tests.codegen.fake_target import target
from tests.ir.graphs import Ops, small


def test_tables():
    plan = plan_phase(small(Ops()), target("scale", "halves", "store"))
    text = phase_tables("prefill", plan)
    symbols = [x.instance.symbol for x in plan.launches]
    rows = re.findall(r"\{(\w+)_thunk, ([-\d, ]+)\}", text)
    assert [r[0] for r in rows] == symbols
    # args at, how many, of them inputs; dims at, how many; items: size index, times, over
    assert [r[1] for r in rows] == ["0, 3, 2, 0, 1, 0, 1, 1", "3, 2, 2, 1, 2, 0, 1, 1",
                                    "5, 3, 2, 3, 1, 0, 1, 1", "8, 3, 1, 4, 1, 0, 1, 1"]
    names = [v.name for v in plan.values]
    args = [int(i) for i in re.search(r"prefill_args\[\] = \{(.*)\}", text)[1].split(", ")]
    assert [names[i] for i in args] == [v.name for n in plan.graph.nodes
                                        for v in (*n.inputs, *n.outputs)]
    assert "prefill_dims[] = {0, 1, 0, 1, 1, 1, 0, 1, 0, 1}" in text  # (size index, times)
    sizes = re.search(r"prefill_bytes\[\] = \{\n(.*?)\n\};", text, re.S)[1]
    assert sizes.split(",\n")[:3] == ["  {16, 0, -1}", "  {16, -1, -1}", "  {16, 1, -1}"]
    whole = step_text({"prefill": plan, "decode": plan}, abi=7)
    assert whole.count('extern "C" void') == len(set(symbols))
    assert "deepinfer_abi() { return 7; }" in whole and "int32_t deepinfer_decode(" in whole


def test_limits_are_those_of_the_header():
    text = (MICRO / "step.h").read_text()
    assert f"kMaxArgs = {MAX_ARGS}, kMaxDims = {MAX_DIMS};" in text


def tables_of(name: str, signature: str, *types: TensorType) -> str:
    made = Op(name, parse_signature(signature), ELEMENTWISE, lambda *arrays: None, "")
    with Builder("g") as b:
        made(*(b.input(f"x{i}", t) for i, t in enumerate(types)))
    return phase_tables("g", plan_phase(b.graph([]), target(name)))


def test_what_does_not_fit_the_tables():
    many = ", ".join(f"x{i}:u8[N]" for i in range(MAX_ARGS + 1))
    with pytest.raises(TargetError, match="33 operands and 0 symbolic dims, expected at most 32"):
        tables_of("many", f"{many} -> ", *[TensorType((3,), U8)] * (MAX_ARGS + 1))
    cube = TensorType((Sym("a", 2), Sym("b", 2), Sym("c", 2)), F32)
    with pytest.raises(TargetError, match="has 3 symbolic dims, expected at most 2"):
        tables_of("cube", "y:f32[N,B,C] -> ", cube)


def test_thunk():
    plan = plan_phase(small(Ops()), target("scale", "halves", "store"))
    spec = plan.launches[0].instance.spec
    lowered = LoweredKernel("k", "void k() {}\n", (
        ("C", "int32_t"), ("lo", "int32_t"), ("hi", "int32_t"), ("w", "float*"), ("y", "float*"),
        ("scratch", "uint8_t*"), ("x", "float*"), ("N", "int32_t")))
    with pytest.raises(ToolchainError, match="'int32_t C' is no operand or dim of scale"):
        thunk_text(lowered, spec)  # C is fixed, so no argument may be called so
    text = thunk_text(LoweredKernel("k", lowered.text, lowered.params[1:]), spec)
    assert ("k(lo, hi, (float*)args[1], (float*)args[2], (uint8_t*)scratch, (float*)args[0], "
            "dims[0]);") in text
