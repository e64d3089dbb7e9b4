"""RMS normalisation, alone and followed by fp8 quantisation."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.ir import Order, op
from deepinfer.numerics.formats import dequantize_fp8, f32, quantize_fp8, to_bf16
from deepinfer.numerics.functions import rsqrt
from deepinfer.numerics.sums import LANE_SUM, lane_sum

Array = NDArray[Any]

ROW_SUM = Order("C", "lane_sum", LANE_SUM, "bf16 once, at the end")
ROW_SUM_FP8 = Order("C", "lane_sum", LANE_SUM, "bf16, then e4m3 per block")


def _normed(x: Array, w: Array, eps: float) -> Array:
    v = f32(x)
    mean = lane_sum(v * v) / np.float32(x.shape[-1])
    r = rsqrt(mean + np.float32(eps))
    return to_bf16(f32(w) * (v * r[:, None]))


@op("x:bf16[N,C], w:bf16[C] -> y:bf16[N,C]", order=ROW_SUM)
def rms_norm(x: Array, w: Array, *, eps: float) -> Array:
    """Normalise each row by its root mean square.

    y = bf16(w * (x * 1/sqrt(sum(x^2)/C + eps))), in fp32 until the cast.

    Args:
        x: rows. w: weight per channel. eps: added to the mean square (1e-20 in this model).
    Order: sum of squares over C in 16 lanes, then the tree of ``lane_sum``.
    Source: spec §2.0.
    """
    return _normed(x, w, eps)


@op("x:bf16[N,C], w:bf16[C] -> q:e4m3[N,C], sf:ue8m0[N,C/block]", order=ROW_SUM_FP8)
def norm_quant(x: Array, w: Array, *, eps: float, block: int) -> tuple[Array, Array]:
    """``quantize_fp8(rms_norm(x, w))`` in one pass over the row, bit for bit.

    Args:
        x: rows. w: weight per channel. eps: added to the mean square. block: elements per scale.
    Order: that of ``rms_norm``; the normed row is rounded to bf16 before it is quantised.
    Source: spec §2.0, §6.3.
    """
    return quantize_fp8(_normed(x, w, eps), block)


@op("x:bf16[N,C], w:bf16[C] -> y:bf16[N,C]", order=ROW_SUM_FP8)
def norm_fake_quant(x: Array, w: Array, *, eps: float, block: int) -> Array:
    """``fake_quantize_fp8(rms_norm(x, w))`` in one pass over the row, bit for bit.

    Args:
        x: rows. w: weight per channel. eps: added to the mean square. block: elements per scale.
    Order: that of ``rms_norm``; the normed row is rounded to bf16 before it is quantised.
    Source: spec §2.0, §6.3.
    """
    return dequantize_fp8(*quantize_fp8(_normed(x, w, eps), block), block)
