"""Linear layers on weights packed in tiles of 16 outputs, as the cpu micro-kernels read them.

Tile b holds outputs 16b..16b+15; element (n, 2j+i) of a tile stands at [b, j, 2n+i].
``deepinfer.checkpoint.layouts`` makes the layouts; the functions here undo them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import IRError
from deepinfer.ir import op
from deepinfer.numerics.formats import decode_e4m3, dequantize_fp4, f32, to_bf16
from deepinfer.numerics.sums import gemm
from deepinfer.ops.gemm import GEMM, rounded

Array = NDArray[Any]

TILE = 16


def unpack_bf16(w: Array) -> Array:
    """bf16[B,P,32] -> bf16[16B,2P]: the padded weight."""
    b, p, _ = w.shape
    return w.reshape(b, p, TILE, 2).transpose(0, 2, 1, 3).reshape(b * TILE, p * 2)


def unpack_e4m3(w: Array, sf: Array) -> Array:
    """e4m3[B,P,32] and ue8m0[B,P/16] -> bf16[16B,2P]: the padded weight, dequantised."""
    codes = unpack_bf16(w.view(np.uint8))
    scale = np.repeat(np.repeat(f32(sf), TILE, axis=0), 32, axis=1)
    return to_bf16(decode_e4m3(codes) * scale)


def unpack_e2m1(w: Array, sf: Array) -> Array:
    """e2m1[B,P,32] and ue8m0[B,P/16,16] -> bf16[16B,2P]: the padded weight, dequantised."""
    b, p, _ = w.shape
    codes = w.transpose(0, 2, 1).reshape(b * TILE, p)
    return dequantize_fp4(codes, sf.transpose(0, 2, 1).reshape(b * TILE, -1), 32)


def _product(x: Array, w: Array, m: int, groups: int, out: str) -> Array:
    k, rows = x.shape[1] // groups, m // groups
    if m > len(w) or m % groups or (groups > 1 and rows % TILE):
        raise IRError(f"{m} outputs in {groups} groups do not fit {len(w)} packed rows",
                      where="op packed_linear",
                      next="pack the weight with passes/prepack_weights.py")
    parts = [gemm(x[:, g * k:(g + 1) * k], w[g * rows:(g + 1) * rows, :k]) for g in range(groups)]
    return rounded(np.concatenate(parts, axis=1), out)


@op("x:bf16[N,K], w:bf16[B,P,32] -> y:$out[N,m]", order=GEMM)
def packed_linear_bf16(x: Array, w: Array, *, m: int, out: str = "bf16") -> Array:
    """``linear`` on a packed weight.

    Args:
        x: rows. w: tiles of 16 outputs (layout tile16_bf16), K padded to 32 with zeros.
        m: outputs without the padding. out: "bf16", or "f32" to keep the fp32 sum.
    Order: DESIGN §5 "cpu GEMM order".
    Raises: IRError if the packed weight is smaller than m.
    Source: spec §2.0.
    """
    return _product(x, unpack_bf16(w), m, 1, out)


@op("x:bf16[N,K*groups], w:e4m3[B,K/2,32], sf:ue8m0[B,K/32] -> y:$out[N,m]", order=GEMM)
def packed_linear_fp8(x: Array, w: Array, sf: Array, *, m: int, out: str = "bf16",
                      groups: int = 1) -> Array:
    """``wide_linear_fp8``, or ``grouped_linear_fp8`` with groups > 1, on a packed weight.

    Args:
        x: rows; group g is columns g*K to (g+1)*K. w: tiles of 16 outputs (tile16_e4m3).
        sf: one scale per tile and 32 along K (tile16_e4m3_sf). m: outputs without the padding.
        out: "bf16", or "f32" to keep the fp32 sum. groups: m/groups is a multiple of 16.
    Order: DESIGN §5 "cpu GEMM order".
    Raises: IRError if m does not fit the packed weight or the groups.
    Source: spec §2.0 "Lin8", §2.4 "wo_a".
    """
    return _product(x, unpack_e4m3(w, sf), m, groups, out)


@op("x:bf16[N,K], w:e2m1[B,K/2,32], sf:ue8m0[B,K/32,16] -> y:$out[N,m]", order=GEMM)
def packed_linear_fp4(x: Array, w: Array, sf: Array, *, m: int, out: str = "bf16") -> Array:
    """``wide_linear_fp4`` on a packed weight.

    Args:
        x: rows. w: tiles of 16 outputs (tile16_e2m1). sf: a scale per output and 32 along K
        (tile16_e2m1_sf). m: outputs without the padding. out: "bf16", or "f32".
    Order: DESIGN §5 "cpu GEMM order".
    Raises: IRError if the packed weight is smaller than m.
    Source: spec §2.0 "Lin4".
    """
    return _product(x, unpack_e2m1(w, sf), m, 1, out)
