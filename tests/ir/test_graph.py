"""Builder, rewriting and the text form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer.errors import IRError
from deepinfer.ir import Builder, Kind, Order, TensorType, Value
from deepinfer.ir.rewrite import drop_dead, make_node, rewrite, users, with_nodes
from deepinfer.ir.text import graph_digest, graph_text
from deepinfer.ir.types import F32
from deepinfer.ir.verify import verify
from tests.ir.graphs import ROWS, Ops, small

GOLDEN = """\
graph prefill
  input $x: f32[num_tokens,4]
  weight @w: f32[4]
  state !s: f32[num_slots,4]
  %layers.0.first: f32[num_tokens,4] = scale($x, @w) by=3.0   # layers.0
  store(%layers.0.first, !s)   # layers.0
  %layers.0.attn.scale: f32[num_tokens,4] = scale(%layers.0.first, @w) by=2.0   # layers.0.attn
  %layers.0.attn.halves.lo: f32[num_tokens,2], %layers.0.attn.halves.hi: f32[num_tokens,2] = \
halves(%layers.0.attn.scale)   # layers.0.attn
  return %layers.0.attn.scale, %layers.0.attn.halves.lo
"""


def test_text():
    graph = small(Ops())
    assert graph_text(graph) == GOLDEN
    part = graph_text(graph, only="layers.0.attn").splitlines()
    assert part == ["graph prefill", "  weight @w: f32[4]", *GOLDEN.splitlines()[6:8]]
    assert graph_text(graph, only="layers").count("\n") == 8  # layers.0 and what is in it
    assert graph_text(graph, only="layers.0.at") == "graph prefill\n"


def test_digest():
    graph = small(Ops())
    assert graph_digest(graph) == graph_digest(replace(graph))
    assert graph_digest(small_of(3.5)) != graph_digest(graph)
    ordered = small_of(3.0, Order("C", "serial"))
    assert graph_text(ordered) == graph_text(graph)
    assert graph_digest(ordered) != graph_digest(graph)


def small_of(by, order=None):
    from deepinfer.ir import OPS

    for name in ("scale", "halves", "store"):
        OPS.pop(name)
    return small(Ops(order) if order else Ops(), by)


def test_builder_names():
    ops = Ops()
    with Builder("g") as b:
        x, w = b.input("x", ROWS), b.weight("w", TensorType((4,), F32))
        names = [ops.scale(x, w, name=n).name for n in ("a", "a", "a.1", "a", "x")]
        assert names == ["a", "a.1", "a.1.1", "a.2", "x.1"]
        assert [v.name for v in ops.halves(x)] == ["halves.lo", "halves.hi"]
        assert [v.name for v in ops.halves(x)] == ["halves.1.lo", "halves.1.hi"]
        assert ops.scale(x, w, name="halves.lo").name == "halves.lo.1"
        with b.scope("layer"), pytest.raises(KeyError), b.scope("attn"):
            raise KeyError
        with b.scope("layer"):
            y = ops.scale(x, w)
        assert (y.name, b.nodes[-1].loc) == ("layer.scale", "layer")
        assert b.input("x", ROWS) is x
        b.graph([y])


def test_builder_refuses():
    ops = Ops()
    with Builder("g") as b:
        x = b.input("x", ROWS)
        with pytest.raises(IRError, match=r"'x' was declared as input f32\[num_tokens,4\], now as "
                                          r"weight f32\[4\]"):
            b.weight("x", TensorType((4,), F32))
        with b.scope("here"), pytest.raises(IRError, match="operand 2 is not a value") as caught:
            ops.scale(x, 2)
        assert caught.value.where == "op scale at here"
    with pytest.raises(IRError, match="outside a Builder") as caught:
        ops.halves(x)
    assert caught.value.where == "op halves"
    with Builder("other") as other:
        other_y = ops.halves(x)[0]
        with pytest.raises(IRError, match=r"\$x is used before it is defined"):
            other.graph([other_y])


def test_builders_nest():
    ops = Ops()
    with Builder("outer") as outer:
        x = outer.input("x", ROWS)
        with Builder("inner") as inner:
            ops.halves(inner.input("x", ROWS))
        ops.halves(x)
    assert (len(outer.nodes), len(inner.nodes)) == (1, 1)


def test_lookups():
    graph = small(Ops())
    assert [v.name for v in graph.of_kind(Kind.STATE)] == ["s"]
    assert [v.name for v in graph.of_kind(Kind.WEIGHT)] == ["w"]
    counts = {v.name: len(n) for v, n in users(graph).items()}
    assert counts == {"x": 1, "w": 2, "s": 1, "layers.0.first": 2, "layers.0.attn.scale": 1,
                      "layers.0.attn.halves.lo": 0, "layers.0.attn.halves.hi": 0}


def test_rewrite_replaces_and_substitutes():
    ops = Ops()
    graph = small(ops)
    packed = Value("w|packed", TensorType((4,), F32), Kind.WEIGHT)

    def rule(node):
        if node.op is not ops.scale:
            return None
        new = make_node(ops.scale, [node.inputs[0], packed], [f"{node.outputs[0].name}+"],
                        node.loc, **node.attrs)
        return [new], new.outputs

    made = rewrite(graph, rule)
    verify(made)
    assert graph_text(graph) == GOLDEN  # a graph is never changed
    assert [v.name for v in made.inputs] == ["x", "s", "w|packed"]  # w has no reader any more
    assert [v.name for v in made.outputs] == ["layers.0.attn.scale+", "layers.0.attn.halves.lo"]
    assert made.nodes[1].inputs[0].name == "layers.0.first+"
    assert rewrite(graph, lambda node: None).nodes == graph.nodes

    skipped = rewrite(graph, lambda node: ([], [node.inputs[0]]) if node.op is ops.scale else None)
    verify(skipped)
    assert [n.op.name for n in skipped.nodes] == ["store", "halves"]
    assert skipped.outputs[0] is graph.inputs[0]


def test_rewrite_refuses():
    graph = small(Ops())
    with pytest.raises(IRError, match="0 values stand for 1 outputs of scale") as caught:
        rewrite(graph, lambda node: ([], []))
    assert caught.value.where == "graph prefill at layers.0"


def test_drop_dead():
    ops = Ops()
    graph = small(ops)
    assert drop_dead(graph).nodes == graph.nodes
    bare = drop_dead(replace(graph, outputs=()))
    assert [n.op.name for n in bare.nodes] == ["scale", "store"]  # a write is never dead
    assert [v.name for v in bare.inputs] == ["x", "w", "s"]
    nothing = with_nodes(graph, (), ())
    assert [v.name for v in nothing.inputs] == ["x", "s"]  # the interface stays
