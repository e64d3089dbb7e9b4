"""kill -9 at random moments loses at most the measurement that was running."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading

import pytest

from autotune.effort import Effort
from autotune.session import Session, plan_json
from autotune.store import Store
from tests.autotune.fakes import SPACE, FakeRunner, Heard, Ticks, landscape, task, use_space

TASKS = [task(width=64 * (i + 1)) for i in range(3)]
EFFORT = Effort(repeats=8, visits=3)
BUILDS = EFFORT.visited(len(SPACE))  # of a task, and made again by every run, unlike measurements


@pytest.fixture(autouse=True)
def space(monkeypatch):
    use_space(monkeypatch)


def runner() -> FakeRunner:
    """Without noise: however often a run is cut, it makes the same measurements."""
    return FakeRunner(landscape(3), jitter=0)


def whole_run(path) -> int:
    """Measurements of a run that nobody stops."""
    made, store = runner(), Store(path)
    store.save_run("run", 1, "running", plan_json(TASKS, EFFORT))
    assert Session("run", made, store, EFFORT, Heard(), now=Ticks()).run(TASKS) == "done"
    store.close()
    return made.count("time")


def child(path, log, what: bytes = b"", count: int = 0, delay: float = 0.0) -> None:
    """A run that goes on where the one before stopped. It notes in ``log`` when a measurement
    begins ("b") and has ended ("e"), and when a build or a gate begins ("."). They take no time
    here, so a kill mostly meets the search and the database: it comes ``delay`` seconds after
    more than ``count`` of ``what`` have begun."""
    notes, made = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), runner()
    measure, seen = made.time, []

    def before(stage, index):
        os.write(notes, b"b" if stage == "time" else b".")
        if what == (b"b" if stage == "time" else b"."):
            seen.append(index)
            if len(seen) == count + 1:
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def time(*args):
        got = measure(*args)
        os.write(notes, b"e")
        return got

    made.time = time
    made.before = before
    store = Store(path)
    store.save_run("run", 1, "running", plan_json(TASKS, EFFORT))
    Session("run", made, store, EFFORT, Heard(), now=Ticks()).run(TASKS)
    store.close()


def killed(path, log, what: bytes, count: int, delay: float) -> bool:
    """Start the run that is killed then; whether it was still on."""
    process = multiprocessing.get_context("fork").Process(
        target=child, args=(path, log, what, count, delay))
    process.start()
    process.join()
    return process.exitcode == -signal.SIGKILL


def rows(path) -> int:
    """Visits in a database that is whole."""
    store = Store(path)
    assert store.query("PRAGMA integrity_check")[0][0] == "ok"
    (found,) = store.query("SELECT count(*) AS n FROM sample")
    store.close()
    return int(found["n"])


def check(tmp_path, kills: int, seed: int) -> None:
    """Kill, look, go on; and so on: each kill loses at most the measurement that was running, and
    the runs together make every measurement once and the lost ones once more."""
    path, log, rng = tmp_path / "t.db", tmp_path / "log", random.Random(seed)
    total = whole_run(tmp_path / "whole.db")
    died = lost = kept = begun = 0
    for _ in range(kills):
        delay = rng.uniform(0, 0.001)
        if kept == total or rng.random() < 0.3:  # while it builds, or takes up what is there
            died += killed(path, log, b".", rng.randrange(BUILDS), delay)
        else:
            count = rng.randrange(1 + 2 * (total - kept) // kills)
            died += killed(path, log, b"b", count, delay)
        made = log.read_bytes().count(b"b") - begun
        found = rows(path) if path.exists() else 0
        assert 0 <= made - (found - kept) <= 1
        lost, kept, begun = lost + made - (found - kept), found, begun + made
    assert died >= 0.8 * kills and kept > 0  # the kills hit a run that was on
    child(path, log)
    assert rows(path) == total and log.read_bytes().count(b"b") == total + lost
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
    total = whole_run(tmp_path / "whole.db")
    store, made = Store(tmp_path / "t.db"), runner()

    def interrupt(what, index):
        if what == "time" and made.count("time") == 9:
            raise KeyboardInterrupt

    made.before = interrupt
    store.save_run("run", 1, "running", plan_json(TASKS, EFFORT))
    with pytest.raises(KeyboardInterrupt):
        Session("run", made, store, EFFORT, Heard(), now=Ticks()).run(TASKS)
    assert store.runs()[0][2] == "interrupted"
    assert store.query("SELECT count(*) AS n FROM sample")[0]["n"] == 9
    again = runner()
    assert Session("run", again, store, EFFORT, Heard(), now=Ticks()).run(TASKS) == "done"
    assert again.count("time") == total - 9


def test_the_budget_ends_a_run_and_it_goes_on(tmp_path):
    total = whole_run(tmp_path / "whole.db")
    store, seconds = Store(tmp_path / "t.db"), iter(range(10**6))
    store.save_run("run", 1, "running", plan_json(TASKS, EFFORT))
    first = Session("run", runner(), store, EFFORT, Heard(), budget=100,
                    clock=lambda: next(seconds), now=Ticks())
    assert first.run(TASKS) == "budget" and store.runs()[0][2] == "budget"
    kept = store.query("SELECT count(*) AS n FROM sample")[0]["n"]
    assert 0 < kept < total
    again = runner()
    assert Session("run", again, store, EFFORT, Heard(), now=Ticks()).run(TASKS) == "done"
    assert again.count("time") == total - kept
