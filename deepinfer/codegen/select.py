"""Choose a kernel for every node of a lowered graph; equal specs share one kernel."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from deepinfer.codegen.schedules import choose
from deepinfer.errors import NoKernelError
from deepinfer.ir.graph import Graph, Node
from deepinfer.targets.base import Extent, Kernel, Spec, Target


@dataclass(frozen=True, slots=True)
class Instance:
    """A kernel built for one spec; ``symbol`` is its name in the sources."""

    kernel: Kernel
    spec: Spec
    symbol: str


@dataclass(frozen=True, slots=True)
class Launch:
    """One node with the kernel that runs it and the extent its caller may cut."""

    node: Node
    instance: Instance
    extent: Extent


def select(graph: Graph, target: Target) -> tuple[Launch, ...]:
    """A launch for each node, in order.

    Raises:
        NoKernelError: an op has no kernel on the target; names the op, the node and the target.
    """
    return tuple(launch_of(node, graph, target) for node in graph.nodes)


def launch_of(node: Node, graph: Graph, target: Target) -> Launch:
    kernel = target.kernels.get(node.op.name)
    if kernel is None:
        raise NoKernelError(f"op '{node.op.name}' has no kernel on target '{target.name}'",
                            where=f"graph {graph.name} at {node.loc or 'top'}",
                            next="`deepinfer inspect kernels` lists what each target has")
    spec = Spec.of(node)
    spec = Spec.of(node, choose(kernel, spec, target.name, graph.name))
    return Launch(node, instance_of(kernel, spec), Extent.parse(kernel.items, spec))


def instance_of(kernel: Kernel, spec: Spec) -> Instance:
    """The kernel for a spec, whose schedule is chosen; its symbol is named by the whole spec."""
    digest = hashlib.sha256(spec.key().encode()).hexdigest()[:10]
    return Instance(kernel, spec, f"{spec.op.name}_{digest}")


def instances(launches: tuple[Launch, ...]) -> dict[str, Instance]:
    """The distinct kernels of some launches, by symbol."""
    return {launch.instance.symbol: launch.instance for launch in launches}
