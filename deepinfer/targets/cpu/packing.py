"""Weight layouts of the cpu GEMM micro-kernels: tiles of 16 output columns, pair-interleaved.

In a tile, element (n, 2j+i) of w[N,K] stands at [j][n % 16][i]: the two k of a pair side by side,
as AMX reads its second operand and as the vector levels split even from odd k. One micro-kernel
call reads one tile from front to back. The bytes stay those of the checkpoint, widened only in
registers, for decoding is bound by the bytes of the weights. N is padded to whole tiles with
zeros under scale 1. The values are not looked at: `deepinfer.checkpoint.scales` has checked them.

All functions take any leading axes, e.g. stacked experts [E,N,K], and only move bytes.
Source: DESIGN §5 and deepinfer/targets/cpu/micro/gemm.h.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import TargetError

Array = NDArray[Any]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]

TILE_N = 16
BLOCK_K = 32
E4M3_TILE = 32  # an fp8 weight has one scale per 32 x 32 elements
SCALE_ONE = 127  # ue8m0 code of 1.0


def pack_bf16(w: Array) -> U16:
    """Pack a bf16 weight.

    Args:
        w: bf16 (or its uint16 bits) [..., N, K], K a multiple of 32.
    Returns: uint16 [..., ceil(N/16), K/2, 16, 2].
    Raises: TargetError if K is not a multiple of 32.
    """
    bits = w.view(np.uint16)
    _require_blocks("pack_bf16", bits.shape, bits.shape[-1])
    return _pairs_to_tiles(bits.reshape(*bits.shape[:-1], -1, 2))


def unpack_bf16(packed: U16, n: int) -> U16:
    """Invert `pack_bf16`: the bits uint16 [..., n, K]."""
    pairs = _tiles_to_pairs(packed, n)
    return pairs.reshape(*pairs.shape[:-2], -1)


def pack_e4m3(w: Array, sf: Array) -> tuple[U8, U8]:
    """Pack an fp8 weight and its scales per 32 x 32 tile.

    Args:
        w: e4m3 (or its uint8 codes) [..., N, K], K a multiple of 32.
        sf: ue8m0 (or its uint8 codes) [..., ceil(N/32), K/32].
    Returns:
        (uint8 [..., ceil(N/16), K/2, 16, 2], uint8 [..., ceil(N/16), K/32]); both packed tiles of
        a 32-row tile hold its scales.
    Raises: TargetError if K is not a multiple of 32 or the scales' shape does not fit.
    """
    codes, scales = w.view(np.uint8), sf.view(np.uint8)
    *lead, n, k = codes.shape
    _require_blocks("pack_e4m3", codes.shape, k)
    _require_scales("pack_e4m3", scales, (*lead, -(-n // E4M3_TILE), k // BLOCK_K))
    tiles = np.arange(-(-n // TILE_N)) // (E4M3_TILE // TILE_N)
    return _pairs_to_tiles(codes.reshape(*lead, n, -1, 2)), np.take(scales, tiles, axis=-2)


def unpack_e4m3(packed: U8, sf: U8, n: int) -> tuple[U8, U8]:
    """Invert `pack_e4m3`: the codes uint8 [..., n, K] and [..., ceil(n/32), K/32]."""
    pairs = _tiles_to_pairs(packed, n)
    scales = np.ascontiguousarray(sf[..., :: E4M3_TILE // TILE_N, :])
    return pairs.reshape(*pairs.shape[:-2], -1), scales


def pack_e2m1(w: Array, sf: Array) -> tuple[U8, U8]:
    """Pack an MXFP4 weight, scaled per row and 32 elements of K.

    Args:
        w: packed e2m1 uint8 [..., N, K/2], the even k in the low nibble; K a multiple of 32.
        sf: ue8m0 (or its uint8 codes) [..., N, K/32].
    Returns: (uint8 [..., ceil(N/16), K/2, 16], uint8 [..., ceil(N/16), K/32, 16]).
    Raises: TargetError if K is not a multiple of 32 or the scales' shape does not fit.
    """
    codes, scales = w.view(np.uint8), sf.view(np.uint8)
    *lead, n, pairs = codes.shape
    _require_blocks("pack_e2m1", codes.shape, 2 * pairs)
    _require_scales("pack_e2m1", scales, (*lead, n, 2 * pairs // BLOCK_K))
    return (
        _pairs_to_tiles(codes[..., None])[..., 0],
        _pairs_to_tiles(scales[..., None], SCALE_ONE)[..., 0],
    )


def unpack_e2m1(packed: U8, sf: U8, n: int) -> tuple[U8, U8]:
    """Invert `pack_e2m1`: packed e2m1 uint8 [..., n, K/2] and codes uint8 [..., n, K/32]."""
    return _tiles_to_pairs(packed[..., None], n)[..., 0], _tiles_to_pairs(sf[..., None], n)[..., 0]


def _pairs_to_tiles(x: Array, fill: int = 0) -> Array:
    """[..., N, J, I] -> [..., ceil(N/16), J, 16, I], contiguous, rows padded with `fill`."""
    *lead, n, j, i = x.shape
    tiles, full = -(-n // TILE_N), n // TILE_N
    out = np.full((*lead, tiles, j, TILE_N, i), fill, x.dtype)
    whole = x[..., : full * TILE_N, :, :].reshape(*lead, full, TILE_N, j, i)
    out[..., :full, :, :, :] = whole.swapaxes(-3, -2)
    if full < tiles:
        out[..., full, :, : n - full * TILE_N, :] = x[..., full * TILE_N :, :, :].swapaxes(-3, -2)
    return out


def _tiles_to_pairs(x: Array, n: int) -> Array:
    *lead, tiles, j, _, i = x.shape
    rows = x.swapaxes(-3, -2).reshape(*lead, tiles * TILE_N, j, i)
    return np.ascontiguousarray(rows[..., :n, :, :])


def _require_blocks(who: str, shape: tuple[int, ...], k: int) -> None:
    if k % BLOCK_K or k == 0:
        raise TargetError(
            f"a weight of shape {list(shape)} has K = {k}, expected a multiple of {BLOCK_K}",
            where=who,
            next="the GEMM order of the cpu target sums K in blocks of 32: choose such a dimension",
        )


def _require_scales(who: str, sf: U8, expected: tuple[int, ...]) -> None:
    if sf.shape != expected:
        raise TargetError(
            f"scales of shape {list(sf.shape)}, expected {list(expected)}",
            where=who,
            next="pass the scales that belong to this weight",
        )
