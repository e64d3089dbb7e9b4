"""index_topk on cpu: an item is a row; its scores lie in the thread's scratch.

The macros are those of the three index kernels. A tile is 16 keys as stored: e2m1 pairs and ue8m0
scales per 32 are what the e2m1 GEMM reads, so packing a tile only transposes bytes.
"""

import tilelang.language as T

from deepinfer.ir.types import dim_size
from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import call, const, dims, f32

TILE = 16  # keys of a GEMM tile


def max_entries(spec: Spec) -> int:
    """The most compressed entries a request can have, rounded up to whole tiles."""
    return -(-dim_size(spec.dims["P"], None) * spec.dims["E"] // TILE) * TILE


def score_macros(H: int, I: int, E: int, scale: float):
    """``load`` puts one key (or nothing) into a tile, ``score`` scores the tile's 16 keys."""

    @T.macro
    def load(keys, keys_sf, page, slot, tile, tile_sf, n):
        for j in T.serial(I // 2):
            tile[j, n] = keys[page, slot, j]
        for b in T.serial(I // 32):
            tile_sf[b, n] = keys_sf[page, slot, b]

    @T.macro
    def clear(tile, tile_sf, n):
        for j in T.serial(I // 2):
            tile[j, n] = T.uint8(0)
        for b in T.serial(I // 32):
            tile_sf[b, n] = T.uint8(127)

    @T.macro
    def score(q, weights, row, tile, tile_sf, scores, base):
        dots = T.alloc_local((H, TILE), "float32")
        total = T.alloc_local((TILE,), "float32")
        call("di_gemm_e2m1", T.access_ptr(q[row, 0], "r"), I, T.access_ptr(tile[0, 0], "r"),
             T.access_ptr(tile_sf[0, 0], "r"), I, H, 1, T.access_ptr(dots[0, 0], "w"), 0,
             type="int32")
        for n in T.serial(TILE):
            total[n] = const(0)
        for h in T.serial(H):
            for n in T.serial(TILE):
                total[n] = total[n] + weights[h] * T.if_then_else(
                    dots[h, n] < const(0), const(0), dots[h, n])
        for n in T.serial(TILE):
            scores[base + n] = total[n]

    @T.macro
    def weigh(w, row, weights):
        for h in T.serial(H):
            weights[h] = f32(w[row, h]) * const(scale)

    @T.macro
    def score_all(q, w, row, pages, r, keys, keys_sf, reach, scores):
        """scores[0..reach-1] of the request's entries, ascending."""
        weights = T.alloc_local((H,), "float32")
        tile = T.alloc_local((I // 2, TILE), "uint8")
        tile_sf = T.alloc_local((I // 32, TILE), "uint8")
        weigh(w, row, weights)
        for t in T.serial((reach + (TILE - 1)) // TILE):
            for n in T.serial(TILE):
                entry = t * TILE + n
                if entry < reach:
                    load(keys, keys_sf, pages[r, entry // E], entry % E, tile, tile_sf, n)
                else:
                    clear(tile, tile_sf, n)
            score(q, weights, row, tile, tile_sf, scores, t * TILE)

    return load, clear, weigh, score, score_all


@kernel("index_topk", items="N", scratch=lambda spec: 4 * max_entries(spec))
def index_topk(spec: Spec):
    N, H, I, R, P, E = dims(spec, "N", "H", "I", "R", "P", "E")
    pages_total = dims(spec, "T")
    k, ratio = spec.attrs["k"], spec.attrs["ratio"]
    *_, score_all = score_macros(H, I, E, spec.attrs["scale"])

    @T.prim_func
    def body(q: T.Tensor((N, H * I), "uint16"), w: T.Tensor((N, H), "uint16"),
             positions: T.Tensor((N,), "int32"), request: T.Tensor((N,), "int32"),
             pages: T.Tensor((R, P), "int32"), keys: T.Tensor((pages_total, E, I // 2), "uint8"),
             keys_sf: T.Tensor((pages_total, E, I // 32), "uint8"),
             idx: T.Tensor((N, k), "int32"), scratch: T.Tensor((P * E,), "float32"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = lo + item
            reach = T.min((positions[row] + 1) // ratio, P * E)
            score_all(q, w, row, pages, request[row], keys, keys_sf, reach, scratch)
            call("di_topk", T.access_ptr(scratch[0], "r"), reach, k, -1,
                 T.access_ptr(idx[row, 0], "w"), type="int32")

    return body
