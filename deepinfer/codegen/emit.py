"""Lowered graphs -> Program: lower the kernels, lay out the phases, write the artifact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.codegen.memory import plan_arena
from deepinfer.codegen.select import Instance, Launch, select
from deepinfer.errors import DeepInferError, IRError, PassError
from deepinfer.ir.graph import Graph
from deepinfer.ir.text import graph_digest, graph_text
from deepinfer.ir.types import Kind, Sym, Value
from deepinfer.ir.verify import verify
from deepinfer.targets.base import LoweredKernel, Target


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """A lowered graph ready for a target's step tables.

    Args:
        graph: the lowered graph. launches: one a node. values: in pointer-table order.
        sizes: run-time sizes in native order, with their maxima.
        offsets: arena offsets of the temps. arena_bytes, scratch_bytes: buffer sizes.
    """

    graph: Graph
    launches: tuple[Launch, ...]
    values: tuple[Value, ...]
    sizes: tuple[tuple[str, int], ...]
    offsets: Mapping[Value, int]
    arena_bytes: int
    scratch_bytes: int

    def describe(self) -> dict[str, Any]:
        """The phase as the manifest holds it."""
        return {
            "values": [{"name": v.name, "kind": v.kind.value, "dtype": v.type.dtype.name,
                        "shape": [[d.name, d.times] if isinstance(d, Sym) else d
                                  for d in v.type.shape],
                        **({"offset": self.offsets[v]} if v.kind is Kind.TEMP else {})}
                       for v in self.values],
            "sizes": [list(s) for s in self.sizes],
            "outputs": [v.name for v in self.graph.outputs],
            "arena_bytes": self.arena_bytes,
            "scratch_bytes": self.scratch_bytes,
            "launches": [[x.node.op.name, x.instance.symbol, x.node.loc] for x in self.launches],
            "graph_digest": graph_digest(self.graph),
        }


def plan_phase(graph: Graph, target: Target) -> PhasePlan:
    """Select kernels and plan memory for one lowered graph.

    Raises:
        NoKernelError: an op has no kernel. IRError: an output that no node makes.
    """
    for value in graph.outputs:
        if value.kind is not Kind.TEMP:
            raise IRError(f"output {value} is {value.kind.value}", where=f"graph {graph.name}",
                          next="a step hands back what its nodes make: return a temp")
    launches = select(graph, target)
    values = tuple(graph.values())
    sizes: dict[str, int] = {}
    for value in values:
        for sym in value.type.symbols():
            sizes[sym.name] = max(sym.max, sizes.get(sym.name, 0))
    offsets, arena = plan_arena(graph)
    scratch = max((x.instance.kernel.scratch(x.instance.spec) for x in launches), default=0)
    return PhasePlan(graph, launches, values, tuple(sizes.items()), offsets, arena, scratch)


Report = Callable[[str, int, int], None]


def lower_graph(graph: Graph, target: Target,
                after: Callable[[str, Graph], None] | None = None) -> Graph:
    """Run the target's passes in order, verifying after each.

    Args:
        after: called with each pass's name and the graph it returned.

    Raises:
        PassError: a pass failed; names the pass and the graph.
    """
    for p in target.passes:
        try:
            graph = p.run(graph)
            verify(graph)
        except DeepInferError as error:
            raise PassError(error.what, where=f"pass {p.name} on graph {graph.name}; {error.where}",
                            next=error.next) from error
        except Exception as error:  # whatever a pass runs into, its name is what the reader needs
            raise PassError(f"{type(error).__name__}: {error}",
                            where=f"pass {p.name} on graph {graph.name}",
                            next="this is a fault of the pass: report it") from error
        if after is not None:
            after(p.name, graph)
    return graph


def lower_kernels(wanted: Mapping[str, Instance], lower: Callable[[Instance], LoweredKernel],
                  report: Report | None = None) -> dict[str, LoweredKernel]:
    """Lower every kernel of ``wanted``, in order of symbol."""
    done: dict[str, LoweredKernel] = {}
    for n, symbol in enumerate(sorted(wanted)):
        if report is not None:
            report("lowering kernels", n, len(wanted))
        done[symbol] = lower(wanted[symbol])
    if report is not None:
        report("lowering kernels", len(wanted), len(wanted))
    return done


def texts(plans: Sequence[PhasePlan]) -> dict[str, bytes]:
    """The graph texts of a Program's directory."""
    return {f"graphs/{p.graph.name}.txt": graph_text(p.graph).encode() for p in plans}
