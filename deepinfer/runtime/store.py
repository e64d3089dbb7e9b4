"""The persistent tier of the prefix cache: a directory, on a local disk or a shared file system.

An ``EntryStore`` whose readers verify every byte, and that has a bound on its size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from deepinfer.errors import RequestError
from deepinfer.runtime import store_gc
from deepinfer.runtime.entries import Array, Arrays, Layout, decode, encode
from deepinfer.runtime.entry_store import RETRY_S, EntryStore
from deepinfer.runtime.store_gc import Collected

__all__ = ["RETRY_S", "Arrays", "Layout", "PageStore"]

RESERVE = 16  # a collection leaves a 16th of the limit free, so that it is not due at every write


class PageStore(EntryStore):
    """Pages and snapshots by key, verified on reading, bounded in size and age.

    Args:
        path: the directory; made if it is not there.
        identity: of weights, Program and replay: entries of another one are no hits.
        max_bytes: of all entries of all processes; the ones used least recently go first.
        max_age_s: seconds since the last use after which an entry goes, by cache class.
        clock: seconds since 1970.

    Raises:
        RequestError: a limit below 1.
    """

    what, remade = "prefix cache", "its tokens are computed again"
    elsewhere = "give another cache_dir"

    def __init__(self, path: str | Path, identity: str, *, max_bytes: int | None = None,
                 max_age_s: Mapping[str, float] = store_gc.MAX_AGE_S,
                 clock: Callable[[], float] = time.time) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise RequestError(f"the store's max_bytes is {max_bytes}, expected at least 1",
                               where=str(path), next="give more, or no limit")
        super().__init__(path, max_age_s=max_age_s, clock=clock)
        self.identity, self.max_bytes = identity, max_bytes
        self._since_gc = 0  # bytes written
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._failed(error)
        else:
            self.gc()

    def get(self, kind: str, key: bytes, layout: Layout) -> dict[str, Array] | None:
        """An entry, or None if there is no good one. A bad one is removed, with a warning.

        Args:
            kind: "page" or "snapshot". layout: element types and shapes of its arrays, by name.
        """
        return self.read(kind, key,
                         lambda file: decode(file, kind, key, self.identity, layout))

    def put(self, kind: str, key: bytes, arrays: Arrays, cache_class: str) -> bool:
        """Write an entry unless there is one; whether there is one afterwards.

        Args:
            cache_class: "agent" or "chat": how long it is kept. One that was there keeps its own.
        """
        assert kind in ("page", "snapshot")
        if self.touch(kind, key):
            return True
        if not self.writable:
            return False
        pieces = encode(kind, key, self.identity, cache_class, arrays)
        size = sum(map(len, pieces))
        try:
            if not self._make_room(size):
                return False
            self.write(kind, key, lambda file: file.writelines(pieces))
        except OSError as error:
            self._failed(error)
            return False
        self._since_gc += size
        return True

    def gc(self) -> Collected | None:
        """Collect now; None if another process does, or the directory refuses."""
        limit = self.max_bytes
        return self.collect(limit - limit // RESERVE if limit is not None else None)

    def _make_room(self, size: int) -> bool:
        """Collect if this entry may be the one that is too much; False if it can never fit."""
        if self.max_bytes is None:
            return True
        reserve = self.max_bytes // RESERVE
        if size > self.max_bytes:
            return False
        if self._since_gc + size > reserve:
            if self.collect(self.max_bytes - max(reserve, size)) is None:
                return False
            self._since_gc = 0
        return True
