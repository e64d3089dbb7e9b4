"""CANN tools of the ascend950 target: bisheng makes objects. None is needed to make text."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from deepinfer.errors import ToolchainError
from deepinfer.targets.ascend950.lower import ARCH
from deepinfer.targets.base import LoweredKernel
from deepinfer.targets.tile import load

# As TileLang 0.1.15 calls it (contrib/bisheng.py), and no contraction: a product is rounded before
# it is added, as the ops' orders say. Never run by us: no CANN was at hand.
FLAGS = ("-O2", "-fPIC", "-std=c++20", "-ffp-contract=off", "-mllvm",
         "-cce-aicore-dcpreload-args=false", f"--npu-arch={ARCH}", "--cce-aicore-only", "-c")


def find() -> str | None:
    """Path of bisheng: under $BISHENG_HOME or on PATH; None if absent."""
    home = os.environ.get("BISHENG_HOME")
    for path in ([str(Path(home) / "bin")] if home else []) + [None]:
        found = shutil.which("bisheng", path=path)
        if found:
            return found
    return None


@cache
def bisheng_version() -> str:
    """First line of ``bisheng --version``, or "none"."""
    bisheng = find()
    if bisheng is None:
        return "none"
    done = subprocess.run([bisheng, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def object_path(lowered: LoweredKernel, cache_dir: Path) -> Path:
    """Where ``compile_object`` keeps this kernel's object, named by all that shapes its bytes."""
    key = hashlib.sha256("\0".join((bisheng_version(), *FLAGS, lowered.text)).encode()).hexdigest()
    return cache_dir / f"{key}.o"


def compile_object(lowered: LoweredKernel, cache_dir: Path) -> bytes:
    """Compile one kernel; results are kept by content in ``cache_dir``.

    Raises:
        ToolchainError: bisheng is not found, or it failed.
    """
    bisheng = find()
    if bisheng is None:
        raise ToolchainError("bisheng is not found on PATH or under $BISHENG_HOME",
                             where="ascend950 target", next="install CANN 9.2, or emit source")
    cache_dir.mkdir(parents=True, exist_ok=True)
    made = object_path(lowered, cache_dir)
    if not made.exists():
        include = f"-I{Path(load().__file__).parent / 'src'}"
        with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
            (Path(scratch) / "kernel.asc").write_text(lowered.text)
            done = subprocess.run([bisheng, *FLAGS, include, "kernel.asc", "-o", "kernel.o"],
                                  capture_output=True, text=True, cwd=scratch)
            if done.returncode:
                tail = "\n".join(line for line in done.stderr.splitlines() if "error" in line)
                raise ToolchainError(f"bisheng failed with {done.returncode}:\n"
                                     f"{tail or done.stderr}", where=f"kernel {lowered.symbol}",
                                     next="this is a fault of the ascend950 target: report it")
            os.replace(Path(scratch) / "kernel.o", made)
    return made.read_bytes()
