"""index_topk on cpu: an item is some rows; their scores lie in the thread's scratch.

The macros are those of the three index kernels. A tile is 16 keys as stored: e2m1 pairs and ue8m0
scales per 32 are what the e2m1 GEMM reads, so packing a tile only transposes bytes; neighbouring
rows of a request share the packed tiles.
"""

import tilelang.language as T

from deepinfer.ir.types import dim_size
from deepinfer.targets.base import Spec, grid, kernel
from deepinfer.targets.cpu.dialect import call, const, dims, f32

TILE = 16  # keys of a GEMM tile
TILES = 4  # of a GEMM call
ROWS = 4  # of an item


def max_entries(spec: Spec) -> int:
    """The most compressed entries a request can have, rounded up to whole tiles."""
    return -(-dim_size(spec.dims["P"], None) * spec.dims["E"] // TILE) * TILE


def space(spec: Spec):
    """rows: of an item, whose scores share the packed keys."""
    return grid(rows=(ROWS, 1, 8))


def scratch_bytes(spec: Spec) -> int:
    return 4 * spec.schedule["rows"] * max_entries(spec)


def score_macros(H: int, I: int, E: int, scale: float, rows: int = 1, tiles: int = 1):
    """``load`` puts one key (or nothing) into a tile; ``score`` scores up to ``tiles`` tiles for up
    to ``rows`` rows; ``score_all`` all keys that the rows of a request reach."""

    @T.macro
    def load(keys, keys_sf, page, slot, tile, tile_sf, t, n):
        for j in T.serial(I // 2):
            tile[t, j, n] = keys[page, slot, j]
        for b in T.serial(I // 32):
            tile_sf[t, b, n] = keys_sf[page, slot, b]

    @T.macro
    def clear(tile, tile_sf, t, n):
        for j in T.serial(I // 2):
            tile[t, j, n] = T.uint8(0)
        for b in T.serial(I // 32):
            tile_sf[t, b, n] = T.uint8(127)

    @T.macro
    def score(q, weights, row, count, tile, tile_sf, used, scores, base, stride):
        """Row ``row + r``'s scores of the first ``used`` tiles go to scores[r * stride + base]."""
        dots = T.alloc_local((tiles * rows * H, TILE), "float32")
        total = T.alloc_local((TILE,), "float32")
        call("di_gemm_e2m1", T.access_ptr(q[row, 0], "r"), I, T.access_ptr(tile[0, 0, 0], "r"),
             T.access_ptr(tile_sf[0, 0, 0], "r"), I, count * H, used,
             T.access_ptr(dots[0, 0], "w"), 0, type="int32")
        for t, r in T.grid(used, count):
            for n in T.serial(TILE):
                total[n] = const(0)
            for h in T.serial(H):
                for n in T.serial(TILE):
                    total[n] = total[n] + weights[r, h] * T.if_then_else(
                        dots[(t * count + r) * H + h, n] < const(0), const(0),
                        dots[(t * count + r) * H + h, n])
            for n in T.serial(TILE):
                scores[r * stride + base + t * TILE + n] = total[n]

    @T.macro
    def weigh(w, row, count, weights):
        for r, h in T.grid(count, H):
            weights[r, h] = f32(w[row + r, h]) * const(scale)

    @T.macro
    def score_all(q, w, row, count, pages, request, keys, keys_sf, reach, scores, stride):
        """scores[r * stride + 0..reach-1] of the request's entries, ascending, for each row."""
        weights = T.alloc_local((rows, H), "float32")
        tile = T.alloc_local((tiles, I // 2, TILE), "uint8")
        tile_sf = T.alloc_local((tiles, I // 32, TILE), "uint8")
        used = T.alloc_var("int32")
        weigh(w, row, count, weights)
        for first in T.serial((reach + (tiles * TILE - 1)) // (tiles * TILE)):
            used = T.min(tiles, (reach - first * (tiles * TILE) + (TILE - 1)) // TILE)
            for t, n in T.grid(used, TILE):
                entry = (first * tiles + t) * TILE + n
                if entry < reach:
                    load(keys, keys_sf, pages[request, entry // E], entry % E, tile, tile_sf, t, n)
                else:
                    clear(tile, tile_sf, t, n)
            score(q, weights, row, count, tile, tile_sf, used, scores, first * tiles * TILE,
                  stride)

    return load, clear, weigh, score, score_all


def row_stride(P, E):
    """Scores of a row in scratch."""
    return (P * E + (TILE - 1)) // TILE * TILE


@kernel("index_topk", items="N/rows", space=space, scratch=scratch_bytes)
def index_topk(spec: Spec):
    N, H, I, R, P, E = dims(spec, "N", "H", "I", "R", "P", "E")
    pages_total = dims(spec, "T")
    k, ratio, rows = spec.attrs["k"], spec.attrs["ratio"], spec.schedule["rows"]
    *_, score_all = score_macros(H, I, E, spec.attrs["scale"], rows, TILES)
    stride = row_stride(P, E)

    @T.prim_func
    def body(q: T.Tensor((N, H * I), "uint16"), w: T.Tensor((N, H), "uint16"),
             positions: T.Tensor((N,), "int32"), request: T.Tensor((N,), "int32"),
             pages: T.Tensor((R, P), "int32"), keys: T.Tensor((pages_total, E, I // 2), "uint8"),
             keys_sf: T.Tensor((pages_total, E, I // 32), "uint8"),
             idx: T.Tensor((N, k), "int32"), scratch: T.Tensor((rows * stride,), "float32"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            first = T.alloc_var("int32")
            end = T.alloc_var("int32")
            count = T.alloc_var("int32")
            first = (lo + item) * rows
            end = T.min(first + rows, N)
            while first < end:
                count = 1
                for r in T.serial(1, end - first):
                    if T.And(count == r, request[first + r] == request[first]):
                        count = r + 1
                reach = T.min((positions[first + count - 1] + 1) // ratio, P * E)
                score_all(q, w, first, count, pages, request[first], keys, keys_sf, reach,
                          scratch, stride)
                for r in T.serial(count):
                    call("di_topk", T.access_ptr(scratch[r * stride], "r"),
                         T.min((positions[first + r] + 1) // ratio, P * E), k, -1,
                         T.access_ptr(idx[first + r, 0], "w"), type="int32")
                first = first + count

    return body
