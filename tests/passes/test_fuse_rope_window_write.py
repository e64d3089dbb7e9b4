"""Pass fuse_rope_window_write is exact, and leaves a ring alone that is read before its write."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deepinfer.ir import Builder, Graph, Sym, TensorType
from deepinfer.ir.eval import evaluate
from deepinfer.ir.types import BF16, E4M3, F32, I32, UE8M0
from deepinfer.ir.verify import verify
from deepinfer.ops.attention import window_attention
from deepinfer.ops.cache import window_write
from deepinfer.ops.quant import quantize_fp8
from deepinfer.ops.rope import rope
from deepinfer.passes.fuse_rope_window_write import fuse_rope_window_write

Array = np.ndarray[Any, Any]
N, R, S, D, W = Sym("num_tokens", 8), Sym("num_requests", 4), Sym("num_slots", 4), 64, 8


def seed(*, attend: bool = False, reread: bool = False, inverse: bool = False) -> Graph:
    """A key that is rotated, quantised and written; with an attention before the write, with
    another reader of the rotated key, or with the inverse rotation."""
    with Builder("seed") as b:
        x = b.input("x", TensorType((N, D), BF16))
        positions = b.input("positions", TensorType((N,), I32))
        request = b.input("request", TensorType((N,), I32))
        spans = b.input("spans", TensorType((R, 4), I32))
        table = b.weight("table", TensorType((32, 16), F32))
        ring = b.state("ring", TensorType((S, W, D), E4M3))
        ring_sf = b.state("ring_sf", TensorType((S, W, D // 32), UE8M0))
        k = rope(x, positions, table, heads=1, inverse=inverse, name="k")
        q, sf = quantize_fp8(k, block=32, name="k8")
        outputs = [q, sf]
        if attend:
            sink = b.weight("sink", TensorType((1,), F32))
            outputs.append(window_attention(x, q, sf, ring, ring_sf, sink, positions, request,
                                            spans, window=4, scale=0.125))
        if reread:
            outputs.append(rope(k, positions, table, heads=1, name="again"))
        window_write(q, sf, positions, request, spans, ring, ring_sf)
        return b.graph(outputs)


def run(graph: Graph) -> dict[str, bytes]:
    """Outputs and state after one step with two requests, one longer than the ring."""
    rng = np.random.default_rng(0)
    spans = np.array([[2, 0, 11, 0], [0, 11, 13, 0]], np.int32)
    arrays: dict[str, Array] = {
        "x": rng.standard_normal((13, D)).astype(ml_dtypes.bfloat16),
        "positions": np.r_[3:14, 20:22].astype(np.int32),
        "request": np.repeat([0, 1], [11, 2]).astype(np.int32), "spans": spans,
        "table": rng.uniform(-1, 1, (32, 16)).astype(np.float32),
        "sink": np.zeros(1, np.float32),
        "ring": rng.integers(0, 120, (4, W, D)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn),
        "ring_sf": rng.integers(120, 130, (4, W, D // 32)).astype(np.uint8)
        .view(ml_dtypes.float8_e8m0fnu)}
    used = {v.name: arrays[v.name] for v in graph.inputs}
    outputs = list(evaluate(graph, used).values())
    return {str(i): a.tobytes() for i, a in enumerate((*outputs, used["ring"], used["ring_sf"]))}


def test_the_chain_becomes_one_op_with_the_same_bits() -> None:
    source = seed()
    fused = fuse_rope_window_write(source)
    verify(fused)
    assert [n.op.name for n in fused.nodes] == ["rope_window_write"]
    assert run(fused) == run(source)


@pytest.mark.parametrize("change", ["attend", "reread", "inverse"])
def test_what_does_not_fit_is_left_alone(change: str) -> None:
    source = seed(**{change: True})
    fused = fuse_rope_window_write(source)
    assert [n.op.name for n in fused.nodes] == [n.op.name for n in source.nodes]
    assert run(fused) == run(source)
