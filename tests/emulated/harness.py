"""Runs kernels of an accelerator target in its emulator against their op's reference."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.codegen.cache import cached_lower
from deepinfer.codegen.select import Instance
from deepinfer.ir.op import Op, type_of
from deepinfer.ir.types import Dim, Sym, TensorType
from deepinfer.targets.base import Kernel, Schedule, Spec, Target
from deepinfer.testing.emulators.objects import CACHE

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One kernel on one set of arrays; ``symbolic`` dims are known only at run time."""

    op: Op
    kernel: Kernel
    arrays: tuple[Array, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    symbolic: tuple[str, ...] = ("N",)

    def types(self) -> tuple[TensorType, ...]:
        return tuple(type_of(a, o.dtype)
                     for a, o in zip(self.arrays, self.op.signature.inputs, strict=True))

    def dims(self) -> dict[str, int]:
        unifier = self.op.unifier(self.op.attrs(dict(self.attrs)))
        unifier.unify(self.types())
        return {k: v for k, v in unifier.dims.items() if isinstance(v, int)}

    def spec(self, schedule: Schedule | None = None) -> Spec:
        """The spec with the symbolic dims, at a schedule (the default: the first of the space)."""
        attrs, dims = self.op.attrs(dict(self.attrs)), self.dims()
        unifier = self.op.unifier(attrs)
        unifier.unify(self.types())
        shown: dict[str, Dim] = {k: Sym(k, 1 << 20) if k in self.symbolic else v
                                 for k, v in dims.items()}
        spec = Spec(self.op, shown, dict(unifier.dtypes), attrs)
        return Spec(self.op, shown, dict(unifier.dtypes), attrs,
                    schedule or self.kernel.space(spec)[0])

    def expected(self) -> tuple[Array, ...]:
        """The reference's outputs, then the STATE operands as it leaves them."""
        arrays = tuple(a.copy() for a in self.arrays)
        outputs = self.op.run(arrays, self.op.attrs(dict(self.attrs)))
        return (*outputs, *(arrays[i] for i in self.op.written()))

    def run(self, emulation: Any, schedule: str = "eager") -> tuple[tuple[Array, ...], Any]:
        """As ``expected``, from the emulator."""
        arrays = tuple(a.copy() for a in self.arrays)
        outputs = self.op.infer(self.types(), self.op.attrs(dict(self.attrs)))
        got, report = emulation.run(arrays, outputs, self.dims(), schedule)
        return (*got, *(arrays[i] for i in self.op.written())), report


def bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint8)


Compare = Callable[[tuple[Array, ...], tuple[Array, ...]], str]


def same_bits(got: tuple[Array, ...], expected: tuple[Array, ...]) -> str:
    """"" or how many bytes of which output differ."""
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if not np.array_equal(bits(g), bits(e)):
            return f"output {i}: {int((bits(g) != bits(e)).sum())} of {g.nbytes} bytes differ"
    return ""


@dataclass(frozen=True)
class Harness:
    """The checks of one target's kernels.

    Args:
        target: whose lowering is used. emulation: the class that compiles and runs a lowered
            kernel. schedules: all of its emulator.
    """

    target: Target
    emulation: Callable[..., Any]
    schedules: tuple[str, ...]
    _made: dict[tuple[str, str], Any] = field(default_factory=dict)

    def emulate(self, case: Case, schedule: Schedule | None = None) -> Any:
        """The case's kernel in the emulator; equal specs are lowered and compiled once."""
        spec = case.spec(schedule)
        key = (case.op.name, spec.key())
        if key not in self._made:
            lower = cached_lower(self.target, CACHE / "lowered")
            self._made[key] = self.emulation(
                lower(Instance(case.kernel, spec, case.op.name)), case.op)
        return self._made[key]

    def check(self, case: Case, compare: Compare = same_bits, *, schedule: Schedule | None = None,
              schedules: tuple[str, ...] = ()) -> tuple[Array, ...]:
        """Clean, within the bound, and with the same bits under every schedule (or those named)."""
        emulation, expected = self.emulate(case, schedule), case.expected()
        schedules = schedules or self.schedules
        first: tuple[Array, ...] | None = None
        for name in schedules:
            got, report = case.run(emulation, name)
            assert report.clean(), (f"{name}: {dict(report.counts)}, unwritten "
                                    f"{report.unwritten}\n{report.texts}")
            first = got if first is None else first
            assert not same_bits(got, first), f"{name} differs from {schedules[0]}"
        assert first is not None
        assert not (wrong := compare(first, expected)), wrong
        return first

    def caught(self, case: Case, old: str, new: str, compare: Compare = same_bits, *,
               count: int = 0, schedule: Schedule | None = None) -> str:
        """How the kernel with ``old`` replaced by ``new`` in its text is found broken; "" if not.

        Args:
            old: a regular expression. count: how many matches are replaced, the first ones; 0 is
                all.
        """
        text, made = re.subn(old, new, self.emulate(case, schedule).lowered.text, count=count)
        assert made, f"'{old}' is not in the text"
        return self.fault(case, text, compare, schedule=schedule)

    def fault(self, case: Case, text: str, compare: Compare = same_bits, *,
              schedule: Schedule | None = None) -> str:
        """How the kernel with this text is found broken, "schedule: kinds"; "" if it is not."""
        mutant, expected = self.emulate(case, schedule).with_text(text), case.expected()
        for name in self.schedules:
            got, report = case.run(mutant, name)
            if not report.clean():
                return f"{', '.join(report.counts) or 'unwritten output'}: under {name}"
            if wrong := compare(got, expected):
                return f"wrong numbers: {wrong} under {name}"
        return ""
