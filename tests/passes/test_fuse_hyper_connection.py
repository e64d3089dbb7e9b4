"""Pass fuse_hyper_connection is exact, and leaves alone what is no whole connection."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deepinfer.ir import Builder, Graph, Kind, Sym, TensorType, Value, types
from deepinfer.ir.eval import evaluate
from deepinfer.ir.verify import verify
from deepinfer.ops.hyper import hyper_collapse, hyper_mean, hyper_mix, hyper_post
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.quant import fake_quantize_fp8
from deepinfer.passes.fuse_hyper_connection import fuse_hyper_connection

Array = np.ndarray[Any, Any]
N, HC, C = Sym("num_tokens", 8), 3, 64
M = HC * (HC + 2)
CHANGES = ("no mix", "mixed twice", "row is read", "row is an output", "no quantiser",
           "two quantisers", "pre comes late")


def enter(b: Builder, p: str, streams: Value, pre: Value, change: str = ""
          ) -> tuple[tuple[Value, ...], list[Value]]:
    """The mixes of one sublayer and its quantised row, with one thing changed; and what else
    the graph gives out."""
    with b.scope(p):
        weights = [b.weight(f"{p}.{n}", TensorType(s, types.F32))
                   for n, s in (("fn", (M, HC * C)), ("base", (M,)), ("scale", (3,)))]
        mixes = [hyper_mix(streams, *weights, hc=HC, iters=4, hc_eps=1e-6, eps=1e-20)
                 for _ in range({"no mix": 0, "mixed twice": 2}.get(change, 1))]
        if change == "pre comes late":
            pre = mixes[0][0]
        row = hyper_collapse(streams, pre)
        u = rms_norm(row, b.weight(f"{p}.norm", TensorType((C,), types.BF16)), eps=1e-6)
        count = {"no quantiser": 0, "two quantisers": 2}.get(change, 1)
        quantised = [fake_quantize_fp8(u, block=32) for _ in range(count)]
        extra = [u, *quantised]
        if change == "row is read":
            extra.append(rms_norm(row, b.weight("again", TensorType((C,), types.BF16)), eps=1e-6))
        if change == "row is an output":
            extra.append(row)
        return tuple(v for m in mixes for v in m), extra


def layers(change: str = "") -> Graph:
    """A connection without post, and one with it whose streams are also averaged (a tap)."""
    with Builder("layers") as b:
        streams = b.input("x", TensorType((N, HC, C), types.BF16))
        pre = b.input("pre", TensorType((N, HC), types.F32))
        (next_pre, post, comb), first = enter(b, "a", streams, pre)
        streams = hyper_post(first[1], streams, post, comb)
        tap = hyper_mean(streams)
        mixes, second = enter(b, "b", streams, next_pre, change)
        return b.graph([tap, *first, *mixes, *second, streams])


def run(graph: Graph) -> dict[str, bytes]:
    g = np.random.default_rng(0)
    arrays: dict[str, Array] = {}
    for name, shape in (("x", (5, HC, C)), ("pre", (5, HC)), *(
            (v.name, v.type.storage({})) for v in layers().of_kind(Kind.WEIGHT)), ("again", (C,))):
        arrays[name] = g.standard_normal(shape).astype(np.float32)
    for v in graph.inputs:
        if v.type.dtype is types.BF16:
            arrays[v.name] = arrays[v.name].astype(ml_dtypes.bfloat16)
    found = evaluate(graph, {v.name: arrays[v.name] for v in graph.inputs})
    return {name: a.tobytes() for name, a in found.items()}


def names(graph: Graph) -> list[str]:
    return [n.op.name for n in graph.nodes]


def test_both_connections_become_one_op_each_with_the_same_bits() -> None:
    source = layers()
    fused = fuse_hyper_connection(source)
    verify(fused)
    assert names(fused) == ["hyper_enter", "hyper_post_enter", "hyper_mean"]
    assert fused.outputs == source.outputs and run(fused) == run(source)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_no_whole_connection_is_left_alone(change: str) -> None:
    source = layers(change)
    fused = fuse_hyper_connection(source)
    verify(fused)
    assert names(fused) == ["hyper_enter", *names(source)[4:]], "only the first one is whole"
    assert run(fused) == run(source)


def test_attributes_of_the_mix_and_of_the_norm_are_kept_apart() -> None:
    made = fuse_hyper_connection(layers()).nodes[1]
    assert dict(made.attrs) == {"hc": HC, "iters": 4, "hc_eps": 1e-6, "eps": 1e-20,
                                "norm_eps": 1e-6, "block": 32}
