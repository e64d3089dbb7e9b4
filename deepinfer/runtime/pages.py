"""Pages and slots: who holds which part of the state on the device.

All paged caches of a model share one page id space: page 7 of every layer's compressed KV and index
keys belongs to the same request. A slot is one row of every window ring and pending group.

Nothing is cleared on release. A request reads only what it wrote itself: ring slots of its own
positions, entries of groups it closed, the pending half of a group it opened.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from deepinfer.errors import DeepInferError, RequestError
from deepinfer.program import Program
from deepinfer.runtime.devices.cpu import NUMPY

_REPORT = "this is a fault of the engine: please report it"


def bytes_per_page(program: Program) -> int:
    """Bytes of one page over all paged caches of a Program."""
    sizes = {"num_pages": 1, "num_slots": 0, "pages_per_seq": 0}
    paged = {v.name: int(np.prod(v.storage(sizes), dtype=np.int64)) * NUMPY[v.dtype].itemsize
             for phase in program.phases.values() for v in phase.values if v.kind == "state"}
    return sum(paged.values())


@dataclass(frozen=True, slots=True)
class StateSizes:
    """How much state a device holds.

    Args:
        num_slots: requests that hold state at once. num_pages: pages of the compressed caches.
        pages_per_seq: width of a page table. page_size: tokens per page.
    """

    num_slots: int
    num_pages: int
    pages_per_seq: int
    page_size: int

    @staticmethod
    def plan(program: Program, *, max_num_seqs: int, max_model_len: int,
             cache_bytes: int | None = None) -> StateSizes:
        """Pages for every slot at full length, or as many as ``cache_bytes`` holds.

        Raises:
            RequestError: the bytes do not hold one request of full length.
        """
        page_size = int(program.manifest["facts"]["page_size"])
        per_seq = -(-max_model_len // page_size)
        pages = max_num_seqs * per_seq
        if cache_bytes is not None:
            one = max(1, bytes_per_page(program))
            pages = min(pages, cache_bytes // one)
            if pages < per_seq:
                raise RequestError(
                    f"cache_bytes is {cache_bytes}, expected at least {per_seq * one} "
                    f"({per_seq} pages of {one} bytes for one request of {max_model_len} tokens)",
                    where="cache_bytes", next="raise cache_bytes or lower max_model_len")
        return StateSizes(max_num_seqs, pages, per_seq, page_size)

    def for_device(self) -> dict[str, int]:
        """The sizes by the names of the graph's symbols."""
        return {"num_slots": self.num_slots, "num_pages": self.num_pages,
                "pages_per_seq": self.pages_per_seq}

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)


class PagePool:
    """Free and held pages and slots. Lowest ids are handed out first.

    Args:
        num_pages, num_slots: what there is.
    """

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self.num_pages, self.num_slots = num_pages, num_slots
        self._free_pages = list(range(num_pages))
        self._free_slots = list(range(num_slots))
        self._held: dict[str, tuple[int, tuple[int, ...]]] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def owners(self) -> frozenset[str]:
        """Ids of the requests that hold a slot."""
        return frozenset(self._held)

    def take(self, owner: str, pages: int) -> tuple[int, list[int]] | None:
        """A slot and this many pages, or None if there are too few."""
        assert owner not in self._held
        if not self._free_slots or pages > len(self._free_pages):
            return None
        slot = heapq.heappop(self._free_slots)
        taken = [heapq.heappop(self._free_pages) for _ in range(pages)]
        self._held[owner] = (slot, tuple(taken))
        return slot, taken

    def release(self, owner: str) -> None:
        """Give back all that a request holds; nothing if it holds nothing."""
        slot, pages = self._held.pop(owner, (None, ()))
        if slot is not None:
            heapq.heappush(self._free_slots, slot)
            for page in pages:
                heapq.heappush(self._free_pages, page)

    def check(self) -> None:
        """Every page and every slot is free or held by one request.

        Raises:
            DeepInferError: names what leaked or is held twice, and by whom.
        """
        pages = [(p, o) for o, (_, held) in self._held.items() for p in held]
        slots = [(s, o) for o, (s, _) in self._held.items()]
        _check_all("page", [*pages, *((p, "free") for p in self._free_pages)], self.num_pages)
        _check_all("slot", [*slots, *((s, "free") for s in self._free_slots)], self.num_slots)


def _check_all(kind: str, found: list[tuple[int, str]], count: int) -> None:
    owner: dict[int, str] = {}
    for number, who in found:
        if number in owner or not 0 <= number < count:
            raise DeepInferError(
                f"{kind} {number} of 0..{count - 1} is held by {who} and {owner.get(number)}",
                where="PagePool", next=_REPORT)
        owner[number] = who
    if len(owner) != count:
        lost = sorted(set(range(count)) - owner.keys())[:5]
        raise DeepInferError(f"{count - len(owner)} {kind}s leaked, the first are {lost}",
                             where="PagePool", next=_REPORT)
