"""Binding: a phase's native call, bound to the arrays of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import ml_dtypes
import numpy as np

from deepinfer.errors import ProgramError
from deepinfer.program import Phase, Program, ValueInfo

Array = np.ndarray[Any, Any]

NUMPY: Mapping[str, np.dtype[Any]] = {
    "f64": np.dtype(np.float64), "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16), "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "ue8m0": np.dtype(ml_dtypes.float8_e8m0fnu), "e2m1": np.dtype(np.uint8),
    "u8": np.dtype(np.uint8), "i32": np.dtype(np.int32), "i64": np.dtype(np.int64),
    "u64": np.dtype(np.uint64),
}
LAYOUTS = 256  # combinations of sizes that are remembered


class Step(ctypes.Structure):
    """Twin of DiStep in targets/cpu/micro/step.h."""

    _fields_ = [("values", ctypes.c_void_p), ("sizes", ctypes.c_void_p),
                ("scratch", ctypes.c_void_p), ("scratch_stride", ctypes.c_int64),
                ("pool", ctypes.c_void_p), ("watch", ctypes.c_void_p),
                ("times", ctypes.c_void_p), ("clock", ctypes.c_int64)]


@dataclass(frozen=True, slots=True)
class Call:
    """One native call, bound to its arrays.

    Args:
        inputs: the mapping it was bound to. arrays: its values then. keep: other arrays whose
            addresses it holds.
        step: what the entry point reads. outputs: where in the arena they will lie, by name.
        trace: names to copy out. traced: where they go, by name.
    """

    phase: Phase
    inputs: Mapping[str, Array]
    arrays: tuple[Array, ...]
    keep: tuple[Array, ...]
    step: Step
    outputs: tuple[tuple[str, Array], ...]
    trace: tuple[str, ...]
    traced: dict[str, Array]

    def binds(self, phase_name: str, inputs: Mapping[str, Array], trace: tuple[str, ...]) -> bool:
        """Whether it is the call for these very arrays."""
        return (inputs is self.inputs and phase_name == self.phase.name and trace == self.trace
                and all(map(is_, inputs.values(), self.arrays)))


class Binding:
    """What of a phase is the same in every step, worked out once: a step has no time for it.

    Args:
        program: of the phase. fixed: sizes that are the same in every step.
        table: the native pointer table, complete but for the inputs. arena: where temps lie.
    """

    def __init__(self, program: Program, phase: Phase, fixed: Mapping[str, int], table: Array,
                 arena: Array) -> None:
        self.program, self.phase, self.fixed = program, phase, dict(fixed)
        self._table, self._arena = table, arena
        self._inputs = [(name, phase.index[name], v) for name, v in phase.inputs.items()]
        self._axes = [(d[0], name, axis, d[1]) for name, v in phase.inputs.items()
                      for axis, d in enumerate(v.shape) if isinstance(d, tuple)]
        self._symbols = tuple(dict.fromkeys((*fixed, *(a[0] for a in self._axes),
                                             *(name for name, _ in phase.sizes))))
        self._layouts: dict[tuple[int | None, ...], _Layout] = {}

    def sizes(self, inputs: Mapping[str, Array]) -> dict[str, int]:
        """Sizes of a step, from the inputs' shapes; each must be within its maximum."""
        sizes = dict(self.fixed)
        for symbol, name, axis, times in self._axes:
            if symbol not in sizes and name in inputs and inputs[name].ndim > axis:
                sizes[symbol] = inputs[name].shape[axis] // times
        for name, largest in self.phase.sizes:
            if not 0 <= sizes.get(name, -1) <= largest:
                raise ProgramError(f"size {name} is {sizes.get(name)}, expected 0..{largest}",
                                   where=f"phase {self.phase.name}",
                                   next="run fewer rows or compile with larger limits")
        return sizes

    def call(self, inputs: Mapping[str, Array], trace: Sequence[str], scratch: Array,
             stride: int) -> Call:
        """Check the inputs and note where everything lies.

        Args:
            trace: names of values to copy out. scratch: of all threads, ``stride`` bytes each.
        """
        phase, sizes = self.phase, self.sizes(inputs)
        key = tuple(map(sizes.get, self._symbols))
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = self._layout(sizes)
        table = self._table.copy()
        for (name, at, v), (shape, dtype) in zip(self._inputs, layout.inputs, strict=True):
            array = inputs.get(name)
            if (array is None or array.shape != shape or array.dtype != dtype
                    or not array.flags.c_contiguous):
                array = check(self.program, array, v, sizes)
            table[at] = array.ctypes.data
        watch, watched = np.zeros(len(phase.values) if trace else 0, np.uint64), {}
        for name in trace:
            v = phase.value(name)
            if v.kind != "temp":
                raise ProgramError(f"{v.kind} '{name}' cannot be traced, only what nodes make",
                                   where=f"phase {phase.name}", next="trace a temp")
            watched[name] = np.empty(v.storage(sizes), NUMPY[v.dtype])
            watch[phase.index[name]] = watched[name].ctypes.data
        step = Step(table.ctypes.data, layout.native.ctypes.data, scratch.ctypes.data, stride,
                    None, watch.ctypes.data if watched else None, None, 0)
        return Call(phase, inputs, tuple(inputs.values()), (table, layout.native, watch), step,
                    layout.outputs, tuple(trace), watched)

    def _layout(self, sizes: Mapping[str, int]) -> _Layout:
        return _Layout(
            tuple((v.storage(sizes), NUMPY[v.dtype]) for _, _, v in self._inputs),
            tuple((name, self._view(self.phase.value(name), sizes)) for name in self.phase.outputs),
            np.array([sizes[name] for name, _ in self.phase.sizes], np.int32))

    def _view(self, v: ValueInfo, sizes: Mapping[str, int]) -> Array:
        """The part of the arena that holds a temp."""
        shape, dtype = v.storage(sizes), NUMPY[v.dtype]
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        assert v.offset is not None
        return self._arena[v.offset:v.offset + nbytes].view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Of one combination of sizes: shape and dtype of each input, the outputs' views of the arena,
    and the sizes in native order."""

    inputs: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    outputs: tuple[tuple[str, Array], ...]
    native: Array


def check(program: Program, array: Array | None, v: ValueInfo, sizes: Mapping[str, int]) -> Array:
    """The array, if it is what a Program's value must be.

    Raises:
        ProgramError: another shape or dtype, not contiguous, or nothing at all.
    """
    expected, dtype = v.storage(sizes), NUMPY[v.dtype]
    if array is None or array.shape != expected or array.dtype != dtype:
        found = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
        raise ProgramError(f"{v.kind} '{v.name}' is {found}, expected {dtype}{list(expected)}",
                           where=f"Program {program.path}", next="pass the declared array")
    if not array.flags.c_contiguous:
        raise ProgramError(f"{v.kind} '{v.name}' is not contiguous", next="copy it first",
                           where=f"Program {program.path}")
    return array
