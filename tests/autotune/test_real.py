"""A real kernel of the tiny model: built in child processes, gated, timed, tuned, applied."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autotune import commands, worker
from autotune.building import Built, native_library
from autotune.cli import main, parser
from autotune.commands import tasks_of_model
from autotune.keys import Machine, Policy
from autotune.measure import Failure, LocalRunner
from autotune.model import model
from autotune.space import Task
from autotune.worker import Worker
from deepinfer.codegen.schedules import read_entries
from deepinfer.compiler import default_levels
from deepinfer.settings import ISA_LEVELS
from deepinfer.targets.base import Schedule

POLICY = Policy(warmup=1, seconds=0.05, cold_bytes=1 << 20)


@pytest.fixture(scope="module")
def task() -> Task:
    """The experts' down projection of a draft stage: the smallest of its kernels."""
    return min(tasks_of_model("tiny", "cpu", (1, 40), ["grouped_down"]),
               key=lambda t: t.problem.work(t.points[0]))


@pytest.fixture(scope="module")
def runner():
    made = LocalRunner(Machine.here(default_levels()[0], 2, POLICY))
    yield made
    made.close()


@pytest.fixture(scope="module")
def built(task, runner) -> dict[int, Built]:
    made = {c.index: b for c, b in runner.build(task.candidates())}
    assert all(isinstance(b, Built) for b in made.values()), made
    return made


def test_builds_are_kept_and_differ(task, runner, built):
    assert len({b.library for b in built.values()}) == len(built) == len(task.candidates())
    again = {c.index: b for c, b in runner.build(task.candidates())}
    assert again == built


def test_a_damaged_library_is_built_anew(task, runner, built):
    first = task.candidates()[0]
    whole = Path(built[0].library).read_bytes()
    Path(built[0].library).write_bytes(whole[:100])
    ((_, made),) = runner.build([first])
    assert made == built[0] and Path(made.library).read_bytes() == whole


def test_all_schedules_write_the_bits_of_the_reference(task, runner, built):
    for sizes in (*task.points, task.problem.sizes(7)):
        expected = runner.reference(task.candidates()[0], built[0], sizes)
        assert {runner.gate(c, built[c.index], sizes) for c in task.candidates()} == {expected}


def test_another_kernels_library_does_not_pass(task, runner, built):
    """The gate sees what a library really does: one of another kernel is caught or crashes."""
    other = next(t for t in tasks_of_model("tiny", "cpu", (1,), ["grouped_down"])
                 if t.problem.key != task.problem.key)
    ((_, wrong),) = runner.build(other.candidates()[:1])
    assert isinstance(wrong, Built)
    sizes = task.points[-1]
    got = runner.gate(task.candidates()[0], wrong, sizes)
    assert isinstance(got, Failure) or got != runner.gate(task.candidates()[0], built[0], sizes)


def test_a_worker_keeps_the_arrays_of_its_points(task, monkeypatch):
    """Points come back with the arrays they had; over the limit the oldest goes first."""
    made, isa = Worker(), default_levels()[0]
    points = [task.problem.sizes(rows) for rows in (1, 2, 3)]
    first, second = (made.stand(task.problem, p, isa, 2) for p in points[:2])
    assert first is not second and first.clock is second.clock and first.nbytes > 0
    assert made.stand(task.problem, points[0], isa, 2) is first
    monkeypatch.setattr(worker, "KEEP_BYTES", first.nbytes)
    made.stand(task.problem, points[2], isa, 2)
    assert made.stand(task.problem, points[0], isa, 2) is first
    assert made.stand(task.problem, points[1], isa, 2) is not second


def test_times(task, runner, built):
    ns = runner.time(task.candidates()[0], built[0], task.points[1], 4)
    assert not isinstance(ns, Failure) and 3 <= len(ns) <= 4 and all(n > 0 for n in ns)


def test_what_it_expects_is_modelled_for_its_threads(task, runner):
    for candidate in task.candidates():
        for sizes in task.points:
            assert runner.expected(candidate, sizes) == model(candidate, sizes, {}, 2).ns


def test_a_build_that_fails_says_why(task, runner):
    bad = replace(task.candidates()[0], schedule=Schedule((("tiles", 0),)))
    ((_, got),) = runner.build([bad])
    assert isinstance(got, Failure) and got.kind == "build" and got.reason


def test_ceilings(runner):
    got = runner.ceilings()
    assert 1e8 < got["flops"] < 1e14 and 1e8 < got["bytes"] < 1e13


@pytest.fixture
def quick(monkeypatch):
    """The command with the policy of these tests, two threads, and one kernel."""
    small = tasks_of_model("tiny", "cpu", (1, 40), ["grouped_down"])
    one = [min(small, key=lambda t: t.problem.work(t.points[0]))]
    monkeypatch.setattr(commands, "tasks_of_model", lambda *a, **k: one)
    monkeypatch.setattr(Machine, "here", staticmethod(
        lambda isa, threads=None, policy=None: replace(HERE, isa=isa, threads=2)))


HERE = Machine.here("generic", 2, POLICY)


def test_the_commands(quick, tmp_path, capsys):
    """tune, tune again, status, report, apply, verify, export, merge, gc: on one real kernel."""
    db, schedules = ["--db", str(tmp_path / "t.db")], tmp_path / "schedules.json"
    few = ["--repeats", "3", "--visits", "2"]
    assert main(["tune", "tiny", *db, *few, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["event"] for e in events].count("verdict") == 1
    assert main(["tune", "tiny", *db, *few]) == 0
    again = re.search(r"\((\d+) visits measured, (\d+) reused\)", capsys.readouterr().err)
    assert again is not None and int(again[1]) == 0 and int(again[2]) >= 2
    assert main(["status", *db, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert [r["state"] for r in held["runs"]] == ["done", "done"] and held["quarantined"] == {}
    html = tmp_path / "report.html"
    assert main(["report", *db, "--html", str(html)]) == 0
    assert "grouped_down" in capsys.readouterr().out and "<svg" in html.read_text()
    assert main(["apply", *db, "--out", str(schedules)]) == 0
    assert main(["verify", "tiny", *db, *few, "--file", str(schedules)]) in (0, 1)
    assert len(read_entries(schedules)) in (0, 1, 2)
    assert main(["export", *db, "--out", str(tmp_path / "rows.jsonl")]) == 0
    other = ["--db", str(tmp_path / "other.db")]
    assert main(["merge", *other, str(tmp_path / "rows.jsonl"), str(tmp_path / "t.db")]) == 0
    assert main(["gc", *other, "--dry-run"]) == 0
    assert main(["resume", *db]) == 3
    assert "no unfinished run" in capsys.readouterr().err


def test_usage(capsys, tmp_path):
    for wrong in (["tune", "--budget", "soon"], ["tune", "--rows", "0"], ["tune", "--mode", "x"],
                  ["nonsense"], []):
        with pytest.raises(SystemExit) as caught:
            parser().parse_args(wrong)
        assert caught.value.code == 2
    args = parser().parse_args(["tune", "--budget", "1.5h", "--rows", "1,8"])
    assert args.budget == 5400 and args.rows == (1, 8) and args.model == "mini"
    assert main(["tune", "no such model", "--db", str(tmp_path / "t.db")]) == 2
    assert main(["tune", "tiny", "--visits", "0", "--db", str(tmp_path / "t.db")]) == 2
    assert main(["report", "--db", str(tmp_path / "t.db")]) == 3
    assert "0 machines fit" in capsys.readouterr().err


@pytest.mark.parametrize("isa", ISA_LEVELS)
def test_native_code_compiles_for_every_level(isa):
    """Also for levels that this machine cannot run."""
    assert native_library(isa).read_bytes()[:4] == b"\x7fELF"
