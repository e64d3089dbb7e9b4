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


def cached_lower(target: Target, directory: Path) -> Callable[[Instance], LoweredKernel]:
    """``target.lower`` behind a cache keyed by spec, TileLang, and every source file that the
    kernel or the way from its program to its text depends on."""
    bridge = [f for f in (inspect.getsourcefile(target.lower),) if f is not None]

    def lower(instance: Instance) -> LoweredKernel:
        source = inspect.getsourcefile(instance.kernel.build)
        assert source is not None
        digest = hashlib.sha256(f"{tilelang_version()}\0{instance.spec.key()}".encode())
        for file in closure(*map(Path, (source, *bridge))):
            digest.update(file.read_bytes())
        path = directory / f"{digest.hexdigest()}.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return LoweredKernel(found["symbol"], found["text"],
                                 tuple((n, t) for n, t in found["params"]), found["launch"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # absent, or a file of another format: lower it and write it anew
        made = target.lower(instance.kernel.build(instance.spec), instance.symbol)
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"symbol": made.symbol, "text": made.text, "params": made.params,
                           "launch": made.launch})
        handle, name = tempfile.mkstemp(dir=directory)
        with os.fdopen(handle, "w") as out:
            out.write(text)
        os.replace(name, path)
        return made

    return lower
