"""Builds the files of an sm100 Program: sources, launch data, and cubins where nvcc is found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer.targets.base import LoweredKernel, Spec
from deepinfer.targets.sm100.gates import check_cubin, check_text, require
from deepinfer.targets.sm100.toolchain import compile_cubin, find, nvcc_version


def build(phases: Mapping[str, Any], kernels: Mapping[str, LoweredKernel],
          specs: Mapping[str, Spec], *, cache: Path, isa: Sequence[str] = (), abi: int = 0,
          jobs: int | None = None) -> dict[str, bytes]:
    """Sources, launch data and cubins by path inside the Program; every kernel passes its gates.

    Args:
        phases, specs, isa, abi, jobs: as every target's build; unused, there is no step table.
        kernels: by symbol. cache: directory of cubins, kept by content.

    Raises:
        TargetError: a gate failed. ToolchainError: nvcc failed.
    """
    files: dict[str, bytes] = {}
    for symbol, lowered in sorted(kernels.items()):
        cubin = compile_cubin(lowered, cache) if find("nvcc") else None
        gates = (*check_text(lowered), *check_cubin(lowered, cubin))
        require(gates, symbol)
        described = {"params": lowered.params, "launch": lowered.launch,
                     "gates": [[g.name, g.status, g.detail] for g in gates]}
        files[f"src/{symbol}.cu"] = lowered.text.encode()
        files[f"src/{symbol}.json"] = json.dumps(described, indent=1).encode()
        if cubin is not None:
            files[f"bin/{symbol}.cubin"] = cubin.data
    return files


def versions() -> dict[str, str]:
    """Tool versions that shape the binaries."""
    return {"nvcc": nvcc_version()}
