"""The prefix cache: what requests with equal beginnings need not compute again.

A page has a key, a hash over its tokens and, through its parent's key, over all before them. Pages
hold the compressed caches. The rings of window attention are per request and soon overwritten, so a
hit also needs them as they were at its end: in mode "exact" snapshots of them are kept at page ends
and a hit ends at one, so its bits are those of a cold run. Pending groups are empty at page ends
and Engram's history is in the tokens. In mode "replay" a hit takes all cached pages, and the engine
computes the last window before its end again to fill the rings (spec §4.2, approximate).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from deepinfer.errors import DeepInferError, RequestError
from deepinfer.runtime.entries import Arrays
from deepinfer.runtime.pages import PagePool
from deepinfer.runtime.prefix_keys import page_keys, root_key
from deepinfer.runtime.snapshots import Snapshots
from deepinfer.runtime.state import PARTS
from deepinfer.runtime.store import PageStore
from deepinfer.runtime.tier import Device, Tier

MODES = ("exact", "replay", "off")
Mode = Literal["exact", "replay", "off"]


@dataclass(frozen=True, slots=True)
class Hit:
    """What the cache has of a request.

    Args:
        length: positions that need not be computed; a page end.
        pages: the pages of those positions; None where the page comes from the store.
        snapshot: rings at ``length``; None in mode "replay" and where nothing was found.
        replay_from: where the engine starts: ``length``, or a window before it in mode "replay",
            to fill the rings with rows that write no page.
        keys: of the pages. loaded: contents of the pages that are not in the pool, by index.
    """

    length: int = 0
    pages: tuple[int | None, ...] = ()
    snapshot: Arrays | None = None
    replay_from: int = 0
    keys: tuple[bytes, ...] = ()
    loaded: Mapping[int, Arrays] = field(default_factory=dict)


MISS = Hit()


class PrefixCache:
    """Pages and snapshots of finished prefixes. All calls are between steps, on one thread.

    Args:
        pool: its cached pages are this cache's; ``pool.on_evict`` is set.
        device: read and written when pages and rings move.
        facts: the Program manifest's: page_size, window, draft_width, state.
        mode: "exact", "replay" or "off".
        interval: pages per snapshot. max_snapshot_bytes: of all of them, in host memory.
        identity: what else the contents depend on: weights fingerprint, Program digest, replay.
        store: a persistent tier behind the pool.
        parts: parts of the model whose rings a snapshot holds: only "encoder" with decoder replay,
            no "draft" where the engine drafts nothing.
        keep_tokens: positions at the end of a prompt that are always computed: 1, or those that
            decoder replay keeps.

    Raises:
        RequestError: a setting with a wrong value.
    """

    def __init__(self, pool: PagePool, device: Device, facts: Mapping[str, Any], mode: Mode,
                 interval: int = 8, max_snapshot_bytes: int | None = None, identity: str = "",
                 store: PageStore | None = None, *, parts: Collection[str] = PARTS,
                 keep_tokens: int = 1) -> None:
        if mode not in MODES:
            raise RequestError(f"prefix_cache is {mode!r}, expected one of {', '.join(MODES)}",
                               where="PrefixCache", next="choose one of them")
        for name, value in (("snapshot_interval", interval), ("keep_tokens", keep_tokens)):
            if value < 1:
                raise RequestError(f"{name} is {value}, expected at least 1", where="PrefixCache",
                                   next=f"correct {name}")
        self.pool, self.device, self.mode = pool, device, mode
        self.interval, self.keep_tokens = interval, keep_tokens
        self.page_size, self.window = int(facts["page_size"]), int(facts["window"])
        # A ring of window + 1 + draft_width slots still holds the window before a page end that
        # was passed by this many rows; rows of rejected drafts are among them.
        self._slack = int(facts["draft_width"]) + 1
        self._rings = tuple(s["name"] for s in facts["state"]
                            if s["kind"] == "ring" and s["part"] in parts)
        self._root = root_key(identity, mode, facts, self._rings)
        self._tier = Tier(store, device, self._rings)
        self.snapshots = Snapshots(pool, max_snapshot_bytes, cascade=store is None)
        pool.on_evict = self.snapshots.page_evicted

    def lookup(self, tokens: Sequence[int], salt: str | None, limit: int) -> Hit:
        """The longest usable prefix of a request. Changes nothing; what it finds in the store is
        read and verified here.

        Args:
            tokens: of the request. salt: requests share nothing across different ones.
            limit: positions that may be taken from the cache at most.
        """
        if self.mode == "off":
            return MISS
        self._tier.begin_lookup()
        keys: list[bytes] = []
        pages: list[int | None] = []
        for key in page_keys(self._root, tokens, limit // self.page_size, self.page_size, salt):
            page = self.pool.lookup(key)
            if page is None and not self._tier.has("page", key):
                break
            keys.append(key)
            pages.append(page)
        count, snapshot = len(keys), None
        loaded: dict[int, Arrays] = {}
        while count:
            if self.mode == "exact":
                snapshot = (self.snapshots.get(keys[count - 1])
                            or self._tier.load("snapshot", keys[count - 1]))
                if snapshot is None:
                    count -= 1
                    continue
            loaded = self._load_missing(keys, pages[:count])
            unreadable = [i for i in range(count) if pages[i] is None and i not in loaded]
            if not unreadable:
                break
            count = unreadable[0]  # a page that cannot be read after all ends the prefix
        if not count:
            return MISS
        length = count * self.page_size
        start = length if self.mode == "exact" else max(0, length - self.window)
        return Hit(length, tuple(pages[:count]), snapshot, start, tuple(keys[:count]), loaded)

    def fits(self, hit: Hit, count: int) -> bool:
        """Whether a table that begins with this hit can now grow to ``count`` pages."""
        resident = [page for page in hit.pages if page is not None]
        return count - len(resident) <= self.pool.free_besides(resident)

    def restore(self, owner: str, slot: int, hit: Hit) -> None:
        """Give a request with an empty table what was found: pages into its table, rings into its
        slot.

        Raises:
            DeepInferError: pages were evicted since the lookup, or do not fit: ask ``fits`` first.
        """
        resident = [(key, page) for key, page in zip(hit.keys, hit.pages, strict=True)
                    if page is not None]
        if (any(self.pool.lookup(key) != page for key, page in resident)
                or not self.fits(hit, len(hit.pages))):
            raise DeepInferError(f"a hit of {hit.length} positions cannot be restored any more",
                                 where=f"request {owner}", next="look it up again right before")
        for _, shared in reversed(resident):
            self.pool.touch(shared)  # so that growing the table evicts none of them
        for index, (key, page) in enumerate(zip(hit.keys, hit.pages, strict=True)):
            if page is not None:
                self.pool.share(owner, [page])
            else:
                self.pool.grow(owner, 1)
                self.pool.publish(owner, index, key)
            self._tier.touch("page", key)
        if hit.loaded:
            table = self.pool.table(owner)
            first = next(iter(hit.loaded.values()))
            self.device.write_pages([table[i] for i in hit.loaded], {
                name: np.stack([arrays[name] for arrays in hit.loaded.values()])
                for name in first})
        if hit.snapshot is not None:
            self.device.write_slot(slot, hit.snapshot)
            self.snapshots.add(hit.keys[-1], hit.snapshot, kept=True)
            self._tier.touch("snapshot", hit.keys[-1])
        self._tier.forget()

    def cuts(self, start: int, end: int, prompt_len: int) -> int:
        """Where a prefill chunk of positions ``start`` to ``end`` must end so that a snapshot can
        be taken: the first such position in it, or ``end``. Depends on the request alone."""
        if self.mode != "exact":
            return end
        every = self.interval * self.page_size
        found = [start - start % every + every, *self._prompt_ends(prompt_len)]
        return min([end, *(p for p in found if start < p)])

    def commit(self, owner: str, tokens: Sequence[int], computed: int, slot: int, salt: str | None,
               cache_class: str, prompt_len: int) -> None:
        """Publish the pages that this step finished and take a snapshot where one is due.

        To be called after every step of the request, before another step writes to its slot, and
        after the draft's rings hold all committed rows.

        Args:
            tokens: committed ones, prompt first. computed: positions whose state is final.
            prompt_len: tokens of the prompt.
        """
        if self.mode == "off":
            return
        done, count = len(self.pool.keys(owner)), computed // self.page_size
        if count <= done:
            return
        parent = self.pool.keys(owner)[-1] if done else self._root
        fresh = list(page_keys(parent, tokens[done * self.page_size:computed], count - done,
                               self.page_size, salt))
        for index, key in enumerate(fresh, done):
            self.pool.publish(owner, index, key)
            self.snapshots.link(parent, key)
            parent = key
        self._tier.save_pages(list(zip(fresh, self.pool.table(owner)[done:], strict=False)),
                              cache_class)
        # Only a page end that this very step passed: later its rows may be overwritten.
        if self.mode == "exact" and computed - count * self.page_size <= self._slack:
            kept = self._due(count * self.page_size, prompt_len)
            if fresh[-1] not in self.snapshots:
                self.snapshots.add(fresh[-1], self.device.read_slot(slot, self._rings), kept=kept)
            self.snapshots.replace_older(self.pool.keys(owner), self.interval)
            if kept:
                self._save_snapshot(fresh[-1], cache_class)

    def finish(self, owner: str, tokens: Sequence[int], computed: int, slot: int, salt: str | None,
               cache_class: str, prompt_len: int) -> None:
        """As ``commit``, and keep the request's last snapshot; before its pages are released, be
        it finished, aborted or preempted."""
        if self.mode == "off":
            return
        self.commit(owner, tokens, computed, slot, salt, cache_class, prompt_len)
        for key in reversed(self.pool.keys(owner)[-self.interval:]):
            if key in self.snapshots:
                self._save_snapshot(key, cache_class)
                break

    def clear(self) -> None:
        """Forget all pages that no request holds, and all snapshots. The store keeps its files."""
        self.pool.clear_cache()
        self.snapshots.clear()
        self._tier.forget()

    def check(self) -> None:
        """Raises: DeepInferError: the pool's or the snapshots' books are wrong."""
        self.pool.check()
        self.snapshots.check()

    def _prompt_ends(self, prompt_len: int) -> list[int]:
        """The last page ends that an equal prompt, and one that goes on after this, can take."""
        ends = (prompt_len - self.keep_tokens, prompt_len - 1)
        return [end - end % self.page_size for end in ends if end >= self.page_size]

    def _due(self, position: int, prompt_len: int) -> bool:
        return (position % (self.interval * self.page_size) == 0
                or position in self._prompt_ends(prompt_len))

    def _load_missing(self, keys: Sequence[bytes], pages: Sequence[int | None]
                      ) -> dict[int, Arrays]:
        """Contents of the pages that are not in the pool, up to the first that cannot be read."""
        loaded: dict[int, Arrays] = {}
        for index, page in enumerate(pages):
            if page is None:
                arrays = self._tier.load("page", keys[index])
                if arrays is None:
                    break
                loaded[index] = arrays
        return loaded

    def _save_snapshot(self, key: bytes, cache_class: str) -> None:
        """Keep a snapshot that may have been one for the time being, and store it."""
        self.snapshots.keep(key)
        arrays = self.snapshots.get(key)
        if arrays is not None:
            self._tier.save_snapshot(key, arrays, cache_class)
