"""Writes to the caches: window rings, compressed pages, and the pending half of a group.

A ring holds the window keys of one request slot: position p lives in ring slot p % W. A page holds
E = page_size / ratio compressed entries: entry j of a request lives in page pages[request, j // E],
slot j % E. A write touches nothing else, so slots nobody wrote may hold anything.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.ir import ELEMENTWISE, op

Array = NDArray[Any]


@op("q:e4m3[N,D], sf:ue8m0[N,F], positions:i32[N], request:i32[N], spans:i32[R,4], "
    "!ring:e4m3[S,W,D], !ring_sf:ue8m0[S,W,F] -> ", order=ELEMENTWISE)
def window_write(q: Array, sf: Array, positions: Array, request: Array, spans: Array,
                 ring: Array, ring_sf: Array) -> None:
    """Store the window keys of a step in the rings: ring[slot, p % W] = q[row].

    Only the last W rows of each request are written, so no ring slot is written twice. Attention of
    the same step reads the ring before this: it needs the positions that are overwritten here.

    Args:
        q, sf: keys of the step's rows and their scales. positions: absolute position of each row.
        request: the row's index into spans. spans: (slot, first row, end row, floor) of each
            request. ring, ring_sf: the rings, written in place.
    Source: spec §2.4, §2.12.
    """
    width = ring.shape[1]
    ends = spans[request, 2]
    rows = np.flatnonzero(np.arange(len(q)) >= ends - width)
    slots, places = spans[request[rows], 0], positions[rows] % width
    ring[slots, places] = q[rows]
    ring_sf[slots, places] = sf[rows]


@op("a:f32[N,D], g:f32[N,D], positions:i32[N], spans:i32[R,4], !pending:f32[S,Q,2,D] -> ",
    order=ELEMENTWISE)
def pending_write(a: Array, g: Array, positions: Array, spans: Array, pending: Array) -> None:
    """Keep (a, g) of the even positions a request ended with: their ratio-2 groups may be open.

    Even position p lives at pending[slot, p // 2 % Q]. All even rows among the last 2 Q of a
    request are kept, so whichever of them the next step continues after, what its first group
    needs is there: rows of a verify step that are rejected need no undoing.

    Args:
        a: values, g: gate logits of the compressor. positions: absolute position of each row.
        spans: (slot, first row, end row, floor) of each request; one without rows writes nothing.
        pending: (a, g) of the last Q even positions of each slot, written in place.
    Source: spec §2.5 (incomplete trailing group), §2.12.
    """
    width = pending.shape[1]
    for slot, first, end, _ in spans:
        for row in range(max(first, end - 2 * width), end):
            if positions[row] % 2 == 0:
                place = pending[slot, positions[row] // 2 % width]
                place[0], place[1] = a[row], g[row]


@op("q:e2m1[G,D], sf:t[G,F], positions:i32[G], request:i32[G], pages:i32[R,P], "
    "!cache:e2m1[T,E,D], !cache_sf:t[T,E,F] -> ", order=ELEMENTWISE)
def kv_write(q: Array, sf: Array, positions: Array, request: Array, pages: Array,
             cache: Array, cache_sf: Array, *, ratio: int) -> None:
    """Store compressed entries (latents or index keys) in their pages.

    Args:
        q, sf: entries and their scales. positions: position of each group's first token, so the
            entry is positions // ratio; -1 writes nothing. request: index into pages.
        pages: page table. cache, cache_sf: the pages, written in place. ratio: tokens per entry.
    Source: spec §2.5, §2.6, §2.7.
    """
    written = positions >= 0
    entries = positions[written] // ratio
    size = cache.shape[1]
    places = pages[request[written], entries // size], entries % size
    cache[places], cache_sf[places] = q[written], sf[written]
