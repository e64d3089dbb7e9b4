"""The evaluator: runs a graph over the numpy references of its ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from deepinfer.errors import IRError
from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.types import Kind, Value

Array = np.ndarray[Any, Any]


def bind_sizes(graph: Graph, arrays: Mapping[str, Array]) -> dict[str, int]:
    """Sizes of the symbolic dims, read from the INPUT and STATE arrays of a step.

    Raises:
        IRError: an array is missing, or two arrays disagree about a size.
    """
    sizes: dict[str, int] = {}
    for value in graph.of_kind(Kind.INPUT) + graph.of_kind(Kind.STATE):
        array = _get(arrays, value, graph)
        if array.ndim != len(value.type.shape):
            raise IRError(f"{value} has shape {list(array.shape)}, expected {value.type}",
                          where=f"graph {graph.name}", next="pass the declared type")
        for axis, dim in enumerate(value.type.shape):
            if isinstance(dim, int):
                continue
            size = array.shape[axis] / dim.times
            if sizes.setdefault(dim.name, int(size)) != size:
                raise IRError(f"{value} has shape {list(array.shape)}: dim {axis} gives "
                              f"{dim.name}={size:g}, expected {sizes[dim.name]}",
                              where=f"graph {graph.name}", next="pass arrays that agree")
    return sizes


def _get(arrays: Mapping[str, Array], value: Value, graph: Graph) -> Array:
    if value.name not in arrays:
        raise IRError(f"no array for {value.kind.value} {value}: {value.type}",
                      where=f"graph {graph.name}", next=f"pass '{value.name}'")
    return arrays[value.name]


def evaluate(graph: Graph, arrays: Mapping[str, Array], *,
             watch: Callable[[Node, tuple[Array, ...]], None] | None = None) -> dict[str, Array]:
    """Run one step. STATE arrays are written in place.

    Args:
        graph: any graph, source or lowered.
        arrays: one array for each INPUT, WEIGHT and STATE value, by name.
        watch: called with each node and its output arrays as they are made.

    Returns:
        The graph's outputs by name.
    """
    sizes = bind_sizes(graph, arrays)
    env: dict[Value, Array] = {}
    for value in graph.inputs:
        array = _get(arrays, value, graph)
        expected = value.type.storage(sizes)
        if array.shape != expected or array.dtype != value.type.dtype.numpy:
            raise IRError(f"{value} is {array.dtype}{list(array.shape)}, expected {value.type} "
                          f"= {value.type.dtype.numpy}{list(expected)}",
                          where=f"graph {graph.name}", next="pass the declared type")
        env[value] = array
    last_use = {v: i for i, n in enumerate(graph.nodes) for v in (*n.outputs, *n.inputs)}
    keep = set(graph.outputs)
    for index, node in enumerate(graph.nodes):
        got = node.op.run(tuple(env[v] for v in node.inputs), node.attrs)
        if watch is not None:
            watch(node, got)
        env.update(zip(node.outputs, got, strict=True))
        del got
        for value in (*node.inputs, *node.outputs):  # free what nobody reads any more
            if last_use[value] == index and value.kind is Kind.TEMP and value not in keep:
                env.pop(value, None)
    return {v.name: env[v] for v in graph.outputs}
