"""A few ops and a small graph for the tests of the IR."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer.ir import ELEMENTWISE, Builder, Graph, Order, Sym, TensorType, op
from deepinfer.ir.op import Op
from deepinfer.ir.types import F32

N = Sym("num_tokens", 8)
ROWS = TensorType((N, 4), F32)


def scale(x: Any, w: Any, *, by: float = 2.0) -> Any:
    return x * w * np.float32(by)


def halves(x: Any) -> Any:
    half = x.shape[1] // 2
    return x[:, :half].copy(), x[:, half:].copy()


def store(x: Any, s: Any) -> None:
    s[: len(x)] = x


class Ops:
    """Declared anew for each test: what a test declares is gone after it."""

    def __init__(self, order: Order = ELEMENTWISE) -> None:
        self.scale: Op = op("x:f32[N,C], w:f32[C] -> y:f32[N,C]", order=order)(scale)
        self.halves: Op = op("x:f32[N,C] -> lo:f32[N,C/2], hi:f32[N,C/2]", order=ELEMENTWISE)(
            halves)
        self.store: Op = op("x:f32[N,C], !s:f32[S,C] -> ", order=ELEMENTWISE)(store)


def small(ops: Ops, by: float = 3.0) -> Graph:
    """x*w*by, stored, scaled again, cut in two; the first half and the whole come back."""
    with Builder("prefill") as b:
        x = b.input("x", ROWS)
        w = b.weight("w", TensorType((4,), F32))
        s = b.state("s", TensorType((Sym("num_slots", 16), 4), F32))
        with b.scope("layers.0"):
            y = ops.scale(x, w, by=by, name="first")
            ops.store(y, s)
            with b.scope("attn"):
                z = ops.scale(y, w)
                low, _ = ops.halves(z)
        return b.graph([z, low])
