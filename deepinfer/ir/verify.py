"""The rules every graph keeps; checked after building and after every pass."""

from __future__ import annotations

from deepinfer.errors import IRError
from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.types import Kind, Value


def verify(graph: Graph) -> None:
    """Check definedness before use, unique names, types, that only STATE is written, and that a
    symbolic dim has one maximum: memory is planned with it.

    Raises:
        IRError: naming the graph, the node with its location, and the rule it breaks.
    """
    defined: set[int] = set()
    names: dict[str, Value] = {}
    largest: dict[str, int] = {}

    def define(value: Value, where: str) -> None:
        if id(value) in defined:
            raise IRError(f"{value} is defined twice", where=where, next="values are defined once")
        if value.name in names:
            raise IRError(f"two values are named '{value.name}'", where=where,
                          next="give each value its own name")
        for sym in value.type.symbols():
            if largest.setdefault(sym.name, sym.max) != sym.max:
                raise IRError(f"{value}: dim {sym.name} is at most {sym.max}, elsewhere at most "
                              f"{largest[sym.name]}", where=where, next="give a dim one maximum")
        defined.add(id(value))
        names[value.name] = value

    for value in graph.inputs:
        if value.kind is Kind.TEMP:
            raise IRError(f"{value} is a temp among the inputs", where=f"graph {graph.name}",
                          next="inputs are INPUT, WEIGHT or STATE")
        define(value, f"graph {graph.name} inputs")
    for index, node in enumerate(graph.nodes):
        where = f"graph {graph.name}, node {index} {node.op.name} at {node.loc or 'top'}"
        _check_operands(node, defined, where)
        for value in node.outputs:
            if value.kind is not Kind.TEMP:
                raise IRError(f"output {value} is {value.kind.value}", where=where,
                              next="nodes define temps; state is written through !operands")
            define(value, where)
    for value in graph.outputs:
        if id(value) not in defined:
            raise IRError(f"output {value} is not defined", where=f"graph {graph.name}",
                          next="return a value of this graph")


def _check_operands(node: Node, defined: set[int], where: str) -> None:
    for value in node.inputs:
        if id(value) not in defined:
            raise IRError(f"{value} is used before it is defined", where=where,
                          next="order the nodes so that values are defined first")
    for value in node.writes():
        if value.kind is not Kind.STATE:
            raise IRError(f"{value} is written but is {value.kind.value}", where=where,
                          next="only STATE values may be written")
    try:
        node.op.attrs(node.attrs)
        types = node.op.infer(tuple(v.type for v in node.inputs), node.attrs)
    except IRError as error:
        raise IRError(error.what, where=where, next=error.next) from None
    if types != tuple(v.type for v in node.outputs):
        raise IRError(f"outputs are {[str(v.type) for v in node.outputs]}, "
                      f"expected {[str(t) for t in types]}", where=where,
                      next="build nodes through the op")
