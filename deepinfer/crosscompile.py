"""Compile single ops for a target that has no whole phase yet: sources, launch data, binaries."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer.codegen.cache import cached_lower
from deepinfer.codegen.emit import Report, lower_graph
from deepinfer.codegen.select import Instance, launch_of
from deepinfer.compiler import build_graphs
from deepinfer.errors import NoKernelError
from deepinfer.graph.config import ModelConfig
from deepinfer.graph.limits import Limits
from deepinfer.graph.single import single_op_graphs
from deepinfer.ir.graph import Graph
from deepinfer.settings import cache_dir
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
                binaries: bool = True, report: Report | None = None) -> Compiled:
    """Build every kernel that the model needs of these ops; each passes the target's gates.

    Args:
        ops: names; each must occur in a lowered graph of the model, or stand alone in
            ``graph.single``. binaries: False writes sources and launch data only.

    Raises:
        NoKernelError: an op has no kernel on the target, or does not occur.
        TargetError: a gate failed. ToolchainError: a compiler failed.
    """
    wanted = _instances(cfg, limits, target, ops)
    lower = cached_lower(target, cache_dir() / "lowered")
    chosen = {x.symbol: x for found in wanted.values() for x in found}
    kernels = {}
    for n, symbol in enumerate(sorted(chosen)):
        if report is not None:
            report("lowering kernels", n, len(chosen))
        kernels[symbol] = lower(chosen[symbol])
    if report is not None:
        report("lowering kernels", len(chosen), len(chosen))
    files = target.build({}, kernels, {s: x.spec for s, x in chosen.items()}, isa=(), abi=0,
                         cache=cache_dir() / "objects")
    kept = {n: data for n, data in files.items() if binaries or not n.startswith("bin/")}
    for name, data in kept.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(scratch, path)
    return Compiled({op: tuple(x.symbol for x in found) for op, found in wanted.items()},
                    tuple(sorted(kept)))


def _instances(cfg: ModelConfig, limits: Limits, target: Target, ops: Sequence[str]
               ) -> dict[str, list[Instance]]:
    """The distinct kernels of each op, over all lowered phases and the single-op graphs."""
    graphs: list[Graph] = [lower_graph(g, target) for g in build_graphs(cfg, limits).values()]
    graphs += single_op_graphs(cfg, limits)
    occurring = {n.op.name for g in graphs for n in g.nodes}
    found: dict[str, list[Instance]] = {}
    for op in ops:
        if op not in target.kernels:
            raise NoKernelError(f"op '{op}' has no kernel on target '{target.name}', it has "
                                f"{', '.join(sorted(target.kernels))}", where="--op",
                                next="choose among them")
        if op not in occurring:
            raise NoKernelError(f"op '{op}' does not occur in this model's lowered graphs",
                                where="--op", next="`deepinfer inspect graph --lowered` shows them")
        unique: dict[str, Instance] = {}
        for graph in graphs:
            for node in graph.nodes:
                if node.op.name == op:
                    instance = launch_of(node, graph, target).instance
                    unique[instance.symbol] = instance
        found[op] = list(unique.values())
    return found
