"""Compile single ops for a target that has no whole phase yet: sources, launch data, binaries."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer.codegen.cache import cached_lower
from deepinfer.codegen.emit import Report, lower_graph, lower_kernels
from deepinfer.codegen.select import Instance, launch_of
from deepinfer.compiler import build_graphs
from deepinfer.errors import NoKernelError
from deepinfer.graph.config import ModelConfig
from deepinfer.graph.limits import Limits
from deepinfer.graph.single import single_op_graphs
from deepinfer.ir.graph import Graph
from deepinfer.settings import cache_dir, usable_cpus
from deepinfer.targets.base import Target


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one call wrote.

    Args:
        symbols: kernel symbols by op. files: written, relative to the directory.
    """

    symbols: dict[str, tuple[str, ...]]
    files: tuple[str, ...]


def compile_ops(cfg: ModelConfig, limits: Limits, target: Target, ops: Sequence[str], out: Path, *,
                binaries: bool = True, jobs: int | None = None, report: Report | None = None
                ) -> Compiled:
    """Build every kernel that the model needs of these ops; each passes the target's gates.

    Args:
        ops: names; each must occur in a lowered graph of the model, or stand alone in
            ``graph.single``. binaries: False writes sources and launch data only, and starts no
            compiler. jobs: compilers at once; default: all cores.

    Raises:
        NoKernelError: an op has no kernel on the target, or does not occur.
        TargetError: a gate failed. ToolchainError: a compiler failed.
    """
    for op in ops:
        if op not in target.kernels:
            raise NoKernelError(f"op '{op}' has no kernel on target '{target.name}', it has "
                                f"{', '.join(sorted(target.kernels))}", where="--op",
                                next="choose among them")
    lowered = [lower_graph(g, target) for g in build_graphs(cfg, limits).values()]
    wanted = kernels_of((*lowered, *single_op_graphs(cfg, limits)), target, ops)
    for op in ops:
        if not wanted[op]:
            raise NoKernelError(f"op '{op}' does not occur in this model's lowered graphs",
                                where="--op", next="`deepinfer inspect graph --lowered` shows them")
    chosen = {x.symbol: x for found in wanted.values() for x in found}
    kernels = lower_kernels(chosen, cached_lower(target, cache_dir() / "lowered"), report)
    files = target.build({}, kernels, {s: x.spec for s, x in chosen.items()}, isa=(), abi=0,
                         cache=cache_dir() / "objects", jobs=jobs or usable_cpus(),
                         binaries=binaries)
    for name, data in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(scratch, path)
    return Compiled({op: tuple(x.symbol for x in found) for op, found in wanted.items()},
                    tuple(sorted(files)))


def kernels_of(graphs: Iterable[Graph], target: Target, ops: Iterable[str]
               ) -> dict[str, list[Instance]]:
    """The distinct kernels that the graphs need of each op; each op has a kernel on the target."""
    found: dict[str, dict[str, Instance]] = {op: {} for op in ops}
    for graph in graphs:
        for node in graph.nodes:
            if node.op.name in found:
                instance = launch_of(node, graph, target).instance
                found[node.op.name][instance.symbol] = instance
    return {op: list(unique.values()) for op, unique in found.items()}
