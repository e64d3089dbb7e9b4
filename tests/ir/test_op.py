"""Ops: what a declaration must say, what a call must give, what a reference must return."""

from __future__ import annotations

import importlib
import pkgutil

import numpy as np
import pytest

import deepinfer.ops
from deepinfer.errors import IRError
from deepinfer.ir import ELEMENTWISE, OPS, Attrs, Builder, Order, TensorType, op
from deepinfer.ir.types import F32

X = np.ones((2, 3), np.float32)


def declare(reference, signature="x:f32[N,C] -> y:f32[N,C]"):
    return op(signature, order=ELEMENTWISE)(reference)


def probe(x, *, k: int = 1):
    return x * np.float32(k)


def test_declaration():
    made = declare(probe)
    assert (made.name, made.required, dict(made.defaults)) == ("probe", frozenset(), {"k": 1})
    assert np.array_equal(made(X, k=3), 3 * X)
    with pytest.raises(IRError, match="op 'probe' is declared twice") as caught:
        declare(probe)
    assert caught.value.where == f"{__name__} and {__name__}"


def test_declaration_refuses():
    with pytest.raises(IRError, match=r"reference takes \['a'\], signature names \['x'\]"):
        declare(lambda a: a)
    with pytest.raises(IRError, match="reference takes"):
        declare(lambda x, *rest: x)
    with pytest.raises(IRError, match=r"signature uses attributes \['block', 'out'\], reference "):
        declare(probe, "x:f32[N,C] -> y:$out[N,C/block]")


def test_attributes_of_a_call():
    made = declare(lambda x, *, k, b=2: x)
    with pytest.raises(IRError, match=r"unknown \['q'\], missing \['k'\]; expected \['b', 'k'\]"):
        made(X, q=1)
    with pytest.raises(IRError, match=r"attribute 'k' is \[1\], expected a number"):
        made(X, k=[1])
    with pytest.raises(IRError, match="attribute 'k' is"):
        made(X, k=(1, X))
    attrs = made.attrs({"k": (1, 2)})
    assert str(attrs) == "b=2 k=(1, 2)" and attrs.k == (1, 2)
    assert hash(attrs) == hash(Attrs({"k": (1, 2), "b": 2})) and attrs == {"k": (1, 2), "b": 2}
    with pytest.raises(AttributeError):
        attrs.missing  # noqa: B018


@pytest.mark.parametrize(("operands", "message"), [
    ((), "0 operands given, expected 1"),
    ((X, X), "2 operands given, expected 1"),
    ((3.0,), "operand 'x' is float, expected an array"),
    ((X.astype(np.float16),), "numpy dtype float16 has no type in the IR"),
    ((X[0],), "has rank 1"),
    ((X.astype(np.float64),), "expected f32"),
])
def test_operands_of_a_run(operands, message):
    with pytest.raises(IRError, match=message):
        declare(probe)(*operands)


@pytest.mark.parametrize(("result", "message"), [
    (None, "reference returned 0 arrays, expected 1"),
    ((X, X), "reference returned 2 arrays, expected 1"),
    (1.0, r"reference returned float, expected f32\[2,3\]"),
    ([X], "reference returned list"),
    (X.astype(np.float64), r"reference returned float64\[2, 3\], expected f32\[2,3\]"),
    (X[:1], r"reference returned float32\[1, 3\], expected f32\[2,3\]"),
])
def test_results_of_a_reference(result, message):
    with pytest.raises(IRError, match=message) as caught:
        op("x:f32[N,C] -> y:f32[N,C]", order=ELEMENTWISE)(lambda x: result)(X)
    assert caught.value.next == "correct the reference"


def test_written_operands_change_in_place():
    def store(x, s):
        s[...] = x

    made = op("x:f32[N,C], !s:f32[N,C] -> ", order=ELEMENTWISE)(store)
    state = np.zeros_like(X)
    assert made(X, state) == () and made.written() == (1,) and np.array_equal(state, X)


def test_values_and_arrays_do_not_mix():
    made = op("x:f32[N,C], y:f32[N,C] -> z:f32[N,C]", order=ELEMENTWISE)(lambda x, y: x)
    with Builder("g") as b:
        value = b.input("x", TensorType((2, 3), F32))
        with pytest.raises(IRError, match="is not a value") as caught:
            made(value, X)
    assert "declare constants as weights or attributes" in str(caught.value)
    with pytest.raises(IRError, match="outside a Builder"):
        made(value, value)


def test_order_digest():
    base = Order("K", "gemm", (("block", 32),), "bf16")
    others = [Order("C", "gemm", (("block", 32),), "bf16"), Order("K", "serial", (("block", 32),)),
              Order("K", "gemm", (("block", 64),), "bf16"), Order("K", "gemm", (("block", 32),))]
    assert len({o.digest() for o in [base, *others]}) == 5
    assert base.digest() == Order("K", "gemm", (("block", 32),), "bf16").digest()


def test_every_op_says_what_it_does_and_where_it_is_from():
    for module in pkgutil.iter_modules(deepinfer.ops.__path__):
        importlib.import_module(f"deepinfer.ops.{module.name}")
    declared = [o for o in OPS.values() if o.reference.__module__.startswith("deepinfer.ops.")]
    assert len(declared) > 50
    for each in declared:
        assert "Source: " in each.doc or "Args: as " in each.doc, each.name
        sums = {"lane_sum", "gemm", "serial", "lane_sum, then serial"}
        assert each.order.sum in sums | {"none"}, each.name
        if each.order.sum in sums:
            assert each.order.axis, each.name
