"""Which files make up a checkpoint, and what its index promises about them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from deepinfer.checkpoint.header import TensorInfo
from deepinfer.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_NAME = "model-{shard:05d}-of-{count:05d}.safetensors"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


def list_shards(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The shards of the checkpoint in directory `path`, and its index's weight map if it has one.

    With an index, the files it names; without, every `*.safetensors` there.
    Raises: CheckpointError if there is no checkpoint, the index is malformed, a shard is missing.
    """
    if not path.is_dir():
        raise CheckpointError(
            "the checkpoint is not a directory" if path.exists() else "there is no such directory",
            where=str(path),
            next="name the directory that holds config.json and the *.safetensors files",
        )
    index = path / INDEX_FILE
    weight_map = _read_index(index) if index.is_file() else None
    if weight_map is None:
        files = sorted(file.name for file in path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"no {SINGLE_FILE}, no {INDEX_FILE} and no other *.safetensors file",
                where=str(path),
                next="name the directory that holds the weights, or finish the download",
            )
        expected = _complete(files)
        why = "another shard's name counts it"
    else:
        expected = sorted(set(weight_map.values()))
        why = f"{INDEX_FILE} names it"
    missing = [name for name in expected if not (path / name).is_file()]
    if missing:
        raise CheckpointError(
            f"missing shard: {len(missing)} of {len(expected)} files, the first is {missing[0]}",
            where=f"{path} ({why})",
            next="finish the download",
        )
    return [path / name for name in expected], weight_map


def check_index(path: Path, weight_map: Mapping[str, str], infos: Mapping[str, TensorInfo]) -> None:
    """Raise CheckpointError unless index and shards name the same tensors in the same files."""
    where, next = str(path / INDEX_FILE), "take the index and all shards from the same release"
    for name, shard in weight_map.items():
        info = infos.get(name)
        if info is None or info.file.name != shard:
            found = "no shard holds it" if info is None else f"it is in {info.file.name}"
            raise CheckpointError(
                f"the index says tensor {name!r} is in {shard}, but {found}", where=where, next=next
            )
    for name, info in infos.items():
        if name not in weight_map:
            what = f"tensor {name!r} of {info.file.name} is not in the index"
            raise CheckpointError(what, where=where, next=next)


def _read_index(index: Path) -> dict[str, str]:
    next = "take the index from the same release as the shards"
    try:
        content = json.loads(index.read_bytes().decode())
    except (OSError, ValueError, RecursionError) as error:
        what = f"the index is not readable JSON: {error}"
        raise CheckpointError(what, where=str(index), next=next) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        what = "the index has no weight_map object with tensors in it"
        raise CheckpointError(what, where=str(index), next=next)
    for name, shard in weight_map.items():
        # A plain file name: an index must not reach outside its own directory.
        plain = isinstance(shard, str) and shard.endswith(".safetensors")
        if not plain or not shard.isprintable() or "/" in shard or "\\" in shard:
            what = f"weight_map[{name!r}] is {shard!r}, expected the name of a *.safetensors file"
            raise CheckpointError(what, where=str(index), next=next)
    return weight_map


def _complete(files: list[str]) -> list[str]:
    """`files` and the shards that their `-00001-of-00048` names say must be there too."""
    names = set(files)
    for match in filter(None, map(_SHARD.fullmatch, files)):
        stem, count = match[1], int(match[3])
        names |= {f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)}
    return sorted(names)
