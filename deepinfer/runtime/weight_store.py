"""Prepacked weights on disk, made once and mapped by every process that runs the model.

An ``EntryStore`` with two kinds of entries: "weights", see ``weight_file``; and "fingerprint", the
content of a checkpoint whose files are in a certain state (``CheckpointReader.stamp``), so that it
is read once. One process packs at a time; the others wait for its file, and pack for themselves
only if that takes too long. Equal keys mean equal bytes, so it does not matter whose file stays.
"""

from __future__ import annotations

import errno
import shutil
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from deepinfer.errors import TargetError
from deepinfer.runtime import store_gc
from deepinfer.runtime.entries import Array, decode, encode
from deepinfer.runtime.entry_store import EntryStore
from deepinfer.runtime.weight_file import CACHE_CLASS, KIND, Pack
from deepinfer.settings import cache_dir

LOCK = "pack.lock"
TIMEOUT_S = 300.0  # for another process that packs
SETTLED_S = 2.0  # the coarsest time of a file's change that a file system keeps
RESERVE = 20  # a 20th of the disk stays free
_FINGERPRINT = {"sha256": (np.dtype(np.uint8), (32,))}


def weights_dir() -> Path:
    """Where packed weights are kept: beside the Programs, whoever's Program they are used with,
    since several Programs of a model share them. Raises: TargetError as ``cache_dir``."""
    return cache_dir() / "weights"


class WeightStore(EntryStore):
    """Weights by content.

    Args:
        path: the directory; made when something is written.
        clock: seconds since 1970. sleep: waits that many. settled_s: how long a file must not have
            changed before its state says what is in it.
    """

    what, remade = "cache of packed weights", "the weights are packed again"
    elsewhere = "set DEEPINFER_CACHE_DIR"

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time,
                 sleep: Callable[[float], None] = time.sleep,
                 settled_s: float = SETTLED_S) -> None:
        super().__init__(path, clock=clock)
        self.sleep, self.settled_s = sleep, settled_s

    @staticmethod
    def default() -> WeightStore | None:
        """The store in the cache directory, beside the Programs; None, with a warning, for a user
        who has none."""
        try:
            return WeightStore(weights_dir())
        except TargetError as error:
            warnings.warn(f"packed weights are not kept: {error}", RuntimeWarning, stacklevel=3)
            return None

    def fingerprint(self, stamp: bytes) -> str:
        """The fingerprint remembered for a checkpoint whose files are in this state, or ""."""
        found = self.read("fingerprint", stamp,
                          lambda file: decode(file, "fingerprint", stamp, "", _FINGERPRINT))
        return "" if found is None else found["sha256"].tobytes().hex()

    def remember(self, stamp: bytes, fingerprint: str) -> None:
        """Keep what ``fingerprint`` shall give for this state of the files."""
        array = np.frombuffer(bytes.fromhex(fingerprint), np.uint8)
        pieces = encode("fingerprint", stamp, "", CACHE_CLASS, {"sha256": array})
        try:
            self.write("fingerprint", stamp, lambda file: file.writelines(pieces))
        except OSError as error:
            self._failed(error)

    def open(self, pack: Pack) -> dict[str, Array] | None:
        """Weights that are there, mapped; None if there is no good file of them."""
        return self.read(KIND, pack.key, pack.map)

    def build(self, pack: Pack, arrays: Callable[[], Iterable[tuple[str, Array]]]
              ) -> dict[str, Array] | None:
        """Write the file of a pack, unless another process has meanwhile, and map it.

        Args:
            arrays: makes the arrays one after the other, in the pack's order.

        Returns:
            None if the file system refuses. What ``arrays`` raises is raised.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with open(self.path / LOCK, "ab") as lock:
                store_gc.locked(lock.fileno(), self.clock() + TIMEOUT_S, self.clock, self.sleep)
                found = self.open(pack)
                if found is None:
                    self._make_room(pack.nbytes)
                    self.write(KIND, pack.key, lambda file: pack.write(file, arrays()))
                    found = self.open(pack)
                return found
        except OSError as error:
            self._failed(error)
            return None

    def _make_room(self, nbytes: int) -> None:
        """Remove what is old, and what was used least recently where the disk is too full.

        Raises:
            OSError: there is not enough room all the same.
        """
        kept = self.collect(None)
        disk = shutil.disk_usage(self.path)
        short = nbytes - (disk.free - disk.total // RESERVE)
        if short <= 0:
            return
        if kept is None or kept.kept_bytes < short:
            raise OSError(errno.ENOSPC, f"{nbytes} bytes leave less than a {RESERVE}th of the disk "
                                        "free")
        self.collect(kept.kept_bytes - short)
