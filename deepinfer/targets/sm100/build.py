"""Builds the files of an sm100 Program: sources, launch data, and cubins where nvcc is found."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deepinfer.targets.base import LoweredKernel, Spec
from deepinfer.targets.sm100.gates import check_cubin, check_text, require
from deepinfer.targets.sm100.toolchain import (
    Cubin,
    compile_cubin,
    cubin_path,
    find,
    nvcc_version,
)


def build(phases: Mapping[str, Any], kernels: Mapping[str, LoweredKernel],
          specs: Mapping[str, Spec], *, cache: Path, isa: Sequence[str] = (), abi: int = 0,
          jobs: int | None = None, binaries: bool = True) -> dict[str, bytes]:
    """Sources, launch data and cubins by path inside the Program; every kernel passes its gates.

    Args:
        phases, specs, isa, abi: as every target's build; unused, there is no step table.
        kernels: by symbol. cache: directory of cubins, kept by content. jobs: compilers at once.
        binaries: False makes no cubins, also where nvcc is found.

    Raises:
        TargetError: a gate failed. ToolchainError: nvcc failed.
    """
    ordered = sorted(kernels.items())
    cubins: list[Cubin | None] = [None] * len(ordered)
    if binaries and find("nvcc"):
        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            cubins = list(pool.map(lambda item: compile_cubin(item[1], cache), ordered))
    why_not = "no nvcc" if binaries else "only sources were asked for"
    files: dict[str, bytes] = {}
    for (symbol, lowered), cubin in zip(ordered, cubins, strict=True):
        gates = (*check_text(lowered), *check_cubin(lowered, cubin, why_not))
        require(gates, symbol)
        described = {"params": lowered.params, "launch": lowered.launch,
                     "gates": [[g.name, g.status, g.detail] for g in gates]}
        files[f"src/{symbol}.cu"] = lowered.text.encode()
        files[f"src/{symbol}.json"] = json.dumps(described, indent=1).encode()
        if cubin is not None:
            files[f"bin/{symbol}.cubin"] = cubin.data
    return files


def is_built(lowered: LoweredKernel, cache: Path) -> bool:
    """Whether ``cache`` holds the kernel's cubin."""
    return cubin_path(lowered, cache).exists()


def versions() -> dict[str, str]:
    """Tool versions that shape the binaries."""
    return {"nvcc": nvcc_version()}
