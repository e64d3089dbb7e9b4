"""The search of one kernel: what it measures, what it keeps, what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.effort import DUEL, Effort, Rung
from autotune.measure import Failure
from autotune.results import quarantine, results
from autotune.search import GATE_ROWS
from autotune.space import canonical
from deepinfer.targets.base import grid
from tests.autotune.fakes import (
    MACHINE,
    POINTS,
    SPACE,
    FakeRunner,
    Ticks,
    landscape,
    run_search,
    task,
    temporary,
    use_space,
)

EXHAUSTIVE = Effort("exhaustive")
VISITED = Effort().visited(len(SPACE))


@pytest.fixture(autouse=True)
def space(monkeypatch):
    use_space(monkeypatch)


def flat(candidate, sizes):
    return 10_000.0


def fast(*ids, by=0.5):
    return lambda c, sizes: 10_000.0 * (by if c.index in ids else 1.0)


def duelled(store, sizes):
    """Visits of the duel at a point by schedule."""
    return {r["place"]: r["n"] for r in store.query(
        "SELECT place, count(*) AS n FROM sample JOIN record ON record.id = record "
        "WHERE rung = ? AND sizes = ? AND session = 's' GROUP BY place", DUEL, canonical(sizes))}


def test_rungs():
    assert [Effort().visited(n) for n in (1, 2, 3, 8, 9, 16)] == [1, 2, 2, 2, 3, 4]
    assert EXHAUSTIVE.visited(16) == 16
    assert Effort().rungs(2) == () and EXHAUSTIVE.rungs(100) == ()
    assert Effort().rungs(3) == (Rung(12, 1 / 4),)
    assert Effort().rungs(16) == (Rung(8, 1 / 16), Rung(12, 1 / 4))
    assert Effort(repeats=64).rungs(16)[0] == Rung(16, 1 / 16)
    assert Effort(repeats=3).rungs(16)[1] == Rung(3, 1 / 4)
    assert Effort().visits_of(16) == 16 + 4 + 2 * 5
    assert Effort().visits_of(16, phases=2) == 16 + 4 + 3 * 5
    assert EXHAUSTIVE.visits_of(16, phases=2) == 16 * 5


@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["short", "long"])
@pytest.mark.parametrize("seed", range(8))
def test_halving_finds_what_exhaustive_finds(seed, scale, tmp_path, monkeypatch):
    """Within 3 % of the best, in at most 25 % of the time, builds and gates, too: of kernels of
    which a visit holds all runs, and of kernels of which it holds a few. The model knows the large
    slopes and none of the bumps."""
    use_space(monkeypatch, grid(a=(0, 1, 2, 3), b=(0, 1, 2, 3), c=(0, 1)))
    spent, times, ns = [], [], landscape(seed)
    for effort in (EXHAUSTIVE, Effort()):
        runner = FakeRunner(lambda c, sizes: scale * ns(c, sizes), guess=landscape(seed, bumps=0.0))
        store = temporary(tmp_path, f"{effort.mode}.db")
        got = run_search(runner, store, effort=effort)
        points = [got.times[got.verdict.winner][p].median for p in range(2)]
        spent.append((runner.spent, runner.count("build"), runner.count("gate")))
        times.append((points[0] * points[1]) ** 0.5)
        store.close()
    assert times[1] <= 1.03 * times[0]
    assert all(less <= 0.25 * all_of_it for all_of_it, less in zip(*spent, strict=True))


def test_each_phase_keeps_its_best(tmp_path):
    """Schedule 5 is best for few rows and bad for many, 9 the other way round: both duel, and are
    visited once where they are no rivals. That is enough for a later session of the same duel, and
    not for one in which they are."""
    def ns(candidate, sizes):
        best, worst = {1: (5, 9), 256: (9, 5)}[dict(sizes)["rows"]]
        return 10_000.0 * {best: 0.5, worst: 4.0}.get(candidate.index, 1.0)

    store, now = temporary(tmp_path), Ticks()
    got = run_search(FakeRunner(ns), store, now=now)
    assert set(got.times) == {0, 5, 9} and got.verdict.winner == 0
    assert [duelled(store, p) for p in POINTS] == [{0: 3, 5: 3, 9: 1}, {0: 3, 5: 1, 9: 3}]
    (result,) = results(store, MACHINE.id)
    assert {n: result.verdict(p).winner for n, p in result.phases().items()} == {
        "": 5, "prefill": 9}
    assert run_search(FakeRunner(ns), store, "later", now=now).measured == 0
    assert run_search(FakeRunner(ns), store, "rivals", only=[9], now=now).measured == 2 * 2 * 3


def test_a_clear_duel_is_short(tmp_path):
    """A point where all differ outside the noise has three visits, and so has one where they are
    alike; one where that is not clear has five. A later session takes them as they are, and an
    exhaustive one makes its own."""
    by = {1: 0.5, 16: 1.0, 64: 1.015}

    def ns(candidate, sizes):
        return 10_000.0 * (by[dict(sizes)["rows"]] if candidate.index == 9 else 1.2)

    def made():
        return FakeRunner(lambda c, sizes: ns(c, sizes) if c.index else 10_000.0, jitter=0.04)

    points = tuple((("rows", r),) for r in by)
    store, now = temporary(tmp_path), Ticks()
    got = run_search(made(), store, given=task(points), now=now)
    assert [duelled(store, p)[0] for p in points] == [3, 3, 5]
    assert [duelled(store, p)[9] for p in points] == [3, 3, 5]
    again = made()
    assert run_search(again, store, "later", given=task(points), now=now).verdict == got.verdict
    assert again.count("time") == 0
    every = made()
    run_search(every, store, "every", given=task(points), effort=EXHAUSTIVE, now=now)
    assert every.count("time") == 3 * 5 * len(SPACE)
    assert run_search(made(), store, "last", given=task(points), now=now).measured == 0


def test_a_duel_visits_the_rivals(tmp_path):
    """What only another phase left is visited once at a point, and so is a default that nobody
    challenges there."""
    def ns(candidate, sizes):
        return 10_000.0 * {9: 0.5 if dict(sizes)["rows"] == 1 else 2.0}.get(candidate.index, 1.5 if
                                                                            candidate.index else 1)

    store, now = temporary(tmp_path), Ticks()
    got = run_search(FakeRunner(ns), store, now=now)
    assert [duelled(store, p) for p in POINTS] == [{0: 3, 9: 3}, {0: 1, 9: 1}]
    (result,) = results(store, MACHINE.id)
    assert [result.verdict((p,)).winner for p in POINTS] == [9, 0] and set(got.times) == {0, 9}
    again = FakeRunner(ns)
    assert run_search(again, store, "later", now=now).measured == again.count("time") == 0


def test_the_winner_is_found_and_kept(tmp_path):
    store = temporary(tmp_path)
    got = run_search(FakeRunner(fast(9)), store)
    assert got.verdict.winner == 9 and got.verdict.gain == pytest.approx(2, rel=0.01)
    (result,) = results(store, MACHINE.id)
    assert result.verdict() == got.verdict and result.times == got.times
    assert result.schedules[9] == str(SPACE[9]) == "a=2,b=1"
    assert len(result.landscape) == 2 * VISITED  # the pruned ones, too


def test_noise_declares_no_winner(tmp_path):
    got = run_search(FakeRunner(flat, jitter=0.2), temporary(tmp_path), effort=EXHAUSTIVE)
    assert got.verdict.winner == 0 and len(got.times) == len(SPACE)


def test_a_second_run_measures_nothing_and_agrees(tmp_path):
    store = temporary(tmp_path)
    first = run_search(FakeRunner(fast(5)), store)
    runner = FakeRunner(fast(5))
    second = run_search(runner, store, "later")
    assert second.verdict == first.verdict and runner.count("time") == runner.count("gate") == 0
    assert second.measured == 0 and second.reused == first.measured
    runner = FakeRunner(fast(6))
    fresh = run_search(runner, store, "fresh", effort=Effort(fresh=True), now=Ticks())
    assert fresh.verdict.winner == 6 and fresh.reused == 0 and runner.count("time") > 0


def test_one_more_schedule_does_not_measure_the_others_again(tmp_path, monkeypatch):
    """They are measured only once more in so far as they duel with it."""
    store = temporary(tmp_path)
    run_search(FakeRunner(fast(5)), store)
    use_space(monkeypatch, (*SPACE, *grid(a=(9,), b=(9,))))
    runner = FakeRunner(fast(5, 16))
    got = run_search(runner, store, "later")
    pruning = [i for what, i in runner.calls if what == "time"]
    others = set(range(1, 16)) - set(got.times)
    assert 16 in pruning and not others & set(pruning)


def test_another_source_is_measured_anew(tmp_path):
    store = temporary(tmp_path)
    first = run_search(FakeRunner(fast(5)), store)
    got = run_search(FakeRunner(fast(3), source="edited"), store, "later", now=Ticks())
    assert got.reused == 0 and got.measured == first.measured and got.verdict.winner == 3


def test_an_edit_in_the_middle_of_a_session_is_not_mixed_in(tmp_path):
    """The same session goes on with another source: only what that one measured counts."""
    store, now = temporary(tmp_path), Ticks()
    run_search(FakeRunner(fast(3)), store, now=now)
    got = run_search(FakeRunner(fast(8), source="edited"), store, now=now)
    (result,) = results(store, MACHINE.id)
    assert result.verdict().winner == got.verdict.winner == 8
    assert result.times == got.times and result.sources[8] == "edited8"


def test_a_failed_build_of_another_machine_is_tried_here(tmp_path):
    store, slow = temporary(tmp_path), replace(MACHINE, cpu="slow")
    late = {(7, "build"): Failure("timeout", "no answer within 180 s")}
    run_search(FakeRunner(fast(7), failures=late, machine=slow), store)
    got = run_search(FakeRunner(fast(7)), store, "here")
    assert got.quarantined == {} and got.verdict.winner == 7


def test_gates_come_before_any_clock(tmp_path):
    runner = FakeRunner(flat)
    run_search(runner, temporary(tmp_path))
    stages = [what for what, _ in runner.calls]
    assert stages.index("time") > max(i for i, s in enumerate(stages) if s == "gate")
    sizes = {*((("rows", r),) for r in GATE_ROWS), *task().points}
    assert runner.count("gate") == VISITED * len(sizes)


@pytest.mark.parametrize(("stage", "failure"), [
    ("build", Failure("build", "ToolchainError: no")),
    ("build", Failure("timeout", "no answer within 180 s")),
    ("gate", Failure("crash", "the process ended with signal SIGSEGV")),
    ("gate", Failure("cut", "other bits when its items are run in ranges")),
    ("time", Failure("timeout", "no answer within 60 s")),
])
def test_quarantine(stage, failure, tmp_path):
    """The fastest schedule fails: it is out, with its reason, now and in later runs."""
    store = temporary(tmp_path)
    runner = FakeRunner(fast(7, 4, by=0.5), failures={(7, stage): failure})
    got = run_search(runner, store)
    assert got.quarantined == {7: failure} and got.verdict.winner == 4 and 7 not in got.times
    runner = FakeRunner(fast(7))
    again = run_search(runner, store, "later")
    assert again.quarantined == {7: failure}
    assert (stage, 7) not in runner.calls
    key = task().problem.key
    assert quarantine(store) == {f"{key} @a=1,b=3": [f"{failure.kind}: {failure.reason}"]}


def test_other_bits_are_quarantined_before_they_are_timed(tmp_path):
    runner = FakeRunner(fast(2, 3), bits={2: "other"})
    got = run_search(runner, temporary(tmp_path))
    assert got.quarantined[2].kind == "mismatch" and ("time", 2) not in runner.calls
    assert "other bits than the default at N=1" in got.quarantined[2].reason
    assert got.verdict.winner == 3


def test_a_default_that_differs_from_its_reference_ends_the_search(tmp_path):
    runner = FakeRunner(fast(2), reference_bits="exact")
    got = run_search(runner, temporary(tmp_path))
    assert got.verdict is None and got.quarantined[0].kind == "reference"
    assert runner.count("time") == 0


@pytest.mark.parametrize("stage", ["build", "gate", "time"])
def test_without_a_default_there_is_no_verdict(stage, tmp_path):
    store = temporary(tmp_path)
    for session in ("first", "second"):
        runner = FakeRunner(flat, failures={(0, stage): Failure("crash", "it ended")})
        got = run_search(runner, store, session)
        assert got.verdict is None and got.times == {} and set(got.quarantined) == {0}
    assert results(store, MACHINE.id) == []


def test_a_kernel_with_one_schedule(tmp_path, monkeypatch):
    use_space(monkeypatch, SPACE[:1])
    got = run_search(FakeRunner(flat), temporary(tmp_path))
    assert got.verdict.winner == 0 and list(got.times) == [0]
