"""Builds the files of an ascend950 Program: sources, launch data, objects if bisheng is found."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deepinfer.targets.ascend950.gates import (
    NOT_CHECKED,
    Gate,
    check_object,
    check_text,
    require,
)
from deepinfer.targets.ascend950.toolchain import (
    bisheng_version,
    compile_object,
    find,
    object_path,
)
from deepinfer.targets.base import LoweredKernel, Spec


def build(phases: Mapping[str, Any], kernels: Mapping[str, LoweredKernel],
          specs: Mapping[str, Spec], *, cache: Path, isa: Sequence[str] = (), abi: int = 0,
          jobs: int | None = None, binaries: bool = True) -> dict[str, bytes]:
    """Sources, launch data and objects by path inside the Program; every kernel passes its gates.

    Args:
        phases, specs, isa, abi: as every target's build; unused, there is no step table.
        kernels: by symbol. cache: directory of objects, kept by content. jobs: compilers at once.
        binaries: False makes no objects, also where bisheng is found.

    Raises:
        TargetError: a gate failed. ToolchainError: bisheng failed.
    """
    ordered = sorted(kernels.items())
    gates = {symbol: check_text(lowered) for symbol, lowered in ordered}
    for symbol in gates:
        require(gates[symbol], symbol)  # bisheng need not see what the gates refuse
    objects: list[bytes | None] = [None] * len(ordered)
    if binaries and find():
        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            objects = list(pool.map(lambda item: compile_object(item[1], cache), ordered))
    files: dict[str, bytes] = {}
    for (symbol, lowered), made in zip(ordered, objects, strict=True):
        compiled = check_object(made) if binaries else Gate(
            "compiles", NOT_CHECKED, "only sources were asked for")
        require((compiled,), symbol)
        described = {"params": lowered.params, "launch": lowered.launch,
                     "gates": [[g.name, g.status, g.detail] for g in (*gates[symbol], compiled)]}
        files[f"src/{symbol}.asc"] = lowered.text.encode()
        files[f"src/{symbol}.json"] = json.dumps(described, indent=1).encode()
        if made is not None:
            files[f"bin/{symbol}.o"] = made
    return files


def is_built(lowered: LoweredKernel, cache: Path) -> bool:
    """Whether ``cache`` holds the kernel's object."""
    return object_path(lowered, cache).exists()


def versions() -> dict[str, str]:
    """Tool versions that shape the binaries."""
    return {"bisheng": bisheng_version()}
