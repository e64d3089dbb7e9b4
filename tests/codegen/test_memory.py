"""The arena: no two values that live at once share a byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepinfer.codegen.memory import ALIGN, plan_arena
from deepinfer.ir import ELEMENTWISE, Attrs, Graph, Kind, Node, Op, Sym, TensorType, Value
from deepinfer.ir.signature import parse_signature
from deepinfer.ir.types import BF16, F32, U8

PROBE = Op("probe", parse_signature("x:u8[N] -> y:u8[N]"), ELEMENTWISE, lambda x: x, "")
SIZES = st.sampled_from([TensorType((n,), t) for n in (0, 1, 31, 64, 200, 1000)
                         for t in (U8, BF16, F32)] + [TensorType((Sym("n", 7), 33), BF16)])


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Nodes of any number of outputs that read any earlier values, or nothing."""
    values = [Value("x", TensorType((4,), U8), Kind.INPUT)]
    nodes = []
    for n in range(draw(st.integers(1, 12))):
        read = draw(st.lists(st.sampled_from(values), max_size=3))
        made = tuple(Value(f"v{n}.{i}", draw(SIZES), Kind.TEMP)
                     for i in range(draw(st.integers(0, 3))))
        nodes.append(Node(PROBE, tuple(read), made, Attrs({}), ""))
        values += made
    temps = values[1:]
    outputs = draw(st.lists(st.sampled_from(temps), unique=True)) if temps else []
    return Graph("g", (values[0],), tuple(nodes), tuple(outputs))


def lives(graph: Graph) -> dict[Value, set[int]]:
    """The nodes during which each temp must keep its bytes."""
    found = {}
    for begin, node in enumerate(graph.nodes):
        for value in node.outputs:
            readers = [i for i, n in enumerate(graph.nodes) if value in n.inputs]
            end = len(graph.nodes) if value in graph.outputs else max([begin, *readers])
            found[value] = set(range(begin, end + 1))
    return found


@given(graphs())
def test_no_two_live_values_overlap(graph):
    offsets, size = plan_arena(graph)
    living = lives(graph)
    assert offsets.keys() == living.keys()
    for value, at in offsets.items():
        assert at % ALIGN == 0 and at + value.type.nbytes() <= size
        for other, to in offsets.items():
            if other is not value and living[value] & living[other]:
                apart = at + value.type.nbytes() <= to or to + other.type.nbytes() <= at
                assert apart or not value.type.nbytes() or not other.type.nbytes()
    need = [sum(v.type.nbytes() for v in living if i in living[v]) for i in range(len(graph.nodes))]
    assert size >= max(need)


@given(graphs())
def test_the_plan_is_one(graph):
    assert plan_arena(graph) == plan_arena(graph)


def test_bytes_are_used_again():
    """A chain of equal values needs the room of two of them."""
    values = [Value(f"v{i}", TensorType((1000,), F32), Kind.TEMP) for i in range(9)]
    nodes = [Node(PROBE, tuple(values[max(i - 1, 0):i]), (values[i],), Attrs({}), "")
             for i in range(9)]
    offsets, size = plan_arena(Graph("g", (), tuple(nodes), (values[8],)))
    assert size == 2 * 4032 and len(set(offsets.values())) == 2
