"""The layouts that the loader turns weights into: ``LAYOUTS[name](array) -> array``.

A lowered graph names such a value "<checkpoint name>|<layout>" (passes/prepack_weights.py). All
take any number of leading axes (experts). A tile is 16 outputs; element (n, 2j+i) of a tile stands
at [tile, j, 2n+i], the pair-interleaved order of AMX. Padding is zero codes and the scale 1. The
op references in ``ops/packed.py`` undo them; ``targets/cpu/micro/gemm.h`` reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import CheckpointError

Array = NDArray[Any]

TILE, BLOCK = 16, 32
_ONE = 127  # the ue8m0 code of 1


def split_name(name: str) -> tuple[str, str]:
    """("source name", "layout") of a value's name; the layout is "" where nothing is packed."""
    source, _, layout = name.partition("|")
    return source, layout


def apply_layout(name: str, source: Array) -> Array:
    """The array of the value called ``name``, made from its source in the checkpoint.

    Raises: CheckpointError if this version has no such layout.
    """
    layout = split_name(name)[1]
    if not layout:
        return source
    if layout not in LAYOUTS:
        raise CheckpointError(f"unknown layout '{layout}', expected one of {', '.join(LAYOUTS)}",
                              where=f"value {name}", next="compile the Program again")
    return LAYOUTS[layout](source)


def _pad(x: Array, axis: int, multiple: int, fill: int = 0) -> Array:
    short = -x.shape[axis] % multiple
    if not short:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, short)
    return np.pad(x, widths, constant_values=fill)


def _tiles(units: Array) -> Array:
    """[..., M, U] -> [..., M/16, U, 16], M a multiple of 16."""
    *lead, m, u = units.shape
    return np.swapaxes(units.reshape(*lead, m // TILE, TILE, u), -1, -2)


def _require_k(layout: str, k: int) -> None:
    if k % BLOCK:
        raise CheckpointError(f"K is {k}, expected a multiple of {BLOCK}",
                              where=f"layout {layout}", next="check the shapes in config.json")


def tile16_bf16(w: Array) -> Array:
    """bf16[..., M, K] -> bf16[..., ceil(M/16), 16*ceil(K/32), 32]."""
    bits = _pad(_pad(w.view(np.uint16), -1, BLOCK), -2, TILE)
    pairs = _tiles(np.ascontiguousarray(bits).view(np.uint32))
    return np.ascontiguousarray(pairs).view(np.uint16).view(w.dtype)


def tile16_e4m3(w: Array) -> Array:
    """e4m3[..., M, K] -> e4m3[..., 2*ceil(M/32), K/2, 32]; M is padded like the 32x32 scales."""
    _require_k("tile16_e4m3", w.shape[-1])
    codes = np.ascontiguousarray(_pad(w.view(np.uint8), -2, BLOCK))
    pairs = _tiles(codes.view(np.uint16))
    return np.ascontiguousarray(pairs).view(np.uint8).view(w.dtype)


def tile16_e4m3_sf(sf: Array) -> Array:
    """ue8m0[..., ceil(M/32), K/32] -> ue8m0[..., 2*ceil(M/32), K/32]: a scale for each tile."""
    return np.repeat(sf, BLOCK // TILE, axis=-2)


def tile16_e2m1(w: Array) -> Array:
    """e2m1 [..., M, K] -> e2m1 [..., ceil(M/16), K/2, 32] (u8, [..., K/2] and [..., 16])."""
    _require_k("tile16_e2m1", w.shape[-1] * 2)
    return np.ascontiguousarray(_tiles(_pad(w.view(np.uint8), -2, TILE)))


def tile16_e2m1_sf(sf: Array) -> Array:
    """ue8m0[..., M, K/32] -> ue8m0[..., ceil(M/16), K/32, 16]."""
    codes = _pad(sf.view(np.uint8), -2, TILE, _ONE)
    return np.ascontiguousarray(_tiles(codes)).view(sf.dtype)


LAYOUTS: dict[str, Callable[[Array], Array]] = {f.__name__: f for f in (
    tile16_bf16, tile16_e4m3, tile16_e4m3_sf, tile16_e2m1, tile16_e2m1_sf)}
