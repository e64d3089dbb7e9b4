"""Lowered kernel texts kept by content, so that a second compile does not start TileLang."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deepinfer.codegen.select import Instance
from deepinfer.codegen.sources import closure
from deepinfer.targets.base import LoweredKernel, Target


def tilelang_version() -> str:
    """The installed TileLang's version, or "none"; does not import it."""
    try:
        return version("tilelang")
    except PackageNotFoundError:
        return "none"


def find_lowered(target: Target, directory: Path, instance: Instance) -> LoweredKernel | None:
    """What ``cached_lower`` would find for a kernel; None where it would lower it."""
    try:
        digest, _, text = _path(target, directory, instance).read_text(
            encoding="utf-8").partition("\n")
        if digest != hashlib.sha256(text.encode()).hexdigest():
            return None
        found = json.loads(text)
        return LoweredKernel(found["symbol"], found["text"],
                             tuple((n, t) for n, t in found["params"]), found["launch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent, damaged, or of another format


def _path(target: Target, directory: Path, instance: Instance) -> Path:
    """Named by spec, TileLang, and every source file that the kernel or the way from its program
    to its text depends on."""
    sources = [inspect.getsourcefile(f) for f in (instance.kernel.build, target.lower)]
    key = hashlib.sha256(f"{tilelang_version()}\0{instance.spec.key()}".encode())
    for file in closure(*(Path(s) for s in sources if s is not None)):
        key.update(file.read_bytes())
    return directory / f"{key.hexdigest()}.json"


def cached_lower(target: Target, directory: Path) -> Callable[[Instance], LoweredKernel]:
    """``target.lower`` behind a cache in ``directory``, by content."""

    def lower(instance: Instance) -> LoweredKernel:
        found = find_lowered(target, directory, instance)
        if found is not None:
            return found
        made = target.lower(instance.kernel.program(instance.spec), instance.symbol)
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"symbol": made.symbol, "text": made.text, "params": made.params,
                           "launch": made.launch})
        handle, name = tempfile.mkstemp(dir=directory)
        with os.fdopen(handle, "w") as out:
            out.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
        os.replace(name, _path(target, directory, instance))
        return made

    return lower
