"""RMS normalisation."""

from __future__ import annotations

import numpy as np

from deepinfer.ir import Order, op
from deepinfer.numerics.formats import f32, quantize_fp8, to_bf16
from deepinfer.numerics.functions import rsqrt
from deepinfer.numerics.sums import lane_sum

ROW_SUM = Order("C", "lane_sum", (("lanes", 16),), "bf16 once, at the end")


@op("x:bf16[N,C], w:bf16[C] -> y:bf16[N,C]", order=ROW_SUM)
def rms_norm(x, w, *, eps: float):  # type: ignore[no-untyped-def]
    """Normalise each row by its root mean square.

    y = bf16(w * (x * 1/sqrt(sum(x^2)/C + eps))), in fp32 until the cast.

    Args:
        x: rows. w: weight per channel. eps: added to the mean square (1e-20 in this model).
    Order: sum of squares over C in 16 lanes, then the tree of ``lane_sum``.
    Source: spec §2.0.
    """
    v = f32(x)
    mean = lane_sum(v * v) / np.float32(x.shape[-1])
    r = rsqrt(mean + np.float32(eps))
    return to_bf16(f32(w) * (v * r[:, None]))
