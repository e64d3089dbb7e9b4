"""The clock: a pool of threads as a step has it, and the nanoseconds that a kernel takes on it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune.building import native_library
from autotune.inputs import Array
from autotune.keys import Policy
from deepinfer.runtime.devices.memory import aligned

PEAK_BYTES = 1 << 28  # read to measure bandwidth
LINE = 64  # bytes that no two threads share


class Clock:
    """Times thunks, and this machine's own ceilings in the same way.

    Args:
        isa: level of the native code. threads: of the pool.
    """

    def __init__(self, isa: str, threads: int) -> None:
        self.isa, self.threads = isa, threads
        self.native = ctypes.CDLL(str(native_library(isa)))
        self.native.tune_pool_create.restype = ctypes.c_void_p
        for name in ("fma", "amx"):
            getattr(self.native, f"tune_{name}_ops").restype = ctypes.c_int64
        self._pool = ctypes.c_void_p(self.native.tune_pool_create(threads))
        self._read: tuple[tuple[int, int], Array] = ((0, 0), aligned(0))
        self._turn = ctypes.c_int64()  # runs so far

    def close(self) -> None:
        self.native.tune_pool_destroy(self._pool)

    def time(self, thunk: Any, sets: Sequence[Sequence[int]], dims: Any, items: int,
             policy: Policy, repeats: int, scratch: Array | None = None, stride: int = 0
             ) -> list[int]:
        """Nanoseconds of each of up to ``repeats`` runs on the pool, as a step runs a kernel.

        Args:
            thunk: native function. sets: its pointers, one list of them after the other in turns;
                where a call ends, the next one of as many sets goes on, so that it meets none that
                this one left in a cache.
            dims: ctypes array of i32. items: to cut over the threads.
            scratch: of all threads. stride: bytes of one thread's.
        """
        table, ns = np.array(sets, np.uint64), np.zeros(repeats, np.int64)
        room = aligned(LINE) if scratch is None else scratch
        got = self.native.tune_time(
            self._pool, thunk, ctypes.c_void_p(table.ctypes.data), table.shape[1], table.shape[0],
            ctypes.byref(self._turn), dims, len(dims), ctypes.c_void_p(room.ctypes.data),
            ctypes.c_int64(stride), ctypes.c_int64(items), policy.warmup,
            ctypes.c_int64(int(policy.warm_seconds * 1e9)), repeats, policy.least,
            ctypes.c_int64(int(policy.seconds * 1e9)), ctypes.c_void_p(ns.ctypes.data))
        assert got > 0, "the signature holds no more operands than a step's tables"
        return [int(n) for n in ns[:got]]

    def reads(self, nbytes: int, policy: Policy, repeats: int) -> tuple[int, list[int]]:
        """Reading so many bytes: as from the weights of a kernel, copies that together exceed
        ``policy.cold_bytes`` are read in turns. Returns the bytes that a run read, and the times.
        """
        kib = max(1, nbytes // self.threads // 1024)
        each = kib * 1024 * self.threads
        count = 1 + policy.cold_bytes // each
        if self._read[0] != (each, count):
            self._read = ((0, 0), aligned(0))  # free before the next one is asked for
            self._read = ((each, count), aligned(each * count))
            self._read[1][...] = 1  # pages that were never written are all one page of zeros
        begin, room = self._read[1].ctypes.data, aligned(LINE * self.threads)
        sets = [[begin + i * each, room.ctypes.data] for i in range(count)]
        return each, self.time(self.native.tune_read, sets, (ctypes.c_int32 * 1)(kib),
                               self.threads, policy, repeats)

    def multiply_adds(self, unit: str, policy: Policy, repeats: int) -> tuple[int, list[int]]:
        """Arithmetic in registers: "fma", fp32 in the vectors of the level, or "amx", bf16 tiles.
        Returns the operations of a run, 0 where the unit is not there, and the times."""
        each = int(getattr(self.native, f"tune_{unit}_ops")())
        if not each:
            return 0, []
        room = aligned(256 * self.threads)
        times = self.time(getattr(self.native, f"tune_{unit}"), [[room.ctypes.data]],
                          (ctypes.c_int32 * 1)(), self.threads, policy, repeats)
        return each * self.threads, times

    def launches(self, policy: Policy, repeats: int) -> list[int]:
        """Starting all threads and waiting for their end, with nothing to do in between."""
        return self.time(self.native.tune_nothing, [[0]], (ctypes.c_int32 * 1)(), self.threads,
                         policy, repeats)


def ceilings(isa: str, threads: int) -> dict[str, float]:
    """This machine's own ceilings with these threads: multiply-adds of the ISA level (bf16 tiles
    on amx, else fp32) in operations/s, and bytes/s read from memory; each the best of five."""
    clock, policy = Clock(isa, threads), Policy(warmup=1, seconds=5.0)
    try:
        operations, times = clock.multiply_adds("amx", policy, 5)
        if not operations:
            operations, times = clock.multiply_adds("fma", policy, 5)
        nbytes, reads = clock.reads(PEAK_BYTES, policy, 5)
        return {"flops": operations / min(times) * 1e9, "bytes": nbytes / min(reads) * 1e9}
    finally:
        clock.close()
