"""What the three packed linears share: their schedules, and which tiles and rows an item is."""

import tilelang.language as T

from deepinfer.targets.base import Spec, grid

ITEMS = "B*split/tiles"
FEW = 8  # tiles: too few to spread over the threads, so their rows are split


def space(spec: Spec, rows: tuple[int, ...] = (96, 48)):
    """rows: of one GEMM call. tiles: of an item, in one call, which widens the rows once for all of
    them. split: an item is one of so many ranges of the rows."""
    B = spec.dims["B"]
    tiles = tuple(t for t in (4, 2, 1, 8) if t == 1 or (B % t == 0 and B // t >= 2))
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
