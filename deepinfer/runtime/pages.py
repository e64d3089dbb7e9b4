"""Pages and slots: who holds which part of the state on the device.

All paged caches of a model share one page id space: page 7 of every layer's compressed KV and index
keys belongs to the same tokens. A slot is one row of every window ring and pending group.

A page whose tokens are all committed can be published under a key. It may then be in the tables of
several requests, and it stays cached after the last of them let go of it, until somebody needs a
page: the one that was used least recently goes first.

Nothing is cleared on release. A request reads only what it wrote itself or took from the cache:
ring slots of its own positions, entries of groups it closed, the pending half of a group it opened.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence

from deepinfer.errors import DeepInferError, RequestError
from deepinfer.runtime.state import StateSizes, bytes_per_page

__all__ = ["PagePool", "StateSizes", "bytes_per_page"]

_REPORT = "this is a fault of the engine: please report it"


class PagePool:
    """Free, held and cached pages, and slots. Lowest free ids are handed out first.

    Args:
        num_pages, num_slots: what the device has.
        on_evict: called with the key of a cached page after its page was put to another use.
    """

    def __init__(self, num_pages: int, num_slots: int,
                 on_evict: Callable[[bytes], None] | None = None) -> None:
        self.num_pages, self.num_slots, self.on_evict = num_pages, num_slots, on_evict
        self._device_pages = num_pages
        self._free_pages = list(range(num_pages))
        self._free_slots = list(range(num_slots))
        self._slots: dict[str, int] = {}
        self._tables: dict[str, list[int]] = {}
        self._keys: dict[str, list[bytes]] = {}  # of the final pages at the front of a table
        self._refs: dict[int, int] = {}  # how many tables hold a page
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, in no table; oldest use first

    @property
    def free_pages(self) -> int:
        """Pages that can be had now: the free ones and the cached ones that nobody holds."""
        return len(self._free_pages) + len(self._idle)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def cached_pages(self) -> int:
        """Pages that a key finds, held or not."""
        return len(self._page_of)

    @property
    def owners(self) -> frozenset[str]:
        """Ids of the requests that hold a slot."""
        return frozenset(self._slots)

    def table(self, owner: str) -> list[int]:
        """The pages of a request in order of position."""
        return list(self._tables[owner])

    def keys(self, owner: str) -> Sequence[bytes]:
        """The keys of the request's final pages, which are the first of its table."""
        return self._keys[owner]

    def free_besides(self, pages: Sequence[int]) -> int:
        """``free_pages`` once these cached pages are shared with somebody."""
        return self.free_pages - sum(page in self._idle for page in pages)

    def take_slot(self, owner: str) -> int | None:
        """A slot and an empty table for a request that has none; None if all slots are taken."""
        assert owner not in self._slots
        if not self._free_slots:
            return None
        self._slots[owner] = slot = heapq.heappop(self._free_slots)
        self._tables[owner], self._keys[owner] = [], []
        return slot

    def grow(self, owner: str, count: int) -> bool:
        """Add this many pages to the end of a table, or none at all if there are too few."""
        if count > self.free_pages:
            return False
        while len(self._free_pages) < count:
            self._evict(next(iter(self._idle)))
        for _ in range(count):
            page = heapq.heappop(self._free_pages)
            self._refs[page] = 1
            self._tables[owner].append(page)
        return True

    def share(self, owner: str, pages: Sequence[int]) -> None:
        """Add cached pages to a table of which all pages are final (an empty one, say)."""
        table, keys = self._tables[owner], self._keys[owner]
        assert len(keys) == len(table)
        for page in pages:
            keys.append(self._key_of[page])
            table.append(page)
            self._refs[page] = self._refs.get(page, 0) + 1
            self._idle.pop(page, None)

    def release(self, owner: str) -> None:
        """Give back all that a request holds; nothing if it holds nothing.

        Its last page becomes the least recently used one: without the pages before it, it is of no
        use to anybody.
        """
        if owner not in self._slots:
            return
        heapq.heappush(self._free_slots, self._slots.pop(owner))
        table, keys = self._tables.pop(owner), self._keys.pop(owner)
        for page, key in zip(table, keys, strict=False):
            self._name(page, key)  # the page that had the key may have been evicted meanwhile
        for page in reversed(table):
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            del self._refs[page]
            if page in self._key_of:
                self._idle[page] = None
                if page >= self.num_pages:
                    self._evict(page)
            else:
                self._free(page)

    def publish(self, owner: str, index: int, key: bytes) -> None:
        """Page ``index`` of a table is final and ``key`` finds it; pages are published in order.

        If another page is cached under the key, that one stays and this one remains private.
        """
        keys, table = self._keys[owner], self._tables[owner]
        assert index == len(keys) < len(table)
        keys.append(key)
        self._name(table[index], key)

    def lookup(self, key: bytes) -> int | None:
        """The page cached under a key. Does not count as a use."""
        return self._page_of.get(key)

    def touch(self, page: int) -> None:
        """A cached page was used: it becomes the last one to be evicted."""
        if page in self._idle:
            self._idle.move_to_end(page)

    def discard(self, key: bytes) -> bool:
        """Free a cached page that nobody holds, without a call of ``on_evict``; whether it did."""
        page = self._page_of.get(key)
        if page is None or page not in self._idle:
            return False
        self._forget(page)
        return True

    def clear_cache(self) -> None:
        """Free every cached page that nobody holds."""
        while self._idle:
            self._evict(next(iter(self._idle)))

    def resize(self, num_pages: int) -> None:
        """Use fewer pages of the device, or again more. Held ones are withdrawn when released.

        Raises:
            RequestError: more pages than the device has, or a negative number.
        """
        if not 0 <= num_pages <= self._device_pages:
            raise RequestError(f"num_pages is {num_pages}, expected 0..{self._device_pages}",
                               where="PagePool.resize", next="make a device with more pages")
        back = [p for p in range(self.num_pages, num_pages) if p not in self._refs]
        self.num_pages = num_pages
        for page in [p for p in self._idle if p >= num_pages]:
            if page in self._idle:
                self._evict(page)
        self._free_pages = sorted(p for p in [*self._free_pages, *back] if p < num_pages)

    def check(self) -> None:
        """Every page is free, cached or held; only published pages are held more than once.

        Raises:
            DeepInferError: names what leaked, is held twice or counted wrongly, and by whom.
        """
        held: dict[int, list[tuple[str, int]]] = {}
        for owner, table in self._tables.items():
            for index, page in enumerate(table):
                held.setdefault(page, []).append((owner, index))
        for page, uses in held.items():
            self._check_held(page, uses)
        pages = [*((p, uses[0][0]) for p, uses in held.items()),
                 *((p, "the cache") for p in self._idle), *((p, "free") for p in self._free_pages)]
        withdrawn = {p for p in held if p >= self.num_pages}
        _check_all("page", [x for x in pages if x[0] not in withdrawn], self.num_pages)
        _check_all("slot", [*((s, o) for o, s in self._slots.items()),
                            *((s, "free") for s in self._free_slots)], self.num_slots)
        idle = {p for p in self._key_of if p not in held}
        if idle != self._idle.keys() or self._refs.keys() != held.keys():
            raise _fault(f"the cache holds pages {sorted(self._idle)}, expected {sorted(idle)}; "
                         f"{len(self._refs)} pages are counted, expected {len(held)}")
        if {k: p for p, k in self._key_of.items()} != self._page_of:
            raise _fault("keys and pages do not name each other")

    def _check_held(self, page: int, uses: list[tuple[str, int]]) -> None:
        owners = " and ".join(owner for owner, _ in uses)
        if self._refs.get(page) != len(uses):
            raise _fault(f"page {page} has {self._refs.get(page, 0)} references, expected "
                         f"{len(uses)}: it is held by {owners}")
        if len(uses) > 1 and page not in self._key_of:
            raise _fault(f"page {page} is held by {owners}, but it is not published")
        if len({index for _, index in uses}) > 1 or len({owner for owner, _ in uses}) < len(uses):
            raise _fault(f"page {page} is held at different places: {uses}")
        for owner, index in uses:
            key, keys = self._key_of.get(page), self._keys[owner]
            if key is not None and (index >= len(keys) or keys[index] != key):
                raise _fault(f"page {page} is cached under another key than {owner} knows")

    def _name(self, page: int, key: bytes) -> None:
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def _evict(self, page: int) -> None:
        key = self._forget(page)
        if self.on_evict is not None:
            self.on_evict(key)

    def _forget(self, page: int) -> bytes:
        del self._idle[page]
        key = self._key_of.pop(page)
        del self._page_of[key]
        self._free(page)
        return key

    def _free(self, page: int) -> None:
        if page < self.num_pages:
            heapq.heappush(self._free_pages, page)


def _fault(what: str) -> DeepInferError:
    return DeepInferError(what, where="PagePool", next=_REPORT)


def _check_all(kind: str, found: list[tuple[int, str]], count: int) -> None:
    owner: dict[int, str] = {}
    for number, who in found:
        if number in owner or not 0 <= number < count:
            raise _fault(f"{kind} {number} of 0..{count - 1} is held by {who} and "
                         f"{owner.get(number)}")
        owner[number] = who
    if len(owner) != count:
        lost = sorted(set(range(count)) - owner.keys())[:5]
        raise _fault(f"{count - len(owner)} {kind}s leaked, the first are {lost}")
