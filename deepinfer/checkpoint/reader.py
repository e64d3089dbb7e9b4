"""Read a checkpoint: every header checked at opening, every tensor a view of the mapped file."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.checkpoint.dtypes import READ_DTYPES
from deepinfer.checkpoint.files import check_index, list_shards
from deepinfer.checkpoint.header import TensorInfo, read_header
from deepinfer.checkpoint.shard import Shard
from deepinfer.errors import CheckpointError

_RELEASE_BYTES = 64 << 20  # of tensors read before their pages are given back


class CheckpointReader:
    """The tensors of the safetensors files in one directory, read in place.

    Opening maps the shards read-only and checks all headers (see `read_header`) and the index;
    no tensor data is touched. Source: spec §6.1.

    Args:
        path: directory with `model.safetensors`, or shards and `model.safetensors.index.json`,
            or just `*.safetensors` files.
    Raises: CheckpointError for a checkpoint that is missing, incomplete or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        shards, weight_map = list_shards(self.path)
        self._opened = time.time()  # before any file is looked at
        self._shards: dict[Path, Shard] = {}
        infos: dict[str, TensorInfo] = {}
        for file in shards:
            self._shards[file] = Shard.open(file)
            for info in read_header(file, self._shards[file].data):
                if info.name in infos:
                    raise CheckpointError(
                        f"tensor {info.name!r} is in two shards",
                        where=f"{infos[info.name].file.name} and {file.name} in {self.path}",
                        next="remove the file that does not belong to this checkpoint",
                    )
                infos[info.name] = info
        if weight_map is not None:
            check_index(self.path, weight_map, infos)
        self._infos = dict(sorted(infos.items()))

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up the mappings. Views handed out earlier stay valid and keep theirs alive."""
        self._shards.clear()

    def names(self) -> tuple[str, ...]:
        """All tensor names, sorted."""
        return tuple(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Where tensor `name` lies. Raises: CheckpointError if the checkpoint does not have it."""
        info = self._infos.get(name)
        if info is None:
            raise CheckpointError(
                f"no tensor {name!r} among the {len(self._infos)} of the checkpoint",
                where=str(self.path),
                next="check that the weights and config.json are of the same release",
            )
        return info

    def raw(self, name: str) -> npt.NDArray[Any]:
        """Tensor `name` as stored: a read-only view of the mapped file, nothing is copied.

        Its numpy dtype is `READ_DTYPES[info.dtype]`; I8 (packed fp4, two elements a byte on the
        last axis) comes as uint8. The view need not be aligned to its item size.
        """
        info = self.info(name)
        if info.file not in self._shards:
            raise CheckpointError(
                "the reader is closed",
                where=f"{self.path}, tensor {name!r}",
                next="take what you need inside the `with` block",
            )
        data, dtype = self._shards[info.file].data, READ_DTYPES[info.dtype]
        if info.begin == info.end:  # numpy takes no view at the very end of a buffer
            return np.empty(info.shape, dtype)
        return np.ndarray(info.shape, dtype, buffer=data, offset=info.begin)

    def require(self, name: str, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """`raw(name)`, if it has this safetensors dtype and this stored shape.

        Raises: CheckpointError with file, tensor, expected and found.
        """
        info = self.info(name)
        if (info.dtype, info.shape) != (dtype, tuple(shape)):
            raise CheckpointError(
                f"expected {dtype}{list(shape)}, found {info.dtype}{list(info.shape)}",
                where=f"{info.file}, tensor {name!r}",
                next="check that the weights and config.json are of the same release",
            )
        return self.raw(name)

    def fingerprint(self) -> str:
        """sha256 (hex) over every tensor's name, dtype, shape and data, in order of the names.

        Independent of sharding, file names and metadata. Reads all data once, in place.
        """
        total, read = hashlib.sha256(), 0
        for name, info in self._infos.items():
            data = self.raw(name).reshape(-1).view(np.uint8)
            read += data.size
            if read >= _RELEASE_BYTES:
                self.release()
                read = 0
            # Each line has one fixed-length hash of the data, so no two tensor lists collide.
            line = repr((name, info.dtype, info.shape, hashlib.sha256(data.data).hexdigest()))
            total.update(line.encode() + b"\n")
        return total.hexdigest()

    def stamp(self) -> bytes:
        """sha256 over where the files are and the state they were opened in; reads no tensor.

        Changing a file moves its ctime, which no program can set. So two readers with one stamp
        have the same data, if the last change was longer before the opening, see ``age``, than the
        file system's clock takes to tick. (Not so for whoever writes through a mapping: a page
        that was not flushed since it was written moves no time when it is written again.)
        """
        lines = [repr(str(self.path.resolve())), *(s.stamp() for s in self._shards.values())]
        return hashlib.sha256("\n".join(lines).encode()).digest()

    def age(self) -> float:
        """Seconds from the last change of a file to the opening of the reader."""
        return self._opened - max(s.changed_at() for s in self._shards.values())

    def require_unchanged(self) -> None:
        """Raise CheckpointError if a file was changed or replaced since the opening."""
        for shard in self._shards.values():
            shard.require_unchanged()

    def release(self) -> None:
        """Give back the memory of what was read; views stay valid and read the files again."""
        for shard in self._shards.values():
            shard.release()


def check_closed(
    reader: CheckpointReader, declared_names: Iterable[str], unused_names: Iterable[str]
) -> None:
    """Every declared tensor is there, and every tensor there is declared.

    Args:
        declared_names: tensors that the model reads.
        unused_names: tensors that may be there and are known not to be read (vision, say).
    Raises: CheckpointError naming the missing and the extra ones: five of each, and the count.
    """
    declared, found = set(declared_names), set(reader.names())
    missing = declared - found
    extra = found - declared - set(unused_names)
    if missing or extra:
        raise CheckpointError(
            "; ".join(_list(k, v) for k, v in (("missing", missing), ("extra", extra)) if v),
            where=str(reader.path),
            next="use the config.json that belongs to these weights, or finish the download",
        )


def _list(kind: str, names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
    return f"{len(names)} {kind} tensor{'s' if len(names) > 1 else ''}: {shown}"
