"""Memory for buffers: aligned to cache lines, on huge pages where the system has them.

A huge page saves address look-ups when a step walks through many megabytes; no value depends on
it. Mapped files have them only where the file system does (``weight_file`` asks for them).
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

LINE = 64
HUGE = 2 << 20  # bytes of a huge page of x86-64, and of AArch64 with small pages of 4 KB


def aligned(nbytes: int) -> Array:
    """Zeroed bytes, of this process alone, that start at a multiple of 64. Memory is taken when it
    is first touched: in huge pages, where there are any, if there is a whole one in it."""
    if nbytes < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return _slice(np.zeros(nbytes + LINE, np.uint8), nbytes, LINE)
    mapping = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them: the same memory in small pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return _slice(np.frombuffer(mapping, np.uint8), nbytes, HUGE)


def _slice(raw: Array, nbytes: int, align: int) -> Array:
    begin = -raw.ctypes.data % align
    return raw[begin:begin + nbytes]


def together(arrays: Sequence[Array]) -> list[Array]:
    """Copies of arrays that lie one after the other in such memory, as in a file of weights, each
    from a multiple of 64 on."""
    begins = [0, *accumulate(-(-a.nbytes // LINE) * LINE for a in arrays)]
    room = aligned(begins[-1])
    made = [room[begin:begin + a.nbytes].view(a.dtype).reshape(a.shape)
            for begin, a in zip(begins[:-1], arrays, strict=True)]
    for copy, array in zip(made, arrays, strict=True):
        copy[...] = array
    return made


def own(array: Array) -> Array:
    """A copy of an array in such memory."""
    made = aligned(array.nbytes).view(array.dtype).reshape(array.shape)
    made[...] = array
    return made
