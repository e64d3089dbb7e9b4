"""The cpu device: loads a Program's library, holds state and arena, runs phases natively."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import Any

import ml_dtypes
import numpy as np

from deepinfer.errors import ProgramError, TargetError
from deepinfer.program import ABI, Phase, Program, ValueInfo
from deepinfer.runtime.devices.isa import choose_level
from deepinfer.runtime.devices.memory import aligned
from deepinfer.runtime.devices.state import StateAccess
from deepinfer.settings import usable_cpus

Array = np.ndarray[Any, Any]

NUMPY: Mapping[str, np.dtype[Any]] = {
    "f64": np.dtype(np.float64), "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16), "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "ue8m0": np.dtype(ml_dtypes.float8_e8m0fnu), "e2m1": np.dtype(np.uint8),
    "u8": np.dtype(np.uint8), "i32": np.dtype(np.int32), "i64": np.dtype(np.int64),
    "u64": np.dtype(np.uint64),
}
MAX_THREADS = 4096  # each has its own scratch memory
POISON = 0xFF  # NaN in every float type: whoever reads an unwritten byte shows


class _Step(ctypes.Structure):
    """Twin of DiStep in targets/cpu/micro/step.h."""

    _fields_ = [("values", ctypes.c_void_p), ("sizes", ctypes.c_void_p),
                ("scratch", ctypes.c_void_p), ("scratch_stride", ctypes.c_int64),
                ("pool", ctypes.c_void_p), ("watch", ctypes.c_void_p),
                ("times", ctypes.c_void_p), ("clock", ctypes.c_int64)]


def _open(program: Program, isa: str) -> ctypes.CDLL:
    """The library of one ISA level, if it is one that this version can call."""
    path = program.path / "bin" / f"{isa}.so"
    try:
        library = ctypes.CDLL(str(path))
        found = library.deepinfer_abi()
    except (OSError, AttributeError) as error:
        raise ProgramError(f"bin/{isa}.so cannot be loaded: {error}", where=str(program.path),
                           next="compile the Program on a machine like this one") from None
    if found != ABI:
        raise ProgramError(f"native ABI is {found}, expected {ABI}", where=str(program.path),
                           next="compile the Program again")
    return library


def _is_paged(program: Program, name: str) -> bool:
    shape = next(v.shape for p in program.phases.values() for v in p.values if v.name == name)
    return shape[0] == ("num_pages", 1)


def _thread_count(given: int | None) -> int:
    if given is None:
        return usable_cpus()
    if isinstance(given, bool) or not isinstance(given, Integral) or not 1 <= given <= MAX_THREADS:
        raise TargetError(f"num_threads is {given!r}, expected an int in 1..{MAX_THREADS}",
                          where="cpu device", next="correct num_threads or leave it out")
    return int(given)


class CpuDevice(StateAccess):
    """Weights, state and buffers of one Program on this CPU. Not thread-safe: one step at a time.

    Args:
        program: compiled for target "cpu".
        weights: an array for each weight value of its phases, by name.
        sizes: "num_slots", "num_pages" and "pages_per_seq": how much state to hold.
        num_threads: threads of the pool; no result depends on it.
        poison: fill state and arena with NaN patterns (tests).
    """

    def __init__(self, program: Program, weights: Mapping[str, Array], sizes: Mapping[str, int], *,
                 num_threads: int | None = None, poison: bool = False) -> None:
        program.require(target="cpu")
        self.program = program
        self.sizes = dict(sizes)
        self.isa = choose_level(tuple(program.manifest["isa"]))
        self.num_threads = _thread_count(num_threads)
        self.poison = poison
        self.calls = 0  # native calls made; a test counts them
        self.launch_ns: dict[str, Array] | None = None  # by phase: see time_launches
        self.clock = time.CLOCK_MONOTONIC
        self.on_native: Callable[[], None] | None = None  # called right before a native call
        self._library = _open(program, self.isa)
        self._library.deepinfer_pool_create.restype = ctypes.c_void_p
        self._pool = self._start_threads()
        self._weights = dict(weights)
        self.state = self._allocate_state()
        self.paged = tuple(name for name in self.state if _is_paged(program, name))
        arena = max(p.arena_bytes for p in program.phases.values())
        self._stride = -(-max(p.scratch_bytes for p in program.phases.values()) // 64) * 64 + 64
        self._arena, self._scratch = aligned(arena), aligned(self._stride * self.num_threads)
        if poison:
            self._scratch[...] = POISON
        self._base = {name: self._fixed_pointers(p) for name, p in program.phases.items()}

    def _start_threads(self) -> ctypes.c_void_p:
        self._pool_owner = os.getpid()
        pool = ctypes.c_void_p(self._library.deepinfer_pool_create(self.num_threads))
        if not pool:
            raise TargetError(f"{self.num_threads} threads cannot be started", where="cpu device",
                              next="ask for fewer, or raise the limit on processes (ulimit -u)")
        return pool

    def _allocate_state(self) -> dict[str, Array]:
        state: dict[str, Array] = {}
        for phase in self.program.phases.values():
            for v in phase.values:
                if v.kind == "state" and v.name not in state:
                    shape, dtype = v.storage(self.sizes), NUMPY[v.dtype]
                    raw = aligned(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
                    if self.poison:
                        raw[...] = POISON
                    state[v.name] = raw.view(dtype).reshape(shape)
        return state

    def _fixed_pointers(self, phase: Phase) -> Array:
        """The pointer table with weights, state and temps filled in; inputs come with the step."""
        table = np.zeros(len(phase.values), np.uint64)
        for i, v in enumerate(phase.values):
            if v.kind == "temp":
                assert v.offset is not None
                table[i] = self._arena.ctypes.data + v.offset
            elif v.kind == "state":
                table[i] = self.state[v.name].ctypes.data
            elif v.kind == "weight":
                table[i] = self._check(self._weights.get(v.name), v, self.sizes).ctypes.data
        return table

    def _check(self, array: Array | None, v: ValueInfo, sizes: Mapping[str, int]) -> Array:
        expected, dtype = v.storage(sizes), NUMPY[v.dtype]
        if array is None or array.shape != expected or array.dtype != dtype:
            found = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
            raise ProgramError(f"{v.kind} '{v.name}' is {found}, expected {dtype}{list(expected)}",
                               where=f"Program {self.program.path}", next="pass the declared array")
        if not array.flags.c_contiguous:
            raise ProgramError(f"{v.kind} '{v.name}' is not contiguous", next="copy it first",
                               where=f"Program {self.program.path}")
        return array

    def run(self, phase_name: str, inputs: Mapping[str, Array], *,
            trace: Iterable[str] = ()) -> dict[str, Array]:
        """Run one step of a phase: one native call.

        Args:
            phase_name: which entry point.
            inputs: an array for each input value; symbolic sizes are read from their shapes.
            trace: names of values to copy out as they are made; no bit of the step changes.

        Returns:
            Copies of the phase's outputs and of the traced values, by name.
        """
        if not self._pool:
            raise ProgramError("the device is closed", where=f"phase {phase_name}",
                               next="make a new CpuDevice")
        if phase_name not in self.program.phases:
            raise ProgramError(f"no phase '{phase_name}', expected one of "
                               f"{', '.join(self.program.phases)}",
                               where=f"Program {self.program.path}", next="choose one of them")
        if self._pool_owner != os.getpid():
            self._pool = self._start_threads()  # a fork copies the pool but not its threads
        phase = self.program.phases[phase_name]
        sizes = self.bind(phase, inputs)
        table = self._base[phase_name].copy()
        for name, v in phase.inputs.items():
            table[phase.index[name]] = self._check(inputs.get(name), v, sizes).ctypes.data
        watch, watched = np.zeros(len(phase.values), np.uint64), {}
        for name in trace:
            v = phase.value(name)
            if v.kind != "temp":
                raise ProgramError(f"{v.kind} '{name}' cannot be traced, only what nodes make",
                                   where=f"phase {phase_name}", next="trace a temp")
            watched[name] = np.empty(v.storage(sizes), NUMPY[v.dtype])
            watch[phase.index[name]] = watched[name].ctypes.data
        native = np.array([sizes[s] for s, _ in phase.sizes], np.int32)
        if self.poison:
            self._arena[...] = POISON
        step = _Step(table.ctypes.data, native.ctypes.data, self._scratch.ctypes.data,
                     self._stride, self._pool, watch.ctypes.data if watched else None,
                     None if self.launch_ns is None else self.launch_ns[phase_name].ctypes.data,
                     self.clock)
        self.calls += 1
        if self.on_native is not None:
            self.on_native()
        ran = getattr(self._library, f"deepinfer_{phase_name}")(ctypes.byref(step))
        if ran != len(phase.launches):
            raise ProgramError(f"{ran} launches ran, expected {len(phase.launches)}",
                               where=f"phase {phase_name}", next="compile the Program again")
        return {name: self._output(phase.value(name), sizes) for name in phase.outputs} | watched

    def bind(self, phase: Phase, inputs: Mapping[str, Array]) -> dict[str, int]:
        """Sizes of this step, from the inputs' shapes; each must be within its maximum."""
        sizes = dict(self.sizes)
        for name, v in phase.inputs.items():
            if name not in inputs:
                continue
            given = inputs[name].shape
            for axis, d in enumerate(v.shape):
                if isinstance(d, tuple) and len(given) > axis:
                    sizes.setdefault(d[0], given[axis] // d[1])
        for name, largest in phase.sizes:
            if not 0 <= sizes.get(name, -1) <= largest:
                raise ProgramError(f"size {name} is {sizes.get(name)}, expected 0..{largest}",
                                   where=f"phase {phase.name}",
                                   next="run fewer rows or compile with larger limits")
        return sizes

    def _output(self, v: ValueInfo, sizes: Mapping[str, int]) -> Array:
        shape, dtype = v.storage(sizes), NUMPY[v.dtype]
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        assert v.offset is not None
        return self._arena[v.offset:v.offset + nbytes].view(dtype).reshape(shape).copy()

    def time_launches(self, on: bool = True) -> None:
        """Begin to add up the nanoseconds of every launch in ``launch_ns[phase]``, or stop."""
        self.launch_ns = {name: np.zeros(len(p.launches), np.int64)
                          for name, p in self.program.phases.items()} if on else None

    def close(self) -> None:
        """Stop the threads. The device cannot be used afterwards."""
        if self._pool:
            if self._pool_owner == os.getpid():  # in a fork there are no threads to wait for
                self._library.deepinfer_pool_destroy(self._pool)
            self._pool = ctypes.c_void_p(None)
