"""Weights of the tests of the store, and a process that starts writers of them.

As in store_writer, the writers are forks of one process. It is told ``pack|PATH|CALL|AFTER`` and
``wait|PID``; a writer prints a line before each array that it packs, and at its end the inode that
it has mapped. It kills itself where it would make its AFTER-th call of ``os.CALL``, or, where CALL
is "array", pack its AFTER-th array.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from deepinfer.runtime.entries import Array
from deepinfer.runtime.store_gc import entry_path
from deepinfer.runtime.weight_file import KIND, Pack
from deepinfer.runtime.weight_store import WeightStore
from tests.runtime.store_writer import die_at, say

SHAPES = {"a": ((2, 3), np.float32), "b|tile": ((5, 1024), ml_dtypes.bfloat16),
          "c": ((4096,), np.uint8), "empty": ((0, 4), np.float32),
          "last": ((70, 1000), ml_dtypes.float8_e4m3fn)}
PACK = Pack(b"k" * 32, "the fingerprint", {n: (np.dtype(t), s) for n, (s, t) in SHAPES.items()})


def arrays(die_before: int = 0) -> Iterator[tuple[str, Array]]:
    """The arrays of PACK, the same bytes every time."""
    rng = np.random.default_rng(5)
    for i, (name, (dtype, shape)) in enumerate(PACK.layout.items(), 1):
        say("array", i)
        if i == die_before:
            os.kill(os.getpid(), signal.SIGKILL)
        raw = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
        yield name, raw.view(dtype).reshape(shape)


def pack(path: str, call: str, after: int) -> None:
    if call not in ("array", "never"):
        die_at(call, after)
    store = WeightStore(path)
    found = store.build(PACK, lambda: arrays(after if call == "array" else 0))
    assert found is not None
    say("inode", os.stat(entry_path(store.path, KIND, PACK.key)).st_ino)


def main() -> None:
    for line in iter(sys.stdin.readline, ""):
        what, *words = line.strip().split("|")
        if what == "wait":
            say("ended", os.waitpid(int(words[0]), 0)[1])
        elif os.fork() == 0:
            say("pid", os.getpid())
            pack(words[0], words[1], int(words[2]))
            os._exit(0)


if __name__ == "__main__":
    main()
