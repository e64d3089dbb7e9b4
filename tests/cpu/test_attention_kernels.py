"""The attention family's cpu kernels against their references, in bits, over poisoned caches."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import deepinfer.ops.attention
import deepinfer.ops.cache
import deepinfer.ops.compress
import deepinfer.ops.indexer  # noqa: F401  (all four fill OPS)
from deepinfer.ir import OPS
from deepinfer.numerics.formats import quantize_fp4_e4m3, quantize_fp4_ue8m0
from deepinfer.targets.base import Kernel
from tests.cpu.harness import Array, assert_same_bits, check, run_kernel
from tests.ops.attention_cases import (
    index_case,
    poison,
    queries,
    rows_of,
    sparse_case,
    window_case,
    with_nan_row,
)

SIZES = "N,R,S,T,P,G"
STEP = [(2, 0, 3), (0, 29, 3), (3, 130, 1), (1, 60, 9)]


def kernel(name: str) -> Kernel:
    module = importlib.import_module(f"deepinfer.targets.cpu.kernels.{name}")
    found = getattr(module, name)
    assert isinstance(found, Kernel)
    return found


def verify(name: str, arrays: tuple[Array, ...], **attrs: Any) -> None:
    check(OPS[name], kernel(name), arrays, symbolic=SIZES, **attrs)


ATTENTION = dict(window=8, scale=0.17)
SHAPE = dict(heads=4, width=64, ring=20, window=8)
WIDE = dict(heads=20, width=96, ring=128, window=128)  # heads do not fill the tiles of 16


@pytest.mark.parametrize("requests", [STEP, [(0, 0, 1)], [(1, 61, 5), (0, 7, 2)]])
def test_window_attention(requests: list[tuple[int, int, int]]) -> None:
    verify("window_attention", window_case(requests, **SHAPE), **ATTENTION)


def test_window_attention_of_three_tiles_and_many_heads() -> None:
    verify("window_attention", window_case([(0, 190, 2), (1, 150, 1)], **WIDE),
           window=128, scale=0.1)


@pytest.mark.parametrize("window", [63, 64, 65, 70])
def test_a_window_that_slides_over_tiles(window: int) -> None:
    """Keys come and go at tile boundaries; a request follows another one in the same range."""
    shape = dict(heads=2, width=32, ring=80, window=window)
    requests = [(0, 120, 80), (1, 0, 66)]
    verify("window_attention", window_case(requests, **shape, floors=[150, 0]), window=window,
           scale=0.2)


def test_a_large_sink_and_large_scores() -> None:
    """exp underflows to denormals and zero; the running maximum jumps between tiles."""
    case = list(window_case([(0, 60, 10)], **SHAPE))
    case[0] = (case[0].astype(np.float32) * 70).astype(case[0].dtype)
    case[5] = np.float32([90, -90, 0, 30])
    verify("window_attention", tuple(case), **ATTENTION)


@pytest.mark.parametrize("floors", [[1, 28, 127, 55], [2, 31, 140, 66], [9, 30, 130, 60]])
def test_floors(floors: list[int]) -> None:
    """Below, in and above the step's rows, over rings that are poisoned below them."""
    verify("window_attention", window_case(STEP, **SHAPE, floors=floors), **ATTENTION)
    verify("draft_attention", window_case(STEP, **SHAPE, floors=floors), **ATTENTION)
    verify("sparse_attention",
           sparse_case(STEP, **SHAPE, ratio=2, k=130, size=8, floors=floors), **ATTENTION)


def test_sparse_attention() -> None:
    verify("sparse_attention", sparse_case(STEP, **SHAPE, ratio=2, k=130, size=8), **ATTENTION)


def test_sparse_attention_over_several_tiles_of_picks() -> None:
    case = sparse_case([(0, 158, 3), (1, 200, 2)], **SHAPE, ratio=1, k=130, size=8)
    assert (np.sum(case[9] >= 0, axis=1) > 64).any()
    verify("sparse_attention", case, **ATTENTION)


def test_draft_attention() -> None:
    requests = [(0, 62, 5), (2, 0, 5), (1, 9, 5)]
    verify("draft_attention", window_case(requests, **SHAPE), **ATTENTION)


def test_rows_of_no_request() -> None:
    case = window_case([(0, 9, 2)], **SHAPE)
    none = tuple(a[:0] if i in (0, 1, 2, 6, 7, 8) else a for i, a in enumerate(case))
    verify("window_attention", none, **ATTENTION)


def test_a_nan_row_stays_alone() -> None:
    case = sparse_case(STEP, **SHAPE, ratio=2, k=130, size=8)
    bad = list(case)
    bad[0] = with_nan_row(case[0], 7)
    bad[1] = case[1].copy()
    bad[1][5] = np.nan  # the last key of its request: seen by row 5 alone
    run = [run_kernel(OPS["sparse_attention"], kernel("sparse_attention"), tuple(c), ATTENTION,
                      symbolic=SIZES, isa="generic")[0] for c in (case, bad)]
    others = np.delete(np.arange(len(case[0])), [5, 7])
    assert_same_bits(run[1][others], run[0][others])
    assert np.isnan(run[1][[5, 7]].astype(np.float32)).all()


INDEX = dict(ratio=2, scale=0.125)
INDEX_STEP = [(0, 20, 4), (1, 0, 3), (2, 141, 2)]
INDEX_SHAPE = dict(heads=4, width=32, ratio=2, size=8)


def test_index_topk_and_that_it_drops_what_is_not_finite() -> None:
    """Pages of 5 entries: a tile of 16 keys crosses pages."""
    case = list(index_case(INDEX_STEP, heads=3, width=64, ratio=2, size=5))
    verify("index_topk", tuple(case), k=40, **INDEX)
    case[6] = case[6].copy()
    case[6].view(np.uint8)[case[4][2, 1], 2] = 255
    case[1] = with_nan_row(case[1], 0)
    verify("index_topk", tuple(case), k=40, **INDEX)


def test_index_topk_of_rows_that_share_keys() -> None:
    """Items of 4 and 8 rows hold several requests; calls of several tiles, and some of one."""
    steps = [(0, 135, 9), (1, 3, 1), (2, 0, 6), (3, 300, 2)]
    verify("index_topk", tuple(index_case(steps, heads=3, width=64, ratio=2, size=5)), k=20,
           **INDEX)


def test_index_topk_candidates_and_within() -> None:
    case = index_case(INDEX_STEP, **INDEX_SHAPE)
    verify("index_topk_candidates", case, k=8, block=4, count=4, **INDEX)
    _, blocks = OPS["index_topk_candidates"](*case, k=8, block=4, count=4, **INDEX)
    verify("index_topk_within", (*case, blocks), k=8, block=4, **INDEX)


def test_index_topk_within_reads_only_candidates() -> None:
    """Pages without a candidate are not there at all: reading one would crash."""
    case = list(index_case([(0, 140, 1)], **INDEX_SHAPE))
    blocks = np.array([[2, 3, 9, -1]], np.int32)
    pages = np.full_like(case[4], 1 << 30)
    wanted = np.unique(blocks[blocks >= 0] * 4 // 8)
    pages[0, wanted] = case[4][0, wanted]
    case[4] = pages
    verify("index_topk_within", (*case, blocks), k=8, block=4, **INDEX)


def test_topk_of_ties_zeros_infinities_and_nan() -> None:
    rng = np.random.default_rng(3)
    values = np.float32([-2, -1, -0.0, 0.0, 1e-45, 1, 3, np.nan, np.inf, -np.inf])
    scores = values[rng.integers(0, len(values), (24, 50))]
    scores[12:] = rng.normal(size=(12, 50)).astype(np.float32)
    verify("topk", (scores, np.arange(70, 94, dtype=np.int32)), k=9, ratio=2)


def test_window_write() -> None:
    case = window_case([(1, 5, 30), (0, 3, 2), (2, 0, 0)], **SHAPE)
    k, k_sf, ring, ring_sf, _, positions, request, spans = case[1:]
    verify("window_write", (k, k_sf, positions, request, spans, ring, ring_sf))


@pytest.mark.parametrize("block", [16, 32])
def test_kv_write(block: int) -> None:
    quantize = quantize_fp4_e4m3 if block == 16 else quantize_fp4_ue8m0
    q, sf = quantize(queries(6, 64, 0))
    positions = np.array([4, 6, -1, 0, 2, 10], np.int32)  # -1: no entry is written
    request = np.array([0, 0, 0, 1, 1, 1], np.int32)
    pages = np.array([[3, 0, -1], [1, 4, -1]], np.int32)
    caches = poison((5, 3, 32), np.uint8), poison((5, 3, 64 // block), sf.dtype)
    verify("kv_write", (q, sf, positions, request, pages, *caches), ratio=2)


def test_compress_pairs_and_pending_write() -> None:
    """Groups inside a request, groups whose first half is pending, and halves left over; more
    even rows than the ring of pending positions holds."""
    rng = np.random.default_rng(1)
    positions, request, spans = rows_of([(2, 0, 9), (0, 7, 2), (1, 3, 1), (3, 0, 0)])
    a, g = (rng.normal(size=(12, 48)).astype(np.float32) * 30 for _ in range(2))
    pending = poison((4, 3, 2, 48), np.float32)
    pending[:2, [6 // 2 % 3, 2 // 2 % 3]] = rng.normal(size=(2, 2, 2, 48))
    closing = np.flatnonzero(positions % 2 == 1).astype(np.int32)
    assert set(closing - spans[request[closing], 1]) == {0, 1, 3, 5, 7}
    verify("compress_pairs", (a, g, closing, positions[closing] - 1, request[closing], spans,
                              pending))
    verify("pending_write", (a, g, positions, spans, pending))
