"""Ops: a signature, a reduction order and a numpy reference, declared once with ``@op``."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.errors import IRError
from deepinfer.ir.signature import Signature, Unifier, parse_signature
from deepinfer.ir.types import DTYPES, E2M1, TensorType, Value

AttrValue = int | float | str | bool | tuple[int, ...] | tuple[float, ...] | None


class Attrs(Mapping[str, AttrValue]):
    """The attributes of a node: an immutable, sorted mapping with attribute access."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, AttrValue]) -> None:
        self._items = dict(sorted(items.items()))

    def __getitem__(self, key: str) -> AttrValue:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._items[name]
        except KeyError:
            raise AttributeError(name) from None

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __str__(self) -> str:
        return " ".join(f"{k}={v!r}" if isinstance(v, str) else f"{k}={v}"
                        for k, v in self._items.items())


@dataclass(frozen=True, slots=True)
class Order:
    """All that fixes the bits of an op's sums: part of the op, never of a schedule.

    Args:
        axis: the reduced axis in the field's words ("K", "C", "window keys, then selected keys").
        sum: the declared sum of ``deepinfer.numerics.sums`` ("gemm", "lane_sum", "serial", "none").
        params: numbers of that sum (tile, lanes), as sorted pairs.
        rounding: where a result is rounded, and the tie rule if one is needed.
    """

    axis: str
    sum: str = "none"
    params: tuple[tuple[str, int], ...] = ()
    rounding: str = ""

    def digest(self) -> str:
        text = json.dumps([self.axis, self.sum, self.params, self.rounding])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


ELEMENTWISE = Order("", "none")


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An operation of the vocabulary. Calling it on values adds a node to the open Builder;
    calling it on numpy arrays runs the reference."""

    name: str
    signature: Signature
    order: Order
    reference: Callable[..., Any]
    doc: str
    required: frozenset[str] = field(default_factory=frozenset)
    defaults: Attrs = field(default_factory=lambda: Attrs({}))

    def attrs(self, given: Mapping[str, AttrValue]) -> Attrs:
        """The full attributes of a use; unknown, missing and mutable ones are refused by name."""
        known = self.required | set(self.defaults)
        unknown, missing = set(given) - known, self.required - set(given)
        if unknown or missing:
            raise IRError(
                f"attributes unknown {sorted(unknown)}, missing {sorted(missing)}; "
                f"expected {sorted(known)}", where=f"op {self.name}", next="correct the call")
        for key, value in given.items():
            for part in value if isinstance(value, tuple) else (value,):
                if part is not None and not isinstance(part, int | float | str):
                    raise IRError(f"attribute '{key}' is {value!r}, expected a number, a text, a "
                                  "bool, None, or a tuple of numbers", where=f"op {self.name}",
                                  next="correct the call")
        return Attrs({**self.defaults, **given})

    def infer(self, types: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
        """The output types for these input types; raises IRError where they do not fit."""
        return self.unifier(attrs).unify(types)

    def unifier(self, attrs: Attrs) -> Unifier:
        return Unifier(self.name, self.signature, attrs, {}, {})

    def written(self) -> tuple[int, ...]:
        """Indices of the operands that the op writes."""
        return tuple(i for i, o in enumerate(self.signature.inputs) if o.written)

    def run(self, arrays: tuple[np.ndarray[Any, Any], ...], attrs: Attrs
            ) -> tuple[np.ndarray[Any, Any], ...]:
        """Run the reference on arrays and check what it returns against the signature."""
        operands = self.signature.inputs
        if len(arrays) != len(operands):
            raise IRError(f"{len(arrays)} operands given, expected {len(operands)}",
                          where=f"op {self.name}: {self.signature.text}", next="correct the call")
        for array, operand in zip(arrays, operands, strict=True):
            if not isinstance(array, np.ndarray):
                raise IRError(f"operand '{operand.name}' is {type(array).__name__}, expected an "
                              "array", where=f"op {self.name}", next="pass a numpy array")
        expected = self.infer(
            tuple(type_of(a, o.dtype) for a, o in zip(arrays, operands, strict=True)), attrs)
        with np.errstate(all="ignore"):  # NaN and inf rows are data here, not accidents
            got = self.reference(*arrays, **attrs)
        got = () if got is None else got if isinstance(got, tuple) else (got,)
        if len(got) != len(expected):
            raise IRError(f"reference returned {len(got)} arrays, expected {len(expected)}",
                          where=f"op {self.name}", next="correct the reference")
        for array, want in zip(got, expected, strict=True):
            if not isinstance(array, np.ndarray):
                raise IRError(f"reference returned {type(array).__name__}, expected {want}",
                              where=f"op {self.name}", next="correct the reference")
            if array.shape != want.storage({}) or array.dtype != want.dtype.numpy:
                raise IRError(f"reference returned {array.dtype}{list(array.shape)}, "
                              f"expected {want}", where=f"op {self.name}",
                              next="correct the reference")
        return got

    def __call__(self, *operands: Any, name: str | None = None, **attrs: AttrValue) -> Any:
        full = self.attrs(attrs)
        if any(isinstance(o, Value) for o in operands):
            from deepinfer.ir.graph import Builder
            return Builder.current(f"op {self.name}").add(self, operands, full, name)
        got = self.run(operands, full)
        return got[0] if len(got) == 1 else got


def type_of(array: np.ndarray[Any, Any], declared: str) -> TensorType:
    """The type of an array that is given for an operand of the dtype ``declared`` in a signature
    (packed e2m1 and u8 look alike in numpy).

    Raises:
        IRError: no type has the array's numpy dtype.
    """
    if declared == "e2m1":
        return TensorType((*array.shape[:-1], array.shape[-1] * 2), E2M1)
    for dtype in DTYPES.values():
        if dtype is not E2M1 and dtype.numpy == array.dtype:
            return TensorType(tuple(array.shape), dtype)
    raise IRError(f"numpy dtype {array.dtype} has no type in the IR, which has "
                  f"{', '.join(DTYPES)}", where=f"an array{list(array.shape)} for an operand of "
                  f"dtype {declared}", next="convert it first")


OPS: dict[str, Op] = {}


def op(signature: str, *, order: Order) -> Callable[[Callable[..., Any]], Op]:
    """Declare an op: the decorated function is its numpy reference, its docstring its docs.

    Keyword-only parameters are the op's attributes. STATE operands are written in place.
    """

    def declare(reference: Callable[..., Any]) -> Op:
        parsed = parse_signature(signature)
        parameters = inspect.signature(reference).parameters.values()
        positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        if positional != [o.name for o in parsed.inputs]:
            raise IRError(f"reference takes {positional}, signature names "
                          f"{[o.name for o in parsed.inputs]}", where=f"op {reference.__name__}",
                          next="use the same names in the same order")
        keyword = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        missing = sorted(parsed.attr_names() - {p.name for p in keyword})
        if missing:
            raise IRError(f"signature uses attributes {missing}, reference takes "
                          f"{[p.name for p in keyword]}", where=f"op {reference.__name__}",
                          next="make them keyword-only parameters of the reference")
        made = Op(
            reference.__name__, parsed, order, reference, inspect.getdoc(reference) or "",
            frozenset(p.name for p in keyword if p.default is p.empty),
            Attrs({p.name: p.default for p in keyword if p.default is not p.empty}),
        )
        if made.name in OPS:
            raise IRError(f"op '{made.name}' is declared twice",
                          where=f"{OPS[made.name].reference.__module__} and {reference.__module__}",
                          next="rename one of them")
        OPS[made.name] = made
        return made

    return declare
