"""One tuner at a time may run kernels on a machine: two at once would store each other's noise."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deepinfer.errors import TargetError


def lock_path() -> Path:
    """The machine's lock, shared by all users and databases."""
    return Path(tempfile.gettempdir()) / "deepinfer-tune.lock"


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


@contextmanager
def exclusive(seconds: float, waiting: Callable[[], None] = lambda: None,
              path: Path | None = None, sleep: Callable[[float], None] = time.sleep
              ) -> Iterator[None]:
    """Hold the machine's lock; the system frees it when the process ends, however it ends.

    Args:
        seconds: to wait for it at most. waiting: called once if somebody else holds it.

    Raises:
        TargetError: it was not free in time.
    """
    path = path or lock_path()
    handle = _open(path)
    try:
        end, told = time.monotonic() + seconds, False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise TargetError(
                        f"another tuner has held the machine for {seconds:g} s", where=str(path),
                        next="wait for it, or give more time with --lock-timeout") from None
            if not told:
                told = True
                waiting()
            sleep(0.05)
        yield
    finally:
        os.close(handle)
