"""Graphs: immutable ordered nodes over typed values, and the Builder that makes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from deepinfer.errors import IRError
from deepinfer.ir.op import Attrs, Op
from deepinfer.ir.types import Kind, TensorType, Value


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One use of an op; ``loc`` says where in the model it stands."""

    op: Op
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attrs: Attrs
    loc: str

    def writes(self) -> tuple[Value, ...]:
        return tuple(self.inputs[i] for i in self.op.written())


@dataclass(frozen=True, slots=True)
class Graph:
    """A phase of the model in SSA form; list order is execution order.

    Args:
        name: the phase ("prefill", "decode", "verify", "draft").
        inputs: all INPUT, WEIGHT and STATE values, in order of declaration.
        nodes: the nodes in execution order.
        outputs: the values handed back by a step.
    """

    name: str
    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]

    def of_kind(self, kind: Kind) -> tuple[Value, ...]:
        return tuple(v for v in self.inputs if v.kind is kind)

    def values(self) -> Iterator[Value]:
        """Every value, in order of definition."""
        yield from self.inputs
        for node in self.nodes:
            yield from node.outputs


_current: ContextVar[Builder | None] = ContextVar("deepinfer_builder", default=None)


@dataclass(slots=True)
class Builder:
    """Collects the nodes of one graph; use it as ``with Builder("prefill") as b:``."""

    name: str
    inputs: dict[str, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)
    _scope: list[str] = field(default_factory=list)
    _token: Any = None

    def __enter__(self) -> Builder:
        self._token = _current.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _current.reset(self._token)

    @staticmethod
    def current(where: str) -> Builder:
        """The open builder of this context, for the caller that ``where`` names."""
        builder = _current.get()
        if builder is None:
            raise IRError("an op was called on values outside a Builder", where=where,
                          next="wrap the code in `with Builder(name) as b:`")
        return builder

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Names and locations of the nodes added inside start with ``name``."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    def _declare(self, name: str, type: TensorType, kind: Kind) -> Value:
        if name in self.inputs:
            old = self.inputs[name]
            if old.type != type or old.kind is not kind:
                raise IRError(f"'{name}' was declared as {old.kind.value} {old.type}, "
                              f"now as {kind.value} {type}", where=f"graph {self.name}",
                              next="declare it once")
            return old
        self.inputs[name] = Value(name, type, kind)
        return self.inputs[name]

    def input(self, name: str, type: TensorType) -> Value:
        return self._declare(name, type, Kind.INPUT)

    def weight(self, name: str, type: TensorType) -> Value:
        return self._declare(name, type, Kind.WEIGHT)

    def state(self, name: str, type: TensorType) -> Value:
        return self._declare(name, type, Kind.STATE)

    def add(self, op: Op, operands: Sequence[Value], attrs: Attrs, name: str | None) -> Any:
        """Append a node; returns its output value, or a tuple of them (or None)."""
        loc = ".".join(self._scope)
        for operand in operands:
            if not isinstance(operand, Value):
                raise IRError(f"operand {operand!r} is not a value", where=f"op {op.name} at {loc}",
                              next="declare constants as weights or attributes")
        types = op.infer(tuple(v.type for v in operands), attrs)
        many = len(types) > 1
        names = self._unique(".".join([*self._scope, name or op.name]),
                             [f".{o.name}" if many else "" for o in op.signature.outputs])
        outputs = tuple(Value(n, t, Kind.TEMP) for n, t in zip(names, types, strict=True))
        self.nodes.append(Node(op, tuple(operands), outputs, attrs, loc))
        return None if not outputs else outputs if many else outputs[0]

    def _unique(self, stem: str, ends: Sequence[str]) -> list[str]:
        """``stem`` with each end, numbered if one of these names is taken."""
        for n in itertools.count():
            names = [f"{stem}.{n}{end}" if n else stem + end for end in ends]
            if not any(x in self._names or x in self.inputs for x in names):
                break
        self._names.update(names)
        return names

    def graph(self, outputs: Sequence[Value]) -> Graph:
        """The finished graph, verified."""
        from deepinfer.ir.verify import verify

        made = Graph(self.name, tuple(self.inputs.values()), tuple(self.nodes), tuple(outputs))
        verify(made)
        return made
