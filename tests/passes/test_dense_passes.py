"""The dense passes are exact: the evaluator gives the same bits before and after each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deepinfer.checkpoint.layouts import apply_layout, split_name
from deepinfer.errors import PassError
from deepinfer.ir import Builder, Graph, Kind, Sym, TensorType, Value, types
from deepinfer.ir.eval import evaluate
from deepinfer.ir.text import graph_text
from deepinfer.ir.verify import verify
from deepinfer.ops.gemm import grouped_linear_fp8, linear, linear_fp4, linear_fp8, silu_mul
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.quant import quantize_fp8
from deepinfer.passes.drop_dead import drop_dead
from deepinfer.passes.fuse_norm_quant import fuse_norm_quant
from deepinfer.passes.prepack_weights import packed, prepack_weights
from deepinfer.passes.widen_activations import widen_activations

Array = np.ndarray[Any, Any]
N = Sym("num_tokens", 8)


def weight(b: Builder, name: str, dtype: types.DType, *shape: int) -> Value:
    return b.weight(name, TensorType(shape, dtype))


def fp8(b: Builder, name: str, m: int, k: int) -> tuple[Value, Value]:
    return (weight(b, f"{name}.weight", types.E4M3, m, k),
            weight(b, f"{name}.scale", types.UE8M0, -(-m // 32), k // 32))


def layer() -> Graph:
    """A norm read by fp8 linears alone, one read by other ops too, and every kind of linear."""
    with Builder("layer") as b:
        x = b.input("x", TensorType((N, 64), types.BF16))
        with b.scope("a"):
            u = rms_norm(x, weight(b, "a.norm", types.BF16, 64), eps=1e-20)
            codes = quantize_fp8(u)
            h = silu_mul(linear_fp8(*codes, *fp8(b, "w1", 64, 64)),
                         linear_fp8(*codes, *fp8(b, "w3", 64, 64)), limit=10.0)
        with b.scope("b"):
            v = rms_norm(h, weight(b, "b.norm", types.BF16, 64), eps=1e-20)
            wide = grouped_linear_fp8(v, *fp8(b, "wo_a", 32, 32), groups=2)
            again = quantize_fp8(v, name="again")
            y = linear_fp4(*again, weight(b, "w2.weight", types.E2M1, 40, 64),
                           weight(b, "w2.scale", types.UE8M0, 40, 2), out="f32")
            head = linear(wide, weight(b, "head", types.BF16, 5, 32), out="f32")
            quantize_fp8(wide, name="unused")
        return b.graph([y, head, again[0]])


def weights(graph: Graph) -> dict[str, Array]:
    g = np.random.default_rng(0)
    made: dict[str, Array] = {}
    for value in graph.of_kind(Kind.WEIGHT):
        shape, dtype = value.type.storage({}), value.type.dtype
        if dtype is types.BF16:
            made[value.name] = g.standard_normal(shape).astype(ml_dtypes.bfloat16)
        else:
            low, high = (118, 124) if dtype is types.UE8M0 else (0, 0x7F)
            made[value.name] = g.integers(low, high, shape).astype(np.uint8).view(dtype.numpy)
    return made


def outputs(graph: Graph, source: dict[str, Array]) -> list[bytes]:
    """Evaluate with the loader's layouts of the source weights; the bytes of every output."""
    arrays = {v.name: apply_layout(v.name, source[split_name(v.name)[0]])
              for v in graph.of_kind(Kind.WEIGHT)}
    arrays["x"] = np.random.default_rng(1).standard_normal((5, 64)).astype(ml_dtypes.bfloat16)
    return [a.tobytes() for a in evaluate(graph, arrays).values()]


PASSES: tuple[Callable[[Graph], Graph], ...] = (
    widen_activations, drop_dead, fuse_norm_quant, prepack_weights)


def lowered(*passes: Callable[[Graph], Graph]) -> Graph:
    graph = layer()
    for run in passes:
        graph = run(graph)
        verify(graph)
    return graph


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_passes_in_order_are_exact(count: int) -> None:
    before = layer()
    after = lowered(*PASSES[:count])
    assert graph_text(after) != graph_text(lowered(*PASSES[:count - 1])), "the pass did nothing"
    assert outputs(after, weights(before)) == outputs(before, weights(before))


@pytest.mark.parametrize("run", [p for p in PASSES if p is not widen_activations],
                         ids=lambda p: p.__name__)
def test_each_pass_alone_is_exact(run: Callable[[Graph], Graph]) -> None:
    before = layer()
    assert outputs(run(before), weights(before)) == outputs(before, weights(before))


def test_the_lowered_text() -> None:
    graph = lowered(*PASSES)
    assert graph_text(graph, only="a") == """\
graph layer
  input $x: bf16[num_tokens,64]
  weight @a.norm: bf16[64]
  weight @w1.weight|tile16_e4m3: e4m3[4,32,32]
  weight @w1.scale|tile16_e4m3_sf: ue8m0[4,2]
  weight @w3.weight|tile16_e4m3: e4m3[4,32,32]
  weight @w3.scale|tile16_e4m3_sf: ue8m0[4,2]
  %a.quantize_fp8.q.wide: bf16[num_tokens,64] = norm_fake_quant($x, @a.norm) block=32 eps=1e-20\
   # a
  %a.linear_fp8: bf16[num_tokens,64] = packed_linear_fp8(%a.quantize_fp8.q.wide, \
@w1.weight|tile16_e4m3, @w1.scale|tile16_e4m3_sf) groups=1 m=64 out='bf16'   # a
  %a.linear_fp8.1: bf16[num_tokens,64] = packed_linear_fp8(%a.quantize_fp8.q.wide, \
@w3.weight|tile16_e4m3, @w3.scale|tile16_e4m3_sf) groups=1 m=64 out='bf16'   # a
  %a.silu_mul: bf16[num_tokens,64] = silu_mul(%a.linear_fp8, %a.linear_fp8.1) limit=10.0   # a
"""
    names = [n.op.name for n in graph.nodes if n.loc == "b"]
    assert names == ["rms_norm", "packed_linear_fp8", "quantize_fp8", "fake_quantize_fp8",
                     "packed_linear_fp4", "packed_linear_bf16"]


def test_a_norm_with_a_second_reader_is_not_fused() -> None:
    graph = fuse_norm_quant(layer())
    assert [n.op.name for n in graph.nodes if "norm" in n.op.name] == ["norm_quant", "rms_norm"]


def test_a_dead_quantiser_does_not_keep_a_norm_from_being_fused() -> None:
    graph = lowered(widen_activations, fuse_norm_quant)
    assert [n.op.name for n in graph.nodes if "norm" in n.op.name] == ["norm_fake_quant",
                                                                       "rms_norm"]


def test_rows_quantised_twice_are_widened_once() -> None:
    with Builder("twice") as b:
        x = b.input("x", TensorType((N, 64), types.BF16))
        a = linear_fp8(*quantize_fp8(x), *fp8(b, "w1", 64, 64))
        c = linear_fp8(*quantize_fp8(x), *fp8(b, "w3", 64, 64))
        before = b.graph([a, c])
    after = drop_dead(widen_activations(before))
    verify(after)
    assert [n.op.name for n in after.nodes] == ["fake_quantize_fp8", "wide_linear_fp8",
                                                "wide_linear_fp8"]
    assert outputs(after, weights(before)) == outputs(before, weights(before))


def test_packed_values_are_one_per_weight_and_keep_leading_dims() -> None:
    w = Value("experts.w1", TensorType((3, 40, 64), types.E2M1), Kind.WEIGHT)
    assert packed(w, "tile16_e2m1") is packed(w, "tile16_e2m1")
    assert str(packed(w, "tile16_e2m1").type) == "e2m1[3,3,32,32]"
    sf = Value("experts.s1", TensorType((3, 40, 2), types.UE8M0), Kind.WEIGHT)
    assert str(packed(sf, "tile16_e2m1_sf").type) == "ue8m0[3,3,2,16]"


def test_misuse_says_what_is_wrong() -> None:
    with pytest.raises(PassError, match="is input, expected a weight of fixed shape"):
        packed(Value("x", TensorType((N, 64), types.BF16), Kind.INPUT), "tile16_bf16")
    with pytest.raises(PassError, match="K = 48, expected a multiple of 32"):
        packed(Value("w", TensorType((16, 48), types.E4M3), Kind.WEIGHT), "tile16_e4m3")
    with Builder("g") as b:
        x = b.input("x", TensorType((N, 64), types.BF16))
        graph = b.graph([grouped_linear_fp8(x, *fp8(b, "wo_a", 16, 32), groups=2)])
    with pytest.raises(PassError, match="16 outputs in 2 groups, expected a multiple of 16"):
        prepack_weights(graph)
