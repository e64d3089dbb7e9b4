"""The evaluator: what it computes, what it refuses, what it keeps alive."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from deepinfer.errors import IRError
from deepinfer.ir import Builder, Sym, TensorType
from deepinfer.ir.eval import bind_sizes, evaluate
from deepinfer.ir.types import F32
from tests.ir.graphs import Ops, small


def arrays(n: int = 3) -> dict[str, np.ndarray]:
    return {"x": np.arange(n * 4, dtype=np.float32).reshape(n, 4),
            "w": np.float32([1, 2, 3, 4]), "s": np.zeros((5, 4), np.float32)}


def test_evaluate():
    graph, given = small(Ops()), arrays()
    x = given["x"].copy()
    out = evaluate(graph, given)
    y = x * given["w"] * 3
    assert list(out) == ["layers.0.attn.scale", "layers.0.attn.halves.lo"]
    assert np.array_equal(out["layers.0.attn.scale"], y * given["w"] * 2)
    assert np.array_equal(out["layers.0.attn.halves.lo"], (y * given["w"] * 2)[:, :2])
    assert np.array_equal(given["s"][:3], y) and not given["s"][3:].any()  # written in place
    assert np.array_equal(given["x"], x)
    assert evaluate(graph, arrays(0))["layers.0.attn.scale"].shape == (0, 4)


@pytest.mark.parametrize("name", ["x", "w", "s"])
def test_a_missing_array(name):
    given = arrays()
    del given[name]
    with pytest.raises(IRError, match=f"no array for .*{name}") as caught:
        evaluate(small(Ops()), given)
    assert caught.value.where == "graph prefill" and name in caught.value.next


@pytest.mark.parametrize(("name", "array", "message"), [
    ("x", np.zeros((3, 5), np.float32), r"\$x is float32\[3, 5\], expected f32\[num_tokens,4\]"),
    ("x", np.zeros((3, 4), np.float64), r"\$x is float64\[3, 4\]"),
    ("x", np.zeros(3, np.float32), r"\$x has shape \[3\], expected f32\[num_tokens,4\]"),
    ("w", np.zeros((4, 1), np.float32), r"@w is float32\[4, 1\], expected f32\[4\]"),
    ("s", np.zeros((5, 4), np.int32), r"!s is int32"),
])
def test_an_array_of_another_type(name, array, message):
    with pytest.raises(IRError, match=message):
        evaluate(small(Ops()), {**arrays(), name: array})


def test_sizes():
    n = Sym("n", 8)
    with Builder("g") as b:
        b.input("a", TensorType((n,), F32))
        b.input("b", TensorType((n * 2,), F32))
    graph = b.graph([])
    make = lambda a, b: {"a": np.zeros(a, np.float32), "b": np.zeros(b, np.float32)}  # noqa: E731
    assert bind_sizes(graph, make(3, 6)) == {"n": 3}
    with pytest.raises(IRError, match=r"\$b has shape \[8\]: dim 0 gives n=4, expected 3"):
        bind_sizes(graph, make(3, 8))
    with pytest.raises(IRError, match=r"\$b has shape \[7\]: dim 0 gives n=3.5, expected 3"):
        bind_sizes(graph, make(3, 7))


def test_temps_are_freed():
    """At each node only what a later node or the caller reads is alive."""
    graph, made, alive = small(Ops()), {}, []

    def watch(node, outputs):
        alive.append({name for name, ref in made.items() if ref() is not None})
        made.update({v.name: weakref.ref(a) for v, a in zip(node.outputs, outputs, strict=True)})

    out = evaluate(graph, arrays(), watch=watch)
    assert alive == [set(), {"layers.0.first"}, {"layers.0.first"}, {"layers.0.attn.scale"}]
    assert {name for name, ref in made.items() if ref() is not None} == set(out)
