"""Where the threads of a pool run: as many as processors share none with the caller."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.clock import Clock
from autotune.keys import Policy
from deepinfer.compiler import default_levels

TASKS = Path("/proc/self/task")
LEVEL = default_levels()[0]
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Linux says where threads may run"),
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
                       reason="needs two processors")]


@pytest.fixture
def processors() -> Iterator[set[int]]:
    every = os.sched_getaffinity(0)
    yield every
    os.sched_setaffinity(0, every)


def places(before: set[str]) -> list[set[int]]:
    """Where each thread that began since may run."""
    return [os.sched_getaffinity(int(tid)) for tid in sorted({t.name for t in TASKS.iterdir()}
                                                             - before)]


def launch(clock: Clock) -> None:
    clock.multiply_adds("fma", Policy(warmup=1, seconds=0.1), 3)


def test_workers_keep_off_the_callers_processor_when_it_moves(processors):
    before = {t.name for t in TASKS.iterdir()}
    clock = Clock(LEVEL, len(processors))
    try:
        for caller in sorted(processors):
            os.sched_setaffinity(0, {caller})
            launch(clock)
            found = places(before)
            assert len(found) == len(processors) - 1
            assert set().union(*found) == processors - {caller}
            assert all(len(place) == 1 for place in found)
    finally:
        clock.close()


def test_other_numbers_of_threads_run_anywhere(processors):
    os.sched_setaffinity(0, processors)
    before = {t.name for t in TASKS.iterdir()}
    clock = Clock(LEVEL, len(processors) + 1)
    try:
        launch(clock)
        assert places(before) == [processors] * len(processors)
    finally:
        clock.close()
