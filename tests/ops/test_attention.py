"""The attention family against independent float64 formulas, and its invariances in bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer.numerics.formats import (
    dequantize_fp4,
    dequantize_fp8,
    quantize_fp4_e4m3,
    quantize_fp4_ue8m0,
)
from deepinfer.ops.attention import draft_attention, sparse_attention, window_attention
from deepinfer.ops.cache import kv_write, pending_write, window_write
from deepinfer.ops.compress import compress_pairs
from deepinfer.ops.indexer import (
    candidate_blocks,
    candidate_mask,
    index_scores,
    index_topk,
    index_topk_candidates,
    index_topk_within,
    topk,
)
from tests.ops.attention_cases import (
    Keys,
    groups_of,
    index_case,
    paged,
    picks,
    poison,
    queries,
    rows_of,
    sparse_case,
    window_case,
    with_nan_row,
)

Array = np.ndarray[Any, Any]
F64 = np.float64
H, D, W, WINDOW, SCALE = 3, 32, 12, 8, 32**-0.5
ATTENTION = dict(window=WINDOW, scale=SCALE)
# slot, first position, rows: from the start, after a wrap of the ring, one row, across tile 64
STEP = [(2, 0, 10), (0, 29, 3), (3, 70, 1), (1, 60, 9)]


def exact(q: Array, keys: Array, sink: Array) -> Array:
    """Softmax attention with a sink of one row in float64: q [H*D], keys [n,D] -> [H*D]."""
    heads = q.astype(F64).reshape(len(sink), -1)
    scores = heads @ keys.astype(F64).T * SCALE
    e = np.exp(scores)
    return (e @ keys.astype(F64) / (e.sum(1) + np.exp(sink.astype(F64)))[:, None]).reshape(-1)


def close(got: Array, expected: Array) -> None:
    """Within what bf16 probabilities and a bf16 result can move."""
    np.testing.assert_allclose(got.astype(F64), expected, rtol=0.02, atol=0.02)


def same(got: Array, expected: Array) -> None:
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(np.uint8),
                                  np.ascontiguousarray(expected).view(np.uint8))


def test_window_attention_is_softmax_over_the_window_with_a_sink() -> None:
    keys = Keys(4, W, D, 71, seed=0)
    case = window_case(STEP, heads=H, width=D, ring=W, window=WINDOW)
    out = window_attention(*case, **ATTENTION)
    q, sink, positions, request, spans = case[0], *case[5:]
    everything = dequantize_fp8(Keys(4, W, D, 71, seed=0).q, keys.sf)
    for row, p in enumerate(positions):
        seen = everything[spans[request[row], 0], max(0, p - WINDOW + 1) : p + 1]
        close(out[row], exact(q[row], seen, sink))


@pytest.mark.parametrize("edge", [-WINDOW, -WINDOW + 1, 0, 1])
def test_window_edges(edge: int) -> None:
    """Changing the key at distance ``edge`` changes row 20 exactly if it is in the window."""
    case = window_case([(0, 0, 22)], heads=H, width=D, ring=W, window=WINDOW)
    before = window_attention(*case, **ATTENTION)[20]
    changed = list(case)
    changed[1] = case[1].copy()
    changed[1][20 + edge] = case[1][3]
    after = window_attention(*changed, **ATTENTION)[20]
    visible = -WINDOW < edge <= 0
    assert (before.tobytes() != after.tobytes()) == visible


def test_sink_counts_only_in_the_denominator_and_is_not_scaled() -> None:
    case = list(window_case([(0, 0, 1)], heads=H, width=D, ring=W, window=WINDOW))
    key = dequantize_fp8(case[1], case[2]).astype(F64)[0]
    score = case[0].astype(F64).reshape(H, D) @ key * SCALE
    case[5] = (score + np.log(3)).astype(np.float32)  # e^sink = 3 e^score: a quarter is left
    close(window_attention(*case, **ATTENTION)[0], np.tile(key / 4, H))


def test_sparse_attention_is_one_softmax_over_window_and_picks() -> None:
    case = sparse_case(STEP, heads=H, width=D, ring=W, window=WINDOW, ratio=2, k=9, size=4)
    out = sparse_attention(*case, **ATTENTION)
    keys = Keys(4, W, D, 71, seed=0)
    everything = dequantize_fp8(keys.q, keys.sf)
    q, (sink, positions, request, spans, idx, pages, kv, kv_sf) = case[0], case[5:]
    assert (idx[:, :4] == -1).any(1).any() and (idx >= 0).sum() > 40
    for row, p in enumerate(positions):
        seen = everything[spans[request[row], 0], max(0, p - WINDOW + 1) : p + 1]
        chosen = idx[row][idx[row] >= 0]
        at = pages[request[row], chosen // 4], chosen % 4
        both = np.concatenate([seen, dequantize_fp4(kv[at], kv_sf[at], 16)])
        close(out[row], exact(q[row], both, sink))


def test_picks_are_packed_before_they_are_tiled() -> None:
    """A -1 anywhere in a selection takes no rank: more than one tile, and -1 at other places."""
    case = list(sparse_case([(0, 159, 1)], heads=H, width=D, ring=W, window=WINDOW, ratio=2, k=80,
                            size=8))
    chosen = np.arange(2, 72, dtype=np.int32)
    front, middle = np.full((1, 80), -1, np.int32), np.full((1, 80), -1, np.int32)
    front[0, :70] = chosen
    middle[0, np.delete(np.arange(80), np.arange(0, 80, 8))] = chosen
    case[9] = front
    expected = sparse_attention(*case, **ATTENTION)
    case[9] = middle
    same(sparse_attention(*case, **ATTENTION), expected)


def test_draft_rows_see_the_window_before_the_block_and_all_of_it() -> None:
    steps = [(1, 62, 5), (0, 0, 5), (2, 3, 5)]
    case = window_case(steps, heads=H, width=D, ring=W, window=WINDOW)
    out = draft_attention(*case, **ATTENTION)
    keys = Keys(3, W, D, 67, seed=0)
    everything = dequantize_fp8(keys.q, keys.sf)
    for row in range(15):
        slot, start, count = steps[row // 5]
        seen = everything[slot, max(0, start - WINDOW) : start + count]
        close(out[row], exact(case[0][row], seen, case[5]))


@pytest.mark.parametrize("ring", [WINDOW, W, 64])
@pytest.mark.parametrize("cuts", [(1,) * 90, (7, 1, 30, 2, 50), (64, 26)])
def test_any_chunking_gives_the_bits_of_the_whole_prompt(ring: int, cuts: tuple[int, ...]) -> None:
    length, keys = 90, Keys(2, ring, D, 90, seed=5)
    q, sink = queries(length, H * D, 6), np.float32([0.5, -1, 2])
    pages, kv, kv_sf = paged([45], 8, D, 7, table=7, kind="kv")
    idx = picks(np.arange(length), 2, 11, 8)

    def step(start: int, rows: int, rings: tuple[Array, Array]) -> Array:
        requests, at = [(1, start, rows)], slice(start, start + rows)
        positions, request, spans = rows_of(requests)
        k, k_sf = keys.rows(requests)
        out = sparse_attention(q[at], k, k_sf, *rings, sink, positions, request, spans, idx[at],
                               pages, kv, kv_sf, **ATTENTION)
        window_write(k, k_sf, positions, request, spans, *rings)
        return out

    def run(sizes: tuple[int, ...]) -> Array:
        rings, outs, start = keys.rings([(1, 0, 0)], WINDOW), [], 0
        for rows in sizes:
            outs.append(step(start, rows, rings))
            start += rows
        return np.concatenate(outs)

    # 90 one-row steps take long: the first wraps and the tile border are enough.
    kept = 70 if len(cuts) == 90 else 90
    same(run(cuts[:kept])[:kept], run((length,))[:kept])


def test_a_row_alone_has_the_bits_it_has_in_a_batch_and_nan_neighbours_do_not_matter() -> None:
    case = sparse_case(STEP, heads=H, width=D, ring=W, window=WINDOW, ratio=2, k=9, size=4)
    whole = sparse_attention(*case, **ATTENTION)
    alone = list(case)
    alone[0] = with_nan_row(case[0], 5)
    alone[1] = case[1].copy()
    alone[1][12] = np.nan  # the last key of request 1: position 31, seen by row 12 alone
    got = sparse_attention(*alone, **ATTENTION)
    assert np.isnan(got[[5, 12]].astype(np.float32)).all()
    others = np.delete(np.arange(len(whole)), [5, 12])
    same(got[others], whole[others])


def test_window_write_keeps_the_last_ring_of_rows() -> None:
    case = window_case([(1, 5, 30), (0, 3, 2), (2, 0, 0)], heads=H, width=D, ring=W, window=WINDOW)
    k, k_sf, _, _, _, positions, request, spans = case[1:]
    ring, ring_sf = poison((3, W, D), k.dtype), poison((3, W, 1), k_sf.dtype)
    window_write(k, k_sf, positions, request, spans, ring, ring_sf)
    for p in range(35 - W, 35):
        same(ring[1, p % W], k[p - 5])
        same(ring_sf[1, p % W], k_sf[p - 5])
    same(ring[0, 3:5], k[30:32])
    same(ring[0, 5:], poison((W - 5, D), k.dtype))
    same(ring[2], poison((W, D), k.dtype))


def test_kv_write_puts_entries_into_their_pages() -> None:
    q, sf = quantize_fp4_e4m3(queries(6, 32, 0))
    positions = np.array([4, 6, 8, 0, 2, 10], np.int32)
    request = np.array([0, 0, 0, 1, 1, 1], np.int32)
    pages = np.array([[3, 0, -1], [1, 4, -1]], np.int32)
    cache, cache_sf = poison((5, 3, 16), np.uint8), poison((5, 3, 2), sf.dtype)
    kv_write(q, sf, positions, request, pages, cache, cache_sf, ratio=2)
    for row, (page, slot) in enumerate([(3, 2), (0, 0), (0, 1), (1, 0), (1, 1), (4, 2)]):
        same(cache[page, slot], q[row])
        same(cache_sf[page, slot], sf[row])
    assert (cache == 0xFF).all(-1).sum() >= 15 - 6
    before = cache.copy(), cache_sf.copy()
    kv_write(q[::-1], sf[::-1], np.full(6, -1, np.int32), request, pages, cache, cache_sf, ratio=2)
    same(cache, before[0])  # no position, no entry
    same(cache_sf, before[1])


@pytest.mark.parametrize("cuts", [(1,) * 9, (2, 3, 1, 3), (5, 4)])
def test_compressed_pairs_do_not_depend_on_chunks(cuts: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    a, g = (rng.normal(size=(9, 32)).astype(np.float32) * 4 for _ in range(2))
    soft = np.exp(g[:8].astype(F64)).reshape(4, 2, 32)
    exact_c = (soft * a[:8].reshape(4, 2, 32)).sum(1) / soft.sum(1)

    def run(sizes: tuple[int, ...]) -> Array:
        pending, outs, start = poison((3, 2, 2, 32), np.float32), [], 0
        for rows in sizes:
            at = slice(start, start + rows)
            positions, _, spans = rows_of([(2, start, rows)])
            outs.append(compress_pairs(a[at], g[at], *groups_of(positions), spans, pending))
            pending_write(a[at], g[at], positions, spans, pending)
            start += rows
        same(pending[2, 0], np.stack([a[8], g[8]]))  # 8 // 2 % 2
        same(pending[:2], poison((2, 2, 2, 32), np.float32))
        return np.concatenate(outs)

    whole = run((9,))
    np.testing.assert_allclose(whole.astype(F64), exact_c, rtol=0.004, atol=1e-3)
    same(run(cuts), whole)


INDEX = dict(ratio=2, scale=0.125)
INDEX_STEP = [(0, 20, 4), (1, 0, 3), (2, 61, 2)]


def source_scores(case: tuple[Array, ...]) -> Array:
    return index_scores(*quantize_fp4_ue8m0(case[0]), *case[1:], **INDEX)


def test_index_scores_are_weighted_relu_dots() -> None:
    case = index_case(INDEX_STEP, heads=4, width=32, ratio=2, size=4)
    q, w, positions, request, pages, keys, keys_sf = case
    scores = source_scores(case)
    for row, p in enumerate(positions):
        reach = (p + 1) // 2
        at = np.arange(reach)
        k = dequantize_fp4(keys[pages[request[row], at // 4], at % 4],
                           keys_sf[pages[request[row], at // 4], at % 4], 32).astype(F64)
        dots = np.maximum(q[row].astype(F64).reshape(4, 32) @ k.T, 0)
        np.testing.assert_allclose(scores[row, :reach], w[row].astype(F64) * 0.125 @ dots,
                                   rtol=1e-5, atol=1e-5)
        assert (scores[row, reach:] == -np.inf).all()


def slow_topk(scores: Array, k: int) -> list[int]:
    usable = [i for i, s in enumerate(scores) if np.isfinite(s)]
    best = sorted(sorted(usable, key=lambda i: (-scores[i], i))[:k])
    return best + [-1] * (k - len(best))


def tied_scores(rows: int, count: int) -> Array:
    """Few values, both zeros, infinities and NaN."""
    rng = np.random.default_rng(3)
    values = np.float32([-2, -1, -0.0, 0.0, 1, 3, np.nan, np.inf, -np.inf])
    return values[rng.integers(0, len(values), (rows, count))]


def test_topk_takes_finite_scores_and_the_lower_index_of_equals() -> None:
    scores = tied_scores(40, 33)
    positions = np.arange(30, 70, dtype=np.int32)
    got = topk(scores, positions, k=7, ratio=2)
    for row, p in enumerate(positions):
        assert got[row].tolist() == slow_topk(scores[row, : (p + 1) // 2], 7)
    none = topk(scores[:2], np.array([0, 0], np.int32), k=7, ratio=2)
    assert (none == -1).all()


def test_candidates_are_the_best_blocks_and_always_the_newest() -> None:
    scores = tied_scores(40, 33)
    positions = np.arange(0, 40, dtype=np.int32)
    got = candidate_blocks(scores, positions, ratio=1, block=4, count=3)
    forced = 0
    for row, p in enumerate(positions):
        reach = min(p + 1, 33)
        finite = np.where(np.isfinite(scores[row, :reach]), scores[row, :reach], -np.inf)
        best = [max(finite[b : b + 4]) for b in range(0, reach, 4)]
        newest = len(best) - 1
        forced += newest not in slow_topk(np.array(best), 3)
        best[newest] = 1e9
        assert got[row].tolist() == slow_topk(np.array(best), 3)
    assert forced > 5  # the rule was needed
    masked = candidate_mask(scores, got, block=4)
    inside = np.zeros((40, 36), bool)
    for row in range(40):
        for b in got[row][got[row] >= 0]:
            inside[row, 4 * b : 4 * b + 4] = True
    same(masked, np.where(inside[:, :33], scores, np.float32(-np.inf)))


def test_streamed_ops_equal_the_single_steps() -> None:
    case = index_case(INDEX_STEP, heads=2, width=32, ratio=2, size=4)
    scores, positions = source_scores(case), case[2]
    assert sum(len(set(s[np.isfinite(s)])) < np.isfinite(s).sum() for s in scores) > 0  # ties
    expected = topk(scores, positions, k=5, ratio=2)
    blocks = candidate_blocks(scores, positions, ratio=2, block=3, count=4)
    same(index_topk(*case, k=5, **INDEX), expected)
    idx, got_blocks = index_topk_candidates(*case, k=5, block=3, count=4, **INDEX)
    same(idx, expected)
    same(got_blocks, blocks)
    within = topk(candidate_mask(scores, blocks, block=3), positions, k=5, ratio=2)
    assert (within != expected).any()
    same(index_topk_within(*case, blocks, k=5, block=3, **INDEX), within)


def test_a_nan_key_is_never_picked() -> None:
    case = list(index_case([(0, 20, 4)], heads=2, width=32, ratio=2, size=4))
    keys_sf = case[6].copy()
    keys_sf.view(np.uint8)[case[4][0, 1], 2] = 255  # entry 6
    idx = index_topk(*case[:6], keys_sf, k=12, **INDEX)
    assert 6 in index_topk(*case, k=12, **INDEX) and 6 not in idx
