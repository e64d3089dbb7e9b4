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


@pytest.fixture(autouse=True)
def space(monkeypatch):
    use_space(monkeypatch)


def flat(candidate, sizes):
    return 10_000.0


def fast(*ids, by=0.5):
    return lambda c, sizes: 10_000.0 * (by if c.index in ids else 1.0)


def test_rungs():
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
    """Within 3 % of the best, in at most 25 % of the time: of kernels of which a visit holds all
    runs, and of kernels of which it holds a few."""
    use_space(monkeypatch, grid(a=(0, 1, 2, 3), b=(0, 1, 2, 3), c=(0, 1)))
    spent, times, ns = [], [], landscape(seed)
    for effort in (EXHAUSTIVE, Effort()):
        runner = FakeRunner(lambda c, sizes: scale * ns(c, sizes))
        store = temporary(tmp_path, f"{effort.mode}.db")
        got = run_search(runner, store, effort=effort)
        points = [got.times[got.verdict.winner][p].median for p in range(2)]
        spent.append(runner.spent)
        times.append((points[0] * points[1]) ** 0.5)
        store.close()
    assert times[1] <= 1.03 * times[0]
    assert spent[1] <= 0.25 * spent[0]


def test_each_phase_keeps_its_best(tmp_path):
    """Schedule 5 is best for few rows and bad for many, 9 the other way round: both duel."""
    def ns(candidate, sizes):
        best, worst = {1: (5, 9), 256: (9, 5)}[dict(sizes)["rows"]]
        return 10_000.0 * {best: 0.5, worst: 4.0}.get(candidate.index, 1.0)

    store = temporary(tmp_path)
    got = run_search(FakeRunner(ns), store)
    assert set(got.times) == {0, 5, 9} and got.verdict.winner == 0
    (result,) = results(store, MACHINE.id)
    assert {n: result.verdict(p).winner for n, p in result.phases().items()} == {
        "": 5, "prefill": 9}


def test_a_clear_duel_is_short(tmp_path):
    """A point where all differ outside the noise has three visits, one where they do not five;
    a later session takes both as they are, and an exhaustive one makes its own."""
    def ns(candidate, sizes):
        return 10_000.0 * (0.5 if candidate.index == 9 and dict(sizes)["rows"] == 1 else 1)

    store, now = temporary(tmp_path), Ticks()
    got = run_search(FakeRunner(ns), store, given=task(POINTS), now=now)
    (result,) = results(store, MACHINE.id)
    made = {p: store.query("SELECT count(*) AS n FROM sample JOIN record ON record.id = record "
                           "WHERE rung = ? AND sizes = ? AND place = 0", DUEL,
                           canonical(p))[0]["n"] for p in POINTS}
    assert list(made.values()) == [3, 5] and got.verdict.winner == 9
    again = FakeRunner(ns)
    assert run_search(again, store, "later", now=now).verdict == got.verdict
    assert again.count("time") == 0
    every = FakeRunner(ns)
    run_search(every, store, "every", effort=EXHAUSTIVE, now=now)
    assert every.count("time") == 2 * 5 * len(SPACE)
    assert run_search(FakeRunner(ns), store, "last", now=now).measured == 0


def test_the_winner_is_found_and_kept(tmp_path):
    store = temporary(tmp_path)
    got = run_search(FakeRunner(fast(9)), store)
    assert got.verdict.winner == 9 and got.verdict.gain == pytest.approx(2, rel=0.01)
    (result,) = results(store, MACHINE.id)
    assert result.verdict() == got.verdict and result.times == got.times
    assert result.schedules[9] == str(SPACE[9]) == "a=2,b=1"
    assert len(result.landscape) == 2 * len(SPACE)  # the pruned ones, too


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
    assert runner.count("gate") == len(SPACE) * len(sizes)


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
