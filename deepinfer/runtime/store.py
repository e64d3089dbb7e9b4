"""The persistent tier of the prefix cache: a directory, on a local disk or a shared file system.

One file an entry, named by its key, in one of 256 folders. A file appears complete or not at all:
it is written under a temporary name, synced and renamed. A reader verifies every byte; what is
wrong in any way is a miss. So processes need no lock among them, however they end. Who can write to
the directory decides what is in the cache: share it only among users who trust each other.

Whatever the file system refuses, the engine goes on without it: one warning for each kind of
trouble, and no writes for a while.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from deepinfer.errors import RequestError
from deepinfer.runtime import store_gc
from deepinfer.runtime.entries import KINDS, Array, Arrays, EntryError, Layout, decode, encode
from deepinfer.runtime.store_gc import Collected, entry_path, temporary_name

__all__ = ["Arrays", "Layout", "PageStore"]

RETRY_S = 60.0  # after a write failed; a full disk, say
RESERVE = 16  # a collection leaves a 16th of the limit free, so that it is not due at every write


class PageStore:
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

    def __init__(self, path: str | Path, identity: str, *, max_bytes: int | None = None,
                 max_age_s: Mapping[str, float] = store_gc.MAX_AGE_S,
                 clock: Callable[[], float] = time.time) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise RequestError(f"the store's max_bytes is {max_bytes}, expected at least 1",
                               where=str(path), next="give more, or no limit")
        self.path, self.identity, self.max_bytes = Path(path).absolute(), identity, max_bytes
        self.max_age_s, self.clock = max_age_s, clock
        self._retry_at = 0.0
        self._warned: set[str] = set()
        self._since_gc = 0  # bytes written
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._failed(error)
        else:
            self.gc()

    @property
    def writable(self) -> bool:
        """False for a while after a write failed."""
        return self.clock() >= self._retry_at

    def contains(self, kind: str, key: bytes) -> bool:
        """Whether there is a file for it; only ``get`` knows whether it is good."""
        return os.path.exists(entry_path(self.path, kind, key))

    def get(self, kind: str, key: bytes, layout: Layout) -> dict[str, Array] | None:
        """An entry, or None if there is no good one. A bad one is removed, with a warning.

        Args:
            kind: "page" or "snapshot". layout: element types and shapes of its arrays, by name.
        """
        path = entry_path(self.path, kind, key)
        try:
            with open(path, "rb") as file:
                arrays = decode(file, kind, key, self.identity, layout)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._warn("unreadable", f"{error.strerror or error}", path,
                       "check the directory's permissions and its disk")
            return None
        except EntryError as error:
            self._warn(error.fault, str(error), path,
                       "nothing: it was removed and its tokens are computed again")
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        self.touch(kind, key)
        return arrays

    def put(self, kind: str, key: bytes, arrays: Arrays, cache_class: str) -> bool:
        """Write an entry unless there is one; whether there is one afterwards.

        Args:
            cache_class: "agent" or "chat": how long it is kept. One that was there keeps its own.
        """
        assert kind in KINDS
        if self.touch(kind, key):
            return True
        if not self.writable:
            return False
        pieces = encode(kind, key, self.identity, cache_class, arrays)
        size = sum(map(len, pieces))
        try:
            if not self._make_room(size):
                return False
            try:
                self._write(entry_path(self.path, kind, key), pieces)
            except FileNotFoundError:  # a collector took it for a leftover, or the directory went
                self._write(entry_path(self.path, kind, key), pieces)
        except OSError as error:
            self._failed(error)
            return False
        self._since_gc += size
        return True

    def touch(self, kind: str, key: bytes) -> bool:
        """Note a use of an entry; whether there is one."""
        now = self.clock()
        try:
            os.utime(entry_path(self.path, kind, key), (now, now))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # read-only: it is there
        return True

    def gc(self) -> Collected | None:
        """Collect now; None if another process does, or the directory refuses."""
        limit = self.max_bytes
        return self._collect(limit - limit // RESERVE if limit is not None else None)

    def _collect(self, max_bytes: int | None) -> Collected | None:
        try:
            return store_gc.collect(self.path, max_bytes=max_bytes, max_age_s=self.max_age_s,
                                    clock=self.clock)
        except OSError as error:
            self._failed(error)
            return None

    def _make_room(self, size: int) -> bool:
        """Collect if this entry may be the one that is too much; False if it can never fit."""
        if self.max_bytes is None:
            return True
        reserve = self.max_bytes // RESERVE
        if size > self.max_bytes:
            return False
        if self._since_gc + size > reserve:
            if self._collect(self.max_bytes - max(reserve, size)) is None:
                return False
            self._since_gc = 0
        return True

    def _write(self, path: Path, pieces: list[bytes]) -> None:
        """All of it or nothing. The lock tells collectors that the writer is alive."""
        temporary = self.path / store_gc.TEMPORARY / temporary_name(secrets.token_hex(8))
        for folder in (temporary.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed them
        try:
            with open(temporary, "xb") as file:
                with contextlib.suppress(OSError):  # some file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
                now = self.clock()
                os.utime(file.fileno(), (now, now))
                os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def _failed(self, error: OSError) -> None:
        self._retry_at = self.clock() + RETRY_S
        self._warn("unwritable", f"{error.strerror or error}", self.path,
                   "check its permissions and the free space, or give another cache_dir")

    def _warn(self, kind: str, what: str, where: Path, next_: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"prefix cache, {kind} entry or directory: {what}\n  where: {where}\n"
                          f"  next:  {next_}", RuntimeWarning, stacklevel=3)
