"""sparse_attention of ascend950 in the emulator.

The bound, per output and relative to A = sum_j w_j |v_j| (w: the softmax weights): reference and
kernel round the same P to bf16, and where their scores differ the roundings may fall apart by one
unit of 2^-8; scores are fp32 sums of D exact products in different orders, so each side is off by
at most D * 2^-24 * scale * sum|q*k| (dS), which moves a weight by a factor of at most exp(2 dS) in
the numerator and again in the denominator; exp, the sum of P and of P*V are within 2^-18 together;
o is rounded to bf16, another 2^-8 of |o|.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deepinfer.numerics.formats import f32
from deepinfer.ops.attention import (
    first_seen,
    picked_tiles,
    sparse_attention,
    window_tiles,
)
from deepinfer.ops.quant import quantize_fp4_e4m3, quantize_fp8
from deepinfer.targets.ascend950.kernels.sparse_attention import sparse_attention as kernel
from tests.emulated.ascend950_harness import Array, Case, Compare, caught, check, emulate

RING, PAGE, PAGES = 160, 16, 6


def case(heads: int, d: int, window: int, spans: list[tuple[int, int, int]], start: list[int],
         picks: int, seed: int, floors: tuple[int, ...] = ()) -> Case:
    """Requests with the given spans and first positions; some rows have few picks, one none. What
    rings have of positions below a floor is NaN codes."""
    rng = np.random.default_rng(seed)
    n = spans[-1][2]
    floors = floors or (0,) * len(spans)
    request, positions = np.empty(n, np.int32), np.empty(n, np.int32)
    for r, ((_, first, end), p) in enumerate(zip(spans, start, strict=True)):
        request[first:end], positions[first:end] = r, np.arange(p, p + end - first)

    def keys(*shape: int) -> Array:
        x = rng.standard_normal((int(np.prod(shape)), d)) * np.exp2(rng.integers(-2, 2, (1, d)))
        return x.astype(ml_dtypes.bfloat16)

    k, k_sf = quantize_fp8(keys(n), block=32)
    ring, ring_sf = (a.reshape(4, RING, -1) for a in quantize_fp8(keys(4 * RING), block=32))
    for slot in range(4):  # what nobody wrote yet is NaN codes, and must not be read
        old = [p for (s, _, _), p in zip(spans, start, strict=True) if s == slot]
        unwritten = slice(old[0] if old else 0, None)
        ring.view(np.uint8)[slot, unwritten] = ring_sf.view(np.uint8)[slot, unwritten] = 0xFF
    for (slot, _, _), p, floor in zip(spans, start, floors, strict=True):
        below = np.arange(max(0, p - RING), min(floor, p)) % RING
        ring.view(np.uint8)[slot, below] = ring_sf.view(np.uint8)[slot, below] = 0xFF
    total = len(spans) * PAGES
    kv, kv_sf = (a.reshape(total, PAGE, -1)
                 for a in quantize_fp4_e4m3(keys(total * PAGE), block=16))
    pages = rng.permutation(total).astype(np.int32).reshape(len(spans), PAGES)
    idx = np.full((n, picks), -1, np.int32)
    for row in range(n):
        count = (picks, 0, picks // 3, 1)[row % 4]
        chosen = np.sort(rng.choice(PAGE * PAGES, count, replace=False))
        idx[row, np.sort(rng.choice(picks, count, replace=False))] = chosen  # holes between picks
    q = (2 * rng.standard_normal((n, heads * d))).astype(ml_dtypes.bfloat16)
    sink = rng.standard_normal(heads).astype(np.float32)
    return Case(sparse_attention, kernel,
                (q, k, k_sf, np.ascontiguousarray(ring), np.ascontiguousarray(ring_sf), sink,
                 positions, request,
                 np.array([(*s, f) for s, f in zip(spans, floors, strict=True)], np.int32), idx,
                 pages,
                 np.ascontiguousarray(kv), np.ascontiguousarray(kv_sf)),
                (("window", window), ("scale", float(d) ** -0.5)), ("N", "R", "S", "T"))


def bound(c: Case) -> Compare:
    attrs: dict[str, Any] = dict(c.attrs)
    q, k, k_sf, ring, ring_sf, sink, positions, request, spans, idx, pages, kv, kv_sf = c.arrays
    heads, d = len(sink), k.shape[1]
    allowed = np.empty((len(q), heads, d))
    for row, position in enumerate(positions):
        low = first_seen(position, attrs["window"], spans[request[row], 3])
        tiles = [*window_tiles(k, k_sf, ring, ring_sf, positions, spans[request[row]], low,
                               position),
                 *picked_tiles(idx[row], pages[request[row]], kv, kv_sf)]
        v = np.concatenate([f32(t)[seen] for t, seen in tiles]).astype(np.float64)
        queries = f32(q[row]).reshape(heads, d).astype(np.float64)
        s = queries @ v.T * attrs["scale"]
        top = s.max(axis=1, keepdims=True)
        w = np.exp(s - top)
        w /= w.sum(axis=1, keepdims=True) + np.exp(sink[:, None] - top)
        off = np.abs(queries) @ np.abs(v).T * attrs["scale"] * d * 2.0**-24
        spread = np.exp(4 * off.max(axis=1, keepdims=True)) - 1
        allowed[row] = (2.0**-8 + spread + 2.0**-18) * (w @ np.abs(v)) + 2.0**-8 * np.abs(w @ v)

    def compare(got: tuple[Array, ...], expected: tuple[Array, ...]) -> str:
        g, e = (f32(x[0]).astype(np.float64) for x in (got, expected))
        worst = float(np.max(np.abs(g - e) / allowed.reshape(g.shape)))
        return "" if worst <= 1 else f"off by {worst:.3g} of the bound"

    return compare


# The first: whole heads, a row whose window starts inside the step. The second: fewer heads than a
# group has, a window that fills one tile, rows at the very start of a request, few picks.
BIG = (64, 128, 128, [(1, 0, 2), (3, 2, 3)], [300, 40], 80)
SMALL = (12, 64, 40, [(0, 0, 3)], [0], 20)


# The model's head_dim: the two products cut L0A into stages of different sizes.
WIDE = (12, 512, 128, [(2, 0, 1)], [300], 70)


@pytest.mark.parametrize("arguments", [BIG, SMALL, WIDE],
                         ids=["big", "small", "wide"])
def test_agrees_with_the_reference(arguments: tuple[Any, ...]) -> None:
    c = case(*arguments, 1)
    check(c, bound(c))


def test_the_products_run_on_the_cube_core() -> None:
    """Per tile one product for scores and one for outputs; K picks take two tiles, seen or not."""
    c = case(*BIG, 1)
    tiles = sum(int(p) // 64 - max(0, int(p) - 127) // 64 + 1 + 2 for p in c.arrays[6])
    _, report = c.run(emulate(c))
    assert report.operations["mmad"] == 2 * tiles and report.operations["l0c2ub"] == 2 * tiles


def test_keys_below_the_floor_are_not_seen() -> None:
    """A floor that leaves out a whole tile, one inside the step, one above all rows."""
    c = case(12, 64, 128, [(1, 0, 2), (3, 2, 5), (0, 5, 6)], [300, 40, 200], 20, 5,
             (270, 41, 900))
    lows = [first_seen(p, 128, f) for p, f in ((300, 270), (40, 41), (42, 41), (200, 900))]
    assert lows == [270, 40, 41, 200]
    check(c, bound(c), schedules=("random",))


def test_the_number_of_buffers_does_not_change_bits() -> None:
    c = case(*SMALL, 2)
    two, one = c.kernel.space(c.spec())
    a, b = (check(c, bound(c), schedule=s, schedules=("random",)) for s in (two, one))
    assert np.array_equal(a[0].view(np.uint16), b[0].view(np.uint16))


def test_a_group_of_cores_may_take_several_rows() -> None:
    c = case(*SMALL[:3], [(0, 0, 34)], [70], 20, 4)
    check(c, bound(c), schedules=("lazy", "random"))


def test_products_of_unlike_stages_are_kept_apart() -> None:
    """TileLang's locks of a stage do not: without our event one product loads over the other."""
    c = case(*WIDE, 2)
    assert caught(c, r"asc_sync_(wait|notify)\(PIPE_M, PIPE_MTE1.*", ";", bound(c))


BROKEN = [
    ("the wait for keys of one core removed", r"asc_sync_intra_wait\(PIPE_MTE1, \(u & 1\)\);", ";"),
    ("the wait for scores removed", r"asc_sync_intra_wait\(PIPE_V, 4\);", ";"),
    ("the wait for P removed", r"asc_sync_intra_wait\(PIPE_MTE1, 5\);", ";"),
    ("the wait for outputs removed", r"asc_sync_intra_wait\(PIPE_V, 6\);", ";"),
    ("the wait for the product removed", r"asc_sync_wait\(PIPE_M, PIPE_FIX, .*\(1\)\);", ";"),
    ("the wait for queries removed", r"asc_sync_wait\(PIPE_MTE2, PIPE_MTE1.*", ";"),
    ("the wrong event", r"(asc_sync_wait\(PIPE_M, PIPE_FIX, .*)\(0\)\);", r"\1(1));"),
    ("keys in the other stage", r"\(\(\(u_1 \+ 1\) & 1\) \* (\d+)\)", r"((u_1 & 1) * \1)"),
    ("keys of the other half", r"\(half \* 512\)", "((1 - half) * 512)"),
    ("the padding row forgotten", r"(asc_copy_ub2l1\(.*), 1, 32\);", r"\1, 0, 32);"),
    ("one tile too few", r"u(_1)? < (\(.*\)); \+\+u", r"u\1 + 1 < \2; ++u"),
]


@pytest.mark.parametrize(("what", "old", "new"), BROKEN)
def test_broken_variants_are_caught(what: str, old: str, new: str) -> None:
    c = case(*SMALL[:3], [(0, 0, 1)], [200], 20, 3)
    assert caught(c, old, new, bound(c)), what
