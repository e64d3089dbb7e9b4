"""The indexer: scores of compressed entries, candidate blocks, and the selection of top-k entries.

The source graph says it in single steps (`index_scores`, `candidate_blocks`, `candidate_mask`,
`topk`), whose scores are tokens x context. The streamed ops give the same picks from one row of
scores at a time; `passes/stream_index.py` puts them in. A row at position p reaches the entries
j < n(p) = (p+1) // ratio. Selections drop non-finite scores, prefer the lower index on equal
scores (-0 equals +0), and are stored ascending, then -1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.ir import Order, op
from deepinfer.numerics.formats import dequantize_fp4, f32
from deepinfer.numerics.sums import GEMM_SUM, gemm

Array = NDArray[Any]

SCORES = Order("I, then heads ascending", "gemm", GEMM_SUM,
               "w*scale, each w*relu(dot) and each partial sum over heads to fp32")
PICKS = Order("entries", "none", (), "ties: the lower index")
SCORED_PICKS = Order("I, then heads ascending", "gemm", GEMM_SUM,
                     "as index_scores; ties: the lower index")


@op("q:e2m1[N,C], q_sf:ue8m0[N,C/32], w:bf16[N,H], positions:i32[N], request:i32[N], "
    "pages:i32[R,P], keys:e2m1[T,E,I], keys_sf:ue8m0[T,E,I/32] -> scores:f32[N,P*E]", order=SCORES)
def index_scores(q: Array, q_sf: Array, w: Array, positions: Array, request: Array, pages: Array,
                 keys: Array, keys_sf: Array, *, ratio: int, scale: float) -> Array:
    """Index scores of every entry a row can reach; -inf for the others.

    I[p,j] = sum_h (fp32(w[p,h]) * scale) * relu(q[p,h] . k[j]).

    Args:
        q, q_sf: index queries, H heads of I channels (C = H*I). w: head weights before ``scale``.
        positions: of the rows. request: index into pages. pages: page table.
        keys, keys_sf: index keys in pages of E entries. ratio: tokens per entry.
        scale: (I*H)^-0.5, multiplied into w in fp32.
    Order: dot in gemm order over I; then heads ascending from +0, each product rounded.
    Source: spec §2.6, §11.2.
    """
    rows = dequantize_fp4(q, q_sf, 32)
    size = pages.shape[1] * keys.shape[1]
    scores = np.full((len(q), size), -np.inf, np.float32)
    for row, position in enumerate(positions):
        entries = np.arange(min((position + 1) // ratio, size))
        scores[row, entries] = _score(rows[row], w[row], entries, pages[request[row]], keys,
                                      keys_sf, scale)
    return scores


@op("scores:f32[N,L], positions:i32[N] -> blocks:i32[N,count]", order=PICKS)
def candidate_blocks(scores: Array, positions: Array, *, ratio: int, block: int, count: int
                     ) -> Array:
    """The ``count`` blocks of ``block`` entries with the largest maxima, ascending, then -1.

    The block of the newest reachable entry is always taken; a block without a finite score never.

    Args:
        scores: of all entries. positions: of the rows. ratio: tokens per entry.
    Source: spec §2.6 (candidate source), §11.2.
    """
    blocks = np.full((len(scores), count), -1, np.int32)
    for row, position in enumerate(positions):
        reach = min((position + 1) // ratio, scores.shape[1])
        if reach > 0:
            padded = np.full(-(-reach // block) * block, -np.inf, np.float32)
            padded[:reach] = scores[row, :reach]
            padded[~np.isfinite(padded)] = -np.inf
            blocks[row] = _pick(padded.reshape(-1, block).max(axis=1), count,
                                (reach - 1) // block)
    return blocks


@op("scores:f32[N,L], blocks:i32[N,B] -> masked:f32[N,L]", order=PICKS)
def candidate_mask(scores: Array, blocks: Array, *, block: int) -> Array:
    """The scores inside the candidate blocks; -inf elsewhere.

    Args:
        scores: of all entries. blocks: from ``candidate_blocks``. block: entries per block.
    Source: spec §2.6.
    """
    masked = np.full(scores.shape, -np.inf, np.float32)
    for row in range(len(scores)):
        inside = _block_entries(blocks[row], block, scores.shape[1])
        masked[row, inside] = scores[row, inside]
    return masked


@op("scores:f32[N,L], positions:i32[N] -> idx:i32[N,k]", order=PICKS)
def topk(scores: Array, positions: Array, *, k: int, ratio: int) -> Array:
    """The k reachable entries with the largest finite scores, ascending, then -1.

    Args:
        scores: of all entries. positions: of the rows. ratio: tokens per entry.
    Source: spec §2.6, §11.2, §11.3.
    """
    idx = np.empty((len(scores), k), np.int32)
    for row, position in enumerate(positions):
        idx[row] = _pick(scores[row, : max((position + 1) // ratio, 0)], k)
    return idx


@op("q:bf16[N,H*I], w:bf16[N,H], positions:i32[N], request:i32[N], pages:i32[R,P], "
    "keys:e2m1[T,E,I], keys_sf:ue8m0[T,E,I/32] -> idx:i32[N,k]", order=SCORED_PICKS)
def index_topk(q: Array, w: Array, positions: Array, request: Array, pages: Array, keys: Array,
               keys_sf: Array, *, k: int, ratio: int, scale: float) -> Array:
    """``index_scores`` and ``topk`` in one, without a buffer of tokens x context.

    Args:
        q: index queries, already rounded to fp4; the others as there.
    Order: as ``index_scores``.
    Source: spec §2.6, §11.2.
    """
    idx = np.empty((len(q), k), np.int32)
    for row in range(len(q)):
        idx[row] = _pick(_reachable(q, w, positions, request, pages, keys, keys_sf, row, ratio,
                                    scale), k)
    return idx


@op("q:bf16[N,H*I], w:bf16[N,H], positions:i32[N], request:i32[N], pages:i32[R,P], "
    "keys:e2m1[T,E,I], keys_sf:ue8m0[T,E,I/32] -> idx:i32[N,k], blocks:i32[N,count]",
    order=SCORED_PICKS)
def index_topk_candidates(q: Array, w: Array, positions: Array, request: Array, pages: Array,
                          keys: Array, keys_sf: Array, *, k: int, ratio: int, scale: float,
                          block: int, count: int) -> tuple[Array, Array]:
    """``index_scores``, ``topk`` and ``candidate_blocks`` in one.

    Args:
        q: index queries, already rounded to fp4; the others as there.
    Order: as ``index_scores``.
    Source: spec §2.6, §11.2.
    """
    idx = np.empty((len(q), k), np.int32)
    blocks = np.empty((len(q), count), np.int32)
    for row in range(len(q)):
        scores = _reachable(q, w, positions, request, pages, keys, keys_sf, row, ratio, scale)
        idx[row] = _pick(scores, k)
        blocks[row] = candidate_blocks(scores[None], positions[row : row + 1], ratio=ratio,
                                       block=block, count=count)[0]
    return idx, blocks


@op("q:bf16[N,H*I], w:bf16[N,H], positions:i32[N], request:i32[N], pages:i32[R,P], "
    "keys:e2m1[T,E,I], keys_sf:ue8m0[T,E,I/32], blocks:i32[N,B] -> idx:i32[N,k]",
    order=SCORED_PICKS)
def index_topk_within(q: Array, w: Array, positions: Array, request: Array, pages: Array,
                      keys: Array, keys_sf: Array, blocks: Array, *, k: int, ratio: int,
                      scale: float, block: int) -> Array:
    """``index_scores``, ``candidate_mask`` and ``topk`` in one: only candidates are scored.

    Args:
        q: index queries, already rounded to fp4. blocks: candidate blocks, ascending, then -1.
        block: entries per block; the others as there.
    Order: as ``index_scores``.
    Source: spec §2.6, §11.2.
    """
    idx = np.full((len(q), k), -1, np.int32)
    size = pages.shape[1] * keys.shape[1]
    for row, position in enumerate(positions):
        reach = min((position + 1) // ratio, size)
        entries = _block_entries(blocks[row], block, reach)
        scores = _score(q[row], w[row], entries, pages[request[row]], keys, keys_sf, scale)
        picks = _pick(scores, k)
        idx[row, picks >= 0] = entries[picks[picks >= 0]]
    return idx


def _reachable(q: Array, w: Array, positions: Array, request: Array, pages: Array, keys: Array,
               keys_sf: Array, row: int, ratio: int, scale: float) -> Array:
    """Scores of the entries that one row reaches."""
    reach = min((positions[row] + 1) // ratio, pages.shape[1] * keys.shape[1])
    return _score(q[row], w[row], np.arange(reach), pages[request[row]], keys, keys_sf, scale)


def _score(q: Array, w: Array, entries: Array, pages: Array, keys: Array, keys_sf: Array,
           scale: float) -> Array:
    """Scores of one row (q bf16[H*I], w bf16[H]) for the given entries of its request."""
    places = pages[entries // keys.shape[1]], entries % keys.shape[1]
    dots = gemm(q.reshape(len(w), -1), dequantize_fp4(keys[places], keys_sf[places], 32))
    weights = f32(w) * np.float32(scale)
    total = np.zeros(len(entries), np.float32)
    for weight, dot in zip(weights, dots, strict=True):
        total += weight * np.where(dot < 0, np.float32(0), dot)  # keeps a NaN
    return total


def _block_entries(blocks: Array, block: int, end: int) -> Array:
    """The entries below ``end`` of the given blocks, in the order of the blocks."""
    entries = blocks[blocks >= 0, None].astype(np.int64) * block + np.arange(block)
    flat: Array = entries.reshape(-1)
    return flat[flat < end]


def _pick(scores: Array, k: int, forced: int = -1) -> Array:
    """Ranks of the k largest finite scores, ascending, then -1; ``forced`` is always among them."""
    usable = np.isfinite(scores)
    keys = np.where(usable, scores, np.float32(0))
    if forced >= 0:
        usable[forced], keys[forced] = True, np.inf
    found = np.flatnonzero(usable)
    best = found[np.argsort(-keys[found], kind="stable")[:k]]
    picks = np.full(k, -1, np.int32)
    picks[: len(best)] = np.sort(best)
    return picks
