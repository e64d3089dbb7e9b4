"""Load the weights a Program names, packed once and kept on disk.

Three groups: what the checkpoint holds as kernels read it (views of its files); what is laid out
anew; and what is derived from the config and the tokenizer. Each of the last two is a file of a
``WeightStore``, named by all that its bytes depend on. For packed weights that is the fingerprint
of the checkpoint, which is remembered for the state of its files: a checkpoint that was loaded
before is not read again, and one that was changed, in whatever way, is.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import tokenizers

from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.program import Program
from deepinfer.runtime.devices.binding import NUMPY
from deepinfer.runtime.devices.memory import own
from deepinfer.runtime.entries import Layout
from deepinfer.runtime.weight_file import Pack
from deepinfer.runtime.weight_store import WeightStore
from deepinfer.runtime.weights import Array, check_names, check_scales, is_stored, make_each

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Weights:
    """Args:
        arrays: by value name. fingerprint: of the checkpoint, or "" where it was not needed.
    """

    arrays: dict[str, Array]
    fingerprint: str


def open_weights(program: Program, model: Path, store: WeightStore | None) -> Weights:
    """All weight values that a Program's phases read, as ``load_weights`` makes them.

    Args:
        model: the checkpoint's directory. store: where packed weights are kept; None: nowhere,
            they are packed in memory.

    Raises:
        CheckpointError: a tensor is missing, extra, of another type, or holds a bad scale; or the
            files change meanwhile.
    """
    table = program.manifest["weights"]
    layout = weight_layout(program)
    derived = [n for n in sorted(layout) if "derive" in table["values"][n]]
    stored = [n for n in sorted(layout) if is_stored(n, table)]
    packed = sorted(layout.keys() - {*derived, *stored})
    with CheckpointReader(model) as reader:
        check_names(reader, table["stored"])
        fingerprint = "" if store is None else identify(reader, store)
        arrays = dict(make_each(stored, table, reader))
        for names, identity, inputs in (
                (packed, fingerprint, [table["stored"][table["values"][n]["of"]] for n in packed]),
                (derived, "", [table["values"][n] for n in derived] + _tokenizer(model))):
            key = _key(identity, names, inputs)
            pack = Pack(key, identity, {n: layout[n] for n in names})
            make = partial(_make_all, names, table, reader, check=names is packed)
            found = None
            if store is not None and (fingerprint or names is derived):
                found = store.open(pack)
                found = store.build(pack, make) if found is None else found
            arrays |= {n: own(a) for n, a in make()} if found is None else found
        return Weights(arrays, fingerprint)


def weight_layout(program: Program) -> Layout:
    """Element type and shape of every weight value of a Program, by name."""
    return {v.name: (NUMPY[v.dtype], v.storage({}))
            for phase in program.phases.values() for v in phase.values if v.kind == "weight"}


def identify(reader: CheckpointReader, store: WeightStore) -> str:
    """The fingerprint of a checkpoint, read or remembered; "" for one that changed just now: the
    state of its files need not show another change.

    Raises:
        CheckpointError: the files changed while they were read.
    """
    if reader.age() <= store.settled_s:
        return ""
    stamp = reader.stamp()
    found = store.fingerprint(stamp)
    if not found:
        found = reader.fingerprint()
        reader.require_unchanged()
        reader.release()
        store.remember(stamp, found)
    return found


def _make_all(names: Iterable[str], table: Mapping[str, Any], reader: CheckpointReader, *,
              check: bool) -> Iterator[tuple[str, Array]]:
    """The arrays of a group. ``check``: it is the one with which the checkpoint is checked: whoever
    finds it packed need not do that again. The end is reached only if no file changed."""
    if check:
        check_scales(reader, table["stored"])
    yield from make_each(names, table, reader)
    reader.require_unchanged()


def _key(identity: str, names: list[str], inputs: list[Any]) -> bytes:
    parts = [_code(), sys.byteorder, identity, names, inputs]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def _tokenizer(model: Path) -> list[str]:
    """What a token map depends on besides its sizes."""
    file = model / "tokenizer.json"
    content = file.read_bytes() if file.exists() else b""
    return [tokenizers.__version__, hashlib.sha256(content).hexdigest()]


@cache
def _code() -> str:
    """sha256 over the sources that make weights, so that an edit packs anew."""
    files = [_PACKAGE / "runtime" / name for name in ("weights.py", "weight_file.py")]
    for package in ("checkpoint", "numerics"):
        files += sorted((_PACKAGE / package).glob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()
