"""Program: the ahead-of-time artifact. A directory with a manifest, graph texts, sources, binaries.

It holds no weights and no state. Loading it needs the core install only.

    manifest.json          format, digests, tool versions, model facts, phases: values and launches
    graphs/<phase>.txt     the lowered graph, as text
    src/                   every kernel's source and the step tables
    bin/<isa>.so           all kernels and entry points, one library per ISA level
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.errors import ProgramError

FORMAT = 1  # raised when a manifest of before cannot be read any more
ABI = 1  # raised when the native entry points change; checked against the library at load


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """One value of a phase.

    Args:
        name: as in the graph. kind: "input", "weight", "state" or "temp".
        dtype: name of the IR's element type.
        shape: logical dims; a symbolic dim is (name, times).
        offset: bytes into the arena, for temps.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int | tuple[str, int], ...]
    offset: int | None

    def logical(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape under these run-time sizes."""
        return tuple(d if isinstance(d, int) else sizes[d[0]] * d[1] for d in self.shape)

    def storage(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the array that holds it: e2m1 packs two elements a byte."""
        shape = self.logical(sizes)
        return shape if self.dtype != "e2m1" else (*shape[:-1], shape[-1] // 2)


@dataclass(frozen=True, slots=True)
class Phase:
    """One entry point: its values in the order of the pointer table, sizes, and buffers.

    Args:
        name: "prefill", "decode", "verify" or "draft"; the entry point is deepinfer_<name>.
        values: in the order of the native pointer table.
        sizes: names of the run-time sizes with their maxima, in native order.
        outputs: names of the values a step hands back.
        arena_bytes: size of the arena the temps live in. scratch_bytes: per thread.
        launches: (op, kernel symbol, location) in execution order.
    """

    name: str
    values: tuple[ValueInfo, ...]
    sizes: tuple[tuple[str, int], ...]
    outputs: tuple[str, ...]
    arena_bytes: int
    scratch_bytes: int
    launches: tuple[tuple[str, str, str], ...]

    def value(self, name: str) -> ValueInfo:
        for v in self.values:
            if v.name == name:
                return v
        raise ProgramError(f"phase '{self.name}' has no value '{name}'",
                           where="Program", next="list them with `deepinfer inspect program`")


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled artifact on disk; immutable.

    Args:
        path: its directory. manifest: the parsed manifest. phases: by name.
    """

    path: Path
    manifest: Mapping[str, Any]
    phases: Mapping[str, Phase]

    @property
    def digest(self) -> str:
        """sha256 over every file: equal digests mean equal Programs."""
        return str(self.manifest["digest"])

    @property
    def target(self) -> str:
        return str(self.manifest["target"])

    @staticmethod
    def load(path: str | Path) -> Program:
        """Open a Program and check that every file is as written.

        Raises:
            ProgramError: not a Program, another format, or a file that is missing or damaged.
        """
        path = Path(path)
        try:
            text = (path / "manifest.json").read_text()
            manifest = json.loads(text)
        except (OSError, ValueError) as error:
            raise ProgramError(f"cannot read manifest.json: {error}", where=str(path),
                               next="compile it again with `deepinfer compile`") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            found = manifest.get("format") if isinstance(manifest, dict) else type(manifest)
            raise ProgramError(f"format is {found}, expected {FORMAT}", where=str(path),
                               next="compile it again with this version")
        _check_files(path, manifest)
        return Program(path, manifest, {n: _phase(n, p) for n, p in manifest["phases"].items()})

    def require(self, **expected: Any) -> None:
        """Refuse the Program unless these manifest fields have these values.

        Raises:
            ProgramError: names the first differing field, the found and the expected value.
        """
        for name, value in expected.items():
            difference = first_difference(self.manifest.get(name), value, name)
            if difference:
                where, found, want = difference
                raise ProgramError(f"field {where} is {found!r}, expected {want!r}",
                                   where=f"Program {self.path}",
                                   next="compile a Program for this model and these settings")


def first_difference(found: Any, expected: Any, name: str) -> tuple[str, Any, Any] | None:
    """The first place where two JSON values differ: (path, found, expected)."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        for key in sorted({*found, *expected}):
            difference = first_difference(found.get(key), expected.get(key), f"{name}.{key}")
            if difference:
                return difference
        return None
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        if len(found) == len(expected):
            for i, (a, b) in enumerate(zip(found, expected, strict=True)):
                difference = first_difference(a, b, f"{name}[{i}]")
                if difference:
                    return difference
            return None
    return None if found == expected else (name, found, expected)


def save(path: Path, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> Program:
    """Write a Program: all files into a new directory beside ``path``, then one rename.

    If another process wrote the same Program meanwhile, that one is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    body = {**manifest, "format": FORMAT, "abi": ABI, "files": hashes}
    text = json.dumps(body, sort_keys=True)
    body["digest"] = hashlib.sha256(text.encode()).hexdigest()
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        for name, data in files.items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_bytes(data)
        (scratch / "manifest.json").write_text(json.dumps(body, sort_keys=True, indent=1) + "\n")
        scratch.chmod(0o755)
        if (path / "manifest.json").exists():
            _replace_directory(scratch, path)
        else:
            try:
                os.rename(scratch, path)
            except OSError:
                _replace_directory(scratch, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Program.load(path)


def _replace_directory(new: Path, path: Path) -> None:
    """Put ``new`` in the place of a Program; anything that is not one is left alone."""
    if not (path / "manifest.json").exists() and any(path.iterdir()):
        raise ProgramError("the directory holds files that are not a Program", where=str(path),
                           next="give an empty or a new directory")
    old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-old-"))
    try:
        os.rename(path, old / "program")
        os.rename(new, path)
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _check_files(path: Path, manifest: Mapping[str, Any]) -> None:
    for name, expected in manifest["files"].items():
        try:
            found = hashlib.sha256((path / name).read_bytes()).hexdigest()
        except OSError as error:
            raise ProgramError(f"file {name} cannot be read: {error}", where=str(path),
                               next="compile it again") from None
        if found != expected:
            raise ProgramError(f"file {name} has sha256 {found[:16]}.., expected {expected[:16]}..",
                               where=str(path), next="it was changed or damaged: compile it again")


def _phase(name: str, data: Mapping[str, Any]) -> Phase:
    values = tuple(
        ValueInfo(v["name"], v["kind"], v["dtype"],
                  tuple(d if isinstance(d, int) else (d[0], d[1]) for d in v["shape"]),
                  v.get("offset")) for v in data["values"])
    return Phase(name, values, tuple((s, m) for s, m in data["sizes"]), tuple(data["outputs"]),
                 data["arena_bytes"], data["scratch_bytes"],
                 tuple((a, b, c) for a, b, c in data["launches"]))
