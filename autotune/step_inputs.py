"""Integer operands of kernels that read caches: the rows of a step, their pages and their picks.

N rows are shared out over the R requests in order. A request's last row stands at the end of a full
context: of all its pages, or of four windows where there are no pages. So no reader finds less to
read than the shapes promise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

Array = np.ndarray[Any, Any]
Made: TypeAlias = dict[str, Array]
WINDOWS = 4  # of context, where no page table bounds it


def _shares(made: Made) -> tuple[int, int, Array]:
    """Rows, requests, and the first row of each request with the end of the last."""
    rows = len(made["positions"])
    requests = len(made["spans"] if "spans" in made else made["pages"])
    return rows, requests, np.arange(requests + 1, dtype=np.int64) * rows // max(1, requests)


def _context(made: Made, attrs: Mapping[str, Any]) -> int:
    """Positions that a request can have."""
    cache = made.get("keys", made.get("kv"))
    if cache is None:
        return WINDOWS * int(made["ring"].shape[1])
    entries = int(made["pages"].shape[1] * cache.shape[1])
    return entries * int(attrs.get("ratio", 1))


def step_rows(made: Made, rng: np.random.Generator, attrs: Mapping[str, Any]) -> Made:
    """positions, request, and spans and pages where the kernel has them."""
    rows, requests, edges = _shares(made)
    context = _context(made, attrs)
    request = np.repeat(np.arange(requests), np.diff(edges))
    last = np.repeat(edges[1:], np.diff(edges)) - 1
    positions = np.maximum(context - 1 - (last - np.arange(rows)), 0)
    found = {"positions": positions.astype(np.int32), "request": request.astype(np.int32)}
    if "spans" in made:
        slots = len(made["ring"])
        spans = [(r % slots, edges[r], edges[r + 1], 0) for r in range(requests)]
        found["spans"] = np.array(spans, np.int32).reshape(-1, 4)
    if "pages" in made:
        pages = len(made.get("keys", made.get("kv", made["pages"])))
        order = rng.permutation(pages) if pages else np.zeros(1, np.int64)
        count = made["pages"].size
        found["pages"] = np.resize(order, count).reshape(made["pages"].shape).astype(np.int32)
    return found


def _ascending(rows: int, count: int, reach: int, rng: np.random.Generator) -> Array:
    """i32[rows, count]: as many distinct numbers below ``reach`` as there are, then -1."""
    picks = np.full((rows, count), -1, np.int32)
    taken = min(count, reach)
    for row in range(rows):
        picks[row, :taken] = np.sort(rng.choice(reach, taken, replace=False))
    return picks


def sparse_rows(made: Made, rng: np.random.Generator, attrs: Mapping[str, Any]) -> Made:
    """With picks among all entries that lie before the step."""
    found = step_rows(made, rng, attrs)
    rows, count = made["idx"].shape
    reach = int(made["pages"].shape[1] * made["kv"].shape[1])
    return found | {"idx": _ascending(rows, count, reach, rng)}


def candidate_rows(made: Made, rng: np.random.Generator, attrs: Mapping[str, Any]) -> Made:
    """With candidate blocks among all of the context."""
    found = step_rows(made, rng, attrs)
    rows, count = made["blocks"].shape
    entries = int(made["pages"].shape[1] * made["keys"].shape[1])
    return found | {"blocks": _ascending(rows, count, max(1, entries // int(attrs["block"])), rng)}


def rope_rows(made: Made, rng: np.random.Generator, attrs: Mapping[str, Any]) -> Made:
    """Positions that the table of rotations has."""
    rows, table = len(made["positions"]), len(made["table"])
    return {"positions": (np.arange(rows) % table).astype(np.int32)}


STEP_RULES: dict[str, Callable[[Made, np.random.Generator, Mapping[str, Any]], Made]] = {
    "window_attention": step_rows,
    "sparse_attention": sparse_rows,
    "index_topk": step_rows,
    "index_topk_candidates": step_rows,
    "index_topk_within": candidate_rows,
    "rope": rope_rows,
}
