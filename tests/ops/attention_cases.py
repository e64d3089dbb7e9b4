"""Steps of several requests over poisoned caches, for the tests of references and kernels.

Everything a step may not read holds 0xFF bytes (NaN codes), and page tables end in -1, which is a
poisoned page for numpy and for a kernel alike: the last page is never handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.numerics.formats import (
    BF16,
    E4M3,
    UE8M0,
    quantize_fp4_e4m3,
    quantize_fp4_ue8m0,
    quantize_fp8,
    to_bf16,
)

Array = np.ndarray[Any, Any]
Request = tuple[int, int, int]  # slot, first position of the step, rows of the step


def poison(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array whose bytes are all 0xFF."""
    return np.full((*shape[:-1], shape[-1] * np.dtype(dtype).itemsize), 0xFF, np.uint8).view(dtype)


def rows_of(requests: Sequence[Request], floors: Sequence[int] = ()
            ) -> tuple[Array, Array, Array]:
    """positions i32[N], request i32[N], spans i32[R,4] of a step; floors are 0 if not given."""
    positions = [p for _, start, rows in requests for p in range(start, start + rows)]
    request = [r for r, (_, _, rows) in enumerate(requests) for _ in range(rows)]
    ends = np.cumsum([rows for _, _, rows in requests])
    spans = [(slot, end - rows, end, floor) for (slot, _, rows), end, floor in
             zip(requests, ends, floors or [0] * len(requests), strict=True)]
    return (np.array(positions, np.int32), np.array(request, np.int32),
            np.array(spans, np.int32).reshape(-1, 4))


def groups_of(positions: Array) -> tuple[Array, Array, Array]:
    """group_rows, group_positions and group_request of a step of one request."""
    closing = np.flatnonzero(positions % 2 == 1).astype(np.int32)
    return closing, positions[closing] - 1, np.zeros(len(closing), np.int32)


@dataclass
class Keys:
    """The fp8 window keys of every position of each request, and rings filled up to a step."""

    slots: int
    ring_size: int
    width: int
    length: int
    seed: int = 0
    q: Array = field(init=False)
    sf: Array = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        x = rng.normal(size=(self.slots, self.length, self.width)).astype(np.float32)
        self.q, self.sf = quantize_fp8(to_bf16(x))

    def rows(self, requests: Sequence[Request]) -> tuple[Array, Array]:
        """k e4m3[N,D] and k_sf ue8m0[N,F] of the step's rows."""
        q, sf = (np.concatenate([a[slot, start : start + rows] for slot, start, rows in requests])
                 for a in (self.q, self.sf))
        return q, sf

    def rings(self, requests: Sequence[Request], keep: int, floors: Sequence[int] = ()
              ) -> tuple[Array, Array]:
        """Rings that hold the last ``keep`` positions before the step from the request's floor on,
        the rest poisoned."""
        ring = poison((self.slots, self.ring_size, self.width), E4M3)
        ring_sf = poison((self.slots, self.ring_size, self.sf.shape[-1]), UE8M0)
        for (slot, start, _), floor in zip(requests, floors or [0] * len(requests), strict=True):
            for p in range(max(floor, start - keep), start):
                ring[slot, p % self.ring_size] = self.q[slot, p]
                ring_sf[slot, p % self.ring_size] = self.sf[slot, p]
        return ring, ring_sf


def queries(count: int, channels: int, seed: int) -> Array:
    return to_bf16(np.random.default_rng(seed).normal(size=(count, channels)).astype(np.float32))


def paged(entries: Sequence[int], size: int, width: int, seed: int, *, table: int, kind: str
          ) -> tuple[Array, Array, Array]:
    """(pages i32[R,table], cache e2m1, scales) with ``entries[r]`` entries of each request.

    ``kind`` is "kv" (e4m3 scales per 16) or "index" (ue8m0 scales per 32).
    """
    rng = np.random.default_rng(seed)
    quantize = quantize_fp4_e4m3 if kind == "kv" else quantize_fp4_ue8m0
    needed = [-(-n // size) for n in entries]
    free = list(rng.permutation(sum(needed) + 1))
    pages = np.full((len(entries), table), -1, np.int32)
    cache = poison((len(free) + 1, size, width // 2), np.uint8)
    block, scale = (16, E4M3) if kind == "kv" else (32, UE8M0)
    cache_sf = poison((len(free) + 1, size, width // block), scale)
    for r, count in enumerate(entries):
        pages[r, : needed[r]] = [free.pop() for _ in range(needed[r])]
        x = to_bf16(rng.normal(size=(count, width)).astype(np.float32))
        packed, sf = quantize(x)
        at = np.arange(count)
        cache[pages[r, at // size], at % size] = packed
        cache_sf[pages[r, at // size], at % size] = sf
    return pages, cache, cache_sf


def picks(positions: Array, ratio: int, k: int, seed: int) -> Array:
    """Random ascending selections of reachable entries, -1 padded; some rows have a -1 inside."""
    rng = np.random.default_rng(seed)
    idx = np.full((len(positions), k), -1, np.int32)
    for row, p in enumerate(positions):
        reach = (p + 1) // ratio
        count = min(k, int(rng.integers(0, reach + 1)))
        idx[row, :count] = np.sort(rng.choice(reach, count, replace=False))
        if count > 3 and row % 3 == 0:
            idx[row, 1] = -1
    return idx


def window_case(requests: Sequence[Request], *, heads: int, width: int, ring: int, window: int,
                seed: int = 0, floors: Sequence[int] = ()) -> tuple[Array, ...]:
    """The operands of window_attention for one step; rings are poisoned below a floor."""
    slots = 1 + max(slot for slot, _, _ in requests)
    keys = Keys(slots, ring, width, max(s + n for _, s, n in requests), seed)
    positions, request, spans = rows_of(requests, floors)
    sink = np.random.default_rng(seed + 1).normal(size=heads).astype(np.float32)
    return (queries(len(positions), heads * width, seed + 2), *keys.rows(requests),
            *keys.rings(requests, window, floors), sink, positions, request, spans)


def sparse_case(requests: Sequence[Request], *, heads: int, width: int, ring: int, window: int,
                ratio: int, k: int, size: int, seed: int = 0, floors: Sequence[int] = ()
                ) -> tuple[Array, ...]:
    """The operands of sparse_attention for one step."""
    base = window_case(requests, heads=heads, width=width, ring=ring, window=window, seed=seed,
                       floors=floors)
    entries = [(start + rows) // ratio for _, start, rows in requests]
    pages, kv, kv_sf = paged(entries, size, width, seed + 3, kind="kv",
                             table=2 + max(-(-n // size) for n in entries))
    return (*base, picks(base[6], ratio, k, seed + 4), pages, kv, kv_sf)


def index_case(requests: Sequence[Request], *, heads: int, width: int, ratio: int, size: int,
               seed: int = 0) -> tuple[Array, ...]:
    """The operands of index_topk for one step: q (bf16, on the fp4 grid), w, ... keys_sf."""
    from deepinfer.numerics.formats import dequantize_fp4

    positions, request, _ = rows_of(requests)
    q = dequantize_fp4(*quantize_fp4_ue8m0(queries(len(positions), heads * width, seed)), 32)
    w = queries(len(positions), heads, seed + 1)
    entries = [(start + rows) // ratio for _, start, rows in requests]
    return (q, w, positions, request,
            *paged(entries, size, width, seed + 2, kind="index",
                   table=1 + max(-(-n // size) for n in entries)))


def with_nan_row(array: Array, row: int) -> Array:
    """A copy whose row ``row`` holds NaN."""
    changed = array.copy()
    changed[row] = np.array(np.nan, BF16) if array.dtype == BF16 else np.nan
    return changed
