"""Builds one schedule of a cpu kernel into a library of its own, kept by content."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune.keys import NATIVE, compile_body
from autotune.space import Candidate, digest
from deepinfer.codegen.cache import cached_lower
from deepinfer.codegen.select import instance_of
from deepinfer.settings import cache_dir
from deepinfer.targets.base import LoweredKernel, load_target
from deepinfer.targets.cpu.toolchain import (
    FLAGS,
    ISA_FLAGS,
    compile_library,
    compiler_version,
    micro_digest,
    thunk_text,
)

HIDDEN = 'extern "C" void'
VISIBLE = 'extern "C" __attribute__((visibility("default"))) void'


@dataclass(frozen=True, slots=True)
class Built:
    """A library that holds one schedule of one kernel.

    Args:
        library: its path. symbol: of the kernel; the thunk is ``<symbol>_thunk``.
        source: digest of the generated text and of the micro-kernels it calls.
    """

    library: str
    symbol: str
    source: str


def build_dir() -> Path:
    """Where the tuner keeps libraries."""
    return cache_dir() / "tuning"


def lower(candidate: Candidate) -> LoweredKernel:
    """The candidate's generated text; kept in the compiler's own cache."""
    target = load_target(candidate.problem.target)
    instance = instance_of(candidate.problem.kernel(),
                           candidate.problem.spec(candidate.schedule))
    return cached_lower(target, cache_dir() / "lowered")(instance)


def source_digest(lowered: LoweredKernel) -> str:
    """sha256 of the text under a neutral name (the symbol is named by the schedule), and of the
    micro-kernels."""
    text = lowered.text.replace(lowered.symbol, "kernel")
    return digest([text, lowered.launch, micro_digest()])


def build(candidate: Candidate, isa: str) -> Built:
    """Lower and compile a candidate, or find it in the cache.

    Raises:
        ToolchainError: TileLang or the C++ compiler failed.
    """
    library = build_dir() / f"{digest(compile_body(candidate, isa))}.so"
    note = library.with_suffix(".json")
    found = _find(library, note)
    if found is not None:
        return found
    lowered = lower(candidate)
    text = thunk_text(lowered, candidate.problem.spec(candidate.schedule))
    build_dir().mkdir(parents=True, exist_ok=True)
    compile_library({"kernel": text.replace(HIDDEN, VISIBLE)}, isa, library,
                    cache_dir() / "objects", jobs=1)
    made = Built(str(library), lowered.symbol, source_digest(lowered))
    body = {**asdict(made), "sha256": hashlib.sha256(library.read_bytes()).hexdigest()}
    handle, name = tempfile.mkstemp(dir=library.parent)
    with os.fdopen(handle, "w") as out:
        json.dump(body, out)
    os.replace(name, note)
    return made


def _find(library: Path, note: Path) -> Built | None:
    """What an earlier build left, if it is as it was written; a damaged one is built anew."""
    try:
        held = json.loads(note.read_text(encoding="utf-8"))
        if hashlib.sha256(library.read_bytes()).hexdigest() == held["sha256"]:
            return Built(str(library), held["symbol"], held["source"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent or damaged
    return None


def native_library(isa: str) -> Path:
    """The tuner's own native code for this ISA level, compiled on first use."""
    text = NATIVE.read_text(encoding="utf-8")
    key = digest([text, micro_digest(), compiler_version(), FLAGS, ISA_FLAGS[isa]])
    library = build_dir() / f"native-{isa}-{key[:24]}.so"
    if not library.exists():
        build_dir().mkdir(parents=True, exist_ok=True)
        compile_library({"native": text}, isa, library, cache_dir() / "objects", jobs=1)
    return library
