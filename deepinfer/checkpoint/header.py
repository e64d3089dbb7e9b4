"""The header of one safetensors file: parsed and checked completely before any tensor is used.

A file is: 8 bytes little-endian header length n, n bytes of JSON
`{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}`,
then the data that the offsets point into, without overlap and without holes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from deepinfer.checkpoint.dtypes import READ_DTYPES
from deepinfer.errors import CheckpointError

LENGTH_BYTES = 8
METADATA = "__metadata__"
MAX_RANK = 32  # numpy's own limit is 64
DOWNLOAD_AGAIN = "download or copy this file again and compare its size with the source"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    Args:
        name: the tensor's name in the checkpoint.
        dtype: safetensors code, a key of `READ_DTYPES`.
        shape: as stored; packed fp4 counts bytes, two elements each, on the last axis.
        file: the shard.
        begin, end: byte range in the file, counted from the file's start.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


def read_header(file: Path, data: npt.NDArray[np.uint8]) -> list[TensorInfo]:
    """Parse and check the header of one shard.

    Args:
        file: the shard's path, for messages and for `TensorInfo.file`.
        data: uint8 [file size], the whole file, mapped.

    Returns: the file's tensors in ascending order of their data.
    Raises: CheckpointError for anything that is not exactly the format above.
    """
    fields, data_begin = _parse(file, data)
    infos = [_tensor_info(file, name, fields[name], data_begin) for name in fields]
    infos.sort(key=lambda info: (info.begin, info.end))
    _check_layout(file, infos, data_begin, data.size)
    return infos


def _fail(file: Path, what: str, *, tensor: str = "", next: str = DOWNLOAD_AGAIN) -> NoReturn:
    where = f"{file}, tensor {tensor!r}" if tensor else str(file)
    raise CheckpointError(what, where=where, next=next)


def _parse(file: Path, data: npt.NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    if data.size < LENGTH_BYTES:
        _fail(file, f"the file has {data.size} bytes, expected at least {LENGTH_BYTES}: no header")
    length = int.from_bytes(data[:LENGTH_BYTES].tobytes(), "little")
    data_begin = LENGTH_BYTES + length
    if data_begin > data.size:
        _fail(file, f"the header is {length} bytes long, the file has {data.size}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            _fail(file, f"the header names {twice!r} twice")
        return fields

    try:
        text = data[LENGTH_BYTES:data_begin].tobytes().decode()
        fields = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        _fail(file, f"the header is not JSON: {error}")
    if not isinstance(fields, dict):
        _fail(file, f"the header is a JSON {type(fields).__name__}, expected an object")
    metadata = fields.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _fail(file, f"{METADATA} is not an object of strings")
    return fields, data_begin


def _tensor_info(file: Path, name: str, field: Any, data_begin: int) -> TensorInfo:
    if not name.isprintable():  # also what cannot be encoded: lone surrogates
        _fail(file, "a tensor's name holds characters that cannot be printed", tensor=name)
    if not isinstance(field, dict) or field.keys() != {"dtype", "shape", "data_offsets"}:
        found = sorted(field) if isinstance(field, dict) else type(field).__name__
        _fail(file, f"expected dtype, shape and data_offsets, found {found}", tensor=name)
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(dtype, str) or dtype not in READ_DTYPES:
        known = ", ".join(READ_DTYPES)
        _fail(file, f"unknown dtype {dtype!r}, expected one of {known}", tensor=name)
    if not _are_sizes(shape) or len(shape) > MAX_RANK or _extent(shape) >= 2**56:
        _fail(file, f"shape {shape!r} is not a list of at most {MAX_RANK} sizes", tensor=name)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(file, f"data_offsets {offsets!r} are not [begin, end]", tensor=name)
    begin, end = offsets
    expected = math.prod(shape) * READ_DTYPES[dtype].itemsize
    if end - begin != expected:
        what = f"{end - begin} bytes of data, expected {expected} for {dtype}{shape}"
        _fail(file, what, tensor=name)
    return TensorInfo(name, dtype, tuple(shape), file, data_begin + begin, data_begin + end)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _extent(shape: list[int]) -> int:
    """The product that must fit numpy's sizes: of all axes, the empty ones counted as 1."""
    return math.prod(max(size, 1) for size in shape)


def _check_layout(file: Path, infos: list[TensorInfo], data_begin: int, size: int) -> None:
    at = data_begin
    for info in infos:
        if info.begin != at:
            kind = "overlaps the tensor before it" if info.begin < at else "leaves a hole before it"
            what = f"the data {kind}: begins at byte {info.begin}, expected {at}"
            _fail(file, what, tensor=info.name)
        if info.end > size:
            what = f"the file is truncated: the data ends at byte {info.end}, the file at {size}"
            _fail(file, what, tensor=info.name)
        at = info.end
    if at != size:
        _fail(file, f"{size - at} bytes after the last tensor belong to none")
