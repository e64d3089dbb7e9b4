"""Write a checkpoint in the official layout: safetensors files, an index when there are several."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.checkpoint.dtypes import WRITE_CODES
from deepinfer.checkpoint.files import INDEX_FILE, SHARD_NAME, SINGLE_FILE
from deepinfer.checkpoint.header import LENGTH_BYTES, METADATA
from deepinfer.errors import CheckpointError

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array] | Iterable[tuple[str, Array]]


def write_checkpoint(
    path: Path,
    tensors: Tensors,
    *,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `tensors` into directory `path`; equal inputs give equal bytes.

    Each file is written beside the directory's contents and renamed into place, the index last:
    an interrupted write never leaves something that reads as a complete checkpoint.

    Args:
        path: created if need be; may hold other files (config.json). An existing lone
            `model.safetensors` may be replaced by another one; other weights are not touched.
        tensors: name -> array, or pairs in the order in which they fill the shards (a mapping is
            taken in order of the names). At most one shard is held in memory. The dtype says the
            code: int8 -> I8 (packed fp4: `packed.view(np.int8)`), uint8 -> U8, and the rest as
            `CheckpointReader.raw` returns them.
        max_shard_bytes: start another file rather than exceed this many data bytes.
        metadata: the header's `__metadata__`; {"format": "pt"} if None, as released.
    Raises: CheckpointError for a dtype without a code, a name given twice, or weights in the way.
    """
    path = Path(path)
    metadata = {"format": "pt"} if metadata is None else metadata
    try:
        path.mkdir(parents=True, exist_ok=True)
        _refuse_overwriting(path, but=SINGLE_FILE)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=path) as temporary:
            _write_files(path, Path(temporary), _checked(path, tensors), max_shard_bytes, metadata)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint cannot be written: {error.strerror or error}",
            where=str(path),
            next="check the directory's permissions and the free space",
        ) from error


def _write_files(
    path: Path,
    temporary: Path,
    pairs: Iterator[tuple[str, Array]],
    max_shard_bytes: int | None,
    metadata: Mapping[str, str],
) -> None:
    parts: list[Path] = []
    shard_of: dict[str, int] = {}
    total_size = 0
    for number, shard in enumerate(_shards(pairs, max_shard_bytes), start=1):
        parts.append(temporary / str(number))
        _write_file(parts[-1], shard, metadata)
        shard_of |= dict.fromkeys(shard, number)
        total_size += sum(array.nbytes for array in shard.values())
    if len(parts) == 1:
        os.replace(parts[0], path / SINGLE_FILE)
        return
    _refuse_overwriting(path)
    files = [SHARD_NAME.format(shard=i + 1, count=len(parts)) for i in range(len(parts))]
    weight_map = {name: files[number - 1] for name, number in sorted(shard_of.items())}
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    part = temporary / "index"
    part.write_text(json.dumps(index, indent=2) + "\n")
    for source, file in zip([*parts, part], [*files, INDEX_FILE], strict=True):
        os.replace(source, path / file)


def _checked(path: Path, tensors: Tensors) -> Iterator[tuple[str, Array]]:
    if isinstance(tensors, Mapping):
        pairs: Iterable[tuple[str, Array]] = ((name, tensors[name]) for name in sorted(tensors))
    else:
        pairs = tensors
    seen: set[str] = set()
    for name, array in pairs:
        where = f"{path}, tensor {name!r}"
        if array.dtype not in WRITE_CODES:
            known = ", ".join(map(str, WRITE_CODES))
            what = f"dtype {array.dtype} has no safetensors code here, expected one of {known}"
            raise CheckpointError(what, where=where, next="convert the array before writing it")
        if name in seen or name == METADATA or not name.isprintable():
            what = "the name is given twice" if name in seen else "not a tensor's name"
            raise CheckpointError(what, where=where, next="give each tensor a name of its own")
        seen.add(name)
        yield name, array


def _shards(
    pairs: Iterator[tuple[str, Array]], max_shard_bytes: int | None
) -> Iterator[dict[str, Array]]:
    shard: dict[str, Array] = {}
    size = 0
    for name, array in pairs:
        if shard and max_shard_bytes is not None and size + array.nbytes > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = array
        size += array.nbytes
    yield shard


def _write_file(file: Path, shard: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    # Wide items first: the format allows no padding, and so every tensor stays aligned.
    names = sorted(shard, key=lambda name: (-shard[name].dtype.itemsize, name))
    header: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    begin = 0
    for name in names:
        array = shard[name]
        end = begin + array.nbytes
        code, shape = WRITE_CODES[array.dtype], list(array.shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for name in names:
            out.write(np.asarray(shard[name], order="C").reshape(-1).view(np.uint8).data)
        out.flush()
        os.fsync(out.fileno())  # the rename must not reach the disk before the data


def _refuse_overwriting(path: Path, *, but: str = "") -> None:
    # One file is replaced atomically; several cannot be: old and new shards could mix.
    present = {file.name for file in path.glob("*.safetensors")}
    present |= {INDEX_FILE} & {file.name for file in path.iterdir()}
    in_the_way = sorted(present - {but})
    if in_the_way:
        raise CheckpointError(
            f"the directory already holds weights: {', '.join(in_the_way[:5])}",
            where=str(path),
            next="remove them, or write to another directory",
        )
