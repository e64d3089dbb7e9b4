"""A device for tests of the prefix cache: state is a hash of the history, so a wrong byte shows."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.runtime.pages import PagePool
from deepinfer.runtime.prefix import Hit, PrefixCache
from deepinfer.runtime.store import PageStore

Array = np.ndarray[Any, Any]
PAGE, WINDOW, WIDTH = 4, 6, 1
RING = WINDOW + 1 + WIDTH
FACTS = {"page_size": PAGE, "window": WINDOW, "draft_width": WIDTH, "ring": RING, "state": [
    {"name": "layers.0.ring", "kind": "ring", "part": "encoder", "layer": 0},
    {"name": "layers.4.ring", "kind": "ring", "part": "decoder", "layer": 4},
    {"name": "mtp.0.ring", "kind": "ring", "part": "draft", "layer": 5},
    {"name": "layers.0.pending", "kind": "pending", "part": "encoder", "layer": 0},
    {"name": "layers.0.kv", "kind": "paged", "part": "encoder", "layer": 0},
    {"name": "layers.0.index_keys", "kind": "paged", "part": "encoder", "layer": 0},
]}
RINGS = ("layers.0.ring", "layers.4.ring", "mtp.0.ring")


def value(tokens: Sequence[int], position: int) -> int:
    """What a row leaves in the state: a function of all tokens up to it."""
    return zlib.crc32(np.asarray(tokens[:position + 1], np.int64).tobytes())


class CacheDevice:
    """Rings and pages of u32, full of ``garbage`` before they are written."""

    def __init__(self, num_pages: int, num_slots: int, garbage: int = 0xFFFFFFFF) -> None:
        self.slots = {n: np.full((num_slots, RING), garbage, np.uint32) for n in RINGS}
        self.pages = {n: np.full((num_pages, PAGE), garbage, np.uint32)
                      for n in ("layers.0.kv", "layers.0.index_keys")}
        self.moved: list[str] = []

    def read_slot(self, slot: int, names: Iterable[str]) -> dict[str, Array]:
        self.moved.append("read_slot")
        return {n: self.slots[n][slot].copy() for n in names}

    def write_slot(self, slot: int, arrays: Mapping[str, Array]) -> None:
        self.moved.append("write_slot")
        for name, array in arrays.items():
            self.slots[name][slot] = array

    def read_pages(self, page_ids: Sequence[int]) -> dict[str, Array]:
        self.moved.append("read_pages")
        return {n: a[list(page_ids)] for n, a in self.pages.items()}

    def write_pages(self, page_ids: Sequence[int], arrays: Mapping[str, Array]) -> None:
        self.moved.append("write_pages")
        for name, array in arrays.items():
            self.pages[name][list(page_ids)] = array

    def compute(self, slot: int, table: Sequence[int], tokens: Sequence[int], start: int, end: int
                ) -> None:
        """Rows ``start`` to ``end`` write their rings and pages."""
        for p in range(start, end):
            for ring in self.slots.values():
                ring[slot, p % RING] = value(tokens, p)
            for cache in self.pages.values():
                cache[table[p // PAGE], p % PAGE] = value(tokens, p)

    def require(self, slot: int, table: Sequence[int], tokens: Sequence[int], length: int,
                rings: Sequence[str] = RINGS) -> None:
        """The state of the first ``length`` positions is what computing them would have left."""
        for p in range(length):
            for name, cache in self.pages.items():
                assert cache[table[p // PAGE], p % PAGE] == value(tokens, p), (name, p, length)
        for p in range(max(0, length - WINDOW + 1), length):
            for name in rings:
                assert self.slots[name][slot, p % RING] == value(tokens, p), (name, p, length)


@dataclass
class Serving:
    """A pool, a cache and a device, and just enough of an engine to run requests."""

    num_pages: int = 32
    num_slots: int = 4
    mode: str = "exact"
    interval: int = 2
    max_snapshot_bytes: int | None = None
    store: PageStore | None = None
    garbage: int = 0xFFFFFFFF
    identity: str = "weights"
    given: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = PagePool(self.num_pages, self.num_slots)
        self.device = CacheDevice(self.num_pages, self.num_slots, self.garbage)
        self.cache = PrefixCache(self.pool, self.device, FACTS, self.mode, self.interval,
                                 self.max_snapshot_bytes, self.identity, self.store, **self.given)

    def start(self, owner: str, tokens: Sequence[int], salt: str | None = "",
              limit: int | None = None) -> tuple[int, Hit]:
        """Admit a request: (its slot, what the cache had), the restored state checked."""
        hit = self.cache.lookup(tokens, salt, len(tokens) - 1 if limit is None else limit)
        assert self.cache.fits(hit, -(-len(tokens) // PAGE))
        slot = self.pool.take_slot(owner)
        assert slot is not None
        self.cache.restore(owner, slot, hit)
        self.grow(owner, len(tokens))
        if self.mode == "exact":
            rings = self.cache._rings
            self.device.require(slot, self.pool.table(owner), tokens, hit.length, rings)
        else:
            self.device.require(slot, self.pool.table(owner), tokens, hit.length, ())
        self.cache.check()
        return slot, hit

    def grow(self, owner: str, positions: int) -> None:
        assert self.pool.grow(owner, max(0, -(-positions // PAGE) - len(self.pool.table(owner))))

    def prefill(self, owner: str, slot: int, tokens: list[int], done: int, chunk: int = 100,
                salt: str | None = "", prompt_len: int | None = None) -> int:
        """Compute all tokens in chunks; returns how many chunks there were."""
        prompt_len, chunks = prompt_len or len(tokens), 0
        while done < len(tokens):
            end = self.cache.cuts(done, min(done + chunk, len(tokens)), prompt_len)
            self.device.compute(slot, self.pool.table(owner), tokens, done, end)
            self.cache.commit(owner, tokens, end, slot, salt, "chat", prompt_len)
            done, chunks = end, chunks + 1
            self.cache.check()
        return chunks

    def decode(self, owner: str, slot: int, tokens: list[int], accepted: Sequence[int],
               prompt_len: int, salt: str | None = "") -> None:
        """One verify step: the last token and WIDTH drafts are computed, the first of which are
        ``accepted``; the rows of the others leave garbage behind."""
        computed = len(tokens) - 1
        drafted = [*tokens, *accepted, *[-5] * (WIDTH - len(accepted))]
        self.grow(owner, len(drafted))
        self.device.compute(slot, self.pool.table(owner), drafted, computed, len(drafted))
        tokens += [*accepted, 7 * len(tokens) % 50]
        self.cache.commit(owner, tokens, computed + 1 + len(accepted), slot, salt, "chat",
                          prompt_len)
        self.cache.check()

    def end(self, owner: str, slot: int, tokens: list[int], computed: int, prompt_len: int,
            salt: str | None = "") -> None:
        self.cache.finish(owner, tokens, computed, slot, salt, "chat", prompt_len)
        self.pool.release(owner)
        self.cache.check()

    def serve(self, tokens: Sequence[int], salt: str | None = "", limit: int | None = None,
              chunk: int = 100) -> int:
        """A whole request without output; returns how many positions came from the cache."""
        prompt = list(tokens)
        slot, hit = self.start("served", prompt, salt, limit)
        self.prefill("served", slot, prompt, hit.length, chunk, salt)
        self.end("served", slot, prompt, len(prompt), len(prompt), salt)
        return hit.length
