"""The clock: which argument sets its runs take."""

from __future__ import annotations

import ctypes
import time

from autotune.clock import Clock
from autotune.keys import Policy

THUNK = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_int32),
                         ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)


def test_a_call_goes_on_where_the_last_one_ended():
    """Else the same few copies of small weights are run again and again, from a cache."""
    seen = []
    thunk = THUNK(lambda args, dims, scratch, lo, hi: seen.append((args[0], dims[0], lo, hi)))
    clock = Clock("generic", 1)
    try:
        policy = Policy(warmup=1, seconds=60.0, warm_seconds=0)
        times = [clock.time(thunk, [[64 * i] for i in range(1, 6)], (ctypes.c_int32 * 1)(7), 3,
                            policy, 2) for _ in range(3)]
    finally:
        clock.close()
    assert [len(t) for t in times] == [2, 2, 2] and all(ns > 0 for t in times for ns in t)
    assert [a for a, *_ in seen] == [64 * i for i in (1, 2, 3, 4, 5, 1, 2, 3, 4)]
    assert {s[1:] for s in seen} == {(7, 0, 3)}


def test_the_warm_up_lasts():
    """Two runs of a short kernel are over before an idle core has come to its rate."""
    ran = []
    thunk = THUNK(lambda args, dims, scratch, lo, hi: ran.append(time.perf_counter()))
    clock = Clock("generic", 1)
    try:
        times = clock.time(thunk, [[64]], (ctypes.c_int32 * 1)(), 1,
                           Policy(warmup=2, seconds=60.0, warm_seconds=0.01), 3)
    finally:
        clock.close()
    assert len(times) == 3 and len(ran) > 2 + 3
    assert ran[-3] - ran[0] >= 0.009  # what is timed comes after it
