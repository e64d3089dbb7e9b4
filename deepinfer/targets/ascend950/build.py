"""Builds the files of an ascend950 Program: sources, launch data, objects where bisheng is found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer.targets.ascend950.gates import check_object, check_text, require
from deepinfer.targets.ascend950.toolchain import bisheng_version, compile_object, find
from deepinfer.targets.base import LoweredKernel, Spec


def build(phases: Mapping[str, Any], kernels: Mapping[str, LoweredKernel],
          specs: Mapping[str, Spec], *, cache: Path, isa: Sequence[str] = (), abi: int = 0,
          jobs: int | None = None) -> dict[str, bytes]:
    """Sources, launch data and objects by path inside the Program; every kernel passes its gates.

    Args:
        phases, specs, isa, abi, jobs: as every target's build; unused, there is no step table.
        kernels: by symbol. cache: directory of objects, kept by content.

    Raises:
        TargetError: a gate failed. ToolchainError: bisheng failed.
    """
    files: dict[str, bytes] = {}
    for symbol, lowered in sorted(kernels.items()):
        gates = check_text(lowered)
        require(gates, symbol)  # bisheng need not see what the gates refuse
        made = compile_object(lowered, cache) if find() else None
        gates = (*gates, check_object(made))
        described = {"params": lowered.params, "launch": lowered.launch,
                     "gates": [[g.name, g.status, g.detail] for g in gates]}
        files[f"src/{symbol}.asc"] = lowered.text.encode()
        files[f"src/{symbol}.json"] = json.dumps(described, indent=1).encode()
        if made is not None:
            files[f"bin/{symbol}.o"] = made
    return files


def versions() -> dict[str, str]:
    """Tool versions that shape the binaries."""
    return {"bisheng": bisheng_version()}
