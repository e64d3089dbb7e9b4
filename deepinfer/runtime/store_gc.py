"""Listing and collecting the files of an entry store: a prefix cache, or prepacked weights.

Only files with names that the store gives are ever touched. Two collections at once do no harm; a
lock keeps them from doing the work twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deepinfer.runtime.entries import KINDS, EntryError, Header, read_header

# Since the last use, by cache class.
MAX_AGE_S = {"agent": 3 * 86400.0, "chat": 7 * 86400.0, "weights": 30 * 86400.0}
TEMPORARY = "tmp"
LOCK = "gc.lock"
LEFTOVER_S = 3600.0  # a file of a writer that cannot be asked whether it lives
_NAME = re.compile(rf"([0-9a-f]{{64}})\.({'|'.join(KINDS)})")
_TEMPORARY_NAME = re.compile(r"([0-9a-f]{8})-\d+-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One file. Args: path, kind, key (hex). nbytes: its size. used: seconds since 1970."""

    path: Path
    kind: str
    key: str
    nbytes: int
    used: float


@dataclass(slots=True)
class Collected:
    """What a collection removed, in files: past their age, over the size limit, damaged, left over
    by writers that were killed; and all their bytes. ``kept`` and ``kept_bytes`` remain."""

    expired: int = 0
    over_limit: int = 0
    damaged: int = 0
    leftovers: int = 0
    nbytes: int = 0
    kept: int = 0
    kept_bytes: int = 0


def entry_path(root: Path, kind: str, key: bytes) -> Path:
    name = key.hex()
    return root / name[:2] / f"{name}.{kind}"


def temporary_name(token: str) -> str:
    """The name of a file being written: who writes it, and 16 hex digits."""
    return f"{_host()}-{os.getpid()}-{token}"


@cache
def _host() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def entries(root: Path) -> Iterator[Entry]:
    """All entries, in order of their names. Files that go meanwhile are left out."""
    for folder in sorted(p for p in root.iterdir() if re.fullmatch("[0-9a-f]{2}", p.name)):
        for path in sorted(folder.iterdir() if folder.is_dir() else ()):
            name = _NAME.fullmatch(path.name)
            if name is None or not name[1].startswith(folder.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                yield Entry(path, name[2], name[1], stat.st_size, stat.st_mtime)


def header_of(entry: Entry, verify: bool = False) -> Header | None:
    """What an entry says of itself; None if it is damaged or gone.

    Args:
        verify: read its data, too, and take it for damaged unless they have their sha256.
    """
    try:
        with open(entry.path, "rb") as file:
            header = read_header(file)
            good = not verify or hashlib.file_digest(file, "sha256").hexdigest() == header.sha256
            return header if good else None
    except (OSError, EntryError):
        return None


def leftovers(root: Path, now: float) -> list[Path]:
    """Files of writers that were killed: their lock is gone, or, where nobody can say, old ones."""
    found = []
    folder = root / TEMPORARY
    for path in sorted(folder.iterdir() if folder.is_dir() else ()):
        name = _TEMPORARY_NAME.fullmatch(path.name)
        if name is not None and _is_abandoned(path, now, here=name[1] == _host()):
            found.append(path)
    return found


def _is_abandoned(path: Path, now: float, here: bool) -> bool:
    try:
        with open(path, "rb") as file:
            if here:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                except BlockingIOError:
                    return False
                except OSError:
                    pass  # a file system without locks
            return now - os.fstat(file.fileno()).st_mtime > LEFTOVER_S
    except OSError:
        return False


def collect(root: Path, *, max_bytes: int | None = None,
            max_age_s: Mapping[str, float] = MAX_AGE_S, clock: Callable[[], float] = time.time,
            sleep: Callable[[float], None] = time.sleep, timeout_s: float = 0.0,
            check_all: bool = False, verify: bool = False) -> Collected | None:
    """Remove what is too old or too much, least recently used first, and what writers left over.

    Args:
        max_bytes: that may remain; None: any number. max_age_s: by cache class; a class that is
            not in it has the shortest.
        timeout_s: how long to wait for another process that collects.
        check_all: look into young files, too, for damaged headers. verify: read all their data.

    Returns:
        What was removed; None if the other process was still at it.

    Raises:
        OSError: the directory cannot be read or written.
    """
    with open(root / LOCK, "ab") as lock:
        if not locked(lock.fileno(), clock() + timeout_s, clock, sleep):
            return None
        return _collect(root, max_bytes, max_age_s, clock(), check_all, verify)


def locked(fd: int, deadline: float, clock: Callable[[], float], sleep: Callable[[float], None]
           ) -> bool:
    """Lock a file against other processes; False if one of them still had it at the deadline."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if clock() >= deadline:
                return False
            sleep(0.05)
        except OSError:
            return True  # a file system without locks: go on all the same


def _collect(root: Path, max_bytes: int | None, max_age_s: Mapping[str, float], now: float,
             check_all: bool, verify: bool) -> Collected:
    done = Collected()
    for path in leftovers(root, now):
        done.leftovers += _remove(path, path.stat().st_size if path.exists() else 0, done)
    shortest = min(max_age_s.values(), default=float("inf"))
    kept = []
    for entry in entries(root):
        if check_all or verify or now - entry.used > shortest:  # else it need not be opened
            header = header_of(entry, verify)
            if header is None:
                done.damaged += _remove(entry.path, entry.nbytes, done)
                continue
            if now - entry.used > max_age_s.get(header.cache_class, shortest):
                done.expired += _remove(entry.path, entry.nbytes, done)
                continue
        kept.append(entry)
    total = sum(e.nbytes for e in kept)
    kept.sort(key=lambda e: (e.used, e.key, e.kind))
    while max_bytes is not None and total > max_bytes:
        oldest = kept.pop(0)
        done.over_limit += _remove(oldest.path, oldest.nbytes, done)
        total -= oldest.nbytes
    done.kept, done.kept_bytes = len(kept), total
    return done


def _remove(path: Path, nbytes: int, done: Collected) -> int:
    """1 if this call removed the file. A reader that has it open goes on reading."""
    try:
        path.unlink()
    except FileNotFoundError:
        return 0
    done.nbytes += nbytes
    return 1
