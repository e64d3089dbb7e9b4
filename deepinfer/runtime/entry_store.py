"""A directory of entries by kind and key: what prefix cache and packed weights have in common.

One file an entry, named by its key, in one of 256 folders. A file appears complete or not at all:
it is written under a temporary name, synced and renamed. What is wrong with a file in any way is a
miss. So processes need no lock among them, however they end. Who can write to the directory decides
what is in the cache: share it only among users who trust each other.

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
from typing import BinaryIO, TypeVar

from deepinfer.runtime import store_gc
from deepinfer.runtime.entries import EntryError
from deepinfer.runtime.store_gc import Collected, entry_path, temporary_name

RETRY_S = 60.0  # after a write failed; a full disk, say
T = TypeVar("T")


class EntryStore:
    """Files by kind and key.

    Args:
        path: the directory.
        max_age_s: seconds since the last use after which an entry goes, by cache class.
        clock: seconds since 1970.

    Attributes:
        what: names the store in warnings. remade: what happens after a bad entry was removed.
        elsewhere: how to give it another directory.
    """

    what, remade, elsewhere = "cache", "it is made again", "give another directory"

    def __init__(self, path: str | Path, *, max_age_s: Mapping[str, float] = store_gc.MAX_AGE_S,
                 clock: Callable[[], float] = time.time) -> None:
        self.path, self.max_age_s, self.clock = Path(path).absolute(), max_age_s, clock
        self._retry_at = 0.0
        self._warned: set[str] = set()

    @property
    def writable(self) -> bool:
        """False for a while after a write failed."""
        return self.clock() >= self._retry_at

    def contains(self, kind: str, key: bytes) -> bool:
        """Whether there is a file for it; only reading it tells whether it is good."""
        return os.path.exists(entry_path(self.path, kind, key))

    def read(self, kind: str, key: bytes, decode: Callable[[BinaryIO], T]) -> T | None:
        """What ``decode`` makes of an entry's file, or None if there is no good one. A bad one is
        removed, with a warning.

        Args:
            decode: raises EntryError for a file that is not as expected.
        """
        path = entry_path(self.path, kind, key)
        try:
            with open(path, "rb") as file:
                found = decode(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._warn("unreadable", f"{error.strerror or error}", path,
                       "check the directory's permissions and its disk")
            return None
        except EntryError as error:
            self._warn(error.fault, str(error), path,
                       f"nothing: it was removed and {self.remade}")
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        self.touch(kind, key)
        return found

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

    def write(self, kind: str, key: bytes, fill: Callable[[BinaryIO], None]) -> None:
        """Write an entry, all of it or nothing. One that is there is replaced.

        Args:
            fill: writes the whole file; called again if the file went meanwhile.

        Raises:
            OSError: the file system refuses. Otherwise what ``fill`` raises.
        """
        path = entry_path(self.path, kind, key)
        try:
            self._write(path, fill)
        except FileNotFoundError:  # a collector took it for a leftover, or the directory went
            self._write(path, fill)

    def _write(self, path: Path, fill: Callable[[BinaryIO], None]) -> None:
        """The lock on the temporary file tells collectors that its writer is alive."""
        temporary = self.path / store_gc.TEMPORARY / temporary_name(secrets.token_hex(8))
        for folder in (temporary.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed them
        try:
            with open(temporary, "xb") as file:
                with contextlib.suppress(OSError):  # some file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fill(file)
                file.flush()
                os.fsync(file.fileno())
                now = self.clock()
                os.utime(file.fileno(), (now, now))
                os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def collect(self, max_bytes: int | None) -> Collected | None:
        """Remove what is too old, or too much; None if another process does, or the directory
        refuses."""
        try:
            return store_gc.collect(self.path, max_bytes=max_bytes, max_age_s=self.max_age_s,
                                    clock=self.clock)
        except OSError as error:
            self._failed(error)
            return None

    def _failed(self, error: OSError) -> None:
        self._retry_at = self.clock() + RETRY_S
        self._warn("unwritable", f"{error.strerror or error}", self.path,
                   f"check its permissions and the free space, or {self.elsewhere}")

    def _warn(self, kind: str, what: str, where: Path, next_: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"{self.what}, {kind} entry or directory: {what}\n  where: {where}\n"
                          f"  next:  {next_}", RuntimeWarning, stacklevel=4)
