"""One mapped safetensors file, and the state of the file when it was opened."""

from __future__ import annotations

import hashlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deepinfer.checkpoint.header import LENGTH_BYTES
from deepinfer.errors import CheckpointError

State = tuple[int, int, int, int]  # inode, bytes, mtime and ctime in ns


@dataclass(frozen=True, slots=True)
class Shard:
    """A file, mapped read-only.

    Args:
        path: of the file. data: uint8 [file size], in place. state: when it was opened.
    """

    path: Path
    data: npt.NDArray[np.uint8]
    state: State
    _mapping: mmap.mmap | None

    @staticmethod
    def open(path: Path) -> Shard:
        """Raises: CheckpointError if the file cannot be read."""
        try:
            with open(path, "rb") as file:
                state = _state(os.fstat(file.fileno()))
                if state[1] == 0:  # an empty file cannot be mapped
                    return Shard(path, np.empty(0, np.uint8), state, None)
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(
                f"the file cannot be read: {error.strerror or error}",
                where=str(path),
                next="check its permissions and the disk",
            ) from error
        return Shard(path, np.frombuffer(mapping, np.uint8), state, mapping)

    def changed_at(self) -> float:
        """When the file was changed last before it was opened: seconds since 1970."""
        return self.state[3] / 1e9  # mtime is whatever somebody set it to

    def stamp(self) -> str:
        """The file's name, state and the sha256 of its header, as one line."""
        length = int.from_bytes(self.data[:LENGTH_BYTES].tobytes(), "little")
        header = self.data[: LENGTH_BYTES + length].tobytes()
        return repr((self.path.name, *self.state, hashlib.sha256(header).hexdigest()))

    def require_unchanged(self) -> None:
        """Raise CheckpointError if the file was changed or replaced since it was opened."""
        found = _state(self.path.stat()) if self.path.exists() else None
        if found != self.state:
            raise CheckpointError(
                f"the file changed while it was read: inode, bytes, mtime and ctime are {found}, "
                f"were {self.state}",
                where=str(self.path),
                next="load the checkpoint when nothing writes to it any more",
            )

    def release(self) -> None:
        """Give back the memory of what was read; a later use reads it from the file again."""
        if self._mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)


def _state(found: os.stat_result) -> State:
    # Not the device's number: it may change whenever a disk is mounted.
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
