"""Token embedding."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from deepinfer.ir import ELEMENTWISE, op

Array = NDArray[Any]


@op("tokens:i32[N], w:bf16[V,C] -> y:bf16[N,C]", order=ELEMENTWISE)
def embed(tokens: Array, w: Array) -> Array:
    """Look up one row of the table per token: y[n] = w[tokens[n]].

    Args:
        tokens: token ids in [0, V); the runtime checks them when a request is made.
        w: embedding table.
    Source: spec §2.2.
    """
    return w[tokens]
