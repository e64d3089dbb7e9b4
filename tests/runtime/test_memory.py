"""Memory of the device: aligned, zeroed, private, on huge pages where there are any."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from deepinfer.runtime.devices.memory import HUGE, aligned, own, together

SIZES = [1, 63, 4096, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE + 777]


@pytest.mark.parametrize("nbytes", SIZES)
def test_aligned_and_zeroed(nbytes):
    for _ in range(2):
        made = aligned(nbytes)
        assert (made.shape, made.dtype, made.flags.writeable) == ((nbytes,), np.uint8, True)
        assert made.ctypes.data % 64 == 0 and not made.any()
        if nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            assert made.ctypes.data % HUGE == 0
        made[...] = 255  # the next one must not see it
        del made


def test_nothing():
    assert aligned(0).shape == (0,)


def test_own():
    for shape in ((), (0, 3), (5, 7), (1100, 1000)):
        array = np.arange(np.prod(shape), dtype=np.float64).reshape(shape).astype(
            ml_dtypes.bfloat16)
        made = own(array)
        assert (made.dtype, made.shape) == (array.dtype, shape)
        assert made.tobytes() == array.tobytes() and not np.shares_memory(made, array)


def test_a_fork_has_its_own():
    made = aligned(2 * HUGE)
    made[:2] = 7
    pid = os.fork()
    if pid == 0:
        made[...] = 9
        os._exit(int(made[0]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert made[:2].tolist() == [7, 7]


def test_huge_pages_are_asked_for():
    smaps = Path("/proc/self/smaps")
    if not smaps.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this system has no transparent huge pages")
    made = aligned(4 * HUGE)
    made[...] = 1
    assert made.ctypes.data % HUGE == 0
    assert {"mw", "hg"} <= set(flags_at(smaps.read_text(), made.ctypes.data))


def flags_at(smaps: str, address: int) -> list[str]:
    """The flags of the mapping that holds an address."""
    inside = False
    for line in smaps.splitlines():
        first = line.split()[0]
        if "-" in first:
            begin, end = (int(x, 16) for x in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("the address is not mapped")


def test_together():
    arrays = [np.arange(n, dtype=np.uint16).reshape(shape) for n, shape in
              ((6, (2, 3)), (0, (0, 4)), (1, ()), (3 * HUGE // 2, (-1, 2)), (5, (5,)))]
    made = together(arrays)
    begins = [m.ctypes.data for m in made]
    assert begins == sorted(begins) and not any(b % 64 for b in begins)
    assert begins[-1] - begins[0] < sum(a.nbytes + 64 for a in arrays)
    for copy, array in zip(made, arrays, strict=True):
        assert (copy.dtype, copy.shape) == (array.dtype, array.shape)
        assert np.array_equal(copy, array) and not np.shares_memory(copy, array)
    assert together([]) == []
