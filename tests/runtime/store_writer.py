"""Entries of the tests of the store, and a process that starts writers of them.

Fork is fast, imports are not: the writers are forks of one process that knows all it needs. It is
told ``start|PATH|FIRST|COUNT`` and ``wait|PID``; writers print a line before each entry. With
``|CALL|AFTER`` a writer kills itself where it would make its AFTER-th call of ``os.CALL``: a moment
inside a write, whatever the machine's speed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from deepinfer.runtime.entries import Array, Layout
from deepinfer.runtime.store import PageStore

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def key_of(i: int) -> bytes:
    return (b"%08d" % i) * 4


def arrays_of(i: int, size: int = 128) -> dict[str, Array]:
    rng = np.random.default_rng(i)
    return {"kv": rng.integers(0, 256, (8, size // 8), np.uint8),
            "kv_sf": rng.integers(0, 256, (8, 2), np.uint8).view(E4M3)}


def layout_of(size: int = 128) -> Layout:
    return {"kv": (np.dtype(np.uint8), (8, size // 8)), "kv_sf": (E4M3, (8, 2))}


def size_of(i: int) -> int:
    """Up to 64 KB, so that most of a writer's time is within a write."""
    return 4096 << i % 5


def open_store(path: Path | str, identity: str = "weights") -> PageStore:
    return PageStore(path, identity)


def say(what: str, number: int) -> None:
    """One line in one write: lines of several writers do not mix, as those of print may."""
    os.write(1, f"{what} {number}\n".encode())


def die_at(call: str, after: int) -> None:
    """Replace ``os.<call>`` by one that is never reached for the ``after``-th time."""
    real, left = getattr(os, call), [after]

    def counted(*args: object, **given: object) -> object:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **given)

    setattr(os, call, counted)


def main() -> None:
    for line in iter(sys.stdin.readline, ""):
        what, *words = line.strip().split("|")
        if what == "wait":
            say("ended", os.waitpid(int(words[0]), 0)[1])
        elif os.fork() == 0:
            say("pid", os.getpid())
            if words[3:]:
                die_at(words[3], int(words[4]))
            store = open_store(words[0])
            for i in range(int(words[1]), int(words[1]) + int(words[2])):
                say("entry", i)
                assert store.put("page", key_of(i), arrays_of(i, size_of(i)), "chat")
            os._exit(0)


if __name__ == "__main__":
    main()
