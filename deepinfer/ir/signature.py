"""The signature language of ops: parse ``"x:t[N,C], !s:u8[S] -> y:t[N,C/block]"`` and unify it.

Dims are capitals (unified over all operands), ints, attribute names (lower case), products
``A*k``, quotients ``A/k`` (rounded up when both are ints: scale tiles are ceil-divided), sums
``A+B``. A dtype is a name of the IR, one small letter (unified, as ``t``), or ``$attr`` (named by
an attribute). ``!name`` is a STATE operand that the op writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import IRError
from deepinfer.ir.types import DTYPES, Dim, DType, Sym, TensorType

_OPERAND = re.compile(r"\s*(!?)([a-z]\w*):(\$?\w+)\[([^\]]*)\]\s*(?:,|$)")
_TERM = re.compile(r"([A-Za-z]\w*|\d+)(?:([*/+])([A-Za-z]\w*|\d+))?")


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of a signature, unresolved."""

    name: str
    dtype: str
    dims: tuple[str, ...]
    written: bool


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs of an op."""

    text: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]

    def dim_names(self) -> tuple[str, ...]:
        """Every unified (capital) dim in order of first use."""
        return tuple(w for w in self._words(self.inputs + self.outputs) if w[0].isupper())

    def attr_names(self) -> frozenset[str]:
        """The attributes that name a dim or a dtype."""
        both = self.inputs + self.outputs
        return frozenset(w for w in self._words(both) if w[0].islower()) | frozenset(
            o.dtype[1:] for o in both if o.dtype.startswith("$"))

    @staticmethod
    def _words(operands: tuple[Operand, ...]) -> dict[str, None]:
        """The words of all dims, numbers included, in order of first use."""
        return dict.fromkeys(w for o in operands for d in o.dims for w in re.findall(r"\w+", d))


def parse_signature(text: str) -> Signature:
    """Parse a signature; raises IRError on text that is not one."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise IRError("no '->' was found, expected one", where=f"signature '{text}'",
                      next="write 'inputs -> outputs'")
    made = Signature(text, _operands(left, text), _operands(right, text))
    names = [o.name for o in made.inputs + made.outputs]
    unbound = [d for d in made.dim_names() if d not in made._words(made.inputs)]
    unbound += [o.dtype for o in made.outputs if len(o.dtype) == 1
                and o.dtype not in {i.dtype for i in made.inputs}]
    for wrong, what in ((len(set(names)) < len(names), f"names {names} are not all different"),
                        (any(o.written for o in made.outputs), "an output is marked '!'"),
                        (unbound, f"no operand determines {unbound}")):
        if wrong:
            raise IRError(what, where=f"signature '{text}'", next="correct the signature")
    return made


def _operands(part: str, text: str) -> tuple[Operand, ...]:
    part, at, found = part.strip(), 0, []
    while at < len(part):
        m = _OPERAND.match(part, at)
        if not m:
            raise IRError(f"cannot read '{part[at:]}'", where=f"signature '{text}'",
                          next="write name:dtype[dims], separated by commas")
        if m[3] not in DTYPES and not re.fullmatch(r"[a-z]|\$[a-z]\w*", m[3]):
            raise IRError(f"no dtype '{m[3]}'", where=f"signature '{text}'",
                          next=f"use {', '.join(DTYPES)}, one small letter, or $attr")
        dims = tuple(d.strip() for d in m[4].split(",")) if m[4].strip() else ()
        for d in dims:
            if not _TERM.fullmatch(d):
                raise IRError(f"cannot read dim '{d}'", where=f"signature '{text}'",
                              next="use A, 16, attr, A*k, A/k or A+B")
        found.append(Operand(m[2], m[3], dims, bool(m[1])))
        at = m.end()
    return tuple(found)


@dataclass(slots=True)
class Unifier:
    """Binds dims and dtypes of one use of a signature; errors name op, operand, found, wanted."""

    op: str
    signature: Signature
    attrs: Mapping[str, Any]
    dims: dict[str, Dim]
    dtypes: dict[str, DType]

    def unify(self, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
        """Check the input types and return the output types."""
        inputs = self.signature.inputs
        if len(types) != len(inputs):
            raise self._error(f"{len(types)} operands given, expected {len(inputs)}", "operands")
        for operand, got in zip(inputs, types, strict=True):
            if len(got.shape) != len(operand.dims):
                raise self._error(f"'{operand.name}' has rank {len(got.shape)} ({got}), "
                                  f"expected [{','.join(operand.dims)}]", operand.name)
            self._bind_dtype(operand, got)
            for text, dim in zip(operand.dims, got.shape, strict=True):
                if re.fullmatch(r"[A-Z]\w*", text) and text not in self.dims:
                    self.dims[text] = dim
        for operand, got in zip(inputs, types, strict=True):
            for text, dim in zip(operand.dims, got.shape, strict=True):
                expected = self._dim(text, dim)
                if expected != dim:
                    raise self._error(f"'{operand.name}' is {got}: dim {text} is {dim}, "
                                      f"expected {expected}", operand.name)
        return tuple(
            TensorType(tuple(self._dim(d, None) for d in o.dims), self._dtype(o))
            for o in self.signature.outputs
        )

    def _bind_dtype(self, operand: Operand, got: TensorType) -> None:
        name = operand.dtype
        if name not in DTYPES and not name.startswith("$"):
            expected = self.dtypes.setdefault(name, got.dtype)
        else:
            expected = self._dtype(operand)
        if expected is not got.dtype:
            raise self._error(f"'{operand.name}' is {got}, expected {expected}", operand.name)

    def _dtype(self, operand: Operand) -> DType:
        name = operand.dtype
        if name.startswith("$"):
            attr, name = name[1:], str(self.attrs[name[1:]])
            if name not in DTYPES:
                raise self._error(f"attribute '{attr}' is '{name}', expected one of "
                                  f"{', '.join(DTYPES)}", operand.name)
        return DTYPES[name] if name in DTYPES else self.dtypes[name]

    def _atom(self, word: str) -> Dim | None:
        if word.isdigit():
            return int(word)
        if word[0].isupper():
            return self.dims.get(word)
        size = self.attrs[word]
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise self._error(f"attribute '{word}' is {size!r}, expected a size, an int >= 0",
                              "signature")
        return size

    def _dim(self, text: str, actual: Dim | None) -> Dim:
        m = _TERM.fullmatch(text)
        assert m is not None
        a, sign, b = self._atom(m[1]), m[2], self._atom(m[3]) if m[3] else None
        if b == 0 and sign != "+":
            raise self._error(f"dim '{text}' has a 0 on its right-hand side", "signature")
        if a is None and sign and actual is not None:  # solve A*k = actual or A/k = actual
            self.dims[m[1]] = a = self._solve(sign, b, actual, text)
        if a is None:
            raise self._error(f"dim '{text}' cannot be determined", "signature")
        if not sign:
            return a
        if b is None or isinstance(b, Sym):
            raise self._error(f"dim '{text}' needs a fixed right-hand side", "signature")
        if isinstance(a, Sym):
            if sign == "*":
                return a * b
            if sign == "/" and a.times % b == 0:
                return Sym(a.name, a.max, a.times // b)
            raise self._error(f"dim '{text}' cannot be formed from {a}", "signature")
        return a * b if sign == "*" else -(-a // b) if sign == "/" else a + b

    def _solve(self, sign: str, b: Dim | None, actual: Dim, text: str) -> Dim:
        if isinstance(b, int) and isinstance(actual, int):
            if sign == "*" and actual % b == 0:
                return actual // b
            if sign == "/":
                return actual * b
        raise self._error(f"dim '{text}' cannot be solved from {actual}", "signature")

    def _error(self, what: str, operand: str) -> IRError:
        return IRError(what, where=f"op {self.op}, {operand}: {self.signature.text}",
                       next="give operands that fit the signature")
