"""Pass group_experts is exact, shares what can be shared, and says what it cannot do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer.checkpoint.layouts import apply_layout, split_name
from deepinfer.errors import PassError
from deepinfer.ir import Builder, Graph, Kind, Sym, TensorType
from deepinfer.ir.eval import evaluate
from deepinfer.ir.rewrite import drop_dead
from deepinfer.ir.types import BF16, E2M1, E4M3, F32, I32, UE8M0
from deepinfer.ir.verify import verify
from deepinfer.numerics.formats import quantize_fp4_ue8m0, quantize_fp8, to_bf16
from deepinfer.ops.gemm import linear_fp8
from deepinfer.ops.moe import expert_down, expert_gate_up, expert_reduce
from deepinfer.ops.quant import quantize_fp8 as quantize
from deepinfer.passes.group_experts import group_experts
from deepinfer.passes.widen_activations import widen_activations

Array = np.ndarray[Any, Any]
N, E, C, WIDTH, K = Sym("num_tokens", 64), 4, 64, 96, 2
ODD = 40  # outputs that fill no whole tile


def moe_graph() -> Graph:
    """Two uses of one quantised row: the experts, and a linear as of the shared expert."""
    with Builder("test") as b:
        x = b.input("x", TensorType((N, C), BF16))
        idx = b.input("idx", TensorType((N, K), I32))
        weight = b.input("weight", TensorType((N, K), F32))

        def expert(name: str, m: int, k: int) -> tuple[Any, Any]:
            return (b.weight(name, TensorType((E, m, k), E2M1)),
                    b.weight(name + ".scale", TensorType((E, m, k // 32), UE8M0)))

        q, sf = quantize(x, block=32)
        shared = linear_fp8(q, sf, b.weight("ws", TensorType((C, C), E4M3)),
                            b.weight("ws.scale", TensorType((C // 32, C // 32), UE8M0)))
        hidden = expert_gate_up(q, sf, *expert("w1", WIDTH, C), *expert("w3", WIDTH, C), idx,
                                weight, limit=2.0)
        y = expert_down(*quantize(hidden, block=32), *expert("w2", ODD, WIDTH), idx)
        y2 = expert_down(*quantize(hidden, block=32), *expert("w2b", C, WIDTH), idx)
        return b.graph([y, expert_reduce(y2, idx, shared)])


def arrays(n: int = 7) -> dict[str, Array]:
    g = np.random.default_rng(n)

    def normal(*shape: int) -> Array:
        return g.standard_normal(shape).astype(np.float32)

    made = {"x": to_bf16(normal(n, C)), "weight": np.abs(normal(n, K)),
            "idx": np.array([np.sort(g.choice(E, K, False)) for _ in range(n)],
                            np.int32).reshape(n, K)}
    for name, m, k in (("w1", WIDTH, C), ("w3", WIDTH, C), ("w2", ODD, WIDTH),
                       ("w2b", C, WIDTH)):
        made[name], made[name + ".scale"] = quantize_fp4_ue8m0(to_bf16(normal(E, m, k)))
    made["ws"], scale = quantize_fp8(to_bf16(normal(C, C)))
    made["ws.scale"] = np.ascontiguousarray(scale[::32])
    return made


def lowered_arrays(graph: Graph, given: dict[str, Array]) -> dict[str, Array]:
    return {v.name: apply_layout(v.name, given[split_name(v.name)[0]]) for v in graph.inputs}


@pytest.mark.parametrize("n", [0, 1, 7])
@pytest.mark.parametrize("widen_first", [False, True])
def test_exact(n: int, widen_first: bool) -> None:
    source, given = moe_graph(), arrays(n)
    lowered = drop_dead(group_experts(widen_activations(source) if widen_first else source))
    verify(lowered)
    expected = evaluate(source, given)
    got = evaluate(lowered, lowered_arrays(lowered, given))
    assert len(expected) == 2
    for old, new in zip(expected.values(), got.values(), strict=True):
        assert old.shape == new.shape and old.tobytes() == new.tobytes()


def test_what_the_lowered_graph_holds() -> None:
    lowered = drop_dead(group_experts(widen_activations(moe_graph())))
    names = [node.op.name for node in lowered.nodes]
    assert names == ["fake_quantize_fp8", "wide_linear_fp8", "group_rows", "grouped_gate_up",
                     "fake_quantize_fp8", "grouped_down", "grouped_down", "expert_reduce"]
    weights = {v.name for v in lowered.inputs if v.kind is Kind.WEIGHT}
    assert {"w1|tile16_e2m1", "w1.scale|tile16_e2m1_sf"} <= weights and "w1" not in weights


def test_codes_from_elsewhere_are_refused() -> None:
    with Builder("test") as b:
        q = b.input("q", TensorType((N * K, WIDTH), E4M3))
        sf = b.input("sf", TensorType((N * K, WIDTH // 32), UE8M0))
        idx = b.input("idx", TensorType((N, K), I32))
        with b.scope("layers.3.ffn"):
            y = expert_down(q, sf, b.weight("w2", TensorType((E, C, WIDTH), E2M1)),
                            b.weight("s2", TensorType((E, C, WIDTH // 32), UE8M0)), idx)
        graph = b.graph([y])
    with pytest.raises(PassError, match=r"(?s)\$q is no output of quantize_fp8.*layers\.3\.ffn"):
        group_experts(graph)
