"""Snapshots of window rings in host memory, by the key of the page they end at.

A snapshot is of use only while the pages before it are cached, and in mode "exact" a page only
while a snapshot follows it. So each takes the other along when it goes, unless a store behind them
may still have it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.errors import DeepInferError
from deepinfer.runtime.pages import PagePool
from deepinfer.runtime.store import Arrays


@dataclass(slots=True)
class _Snapshot:
    arrays: Arrays
    nbytes: int
    kept: bool  # else it goes when its request reaches the next page end


class Snapshots:
    """Snapshots under a bound of bytes; the one used least recently goes first.

    Args:
        pool: whose pages they belong to. max_bytes: None: no bound.
        cascade: pages and snapshots that became useless are dropped.
    """

    def __init__(self, pool: PagePool, max_bytes: int | None, cascade: bool) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._pool, self._cascade = pool, cascade
        self._found: OrderedDict[bytes, _Snapshot] = OrderedDict()
        self._parent: dict[bytes, bytes] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, key: bytes) -> bool:
        return key in self._found

    def get(self, key: bytes) -> Arrays | None:
        """The rings at the end of this page. Does not count as a use."""
        found = self._found.get(key)
        return found.arrays if found is not None else None

    def link(self, parent: bytes, key: bytes) -> None:
        """Page ``key`` follows page ``parent``."""
        if not self._cascade:
            return
        self._parent[key] = parent
        self._children.setdefault(parent, {})[key] = None

    def add(self, key: bytes, arrays: Arrays, kept: bool) -> None:
        """Add a snapshot, or use one that is there; makes room for it. One that is larger than the
        bound is not taken."""
        if key in self._found:
            self._found.move_to_end(key)
            self._found[key].kept |= kept
            return
        nbytes = sum(a.nbytes for a in arrays.values())
        if self.max_bytes is not None:
            if nbytes > self.max_bytes:
                return
            while self.nbytes + nbytes > self.max_bytes:
                oldest = next(iter(self._found))
                self._drop(oldest)
                self._prune(oldest)
        self._found[key] = _Snapshot(arrays, nbytes, kept)
        self.nbytes += nbytes

    def keep(self, key: bytes) -> None:
        """Keep a snapshot when its request moves on; it was used just now."""
        if key in self._found:
            self._found[key].kept = True
            self._found.move_to_end(key)

    def replace_older(self, keys: Sequence[bytes], within: int) -> None:
        """Drop the snapshot before the last of these pages that was only for the time being."""
        for key in reversed(keys[-1 - within:-1]):
            if key in self._found:
                if not self._found[key].kept:
                    self._drop(key)
                return

    def page_evicted(self, key: bytes) -> None:
        """A page is not in the pool any more: drop what cannot be reached without it."""
        self._unlink(key)
        if not self._cascade:
            return
        unreachable = [key]
        while unreachable:
            gone = unreachable.pop()
            self._drop(gone)
            for child in list(self._children.get(gone, ())):
                unreachable.append(child)
                if self._pool.discard(child):
                    self._unlink(child)

    def clear(self) -> None:
        self._found.clear()
        self.nbytes = 0

    def check(self) -> None:
        """Raises: DeepInferError: a wrong sum, too many bytes, or a snapshot without its page."""
        total = sum(s.nbytes for s in self._found.values())
        lost = [k for k in self._found if self._cascade and self._pool.lookup(k) is None]
        over = self.max_bytes is not None and total > self.max_bytes
        if total != self.nbytes or over or lost:
            raise DeepInferError(
                f"{len(self._found)} snapshots of {total} bytes, expected {self.nbytes} bytes, at "
                f"most {self.max_bytes}; {len(lost)} belong to no cached page",
                where="PrefixCache", next="this is a fault of the engine: please report it")

    def _drop(self, key: bytes) -> None:
        gone = self._found.pop(key, None)
        if gone is not None:
            self.nbytes -= gone.nbytes

    def _prune(self, key: bytes) -> None:
        """Free pages, from this one upwards, that lead to no snapshot and that nobody holds."""
        while (self._cascade and key not in self._found and not self._children.get(key)
               and self._pool.discard(key)):
            parent = self._parent.get(key, b"")
            self._unlink(key)
            key = parent

    def _unlink(self, key: bytes) -> None:
        parent = self._parent.pop(key, b"")
        siblings = self._children.get(parent, {})
        siblings.pop(key, None)
        if not siblings:
            self._children.pop(parent, None)
