"""The test stand: one problem's arrays in memory, run by any of its built schedules."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import replace
from typing import Any

import numpy as np

from autotune.building import Built
from autotune.clock import Clock
from autotune.inputs import Array, make
from autotune.keys import Policy
from autotune.space import Candidate, Problem, Sizes
from deepinfer.ir.types import Kind, Sym
from deepinfer.runtime.devices.memory import aligned, own, together
from deepinfer.targets.base import Extent, Spec

CUTS = 3  # ranges that the gate runs the items in, the last first
MOST_SETS = 512  # copies of the weights at most


class Stand:
    """Runs the schedules of one problem at one size.

    Args:
        problem, sizes: what to run. isa: level of the native code. threads: of the pool.
        clock: of that level and pool, which the stand does not close; None: one of its own.
    """

    def __init__(self, problem: Problem, sizes: Sizes, isa: str, threads: int,
                 clock: Clock | None = None) -> None:
        self.problem, self.sizes, self.threads = problem, dict(sizes), threads
        self.node = problem.node()
        self.arrays = tuple(own(a) for a in make(problem, sizes))
        self.outputs = tuple(
            aligned(max(1, v.type.nbytes(self.sizes)))[:v.type.nbytes(self.sizes)]
            for v in self.node.outputs)
        self.clock, self._shared = clock or Clock(isa, threads), clock is not None
        self._sets: tuple[int, list[tuple[Array, ...]]] = (-1, [])

    def close(self) -> None:
        if not self._shared:
            self.clock.close()

    @property
    def nbytes(self) -> int:
        """Of all arrays and copies."""
        held = {id(a): a.nbytes for a in (*self.arrays, *self.outputs)}
        return sum((held | {id(a): a.nbytes for s in self._sets[1] for a in s}).values())

    def _call(self, candidate: Candidate, built: Built) -> tuple[Any, Any, int, Array, int]:
        """The thunk, the dims, the number of items, the scratch memory and its stride."""
        spec = self.problem.spec(candidate.schedule)
        thunk = getattr(ctypes.CDLL(built.library), f"{built.symbol}_thunk")
        dims = []
        for name in spec.dynamic():
            sym = spec.dims[name]
            assert isinstance(sym, Sym)
            dims.append(self.sizes[sym.name] * sym.times)
        kernel = self.problem.kernel()
        extent = Extent.parse(kernel.items, spec)
        items = -(-(self.sizes[extent.sym] if extent.sym else 1) * extent.mul // extent.div)
        stride = -(-kernel.scratch(self._bound(spec)) // 64) * 64 + 64
        return (thunk, (ctypes.c_int32 * max(1, len(dims)))(*dims), items,
                aligned(stride * self.threads), stride)

    def _bound(self, spec: Spec) -> Spec:
        """The spec with the stand's own sizes as the largest: some scratch memory grows with them,
        and a problem has no maxima."""
        return replace(spec, dims={
            name: Sym(d.name, self.sizes[d.name], d.times) if isinstance(d, Sym) else d
            for name, d in spec.dims.items()})

    def _pointers(self, arrays: tuple[Array, ...]) -> list[int]:
        return [int(a.ctypes.data) for a in (*arrays, *self.outputs)]

    def digest(self, candidate: Candidate, built: Built) -> tuple[str, str]:
        """sha256 of all that the kernel writes, run whole and run in ranges; unwritten bytes are
        0xFF before, so that they show."""
        thunk, dims, items, scratch, _ = self._call(candidate, built)
        found = []
        for cuts in (1, CUTS):
            arrays = tuple(own(a) for a in self.arrays)
            scratch[...] = 0xFF
            for out in self.outputs:
                out[...] = 0xFF
            pointers = self._pointers(arrays)
            args = (ctypes.c_void_p * len(pointers))(*pointers)
            edges = [items * i // cuts for i in range(cuts + 1)]
            for lo, hi in reversed(list(zip(edges, edges[1:], strict=False))):
                self.clock.native.tune_part(thunk, args, dims, ctypes.c_void_p(scratch.ctypes.data),
                                      ctypes.c_int32(lo), ctypes.c_int32(hi))
            found.append(self._sum(self.outputs, arrays))
        return found[0], found[1]

    def reference(self) -> str:
        """sha256 of what the op's numpy reference writes."""
        arrays = tuple(a.copy() for a in self.arrays)
        outputs = self.node.op.run(arrays, self.node.attrs)
        return self._sum(outputs, arrays)

    def _sum(self, outputs: tuple[Array, ...], arrays: tuple[Array, ...]) -> str:
        written = [arrays[i] for i in self.node.op.written()]
        digest = hashlib.sha256()
        for array in (*outputs, *written):
            digest.update(np.ascontiguousarray(array).view(np.uint8).tobytes())
        return digest.hexdigest()

    def _argument_sets(self, cold_bytes: int) -> list[tuple[Array, ...]]:
        """Copies of the weights that together exceed ``cold_bytes``; all else is shared. They lie
        as in a step, where a file of all weights is mapped, in huge pages if there are any; and as
        what is read to measure bandwidth."""
        if self._sets[0] != cold_bytes:
            weights = [v.kind is Kind.WEIGHT for v in self.node.inputs]
            each = sum(a.nbytes for a, w in zip(self.arrays, weights, strict=True) if w)
            count = 1 if not each else min(MOST_SETS, 1 + cold_bytes // each)
            own_weights = [a for a, w in zip(self.arrays, weights, strict=True) if w]
            copies = iter(own_weights if count == 1 else together(own_weights * count))
            self._sets = (cold_bytes, [tuple(next(copies) if w else a for a, w
                                             in zip(self.arrays, weights, strict=True))
                                       for _ in range(count)])
        return self._sets[1]

    def time(self, candidate: Candidate, built: Built, policy: Policy, repeats: int) -> list[int]:
        """Nanoseconds of each of up to ``repeats`` runs on the pool, as a step runs it."""
        thunk, dims, items, scratch, stride = self._call(candidate, built)
        sets = [self._pointers(s) for s in self._argument_sets(policy.cold_bytes)]
        return self.clock.time(thunk, sets, dims, items, policy, repeats, scratch, stride)
