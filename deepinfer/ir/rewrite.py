"""Rewriting: what passes are made of. A graph is never changed, a new one is returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from deepinfer.errors import IRError
from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.op import AttrValue, Op
from deepinfer.ir.types import Kind, Value


def make_node(op: Op, inputs: Sequence[Value], names: Sequence[str], loc: str,
              **attrs: AttrValue) -> Node:
    """A node of ``op`` whose outputs are new temps called ``names``."""
    full = op.attrs(attrs)
    types = op.infer(tuple(v.type for v in inputs), full)
    outputs = tuple(Value(n, t, Kind.TEMP) for n, t in zip(names, types, strict=True))
    return Node(op, tuple(inputs), outputs, full, loc)


def users(graph: Graph) -> dict[Value, list[Node]]:
    """The nodes that read each value, in order."""
    found: dict[Value, list[Node]] = {v: [] for v in graph.values()}
    for node in graph.nodes:
        for value in node.inputs:
            found[value].append(node)
    return found


def rewrite(graph: Graph, rule: Callable[[Node], tuple[Sequence[Node], Sequence[Value]] | None]
            ) -> Graph:
    """Replace nodes: ``rule(node)`` returns None to keep it, or the new nodes and the values that
    stand for the old outputs, in order. The rule sees nodes whose inputs are already substituted.
    New WEIGHT, STATE or INPUT operands are added to the graph's inputs."""
    mapping: dict[Value, Value] = {}
    nodes: list[Node] = []
    for old in graph.nodes:
        node = replace_inputs(old, mapping)
        result = rule(node)
        if result is None:
            nodes.append(node)
            continue
        new, stand_ins = result
        if len(stand_ins) != len(old.outputs):
            raise IRError(f"{len(stand_ins)} values stand for {len(old.outputs)} outputs of "
                          f"{old.op.name}", where=f"graph {graph.name} at {old.loc or 'top'}",
                          next="return one for each old output")
        nodes.extend(new)
        mapping.update(zip(old.outputs, stand_ins, strict=True))
    outputs = tuple(mapping.get(v, v) for v in graph.outputs)
    return with_nodes(graph, nodes, outputs)


def replace_inputs(node: Node, mapping: dict[Value, Value]) -> Node:
    """The node with its operands substituted; the same object if none is."""
    if not any(v in mapping for v in node.inputs):
        return node
    return replace(node, inputs=tuple(mapping.get(v, v) for v in node.inputs))


def with_nodes(graph: Graph, nodes: Sequence[Node],
               outputs: Sequence[Value] | None = None) -> Graph:
    """The graph with other nodes; external operands are collected in order, unused ones dropped
    except INPUT and STATE, which are the graph's interface."""
    outs = tuple(graph.outputs if outputs is None else outputs)
    external = dict.fromkeys(
        v for n in nodes for v in n.inputs if v.kind is not Kind.TEMP) | dict.fromkeys(
        v for v in outs if v.kind is not Kind.TEMP)
    kept = [v for v in graph.inputs if v in external or v.kind in (Kind.INPUT, Kind.STATE)]
    known = set(kept)
    kept += [v for v in external if v not in known]
    return Graph(graph.name, tuple(kept), tuple(nodes), outs)


def drop_dead(graph: Graph) -> Graph:
    """The graph without nodes whose outputs nobody reads and that write no state."""
    live: set[Value] = set(graph.outputs)
    kept: list[Any] = []
    for node in reversed(graph.nodes):
        if node.writes() or any(v in live for v in node.outputs):
            kept.append(node)
            live.update(node.inputs)
    return with_nodes(graph, kept[::-1])
