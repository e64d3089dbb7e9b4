"""CUDA tools of the sm100 target: nvcc makes cubins, cuobjdump reads them; none needs a GPU."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deepinfer.errors import ToolchainError
from deepinfer.targets.base import LoweredKernel
from deepinfer.targets.sm100.lower import ARCH
from deepinfer.targets.tile import load

# -fmad=false: a product is rounded before it is added, as the ops' orders say; the tensor cores'
# products are not affected.
FLAGS = ("-std=c++20", "-O3", f"-arch={ARCH}", "-cubin", "-w", "-fmad=false", "-Xptxas=-v")
_PIP_BIN = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin"


def find(tool: str) -> str | None:
    """Path of a CUDA tool: on PATH, under $CUDA_HOME, or of a pip package; None if absent."""
    home = os.environ.get("CUDA_HOME")
    places = [str(Path(home) / "bin")] if home else []
    for path in (None, *places, str(_PIP_BIN)):
        found = shutil.which(tool, path=path)
        if found:
            return found
    return None


@cache
def nvcc_version() -> str:
    """Release of the nvcc that is found, or "none"."""
    nvcc = find("nvcc")
    if nvcc is None:
        return "none"
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found[1] if found else text.strip()


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled kernel.

    Args:
        data: the file. registers: per thread. spilled: bytes stored and loaded by spills.
    """

    data: bytes
    registers: int
    spilled: int


def cubin_path(lowered: LoweredKernel, cache_dir: Path) -> Path:
    """Where ``compile_cubin`` keeps this kernel's cubin, named by all that shapes its bytes."""
    key = hashlib.sha256("\0".join((nvcc_version(), *FLAGS, lowered.text)).encode()).hexdigest()
    return cache_dir / f"{key}.cubin"


def compile_cubin(lowered: LoweredKernel, cache_dir: Path) -> Cubin:
    """Compile one kernel; results are kept by content in ``cache_dir``.

    Raises:
        ToolchainError: nvcc is not found, or it failed.
    """
    nvcc = find("nvcc")
    if nvcc is None:
        raise ToolchainError(
            "nvcc is not found on PATH, under $CUDA_HOME or among pip's packages",
            where="sm100 target",
            next="install CUDA 13 or `pip install nvidia-cuda-nvcc`, or emit source")
    package = Path(load().__file__).parent
    include = (f"-I{package / 'src'}", f"-I{package / '3rdparty' / 'cutlass' / 'include'}")
    cache_dir.mkdir(parents=True, exist_ok=True)
    made = cubin_path(lowered, cache_dir)
    log = made.with_suffix(".ptxas")
    if not (made.exists() and log.exists()):
        with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
            (Path(scratch) / "kernel.cu").write_text(lowered.text)
            done = subprocess.run([nvcc, *FLAGS, *include, "kernel.cu", "-o", "kernel.cubin"],
                                  capture_output=True, text=True, cwd=scratch)
            if done.returncode:
                tail = "\n".join(line for line in done.stderr.splitlines() if "error" in line)
                raise ToolchainError(f"nvcc failed with {done.returncode}:\n{tail or done.stderr}",
                                     where=f"kernel {lowered.symbol}",
                                     next="this is a fault of the sm100 target: report it")
            log.write_text(done.stderr + done.stdout)
            os.replace(Path(scratch) / "kernel.cubin", made)
    return Cubin(made.read_bytes(), *_resources(log.read_text(), lowered.symbol))


def _resources(log: str, symbol: str) -> tuple[int, int]:
    """(registers, spilled bytes) that ptxas reports."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise ToolchainError(f"cannot read ptxas's report:\n{log}", where=f"kernel {symbol}",
                             next="use CUDA 13.0, whose report is known")
    return int(registers[1]), int(spills[1]) + int(spills[2])


def disassemble(cubin: Cubin) -> str | None:
    """SASS of a cubin, or None where cuobjdump or nvdisasm is not installed.

    Raises:
        ToolchainError: the tool failed.
    """
    cuobjdump, nvdisasm = find("cuobjdump"), find("nvdisasm")
    if cuobjdump is None or nvdisasm is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin.data)
        file.flush()
        path = os.pathsep.join((str(Path(nvdisasm).parent), os.environ.get("PATH", "")))
        done = subprocess.run([cuobjdump, "-sass", file.name], capture_output=True, text=True,
                              env={**os.environ, "PATH": path})
    if done.returncode:
        raise ToolchainError(f"cuobjdump failed: {done.stderr.strip()}", where="sm100 target",
                             next="install nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm >= 13.2")
    return done.stdout
