"""Compiles C++ into shared objects that are cached by content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from deepinfer.errors import ToolchainError
from deepinfer.settings import cache_dir

CACHE = cache_dir().absolute() / "emulators"


@cache
def compiler() -> str:
    """The g++ that builds emulators.

    Raises:
        ToolchainError: there is none.
    """
    found = shutil.which("g++")
    if found is None:
        raise ToolchainError("g++ is not found", where="emulator", next="install g++")
    return found


def build(name: str, sources: Mapping[str, str | Path], flags: Sequence[str],
          depends: Sequence[Path] = (), link: Sequence[str] = ()) -> Path:
    """Compile each source (text, or a file) with ``flags`` and link them into one shared object.

    Args:
        name: first part of the object's file name.
        sources: by name. depends: files whose content decides whether an object is still good.
        link: flags of the link step.

    Raises:
        ToolchainError: the compiler failed; holds its first errors.
    """
    digest = hashlib.sha256("\0".join((*flags, *link)).encode())
    for path in (*depends, *(s for s in sources.values() if isinstance(s, Path))):
        digest.update(path.read_bytes())
    for text in sources.values():
        if isinstance(text, str):
            digest.update(text.encode())
    out = CACHE / f"{name}-{digest.hexdigest()[:20]}.so"
    if out.exists():
        return out
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        objects = []
        for source, content in sources.items():
            path = content if isinstance(content, Path) else Path(scratch) / f"{source}.cpp"
            if isinstance(content, str):
                path.write_text(content)
            objects.append(str(Path(scratch) / f"{source}.o"))
            _run([*flags, "-c", str(path), "-o", objects[-1]], f"{name}/{source}")
        made = Path(scratch) / "made.so"
        _run(["-shared", *objects, *link, "-o", str(made)], f"{name}, link step")
        os.replace(made, out)
    return out


def _run(arguments: list[str], what: str) -> None:
    done = subprocess.run([compiler(), *arguments], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise ToolchainError("g++ failed:\n" + "\n".join(errors[:8]), where=f"emulator, {what}",
                             next="a name the emulator does not know is not emulated")
