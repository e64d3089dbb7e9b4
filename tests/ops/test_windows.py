"""What a step sees of earlier ones: windows with a floor, and pending halves after a rollback."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer.graph.limits import Limits
from deepinfer.numerics.formats import dequantize_fp8, quantize_fp8, to_bf16
from deepinfer.ops.attention import draft_attention, window_attention
from deepinfer.ops.cache import pending_write, window_write
from deepinfer.ops.compress import compress_pairs
from tests.ops.attention_cases import Keys, groups_of, poison, rows_of, window_case
from tests.ops.test_attention import ATTENTION, F64, WINDOW, D, H, W, close, exact, same

Array = np.ndarray[Any, Any]


@pytest.mark.parametrize("width", range(1, 9))
def test_rejected_verify_rows_leave_what_later_groups_need(width: int) -> None:
    """Case C1: a verify step of 1 + width rows of which any number is accepted, from any start,
    then plain steps; the ring of pending positions holds just what ``Limits`` gives it."""
    rng = np.random.default_rng(width)
    a, g = (rng.normal(size=(40, 32)).astype(np.float32) for _ in range(2))
    whole, _, spans = rows_of([(0, 0, 40)])
    expected = compress_pairs(a, g, *groups_of(whole), spans, poison((1, 1, 2, 32), np.float32))

    def step(start: int, values: Array, gates: Array, pending: Array) -> None:
        positions, _, spans = rows_of([(0, start, len(values))])
        groups = groups_of(positions)
        got = compress_pairs(values, gates, *groups, spans, pending)
        pending_write(values, gates, positions, spans, pending)
        for position, c in zip(groups[1], got, strict=True):
            made[position // 2] = c

    for start in range(6):
        for accepted in range(width + 1):
            made: dict[int, Array] = {}
            pending = poison((1, Limits(draft_width=width).pending, 2, 32), np.float32)
            for p in range(start):
                step(p, a[p:p + 1], g[p:p + 1], pending)
            drafted = [x[start:start + 1 + width].copy() for x in (a, g)]
            for x in drafted:
                x[1 + accepted:] = 9  # rows of rejected drafts, of other tokens
            step(start, *drafted, pending)
            for p in range(start + 1 + accepted, start + accepted + 8):
                step(p, a[p:p + 1], g[p:p + 1], pending)
            for j in range((start + accepted + 8) // 2):
                same(made[j], expected[j])


@pytest.mark.parametrize("floor", [9, 28, 29, 30, 31])
def test_no_key_below_the_floor_is_seen(floor: int) -> None:
    """Floors in the ring, at the first row, and inside the step; below it all is poison."""
    case = list(window_case([(0, 29, 4)], heads=H, width=D, ring=W, window=WINDOW, floors=[floor]))
    case[1], case[2] = case[1].copy(), case[2].copy()
    below = max(0, floor - 29)
    case[1][:below] = np.nan
    out = window_attention(*case, **ATTENTION)
    everything = dequantize_fp8(*(getattr(Keys(1, W, D, 33, seed=0), n)[0] for n in ("q", "sf")))
    assert np.isnan(out[:below].astype(F64)).all()  # they see themselves alone
    for row in range(below, 4):
        seen = everything[max(floor, 29 + row - WINDOW + 1):29 + row + 1]
        close(out[row], exact(case[0][row], seen, case[5]))
    block = window_case([(0, 29, 4)], heads=H, width=D, ring=W, window=WINDOW, floors=[floor])
    drafted = draft_attention(*block, **ATTENTION)
    seen = everything[min(29, max(floor, 29 - WINDOW)):33]
    for row in range(4):
        close(drafted[row], exact(case[0][row], seen, case[5]))


def test_a_row_below_the_floor_sees_itself_alone() -> None:
    case = window_case([(0, 9, 4)], heads=H, width=D, ring=W, window=WINDOW, floors=[40])
    keys = dequantize_fp8(case[1], case[2])
    out = window_attention(*case, **ATTENTION)
    for row in range(4):
        close(out[row], exact(case[0][row], keys[row:row + 1], case[5]))


@pytest.mark.parametrize("floor", [0, 100])
@pytest.mark.parametrize("chunk", [201, 7, 128, 129, 6, 1])
def test_a_window_of_128_sees_128_keys(chunk: int, floor: int) -> None:
    """Case D6: with q = 0 and no sink the output is the mean of what is seen; key j is unit vector
    j, so the output says which keys these are."""
    count, ring = 201, 134
    k, k_sf = quantize_fp8(to_bf16(np.eye(count, 224, dtype=np.float32)))
    rings = poison((1, ring, 224), k.dtype), poison((1, ring, 7), k_sf.dtype)
    checked = set()
    for start in range(floor, count, chunk):
        at = slice(start, min(start + chunk, count))
        positions, request, spans = rows_of([(0, start, at.stop - start)], [floor])
        probed = [p for p in (0, 127, 128, 200, 100, 150) if at.start <= p < at.stop]
        if probed:  # steps without one are left out: the reference is slow
            out = window_attention(
                to_bf16(np.zeros((len(positions), 224), np.float32)), k[at],
                k_sf[at], *rings, np.float32([-np.inf]), positions, request, spans, window=128,
                scale=1.0).astype(F64)
        for p in probed:
            seen = np.flatnonzero(out[p - start])
            assert seen.tolist() == list(range(max(floor, p - 127), p + 1)), p
            assert len(set(out[p - start, seen])) == 1
            checked.add((p, float(seen.mean())))
        window_write(k[at], k_sf[at], positions, request, spans, *rings)
    assert checked >= ({(0, 0.0), (127, 63.5), (128, 64.5), (200, 136.5)} if not floor
                       else {(100, 100.0), (128, 114.0), (200, 150.0)})
