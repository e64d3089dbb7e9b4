"""The declared summation orders: row sums, fp32 linear layers, and the cpu GEMM order.

`gemm` computes fused multiply-adds through float64, and that rounds once: the product of two bf16
has 16 bits and is exact, the chain value has 24, and a float64 sum of two values of up to 24 bits
rounds to 24 bits as the exact sum does (53 >= 2 * 24 + 2). Denormals are flushed as by MXCSR's FTZ
and DAZ, which decide after rounding to 24 bits, not after rounding to the denormal grid.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import DeepInferError

Array = NDArray[Any]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

GEMM_BLOCK = 32
LANES = 16
# The parameters of the declared sums: an op's Order takes them from here, and so do the sums.
LANE_SUM = (("lanes", LANES),)
GEMM_SUM = (("block", GEMM_BLOCK), ("chains", 2))
_SMALLEST_NORMAL = np.float32(2.0**-126)
# Rounded to 24 bits with an unbounded exponent, a smaller value stays below 2^-126: it is flushed.
_FLUSH_BELOW = 2.0**-126 - 2.0**-151
# Elements of the float64 working arrays of one tile: they should stay in a core's L2 cache.
_TILE_ELEMENTS = 1 << 15


def lane_sum(x: Array, lanes: int = LANES) -> F32:
    """Sum over the last axis in a fixed number of lanes, then a fixed tree.

    Order: lane l starts at +0 and adds x[l], x[l + lanes], ... ascending; a ragged tail adds only
    to its own lanes. Then acc[i] += acc[i + h] for h = lanes/2, ..., 2, 1. All in fp32.

    Args:
        x: f32[..., C].
        lanes: a power of two.
    Returns: f32[...].
    Raises: DeepInferError if lanes is not a power of two.
    Source: DESIGN §5.
    """
    _require_lanes("lane_sum", lanes)
    values = np.asarray(x, np.float32)
    acc = np.zeros((*values.shape[:-1], lanes), np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, values.shape[-1], lanes):
            part = values[..., start : start + lanes]
            acc[..., : part.shape[-1]] += part
        return _tree(acc)


def linear_fp32(x: Array, w: Array, lanes: int = LANES) -> F32:
    """x @ w.T in fp32: every product is rounded, then the products are summed as by `lane_sum`.

    Args:
        x: f32[M,K].
        w: f32[N,K].
        lanes: a power of two.
    Returns: f32[M,N].
    Raises: DeepInferError if the two K differ.
    Source: spec §2.0 "fp32 linear"; DESIGN §5.
    """
    _require_lanes("linear_fp32", lanes)
    _require_same_k("linear_fp32", x, w)
    rows, weights = np.asarray(x, np.float32), np.asarray(w, np.float32)
    (m, k), n = rows.shape, weights.shape[0]
    out = np.empty((m, n), np.float32)
    n_tile = max(1, min(n, _TILE_ELEMENTS // lanes))
    m_tile = max(1, _TILE_ELEMENTS // (lanes * n_tile))
    with np.errstate(all="ignore"):
        for i in range(0, m, m_tile):
            for j in range(0, n, n_tile):
                left, right = rows[i : i + m_tile, None], weights[None, j : j + n_tile]
                acc = np.zeros((left.shape[0], right.shape[1], lanes), np.float32)
                for start in range(0, k, lanes):
                    stop = min(start + lanes, k)
                    product = left[..., start:stop] * right[..., start:stop]
                    acc[..., : stop - start] += product
                out[i : i + m_tile, j : j + n_tile] = _tree(acc)
    return out


def gemm(a: Array, b: Array, acc: Array | None = None) -> F32:
    """a @ b.T (+ acc) in the cpu GEMM order: the bits of AMX tdpbf16ps on every instruction set.

    Order: K in blocks of 32, ascending (a last short block is padded with +0). In a block the even
    and the odd elements are two chains of fused multiply-adds from +0; t = even + odd, then
    acc = acc + t. Each step is rounded to nearest even in fp32; denormal inputs and results are
    zeros of the same sign (DAZ, FTZ).

    Args:
        a: bf16[M,K].
        b: bf16[N,K].
        acc: f32[M,N] to start from; None starts at +0.
    Returns: f32[M,N].
    Raises: DeepInferError if the two K differ, or the shape of acc does not fit.
    Source: DESIGN §5 "cpu GEMM order".
    """
    _require_same_k("gemm", a, b)
    left, right = _chains(a), _chains(b)
    _, halves, blocks, m = left.shape
    n = right.shape[-1]
    if acc is not None and np.shape(acc) != (m, n):
        raise DeepInferError(
            f"the accumulator has shape {np.shape(acc)}, expected {(m, n)}",
            where="gemm",
            next="pass one fp32 accumulator per output element",
        )
    out = np.zeros((m, n), np.float32) if acc is None else np.array(acc, np.float32)
    per_row = halves * max(blocks, 1)
    n_tile = max(1, min(n, _TILE_ELEMENTS // per_row))
    m_tile = max(1, _TILE_ELEMENTS // (per_row * n_tile))
    with np.errstate(all="ignore"):
        _flush(out)
        for i in range(0, m, m_tile):
            for j in range(0, n, n_tile):
                rows = left[..., i : i + m_tile, None]
                columns = right[..., None, j : j + n_tile]
                sums = _block_sums(rows, columns)
                target = out[i : i + m_tile, j : j + n_tile]
                for block in range(blocks):
                    target += sums[block]
                    _flush(target)
    return out


def _chains(x: Array) -> F64:
    """x [R,K], denormals flushed and K padded, as f64 [16 steps, even/odd, K blocks, R]."""
    values = np.array(x, np.float32)
    _flush(values)
    rows, k = values.shape
    blocks = -(-k // GEMM_BLOCK)
    padded = np.zeros((rows, blocks * GEMM_BLOCK), np.float64)
    padded[:, :k] = values
    shaped = padded.reshape(rows, blocks, GEMM_BLOCK // 2, 2)
    return np.ascontiguousarray(shaped.transpose(2, 3, 1, 0))


def _block_sums(rows: F64, columns: F64) -> F32:
    """even + odd of every K block: f32[blocks, m, n]; `rows` and `columns` are broadcast views."""
    chain = np.zeros(np.broadcast_shapes(rows.shape[1:], columns.shape[1:]), np.float32)
    total = np.empty(chain.shape, np.float64)
    for row, column in zip(rows, columns, strict=True):
        np.multiply(row, column, out=total)
        total += chain
        chain[...] = total
        np.multiply(chain, np.float32(0), out=chain, where=np.abs(total) < _FLUSH_BELOW)
    even_plus_odd: F32 = chain[0] + chain[1]
    _flush(even_plus_odd)
    return even_plus_odd


def _flush(x: F32) -> None:
    """Replace denormals by zeros of their sign. A sum of two fp32 that is denormal is exact."""
    np.multiply(x, np.float32(0), out=x, where=np.abs(x) < _SMALLEST_NORMAL)


def _tree(acc: F32) -> F32:
    half = acc.shape[-1] // 2
    while half:
        acc = acc[..., :half] + acc[..., half : 2 * half]
        half //= 2
    return acc[..., 0]


def _require_lanes(who: str, lanes: int) -> None:
    if lanes < 1 or lanes & (lanes - 1):
        raise DeepInferError(
            f"{lanes} lanes, expected a power of two",
            where=who,
            next="use the number of lanes that the op's Order declares",
        )


def _require_same_k(who: str, a: Array, b: Array) -> None:
    if np.ndim(a) != 2 or np.ndim(b) != 2 or np.shape(a)[1] != np.shape(b)[1]:
        raise DeepInferError(
            f"operands of shapes {np.shape(a)} and {np.shape(b)}, expected [M, K] and [N, K]",
            where=who,
            next="pass both operands with the summed axis last and of equal size",
        )
