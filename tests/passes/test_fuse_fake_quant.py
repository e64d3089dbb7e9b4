"""Pass fuse_fake_quant is exact, and fuses only what a kernel of whole tiles can quantise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer.checkpoint.layouts import apply_layout, split_name
from deepinfer.ir import Builder, Graph, Kind, Sym, TensorType, Value
from deepinfer.ir.eval import evaluate
from deepinfer.ir.rewrite import drop_dead
from deepinfer.ir.types import BF16, E2M1, E4M3, F32, I32, UE8M0
from deepinfer.ir.verify import verify
from deepinfer.numerics.formats import quantize_fp4_ue8m0, quantize_fp8, to_bf16
from deepinfer.ops.gemm import grouped_linear_fp8, linear_fp8, silu_mul
from deepinfer.ops.moe import expert_down, expert_gate_up
from deepinfer.ops.quant import fake_quantize_fp8
from deepinfer.ops.quant import quantize_fp8 as quantize
from deepinfer.passes.fuse_fake_quant import fuse_fake_quant
from deepinfer.passes.group_experts import group_experts
from deepinfer.passes.prepack_weights import prepack_weights
from deepinfer.passes.widen_activations import widen_activations

Array = np.ndarray[Any, Any]
N, E, C, K = Sym("num_tokens", 64), 4, 64, 2
FUSED = ["grouped_gate_up_fake_quant", "packed_linear_fp8_fake_quant", "silu_mul_fake_quant"]


def fp8(b: Builder, name: str, m: int, k: int = C) -> tuple[Value, Value]:
    return (b.weight(name, TensorType((m, k), E4M3)),
            b.weight(name + ".scale", TensorType((-(-m // 32), k // 32), UE8M0)))


def fp4(b: Builder, name: str, m: int, k: int) -> tuple[Value, Value]:
    return (b.weight(name, TensorType((E, m, k), E2M1)),
            b.weight(name + ".scale", TensorType((E, m, k // 32), UE8M0)))


def layer() -> Graph:
    """Experts, a shared expert, and an output projection by groups, each quantised for one reader
    or two."""
    with Builder("test") as b:
        x = b.input("x", TensorType((N, C), BF16))
        idx = b.input("idx", TensorType((N, K), I32))
        weight = b.input("weight", TensorType((N, K), F32))
        codes = quantize(x)
        hidden = expert_gate_up(*codes, *fp4(b, "w1", 96, C), *fp4(b, "w3", 96, C), idx, weight,
                                limit=2.0)
        y = expert_down(*quantize(hidden), *fp4(b, "w2", C, 96), idx)
        act = silu_mul(linear_fp8(*codes, *fp8(b, "s1", C)), linear_fp8(*codes, *fp8(b, "s3", C)),
                       limit=2.0)
        again = quantize(act)
        shared = [linear_fp8(*again, *fp8(b, name, 48)) for name in ("s2", "s4")]
        z = grouped_linear_fp8(x, *fp8(b, "wo_a", 64, 32), groups=2)
        return b.graph([y, *shared, linear_fp8(*quantize(z), *fp8(b, "wo_b", 32))])


def source(graph: Graph, n: int = 7) -> dict[str, Array]:
    """Inputs of n rows, and weights by their name in the checkpoint."""
    g = np.random.default_rng(n)

    def normal(*shape: int) -> Array:
        return g.standard_normal(shape).astype(np.float32)

    made: dict[str, Array] = {
        "x": to_bf16(normal(n, C)), "weight": np.abs(normal(n, K)), "h": to_bf16(normal(n, C)),
        "idx": np.array([np.sort(g.choice(E, K, False)) for _ in range(n)],
                        np.int32).reshape(n, K)}
    for value in graph.of_kind(Kind.WEIGHT):
        shape = value.type.concrete({})
        if value.type.dtype is E2M1:
            made[value.name], made[value.name + ".scale"] = quantize_fp4_ue8m0(
                to_bf16(normal(*shape)))
        elif value.type.dtype is E4M3:
            made[value.name], scale = quantize_fp8(to_bf16(normal(*shape)))
            made[value.name + ".scale"] = np.ascontiguousarray(scale[::32])
    return made


def outputs(graph: Graph, given: dict[str, Array]) -> list[bytes]:
    arrays = {v.name: apply_layout(v.name, given[split_name(v.name)[0]]) for v in graph.inputs}
    return [a.tobytes() for a in evaluate(graph, arrays).values()]


def packed(graph: Graph) -> Graph:
    return prepack_weights(drop_dead(group_experts(widen_activations(graph))))


def names(graph: Graph) -> list[str]:
    return sorted(n.op.name for n in graph.nodes if n.op.name.endswith("fake_quant")
                  or n.op is fake_quantize_fp8)


@pytest.mark.parametrize("n", [0, 1, 7])
def test_exact(n: int) -> None:
    before = layer()
    after = fuse_fake_quant(packed(before))
    verify(after)
    assert names(after) == ["fake_quantize_fp8", *FUSED]  # the one of the input x stays
    given = source(before, n)
    assert outputs(after, given) == outputs(before, given)


def test_the_attributes_are_those_of_both() -> None:
    node = next(n for n in fuse_fake_quant(packed(layer())).nodes if n.op.name == FUSED[1])
    assert dict(node.attrs) == {"block": 32, "groups": 2, "m": 64}
    assert node.outputs[0].name.endswith(".wide")


def test_a_dead_quantiser_does_not_count() -> None:
    graph = prepack_weights(group_experts(widen_activations(layer())))
    assert any(n.op is quantize for n in graph.nodes)
    assert names(fuse_fake_quant(graph)) == ["fake_quantize_fp8", *FUSED]


def quantised(m: int, *, groups: int = 1, block: int = 32, keep: bool = False,
              out: str = "bf16") -> tuple[Graph, Graph]:
    """A packed linear of m outputs and its quantiser, before and after the pass."""
    with Builder("test") as b:
        x = b.input("x", TensorType((N, C), BF16))
        if groups > 1:
            z = grouped_linear_fp8(x, *fp8(b, "w", m, C // groups), groups=groups)
        else:
            z = linear_fp8(*quantize(x), *fp8(b, "w", m), out=out)
        wide = fake_quantize_fp8(z, block=block)
        before = b.graph([wide, z] if keep else [wide])
    return before, fuse_fake_quant(packed(before))


def test_whole_blocks_of_a_linear_are_fused() -> None:
    assert FUSED[1] in names(quantised(96)[1])


@pytest.mark.parametrize("case", [
    {"m": 48, "block": 16}, {"m": 48, "block": 48}, {"m": 64, "block": 64},
    {"m": 96, "groups": 2}, {"m": 32, "groups": 2}, {"m": 96, "keep": True}], ids=str)
def test_what_is_left_alone(case: dict[str, Any]) -> None:
    """Blocks that are not two tiles, groups of one and of three tiles, rows that are an output."""
    if case.get("groups") and case["m"] // case["groups"] % 32:
        assert case["m"] // case["groups"] % 16 == 0  # packed all the same
    before, after = quantised(**case)
    assert "packed_linear_fp8" in [n.op.name for n in after.nodes]
    assert FUSED[1] not in names(after)
    given = source(before)
    assert outputs(after, given) == outputs(before, given)


def test_experts_whose_tiles_do_not_pair_are_left_alone() -> None:
    """48 columns are three tiles of 16: three blocks of 16, no whole number of blocks of 32."""
    with Builder("test") as b:
        x = b.input("x", TensorType((N, C), BF16))
        idx = b.input("idx", TensorType((N, K), I32))
        weight = b.input("weight", TensorType((N, K), F32))
        hidden = expert_gate_up(*quantize(x), *fp4(b, "w1", 48, C), *fp4(b, "w3", 48, C), idx,
                                weight, limit=2.0)
        before = b.graph([fake_quantize_fp8(hidden, block=16)])
    after = fuse_fake_quant(packed(before))
    assert [n.op.name for n in after.nodes][-2:] == ["grouped_gate_up", "fake_quantize_fp8"]


def test_rows_with_a_second_reader_are_left_alone() -> None:
    with Builder("test") as b:
        h = b.input("h", TensorType((N, C), BF16))
        act = silu_mul(h, h, limit=2.0)
        before = b.graph([fake_quantize_fp8(act), silu_mul(act, h, limit=3.0)])
    after = fuse_fake_quant(before)
    assert [n.op.name for n in after.nodes] == ["silu_mul", "fake_quantize_fp8", "silu_mul"]
    given = source(before)
    assert outputs(after, given) == outputs(before, given)
