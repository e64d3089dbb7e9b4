"""The cpu device: loads a Program's library, holds state and arena, runs phases natively."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

import numpy as np

from deepinfer.errors import ProgramError, TargetError
from deepinfer.program import ABI, Phase, Program
from deepinfer.runtime.devices.binding import NUMPY, Binding, Call, check
from deepinfer.runtime.devices.isa import choose_level
from deepinfer.runtime.devices.memory import aligned
from deepinfer.runtime.devices.state import StateAccess
from deepinfer.settings import usable_cpus

Array = np.ndarray[Any, Any]

MAX_THREADS = 4096  # each has its own scratch memory
POISON = 0xFF  # NaN in every float type: whoever reads an unwritten byte shows


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
        self._bound: tuple[Call, ...] = ()  # for this step and for the next one
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
        self._entries = {name: getattr(self._library, f"deepinfer_{name}")
                         for name in program.phases}
        self._bindings = {
            name: Binding(program, phase, self.sizes, self._fixed_pointers(phase), self._arena)
            for name, phase in program.phases.items()}

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
                table[i] = check(self.program, self._weights.get(v.name), v,
                                 self.sizes).ctypes.data
        return table

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
        names = tuple(trace)
        for call in self._bound:
            if call.binds(phase_name, inputs, names):
                if names:  # what it copies out is the caller's from here on
                    self._bound = tuple(c for c in self._bound if c is not call)
                return self._launch(call)
        return self._launch(self._bind(phase_name, inputs, names))

    def prepare(self, phase_name: str, inputs: Mapping[str, Array], *,
                trace: Iterable[str] = ()) -> None:
        """Do now what a ``run`` of this phase and this very mapping would do before its native
        call. The contents of its arrays may change until then; the same mapping may be prepared
        again. Unlike all else it may be called while a step runs, from another thread.
        """
        names, last = tuple(trace), self._bound[-1:]
        for call in self._bound:
            if call.binds(phase_name, inputs, names):
                self._bound = (*(c for c in self._bound if c is not call), call)
                return
        self._bound = (*last, self._bind(phase_name, inputs, names))

    def _bind(self, phase_name: str, inputs: Mapping[str, Array], trace: tuple[str, ...]) -> Call:
        """Check the inputs and note where everything lies."""
        if not self._pool:
            raise ProgramError("the device is closed", where=f"phase {phase_name}",
                               next="make a new CpuDevice")
        if phase_name not in self.program.phases:
            raise ProgramError(f"no phase '{phase_name}', expected one of "
                               f"{', '.join(self.program.phases)}",
                               where=f"Program {self.program.path}", next="choose one of them")
        return self._bindings[phase_name].call(inputs, trace, self._scratch, self._stride)

    def _launch(self, call: Call) -> dict[str, Array]:
        phase, step = call.phase, call.step
        if self._pool_owner != os.getpid():
            self._pool = self._start_threads()  # a fork copies the pool but not its threads
        if self.poison:
            self._arena[...] = POISON
        step.pool, step.clock = self._pool, self.clock
        if self.launch_ns is not None:
            step.times = self.launch_ns[phase.name].ctypes.data
        self.calls += 1
        ran = self._entries[phase.name](ctypes.byref(step))
        if ran != len(phase.launches):
            raise ProgramError(f"{ran} launches ran, expected {len(phase.launches)}",
                               where=f"phase {phase.name}", next="compile the Program again")
        made = {name: array.copy() for name, array in call.outputs}
        return made | call.traced if call.traced else made

    def step_sizes(self, phase_name: str, inputs: Mapping[str, Array]) -> dict[str, int]:
        """Sizes of this step, from the inputs' shapes; each must be within its maximum."""
        return self._bindings[phase_name].sizes(inputs)

    def time_launches(self, on: bool = True) -> None:
        """Begin to add up the nanoseconds of every launch in ``launch_ns[phase]``, or stop."""
        self.launch_ns = {name: np.zeros(len(p.launches), np.int64)
                          for name, p in self.program.phases.items()} if on else None

    def close(self) -> None:
        """Stop the threads. The device cannot be used afterwards."""
        if self._pool:
            if self._pool_owner == os.getpid():  # in a fork there are no threads to wait for
                self._library.deepinfer_pool_destroy(self._pool)
            self._pool, self._bound = ctypes.c_void_p(None), ()
