"""Program: the ahead-of-time artifact. A directory with a manifest, graph texts, sources, binaries.

It holds no weights and no state. Loading it needs the core install only.

    manifest.json          one JSON object, see below
    graphs/<phase>.txt     the lowered graph, as text
    src/                   every kernel's source and the step tables
    bin/<isa>.so           all kernels and entry points, one library per ISA level

The manifest's fields: ``format`` and ``abi`` (versions of this file and of the entry points),
``digest`` (sha256 over all other fields), ``key`` (of what it was compiled from), ``target``,
``isa`` (levels in bin/), ``model`` (the config), ``limits``, ``versions`` (of the tools),
``orders`` (digest of each op's reduction order), ``facts`` (what the runtime needs to know),
``cost`` (modelled, of verify and draft steps by rows), ``weights`` (what to load and how),
``phases`` (values, sizes, launches), ``files`` (their sha256).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from deepinfer.errors import ProgramError

FORMAT = 1  # raised when a manifest of before cannot be read any more
ABI = 2  # raised when the native entry points change; checked against the library at load


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


@dataclass(frozen=True)
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

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Where each value lies in the pointer table."""
        return {v.name: i for i, v in enumerate(self.values)}

    @cached_property
    def inputs(self) -> Mapping[str, ValueInfo]:
        """What a step hands in, by name, in the order of the pointer table."""
        return {v.name: v for v in self.values if v.kind == "input"}

    def value(self, name: str) -> ValueInfo:
        if name in self.index:
            return self.values[self.index[name]]
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
            manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ProgramError(f"cannot read manifest.json: {error}", where=str(path),
                               next="compile it again with `deepinfer compile`") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            found = manifest.get("format") if isinstance(manifest, dict) else type(manifest)
            raise ProgramError(f"format is {found}, expected {FORMAT}", where=str(path),
                               next="compile it again with this version")
        found, expected = manifest.get("digest"), _digest(manifest)
        if found != expected:
            raise ProgramError(f"manifest.json says digest {found}, its own is {expected}",
                               where=str(path), next="it was changed or damaged: compile it again")
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

    Raises:
        ProgramError: ``path`` holds something else than a Program; it is left alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    body = {**manifest, "format": FORMAT, "abi": ABI, "files": hashes}
    body["digest"] = _digest(body)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        for name, data in files.items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_bytes(data)
        (scratch / "manifest.json").write_text(json.dumps(body, sort_keys=True, indent=1) + "\n")
        scratch.chmod(0o755)
        made = Program.load(scratch)
        while True:
            try:
                os.rename(scratch, path)  # succeeds where nothing or an empty directory is
                return replace(made, path=path)
            except OSError:
                try:
                    found = Program.load(path)
                    if found.digest == made.digest:
                        return found
                except ProgramError:
                    check_replaceable(path)
            _move_away(path)  # another process may put one there meanwhile: look again
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_replaceable(path: Path) -> None:
    """Refuse to write a Program where something else is.

    An empty directory may be replaced, and a Program, also one of another version or a damaged one.

    Raises:
        ProgramError: a file, or a directory that holds anything else.
    """
    if not path.exists():
        return
    names = {p.name for p in path.iterdir()} if path.is_dir() else {path.name}
    ours = names <= {"manifest.json", "graphs", "src", "bin"} and path.is_dir()
    if ours and "manifest.json" in names:
        try:  # many things have a manifest.json; one that cannot be read is taken for a damaged one
            manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
            ours = isinstance(manifest, dict) and {"format", "abi", "files"} <= manifest.keys()
        except (OSError, ValueError):
            ours = "graphs" in names
    elif names:
        ours = False
    if not ours:
        raise ProgramError(f"it is no Program, it holds {', '.join(sorted(names)[:5])}",
                           where=str(path), next="give an empty or a new directory")


def _move_away(path: Path) -> None:
    """Take a Program out of its place and delete it; the place may be empty afterwards."""
    old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-old-"))
    try:
        os.rename(path, old / "program")
    except FileNotFoundError:
        pass  # another process was faster
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _digest(manifest: Mapping[str, Any]) -> str:
    """sha256 over the manifest without its digest; it holds the hashes of all files."""
    body = {k: v for k, v in manifest.items() if k != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


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
