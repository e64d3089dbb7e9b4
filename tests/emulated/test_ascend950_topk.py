"""topk of ascend950 in the emulator: the reference's bits, as integers leave no choice."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.ops.indexer import topk
from deepinfer.targets.ascend950.kernels.topk import topk as kernel
from tests.emulated.ascend950_harness import Case, caught, check


def case(n: int, entries: int, k: int, ratio: int, seed: int) -> Case:
    """Scores with many ties, both zeros, infinities and NaNs; reaches from 0 to all entries."""
    rng = np.random.default_rng(seed)
    scores = (rng.integers(-40, 40, (n, entries)) / 8).astype(np.float32)
    scores[rng.random(scores.shape) < 0.05] = -0.0
    for value in (np.nan, np.inf, -np.inf, np.float32(-3e38), np.float32(1e-45)):
        scores[rng.random(scores.shape) < 0.03] = value
    positions = rng.integers(0, entries * ratio, n).astype(np.int32)
    positions[:2] = 0, entries * ratio + 5
    return Case(topk, kernel, (scores, positions), (("k", k), ("ratio", ratio)), ("N", "L"))


# The second: more picks than most rows have entries, and rows that end inside a chunk.
@pytest.mark.parametrize(("n", "entries", "k", "ratio"), [(4, 1024, 96, 1), (5, 333, 200, 2)])
def test_agrees_with_the_reference(n: int, entries: int, k: int, ratio: int) -> None:
    c = case(n, entries, k, ratio, 1)
    for schedule in c.kernel.space(c.spec()):
        got = check(c, schedule=schedule)
    assert (got[0][1] >= 0).all() and (got[0][0] == -1).any()


def test_ties_go_to_the_lower_index() -> None:
    scores = np.full((1, 600), np.float32(2))
    scores[0, 599] = 3
    c = Case(topk, kernel, (scores, np.array([600], np.int32)), (("k", 96), ("ratio", 1)),
             ("N", "L"))
    assert check(c)[0][0].tolist() == [*range(95), 599]


BROKEN = [
    ("barriers around the bins removed", r"asc_syncthreads\(\);\n", ";\n"),
    ("one pass over the digits too few", r"p < 4", "p < 3"),
    ("ties not capped", r"ties < quota", "ties <= quota"),
    ("picks one place off", r"(int32_t\*\)buf_dyn_shmem\)\[[^;]*)\)\] = -1", r"\1 + 1)] = -1"),
    ("warps before not counted", r"v < \(\(\(int32_t\)threadIdx.x\) >> 5\)", "v < 0"),
    ("the wait for picks removed", r"asc_sync_wait\(PIPE_V, PIPE_MTE3.*", ";"),
    ("the wait for free picks removed", r"asc_sync_wait\(PIPE_MTE3, PIPE_V, .*\(t & 1\).*", ";"),
    ("the wrong event", r"(asc_sync_wait\(PIPE_MTE3, PIPE_V, .*)\(t & 1\)", r"\1(t & 1 ^ 1)"),
]


@pytest.mark.parametrize(("what", "old", "new"), BROKEN)
def test_broken_variants_are_caught(what: str, old: str, new: str) -> None:
    # A core takes three rows where events matter; elsewhere a row is longer than the threads are.
    c = case(131, 40, 200, 2, 1) if "wait" in what or "event" in what else case(5, 700, 200, 2, 1)
    assert caught(c, old, new), what
