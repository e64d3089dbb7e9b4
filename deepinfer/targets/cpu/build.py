"""Builds the files of a cpu Program: sources and one library per ISA level."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepinfer.targets.base import LoweredKernel, Spec
from deepinfer.targets.cpu.step_tables import PhaseLike, step_text
from deepinfer.targets.cpu.toolchain import (
    MICRO,
    compile_library,
    compiler_version,
    thunk_text,
)


def build(phases: Mapping[str, PhaseLike], kernels: Mapping[str, LoweredKernel],
          specs: Mapping[str, Spec], *, isa: Sequence[str], abi: int, cache: Path,
          jobs: int | None = None, binaries: bool = True) -> dict[str, bytes]:
    """Sources and binaries by path inside the Program.

    Args:
        phases: planned phases by name. kernels, specs: by symbol.
        isa: levels to build, each a key of ISA_FLAGS. abi: what ``deepinfer_abi`` answers.
        cache: directory of objects, kept by content. jobs: compilers at once.
        binaries: False makes sources only.

    Raises:
        ToolchainError: no compiler, or it failed.
    """
    sources = {s: thunk_text(k, specs[s]) for s, k in kernels.items()}
    sources["step"] = step_text(dict(phases), abi)
    files = {f"src/{name}.cc": text.encode() for name, text in sources.items()}
    files |= {f"src/micro/{p.name}": p.read_bytes() for p in sorted(MICRO.iterdir())}
    for level in isa if binaries else ():
        with tempfile.TemporaryDirectory() as scratch:
            library = Path(scratch) / f"{level}.so"
            compile_library(sources, level, library, cache, jobs)
            files[f"bin/{level}.so"] = library.read_bytes()
    return files


def versions() -> dict[str, str]:
    """Tool versions that shape the binaries."""
    return {"compiler": compiler_version()}
