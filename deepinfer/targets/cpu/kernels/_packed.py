"""What the packed linears share: their schedules, and which tiles and rows an item is."""

import tilelang.language as T

from deepinfer.targets.base import Spec, grid
from deepinfer.targets.cpu.dialect import STORAGE, dims
from deepinfer.targets.cpu.kernels._macros import TILE

ITEMS = "B*split/tiles"
FEW = 8  # tiles: too few to spread over the threads, so their rows are split


def tile_counts(B: int, least: int, items: int) -> tuple[int, ...]:
    """Of how many of B tiles an item may be, the default first: more share the widening of the
    rows, fewer leave items for many threads, which few tiles need and many have anyway. Never fewer
    than ``least``, a power of two and a divisor of B, nor so many that there are fewer than
    ``items``, unless ``least`` are."""
    order = (8, 4, 2, 16) if B >= 128 else (4, 8, 2, 16) if B >= 16 else (4, 2, 1, 8)
    return tuple(t for t in order
                 if t >= least and B % t == 0 and B // t >= items) or (least,)


def space(spec: Spec, rows: tuple[int, ...] = (96, 48), least: int = 1):
    """rows: of one GEMM call. tiles: of an item, in one call, which widens the rows once for all of
    them. split: an item is one of so many ranges of the rows."""
    B = spec.dims["B"]
    tiles = tile_counts(B, least, 2)
    if B < FEW:
        return grid(rows=rows[:1], split=(1, 4), tiles=tiles[::-1])
    return grid(rows=rows, split=(1, 2), tiles=tiles)


def first_row(item, N, B, spec: Spec):
    """The first row of the item's range."""
    split, groups = spec.schedule["split"], B // spec.schedule["tiles"]
    return 0 if split == 1 else T.truncdiv(N * T.truncdiv(item, groups), split)


def row_count(item, N, B, spec: Spec):
    """The rows of the item's range. Use it in place: a name given to it becomes N's own name."""
    groups = B // spec.schedule["tiles"]
    return N if spec.schedule["split"] == 1 else (
        first_row(item + groups, N, B, spec) - first_row(item, N, B, spec))


def first_tile(item, B, spec: Spec):
    """The item's first tile; the tiles of an item are neighbours."""
    tiles = spec.schedule["tiles"]
    groups = B // tiles
    return (item if spec.schedule["split"] == 1 else T.truncmod(item, groups)) * tiles


def linear_fp8(spec: Spec, out: str, least: int, store):
    """The body of a linear with an fp8 weight: an item is tiles of 16 outputs, over a range of the
    rows. ``store(y, acc, row, n, first, count)`` writes n rows of ``count`` tiles, a multiple of
    ``least`` but where the rest is padding, from their fp32 sums ``acc[count * n * 16]``."""
    N, K, B = dims(spec, "N", "K", "B")
    m, groups = spec.attrs["m"], spec.attrs["groups"]
    R, tiles = spec.schedule["rows"], spec.schedule["tiles"]
    per_group = m // groups  # outputs; a multiple of the tile where there are several groups
    # Tiles of one call read the same channels; the last one may be padding altogether.
    run = tiles if groups == 1 or per_group // TILE % tiles == 0 else least

    @T.prim_func
    def body(x: T.Tensor((N, K * groups), "uint16"), w: T.Tensor((B, K // 2, 2 * TILE), "uint8"),
             sf: T.Tensor((B, K // 32), "uint8"), y: T.Tensor((N, m), STORAGE[out]),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            first = first_tile(lo + item, B, spec)
            acc = T.alloc_local((run * R * TILE,), "float32")
            for block in T.serial(T.truncdiv(row_count(lo + item, N, B, spec) + R - 1, R)):
                row = first_row(lo + item, N, B, spec) + block * R
                n = T.min(R, row_count(lo + item, N, B, spec) - block * R)
                for t in T.serial(tiles // run):
                    b = first + t * run
                    count = T.min(run, -(-m // TILE) - b)
                    if count > 0:
                        T.call_extern(
                            "int32", "di_gemm_e4m3",
                            T.access_ptr(x[row, b * TILE // per_group * K], "r"), K * groups,
                            T.access_ptr(w[b, 0, 0], "r"), T.access_ptr(sf[b, 0], "r"), K, n,
                            count, T.access_ptr(acc[0], "w"), 0)
                        store(y, acc, row, n, b, count)

    return body
