"""What a run shows: plain lines without a terminal, JSON events for machines."""

from __future__ import annotations

import io
import json

import pytest

from autotune.effort import Effort
from autotune.progress import Progress, duration, title
from autotune.session import Session
from tests.autotune.fakes import FakeRunner, Ticks, task, temporary, use_space


@pytest.fixture(autouse=True)
def space(monkeypatch):
    use_space(monkeypatch)


def run(tmp_path, out, events=False, bits=None):
    ticks = iter(range(10**6))
    with Progress(out, events=events, clock=lambda: next(ticks)) as progress:
        session = Session("s", FakeRunner(
            lambda c, s: 1e4 * (0.5 if c.index == 2 else 1), bits=bits or {}),
            temporary(tmp_path), Effort(), progress, now=Ticks())
        session.run([task(), task(width=128)])


def test_plain_lines(tmp_path):
    out = io.StringIO()
    run(tmp_path, out, bits={3: "other"})
    lines = out.getvalue().splitlines()
    total = 2 * 2 * Effort().visits_of(4, phases=2)
    assert lines[0] == f"tuning 2 kernels: at most {total} visits"
    assert lines[1].startswith("[1/2] silu_mul I=64: 4 of 16 schedules at 2 sizes; 0/")
    assert "left unknown, failures 0" in lines[1]
    assert "quarantined silu_mul a=0,b=3: mismatch: other bits" in lines[2]
    assert lines[3].startswith("  a=0,b=2 x2.0") and "0 reused" in lines[3]
    assert lines[4].startswith("[2/2] silu_mul I=128") and f"{total // 2}/{total}" in lines[4]
    assert "left unknown" not in lines[4] and "failures 1" in lines[4]
    assert "\x1b" not in out.getvalue()


def test_events(tmp_path, capsys):
    run(tmp_path, io.StringIO(), events=True)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [e["event"] for e in events]
    assert kinds[0] == "begin" and kinds.count("kernel") == kinds.count("verdict") == 2
    assert 2 * 2 * 4 < kinds.count("sample") <= events[0]["visits"]
    assert [(e["visited"], e["schedules"]) for e in events if e["event"] == "kernel"] == [
        (4, 16)] * 2
    verdict = next(e for e in events if e["event"] == "verdict")
    assert verdict["winner"] == 2 and verdict["schedule"] == "a=0,b=2"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal(tmp_path):
    out = Terminal()
    run(tmp_path, out)
    assert "visits, left" in out.getvalue() and "failures 0" in out.getvalue()
    assert "a=0,b=2 x2.0" in out.getvalue()


def test_words():
    assert [duration(s) for s in (0.4, 59, 61, 3600, 3725)] == [
        "0 s", "59 s", "1 min 1 s", "1 h", "1 h 2 min"]
    assert title(task()) == "silu_mul I=64"
