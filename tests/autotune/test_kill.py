"""kill -9 at random moments loses at most the measurement that was running."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal

import pytest

from autotune.effort import Effort
from autotune.session import Session, plan_json
from autotune.store import Store
from tests.autotune.fakes import FakeRunner, Heard, Ticks, landscape, task, use_space

TASKS = [task(width=64 * (i + 1)) for i in range(3)]
EFFORT = Effort(repeats=8, visits=3)
TOTAL = sum(EFFORT.visits_of(16) * len(t.points) for t in TASKS)


@pytest.fixture(autouse=True)
def space(monkeypatch):
    use_space(monkeypatch)


def child(path, log) -> None:
    """A whole run; each measurement is noted in ``log`` when it begins and when it has ended."""
    notes = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    runner = FakeRunner(landscape(3))
    measure = runner.time

    def time(*args):
        os.write(notes, b"b")
        got = measure(*args)
        os.write(notes, b"e")
        return got

    runner.time = time
    store = Store(path)
    store.save_run("run", 1, "running", plan_json(TASKS, EFFORT))
    Session("run", runner, store, EFFORT, Heard(), now=Ticks()).run(TASKS)
    store.close()


def killed_after(path, log, measurements: int) -> bool:
    """Start the run and kill it once so many measurements have begun; whether it was still on."""
    before = len(log.read_bytes()) if log.exists() else 0
    process = multiprocessing.get_context("fork").Process(target=child, args=(path, log))
    process.start()
    while process.is_alive():
        if log.exists() and log.read_bytes()[before:].count(b"b") > measurements:
            os.kill(process.pid, signal.SIGKILL)
            break
        process.join(0.001)
    process.join()
    return process.exitcode == -signal.SIGKILL


def rows(path) -> int:
    store = Store(path)
    assert store.query("PRAGMA integrity_check")[0][0] == "ok"
    (found,) = store.query("SELECT count(*) AS n FROM sample")
    store.close()
    return int(found["n"])


def check(tmp_path, kills: int, seed: int) -> None:
    """Kill, look, go on; and so on; at the end all is there, each lost measurement made again."""
    path, log, rng, died = tmp_path / "t.db", tmp_path / "log", random.Random(seed), 0
    for _ in range(kills):
        kept = rows(path) if path.exists() else 0
        died += killed_after(path, log, rng.randrange(1 + max(0, 2 * (TOTAL - kept) // kills)))
        noted = log.read_bytes()
        lost = noted.count(b"e") - rows(path)
        assert lost <= died  # at most one a kill, all kills together
        assert noted.count(b"b") - noted.count(b"e") <= died
    child(path, log)
    assert died >= kills - 1 and rows(path) == TOTAL  # the kills hit a run that was on
    assert TOTAL <= log.read_bytes().count(b"b") <= TOTAL + died
    store = Store(path)
    assert store.runs()[0][2] == "done"
    store.close()


def test_killed_at_5_moments(tmp_path):
    check(tmp_path, 5, seed=1)


@pytest.mark.full
def test_killed_at_50_moments(tmp_path):
    check(tmp_path, 50, seed=2)


def test_an_interrupt_is_noted_and_resumed(tmp_path):
    """Ctrl-C in the tenth measurement: the run says so, and going on measures the rest only."""
    store, runner = Store(tmp_path / "t.db"), FakeRunner(landscape(3))

    def interrupt(what, index):
        if what == "time" and runner.count("time") == 9:
            raise KeyboardInterrupt

    runner.before = interrupt
    store.save_run("run", 1, "running", plan_json(TASKS, EFFORT))
    with pytest.raises(KeyboardInterrupt):
        Session("run", runner, store, EFFORT, Heard(), now=Ticks()).run(TASKS)
    assert store.runs()[0][2] == "interrupted"
    assert store.query("SELECT count(*) AS n FROM sample")[0]["n"] == 9
    again = FakeRunner(landscape(3))
    assert Session("run", again, store, EFFORT, Heard(), now=Ticks()).run(TASKS) == "done"
    assert again.count("time") == TOTAL - 9


def test_the_budget_ends_a_run_and_it_goes_on(tmp_path):
    store, seconds = Store(tmp_path / "t.db"), iter(range(10**6))
    store.save_run("run", 1, "running", plan_json(TASKS, EFFORT))
    first = Session("run", FakeRunner(landscape(3)), store, EFFORT, Heard(), budget=150,
                    clock=lambda: next(seconds), now=Ticks())
    assert first.run(TASKS) == "budget" and store.runs()[0][2] == "budget"
    kept = store.query("SELECT count(*) AS n FROM sample")[0]["n"]
    assert 0 < kept < TOTAL
    again = FakeRunner(landscape(3))
    assert Session("run", again, store, EFFORT, Heard(), now=Ticks()).run(TASKS) == "done"
    assert again.count("time") == TOTAL - kept
