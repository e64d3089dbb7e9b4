"""Load the weights a Program names: read by mmap, laid out, or derived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.checkpoint.layouts import apply_layout, split_name
from deepinfer.checkpoint.reader import CheckpointReader, check_closed
from deepinfer.checkpoint.scales import check_weight_scales
from deepinfer.checkpoint.token_map import token_map_for
from deepinfer.numerics.rope import rope_table, rope_theta

Array = np.ndarray[Any, Any]
TAGS = {"bf16": "BF16", "f32": "F32", "e4m3": "F8_E4M3", "ue8m0": "F8_E8M0", "e2m1": "I8"}


def tensor_names(stored: Mapping[str, Any]) -> list[str]:
    """The checkpoint names of one entry of the table."""
    return [stored["tensors"].replace("*", str(i)) for i in range(stored["count"])]


def load_weights(table: Mapping[str, Any], model: Path) -> dict[str, Array]:
    """All weight values that a Program's phases read.

    Tensors that a kernel reads as stored are views of the mapped file.

    Args:
        table: a Program's manifest["weights"]: what to load and how. model: the checkpoint's
            directory.

    Raises:
        CheckpointError: a tensor is missing, extra, of another type, or holds a bad scale.
    """
    with CheckpointReader(model) as reader:
        check_names(reader, table["stored"])
        check_scales(reader, table["stored"])
        return dict(make_each(table["values"], table, reader))


def make_each(names: Iterable[str], table: Mapping[str, Any], reader: CheckpointReader
              ) -> Iterator[tuple[str, Array]]:
    """Name and array of some values, one after the other; what the one before was made of need not
    stay in memory."""
    for name in names:
        yield name, _make(name, table, reader)
        reader.release()


def is_stored(name: str, table: Mapping[str, Any]) -> bool:
    """Whether a value is a tensor of the checkpoint as it is."""
    how = table["values"][name]
    return ("derive" not in how and not split_name(name)[1]
            and "*" not in table["stored"][how["of"]]["tensors"])


def check_names(reader: CheckpointReader, stored: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the checkpoint has exactly these tensors, with their types."""
    declared: list[str] = []
    unused: list[str] = []
    for entry in stored.values():
        (unused if "unused" in entry or "optional" in entry else declared).extend(
            tensor_names(entry))
    check_closed(reader, declared, unused)
    present = set(reader.names())
    for entry in stored.values():
        for tensor in tensor_names(entry):
            if tensor in present:
                reader.require(tensor, TAGS[entry["dtype"]], tuple(entry["shape"]))


def check_scales(reader: CheckpointReader, stored: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless all quantised weights that are used are exact in bf16."""
    for name, entry in stored.items():
        if "unused" in entry or entry["dtype"] not in ("e4m3", "e2m1"):
            continue
        scale = stored[name.removesuffix(".weight") + ".scale"]
        per_row = scale["shape"][0] == entry["shape"][0]  # one per 32 of a row, or per tile
        for weight_name, scale_name in zip(tensor_names(entry), tensor_names(scale), strict=True):
            check_weight_scales(reader.raw(weight_name), reader.raw(scale_name),
                                tile=(1, 32) if per_row else (32, 32),
                                where=f"{reader.info(weight_name).file}, {weight_name}")
        reader.release()


def _make(name: str, table: Mapping[str, Any], reader: CheckpointReader) -> Array:
    how = table["values"][name]
    if how.get("derive") == "rope":
        yarn = how["yarn"]
        theta = rope_theta(how["base"], how["dims"], tuple(yarn) if yarn else None)
        return rope_table(how["rows"], theta)
    if how.get("derive") == "token_map":
        return token_map_for(reader.path, vocab_size=how["vocab_size"], classes=how["classes"],
                             pad=how["pad"])
    entry = table["stored"][how["of"]]
    arrays = [reader.raw(t) for t in tensor_names(entry)]
    source = np.stack(arrays) if "*" in entry["tensors"] else arrays[0]
    return apply_layout(name, source)
