"""Each rule of the verifier, broken once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer.errors import IRError
from deepinfer.ir import Attrs, Graph, Kind, Sym, TensorType, Value
from deepinfer.ir.types import F32
from deepinfer.ir.verify import verify
from tests.ir.graphs import Ops, small


def with_node(graph: Graph, index: int, **changes) -> Graph:
    nodes = list(graph.nodes)
    nodes[index] = replace(nodes[index], **changes)
    return replace(graph, nodes=tuple(nodes))


def temp(name: str, like: Value, kind: Kind = Kind.TEMP) -> Value:
    return Value(name, like.type, kind)


@pytest.fixture
def graph() -> Graph:
    return small(Ops())


NODE0 = "graph prefill, node 0 scale at layers.0"
NODE1 = "graph prefill, node 1 store at layers.0"


def test_a_good_graph(graph):
    verify(graph)


def broken(graph: Graph) -> dict[str, tuple[Graph, str, str]]:
    x, w, s = graph.inputs
    first, write, second, _ = graph.nodes
    y = first.outputs[0]
    other = Value("o", TensorType((Sym("num_tokens", 9), 4), F32), Kind.INPUT)
    return {
        "temp input": (replace(graph, inputs=(*graph.inputs, temp("t", x))),
                       "%t is a temp among the inputs", "graph prefill"),
        "twice": (replace(graph, inputs=(x, w, s, x)), r"\$x is defined twice",
                  "graph prefill inputs"),
        "one name": (replace(graph, inputs=(x, w, s, temp("w", w, Kind.WEIGHT))),
                     "two values are named 'w'", "graph prefill inputs"),
        "a temp named as an input": (with_node(graph, 0, outputs=(temp("x", y),)),
                                     "two values are named 'x'", NODE0),
        "two maxima": (replace(graph, inputs=(*graph.inputs, other)),
                       "dim num_tokens is at most 9, elsewhere at most 8", "graph prefill inputs"),
        "order": (replace(graph, nodes=(write, first, second, graph.nodes[3])),
                  "%layers.0.first is used before it is defined",
                  "graph prefill, node 0 store at layers.0"),
        "output kind": (with_node(graph, 0, outputs=(temp("y", y, Kind.STATE),)),
                        "output !y is state", NODE0),
        "written kind": (with_node(graph, 1, inputs=(y, x)), r"\$x is written but is input", NODE1),
        "operands": (with_node(graph, 0, inputs=(x,)), "1 operands given, expected 2", NODE0),
        "operand type": (with_node(graph, 0, inputs=(x, x)), "'w' has rank 2", NODE0),
        "attributes": (with_node(graph, 0, attrs=Attrs({"by": 1.0, "to": 2})),
                       r"attributes unknown \['to'\]", NODE0),
        "output type": (with_node(graph, 0, outputs=(Value("y", w.type, Kind.TEMP),)),
                        r"outputs are \['f32\[4\]'\], expected \['f32\[num_tokens,4\]'\]", NODE0),
        "returned": (replace(graph, outputs=(temp("q", y),)), "output %q is not defined",
                     "graph prefill"),
    }


@pytest.mark.parametrize("rule", [
    "temp input", "twice", "one name", "a temp named as an input", "two maxima", "order",
    "output kind", "written kind", "operands", "operand type", "attributes", "output type",
    "returned"])
def test_each_rule(graph, rule):
    cases = broken(graph)
    assert len(cases) == 13
    bad, message, where = cases[rule]
    with pytest.raises(IRError, match=message) as caught:
        verify(bad)
    assert caught.value.where == where and caught.value.next
