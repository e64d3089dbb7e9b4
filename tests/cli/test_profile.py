"""`deepinfer profile` on a fake device whose time is a function of the rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deepinfer import cli
from deepinfer.commands import profile
from deepinfer.commands.profile import Stopwatch, batches, measure
from deepinfer.program import Program
from deepinfer.runtime.cost import CostCurve, Machine, sidecar
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.state import StateSizes
from tests.runtime.fake_device import FakeDevice, fake_program


class Timed(FakeDevice):
    """Takes ``spent(phase, rows)`` nanoseconds of its own clock."""

    num_threads, isa = 3, "avx2"

    def __init__(self, program: Program, sizes: StateSizes, spent: Callable[[str, int], int]
                 ) -> None:
        super().__init__(program, sizes)
        self.now, self.spent = 0, spent

    def run(self, phase_name: str, inputs: Any, *, trace: Any = ()) -> Any:
        rows = len(inputs["anchor"] if phase_name == "draft" else inputs["positions"])
        self.now += self.spent(phase_name, rows)
        return super().run(phase_name, inputs, trace=trace)


@pytest.fixture(scope="module")
def program() -> Program:
    made = fake_program()
    return Program(made.path, {**made.manifest, "digest": "f" * 64,
                               "limits": {"max_num_batched_tokens": 40}}, made.phases)


def timed_engine(program: Program, spent: Callable[[str, int], int], most: int = 4
                 ) -> tuple[Engine, Stopwatch, Timed]:
    sizes = StateSizes.plan(program, max_num_seqs=most, max_model_len=64)
    device = Timed(program, sizes, spent)
    watch = Stopwatch(device, lambda: device.now)
    return Engine(program, watch, sizes, max_num_batched_tokens=40, max_model_len=64,
                  prefix_cache="off", overlap=False), watch, device


def by_rows(phase: str, rows: int) -> int:
    return {"decode": 1000, "verify": 1500, "draft": 300, "prefill": 9000}[phase] + 10 * rows


def test_every_width_of_every_batch_is_timed(program):
    engine, watch, device = timed_engine(program, by_rows)
    measure(engine, watch, [1, 2, 4], 5, 512, rounds=1)
    steps = watch.medians()
    assert steps["decode"] == [(n, by_rows("decode", n)) for n in (1, 2, 4)]
    wanted = {requests * (1 + width) for requests in (1, 2, 4) for width in range(1, 6)}
    found = dict(steps["verify"])
    assert wanted <= found.keys()
    assert all(ns == by_rows("verify", n) for n, ns in found.items())
    assert steps["draft"] == [(n, by_rows("draft", n)) for n in (1, 2, 4)]
    assert not engine.has_unfinished() and engine.drafter is None
    engine.check()
    assert {phase for phase, _ in device.steps} == {"prefill", "decode", "verify", "draft"}


def test_sweeps_are_interleaved_and_the_first_does_not_count(program):
    """A device that is slow in its first sweep, and in a third of what follows."""
    slow = {"now": 10**6}
    engine, watch, device = timed_engine(
        program, lambda phase, rows: by_rows(phase, rows) + slow["now"], most=2)
    sweeps: list[int] = []

    def report(what: str, done: int, total: int) -> None:
        assert total == 4 * 2
        sweeps.append(done // 2)
        slow["now"] = 10**6 if done // 2 in (0, 2) else 0

    measure(engine, watch, [1, 2], 5, 512, rounds=3, report=report)
    assert sweeps == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert watch.medians()["decode"] == [(n, by_rows("decode", n)) for n in (1, 2)]
    assert max(watch.times["decode"][1]) > 10**6 and len(watch.times["decode"][1]) >= 6


def test_the_stopwatch_leaves_the_rest_to_the_device(program):
    _, watch, device = timed_engine(program, by_rows)
    assert Machine.of(program, watch) == Machine.of(program, device)
    watch.close()
    assert device.closed
    with pytest.raises(AttributeError, match="no_such"):
        _ = watch.no_such


def test_numbers_of_requests():
    assert batches(1) == [1]
    assert batches(64) == [1, 2, 4, 8, 16, 32, 64]
    assert batches(5) == [1, 2, 4, 5]


def test_the_command_writes_what_adaptive_drafts_read(program, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(profile, "ROUNDS", 1)

    @contextmanager
    def opened(args: Any) -> Iterator[tuple[Program, Engine, Stopwatch, int]]:
        assert args.model == "model" and args.program is None and args.threads is None
        engine, watch, _ = timed_engine(program, by_rows)
        yield program, engine, watch, 2

    monkeypatch.setattr(profile, "open_engine", opened)
    assert cli.main(["profile", "model", "--json"]) == 0
    out, err = capsys.readouterr()
    said = json.loads(out)
    machine = Machine(program.digest, said["cpu"], 3, "avx2")
    assert Path(said["path"]) == sidecar(machine) and Path(said["path"]).exists()
    assert said["digest"] == program.digest and said["steps"]["decode"] == [[1, 1010], [2, 1020]]
    curve = CostCurve.load(program, machine)
    assert curve.source == "measured" and curve.cost(12, 2) == 1500 + 120 + 320
    assert said["path"] in err
    assert cli.main(["profile", "model"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split() == ["phase", "rows", "median"]
    assert ["decode", "1", "1.0", "us"] in [line.split() for line in out.splitlines()]


def test_bad_arguments_exit_with_2(tmp_path, capsys):
    assert cli.main(["profile", str(tmp_path), "--threads", "0"]) == 2
    assert "threads is 0, expected an int >= 1" in capsys.readouterr().err
    assert cli.main(["profile", str(tmp_path / "none")]) == 2
    assert "no checkpoint directory" in capsys.readouterr().err
