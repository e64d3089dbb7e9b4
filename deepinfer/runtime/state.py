"""How much state a device holds: bytes of pages, slots and snapshots, and what a budget buys."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from deepinfer.errors import RequestError
from deepinfer.program import Program
from deepinfer.runtime.devices.binding import NUMPY

PARTS = ("encoder", "decoder", "draft")  # of a model, as the manifest's facts name them


def state_bytes(program: Program, *, num_pages: int = 0, num_slots: int = 0) -> dict[str, int]:
    """Bytes of every state value of a Program, by name, with this many pages and slots."""
    sizes = {"num_pages": num_pages, "num_slots": num_slots, "pages_per_seq": 0}
    return {v.name: int(np.prod(v.storage(sizes), dtype=np.int64)) * NUMPY[v.dtype].itemsize
            for phase in program.phases.values() for v in phase.values if v.kind == "state"}


def bytes_per_page(program: Program) -> int:
    """Bytes of one page over all paged caches of a Program."""
    return sum(state_bytes(program, num_pages=1).values())


def bytes_per_snapshot(program: Program, parts: Collection[str] = PARTS) -> int:
    """Bytes of one snapshot: the window rings of one slot in these parts of the model."""
    rings = {s["name"] for s in program.manifest["facts"].get("state", ())
             if s["kind"] == "ring" and s["part"] in parts}
    return sum(n for name, n in state_bytes(program, num_slots=1).items() if name in rings)


@dataclass(frozen=True, slots=True)
class StateSizes:
    """How much state a device holds, and its snapshots beside it.

    Args:
        num_slots: requests that hold state at once. num_pages: pages of the compressed caches.
        pages_per_seq: width of a page table. page_size: tokens per page.
        snapshot_bytes: bytes that all snapshots of the prefix cache may take in host memory.
    """

    num_slots: int
    num_pages: int
    pages_per_seq: int
    page_size: int
    snapshot_bytes: int = 0

    @staticmethod
    def plan(program: Program, *, max_num_seqs: int, max_model_len: int,
             cache_bytes: int | None = None, snapshot_interval: int | None = None,
             parts: Collection[str] = PARTS) -> StateSizes:
        """Pages for every slot at full length and a snapshot every ``snapshot_interval`` pages, or
        as many of both, in this proportion, as ``cache_bytes`` holds.

        Args:
            cache_bytes: bound on the paged caches and the snapshots together. Rings are not in it.
            snapshot_interval: pages per snapshot; None: the prefix cache keeps none.
            parts: parts of the model whose rings are in a snapshot.

        Raises:
            RequestError: the bytes do not hold one request of full length.
        """
        page_size = int(program.manifest["facts"]["page_size"])
        per_seq = -(-max_model_len // page_size)
        page = max(1, bytes_per_page(program))
        snapshot = bytes_per_snapshot(program, parts) if snapshot_interval else 0
        every = snapshot_interval or 1
        pages = max_num_seqs * per_seq
        if cache_bytes is not None:
            if cache_bytes < per_seq * page:
                raise RequestError(
                    f"cache_bytes is {cache_bytes}, expected at least {per_seq * page} "
                    f"({per_seq} pages of {page} bytes for one request of {max_model_len} tokens)",
                    where="cache_bytes", next="raise cache_bytes or lower max_model_len")
            pages = min(pages, max(per_seq, cache_bytes * every // (page * every + snapshot)))
        # Each request may keep the end of its prompt and of its output besides.
        wanted = (-(-pages // every) + 2 * max_num_seqs) * snapshot
        room = wanted if cache_bytes is None else min(wanted, cache_bytes - pages * page)
        return StateSizes(max_num_seqs, pages, per_seq, page_size, room)

    def for_device(self) -> dict[str, int]:
        """The sizes by the names of the graph's symbols."""
        return {"num_slots": self.num_slots, "num_pages": self.num_pages,
                "pages_per_seq": self.pages_per_seq}

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def require_room(self, request_id: str, positions: int) -> None:
        """Refuse a request that could never run, however long it waited.

        Args:
            positions: how many it can reach.

        Raises:
            RequestError: it needs more pages than there are; says how many of each.
        """
        need = self.pages_for(positions)
        if need > self.num_pages:
            raise RequestError(
                f"the request needs {need} pages for {positions} positions, expected at most "
                f"{self.num_pages}", where=f"request {request_id}",
                next="lower max_tokens or raise cache_bytes")
