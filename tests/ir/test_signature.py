"""The signature language: every grammar form, and every refusal by its message."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.errors import IRError
from deepinfer.ir.signature import Operand, Unifier, parse_signature
from deepinfer.ir.types import DTYPES, Dim, Sym, TensorType

N = Sym("num_tokens", 64)


def types(*texts: tuple[str, tuple[Dim, ...]]) -> tuple[TensorType, ...]:
    return tuple(TensorType(shape, DTYPES[name]) for name, shape in texts)


def unify(signature: str, *given: tuple[str, tuple[Dim, ...]], **attrs: Any) -> list[str]:
    unifier = Unifier("probe", parse_signature(signature), attrs, {}, {})
    return [str(t) for t in unifier.unify(types(*given))]


def test_parse_every_form():
    made = parse_signature(" x:t[N, C] , !s:$kind[S,W*2,16],a:u8[] -> y:t[N,C/block], z:f32[A+k]"
                           .replace("A+k", "N+k"))
    assert made.inputs == (Operand("x", "t", ("N", "C"), False),
                           Operand("s", "$kind", ("S", "W*2", "16"), True),
                           Operand("a", "u8", (), False))
    assert [o.dims for o in made.outputs] == [("N", "C/block"), ("N+k",)]
    assert made.dim_names() == ("N", "C", "S", "W")
    assert made.attr_names() == {"block", "k", "kind"}
    assert parse_signature("x:f32[N] -> ").outputs == ()


@pytest.mark.parametrize(("text", "message"), [
    ("x:f32[N]", "no '->' was found"),
    ("x f32[N] -> y:f32[N]", "cannot read 'x f32"),
    ("x:f32[N] y:f32[N] -> z:f32[N]", "cannot read"),
    ("X:f32[N] -> y:f32[N]", "cannot read 'X:"),
    ("x:f32[N -> y:f32[N]", "cannot read"),
    ("x:f33[N] -> y:f32[N]", "no dtype 'f33'"),
    ("x:$[N] -> y:f32[N]", "cannot read"),
    ("x:f32[N-1] -> y:f32[N]", "cannot read dim 'N-1'"),
    ("x:f32[N*2*3] -> y:f32[N]", "cannot read dim 'N[*]2[*]3'"),
    ("x:f32[3A] -> y:f32[3]", "cannot read dim '3A'"),
    ("x:f32[N,,C] -> y:f32[N]", "cannot read dim ''"),
    ("x:f32[N], y:f32[N] -> x:f32[N]", "not all different"),
    ("x:f32[N] -> !y:f32[N]", "an output is marked '!'"),
    ("x:f32[N] -> y:f32[M]", r"no operand determines \['M'\]"),
    ("x:f32[N] -> y:t[N]", r"no operand determines \['t'\]"),
])
def test_parse_refuses(text, message):
    with pytest.raises(IRError, match=message) as caught:
        parse_signature(text)
    assert caught.value.where == f"signature '{text}'"


@pytest.mark.parametrize(("signature", "given", "attrs", "expected"), [
    ("x:t[N,C] -> y:t[N,C]", [("bf16", (N, 8))], {}, ["bf16[num_tokens,8]"]),
    ("x:f32[N,C] -> y:f32[N,C/block]", [("f32", (N, 64))], {"block": 32}, ["f32[num_tokens,2]"]),
    ("x:f32[M,4] -> y:f32[M/32,2]", [("f32", (33, 4))], {}, ["f32[2,2]"]),  # rounded up
    ("a:f32[A], b:f32[B] -> y:f32[A+B]", [("f32", (3,)), ("f32", (5,))], {}, ["f32[8]"]),
    ("x:u8[N] -> y:f32[k+1]", [("u8", (N,))], {"k": 6}, ["f32[7]"]),
    ("x:u8[N,K] -> y:u8[N*K]", [("u8", (N, 6))], {}, ["u8[num_tokens*6]"]),
    ("x:u8[Z] -> y:u8[Z/5]", [("u8", (N * 5,))], {}, ["u8[num_tokens]"]),
    ("x:u8[N*K] -> y:u8[N]", [("u8", (12,))], {}, None),  # N*K alone says neither
    ("x:f32[N,K*groups], w:f32[K] -> y:f32[N,K]", [("f32", (N, 12)), ("f32", (4,))],
     {"groups": 3}, ["f32[num_tokens,4]"]),
    ("x:f32[N,K*g] -> y:f32[N,K]", [("f32", (N, 12))], {"g": 3}, ["f32[num_tokens,4]"]),  # solved
    ("x:f32[K/2] -> y:f32[K]", [("f32", (6,))], {}, ["f32[12]"]),
    ("x:f32[N] -> y:$out[N]", [("f32", (N,))], {"out": "bf16"}, ["bf16[num_tokens]"]),
])
def test_unify(signature, given, attrs, expected):
    if expected is None:
        with pytest.raises(IRError, match="cannot be solved from 12"):
            unify(signature, *given, **attrs)
    else:
        assert unify(signature, *given, **attrs) == expected


@pytest.mark.parametrize(("signature", "given", "attrs", "message"), [
    ("x:f32[N], y:f32[N] -> ", [("f32", (4,))], {}, "1 operands given, expected 2"),
    ("x:f32[N,C] -> ", [("f32", (4,))], {}, r"'x' has rank 1 \(f32\[4\]\), expected \[N,C\]"),
    ("x:f32[N] -> ", [("bf16", (4,))], {}, r"'x' is bf16\[4\], expected f32"),
    ("x:t[N], y:t[N] -> ", [("bf16", (4,)), ("f32", (4,))], {}, r"'y' is f32\[4\], expected bf16"),
    ("x:f32[N], y:f32[N] -> ", [("f32", (4,)), ("f32", (5,))], {}, "dim N is 5, expected 4"),
    ("x:f32[N,3] -> ", [("f32", (4, 2))], {}, "dim 3 is 2, expected 3"),
    ("x:f32[N], y:f32[N] -> ", [("f32", (N,)), ("f32", (64,))], {}, "is 64, expected num_tokens"),
    ("x:f32[C] -> y:f32[C/b]", [("f32", (4,))], {"b": 0}, "has a 0 on its right-hand side"),
    ("x:f32[C*b] -> y:f32[C]", [("f32", (4,))], {"b": 0}, "has a 0 on its right-hand side"),
    ("x:f32[C] -> y:f32[C/b]", [("f32", (4,))], {"b": 2.0}, "attribute 'b' is 2.0, expected"),
    ("x:f32[C] -> y:f32[b]", [("f32", (4,))], {"b": -1}, "attribute 'b' is -1"),
    ("x:f32[C] -> y:f32[b]", [("f32", (4,))], {"b": True}, "attribute 'b' is True"),
    ("x:f32[N] -> y:$out[N]", [("f32", (4,))], {"out": "bf17"}, "attribute 'out' is 'bf17'"),
    ("x:f32[K*3] -> y:f32[K]", [("f32", (4,))], {}, "'K[*]3' cannot be solved from 4"),
    ("a:f32[A+B] -> y:f32[A]", [("f32", (4,))], {}, "cannot be solved from 4"),
    ("x:u8[A], y:u8[B] -> z:u8[A*B]", [("u8", (2,)), ("u8", (N,))], {}, "fixed right-hand side"),
    ("x:u8[A], y:u8[B] -> z:u8[A+B]", [("u8", (N,)), ("u8", (2,))], {}, "cannot be formed from"),
    ("x:u8[Z] -> y:u8[Z/5]", [("u8", (N * 4,))], {}, "cannot be formed from num_tokens[*]4"),
])
def test_unify_refuses(signature, given, attrs, message):
    with pytest.raises(IRError, match=message) as caught:
        unify(signature, *given, **attrs)
    assert "op probe" in caught.value.where and signature in caught.value.where


def test_half_a_byte():
    assert TensorType((3, 4), DTYPES["e2m1"]).storage({}) == (3, 2)
    for shape in ((3, 5), (), (4, N)):
        with pytest.raises(IRError, match="half a byte"):
            TensorType(shape, DTYPES["e2m1"])


def test_sizes():
    t = TensorType((N * 2, 4), DTYPES["bf16"])
    assert t.nbytes({"num_tokens": 3}) == 48 and t.nbytes() == 64 * 2 * 4 * 2
    with pytest.raises(IRError, match=r"dim 'num_tokens' has no size; sizes are given for \['S'\]"):
        t.concrete({"S": 1})
