"""Between a prefix cache and its store: moves pages and snapshots of a device to files and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from deepinfer.runtime.entries import Arrays, Layout
from deepinfer.runtime.store import PageStore


class Device(Protocol):
    """What the prefix cache needs of a device. Arrays are copies, by name of the state value."""

    def read_slot(self, slot: int, names: Iterable[str]) -> Arrays:
        """One slot of these values, without the slot axis."""

    def write_slot(self, slot: int, arrays: Arrays) -> None:
        """Replace one slot of these values."""

    def read_pages(self, page_ids: Sequence[int]) -> Arrays:
        """These pages of every paged cache; the first axis is theirs."""

    def write_pages(self, page_ids: Sequence[int], arrays: Arrays) -> None:
        """Replace these pages of every paged cache."""


class Tier:
    """The store of one prefix cache, or none: then nothing is found and nothing is kept.

    Args:
        store: None: no store. device: whose state it is. rings: names of a snapshot's values.
    """

    def __init__(self, store: PageStore | None, device: Device, rings: Sequence[str]) -> None:
        self._store, self._device, self._rings = store, device, rings
        self._layouts: dict[str, Layout] = {}
        self._read: dict[tuple[str, bytes], Arrays] = {}  # since the last lookup but one
        self._before: dict[tuple[str, bytes], Arrays] = {}

    def begin_lookup(self) -> None:
        """What the last lookup read need not be read again; what the one before read is dropped."""
        self._before, self._read = self._read, {}

    def forget(self) -> None:
        """Drop what lookups read."""
        self._before, self._read = {}, {}

    def has(self, kind: str, key: bytes) -> bool:
        """Whether there may be an entry."""
        return self._store is not None and self._store.contains(kind, key)

    def load(self, kind: str, key: bytes) -> Arrays | None:
        """An entry that was verified, or None."""
        if self._store is None:
            return None
        found = self._read.get((kind, key), self._before.get((kind, key)))
        if found is None and self._store.contains(kind, key):
            found = self._store.get(kind, key, self._layout(kind))
        if found is not None:
            self._read[kind, key] = found
        return found

    def touch(self, kind: str, key: bytes) -> bool:
        """Note a use; whether there is an entry."""
        return self._store is not None and self._store.touch(kind, key)

    def save_pages(self, pages: Sequence[tuple[bytes, int]], cache_class: str) -> None:
        """Store pages, given as (key, page), that are not stored yet."""
        if self._store is None or not self._store.writable:
            return
        new = [(key, page) for key, page in pages if not self._store.touch("page", key)]
        if new:
            arrays = self._device.read_pages([page for _, page in new])
            for i, (key, _) in enumerate(new):
                self._store.put("page", key, {n: a[i] for n, a in arrays.items()}, cache_class)

    def save_snapshot(self, key: bytes, arrays: Arrays, cache_class: str) -> None:
        """Store a snapshot if it is not stored yet."""
        if self._store is not None:
            self._store.put("snapshot", key, arrays, cache_class)

    def _layout(self, kind: str) -> Layout:
        """Element types and shapes of a page or a snapshot on this device."""
        if kind not in self._layouts:
            arrays = (self._device.read_slot(0, self._rings) if kind == "snapshot" else
                      {n: a[0] for n, a in self._device.read_pages([0]).items()})
            self._layouts[kind] = {n: (a.dtype, a.shape) for n, a in arrays.items()}
        return self._layouts[kind]
