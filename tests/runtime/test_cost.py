"""Cost curves: on paper, measured, and what happens to a file that is damaged or not ours."""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import ProgramError
from deepinfer.program import Program
from deepinfer.runtime import cost
from deepinfer.runtime.cost import CostCurve, Machine, rising, save, sidecar

STATIC = {"verify": [[1, 100], [2, 110], [4, 150]], "draft": [[1, 30], [2, 50]]}
PROGRAM = Program(Path("p"), {"digest": "d" * 64, "cost": STATIC}, {})
MACHINE = Machine("d" * 64, "AMD Something", 2, "avx2")
MEASURED = {"decode": [(1, 90.0), (2, 95.0)], "verify": [(2, 99.0), (4, 160.0)],
            "draft": [(1, 7.0)]}


def test_costs_lie_on_straight_lines():
    curve = CostCurve.of(PROGRAM)
    assert [curve.cost(n) for n in (0, 1, 2, 3, 4, 6)] == [100, 100, 110, 130, 150, 190]
    assert [curve.cost(1, n) for n in (0, 1, 2, 3)] == [100, 130, 150, 170]
    assert CostCurve(((3, 5.0),)).cost(9, 4) == 5
    flat = CostCurve.of(Program(Path("p"), {"digest": ""}, {}))
    assert flat.source == "flat" and flat.cost(1) == flat.cost(500, 7)


@pytest.mark.parametrize("points", [
    [(2, 1.0), (1, 2.0)], [(1, 1.0), (1, 2.0)], [(0, 1.0)], [(1, 0.0)], [(1, math.nan)],
    [(1, 3.0), (2, 2.0)], [(1, math.inf)], [(1, -1.0)],
])
def test_what_is_no_cost_is_refused(points):
    with pytest.raises(ProgramError, match="steps goes from .* expected rising counts and costs"):
        CostCurve(tuple(points))
    with pytest.raises(ProgramError, match="drafts goes from"):
        CostCurve(((1, 1.0),), tuple(points))


def test_no_points_are_refused():
    with pytest.raises(ProgramError, match="a cost curve has no points"):
        CostCurve(())


def test_measured_costs_come_back_and_only_on_the_same_machine(tmp_path):
    path = save(MACHINE, MEASURED, tmp_path)
    assert path == sidecar(MACHINE, tmp_path) and [p.name for p in tmp_path.iterdir()] == [
        path.name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curve = CostCurve.load(PROGRAM, MACHINE, tmp_path)
        assert curve.source == "measured"
        assert curve.steps == ((1, 90), (2, 99), (4, 160)) and curve.drafts == ((1, 7),)
        for other in (Machine("e" * 64, *(MACHINE.cpu, 2, "avx2")),
                      Machine(MACHINE.digest, "Intel", 2, "avx2"),
                      Machine(MACHINE.digest, MACHINE.cpu, 1, "avx2"),
                      Machine(MACHINE.digest, MACHINE.cpu, 2, "generic")):
            assert CostCurve.load(PROGRAM, other, tmp_path).source == "static"
        assert CostCurve.load(PROGRAM).source == "static"


def test_no_digest_depends_on_it(tmp_path, monkeypatch):
    """It lies in the cache, not in the Program's directory."""
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    path = save(MACHINE, MEASURED)
    assert path.parent == tmp_path / "cache" / "profiles"
    assert CostCurve.load(PROGRAM, MACHINE).source == "measured"


@pytest.mark.parametrize("change", [
    lambda body: "", lambda body: "{", lambda body: "[1]", lambda body: "null",
    lambda body: json.dumps(body)[:-20], lambda body: json.dumps({**body, "format": 0}),
    lambda body: json.dumps({**body, "steps": {}}), lambda body: json.dumps({**body, "steps": 3}),
    lambda body: json.dumps({**body, "steps": {"verify": [[1, -5]]}}),
    lambda body: json.dumps({**body, "steps": {"verify": [[2, 5], [1, 4], [2]]}}),
    lambda body: json.dumps({**body, "steps": {"verify": [[math.inf, 5]]}}),
    lambda body: json.dumps({**body, "steps": {"verify": [[1, math.nan]]}}),
    lambda body: json.dumps({**body, "steps": {"verify": [["x", 5]]}}),
    lambda body: json.dumps({k: v for k, v in body.items() if k != "digest"}),
    lambda body: "[" * 100_000,
], ids=range(15))
def test_a_damaged_file_is_ignored_with_a_warning(change, tmp_path):
    path = save(MACHINE, MEASURED, tmp_path)
    path.write_text(change(json.loads(path.read_text())))
    with pytest.warns(UserWarning, match="measured costs are ignored: .* next: delete it or run "):
        assert CostCurve.load(PROGRAM, MACHINE, tmp_path) == CostCurve.of(PROGRAM)


@pytest.mark.parametrize("field", ["digest", "cpu", "threads", "isa"])
def test_a_foreign_file_under_our_name_is_ignored_with_a_warning(field, tmp_path):
    path = save(MACHINE, MEASURED, tmp_path)
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, field: "other"}))
    with pytest.warns(UserWarning, match=f"its {field} is 'other', expected "):
        assert CostCurve.load(PROGRAM, MACHINE, tmp_path).source == "static"


def test_a_write_that_fails_leaves_the_old_file_and_no_scratch(tmp_path, monkeypatch):
    path = save(MACHINE, MEASURED, tmp_path)
    before = path.read_bytes()

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            save(MACHINE, {**MEASURED, "draft": [(1, 8.0)]}, tmp_path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ProgramError, match="no points"):
        save(MACHINE, {}, tmp_path)
    assert path.read_bytes() == before


def test_noise_is_smoothed_to_the_nearest_curve_that_rises():
    assert rising([(1, 3.0), (2, 1.0), (3, 2.0), (4, 9.0)]) == ((1, 2), (2, 2), (3, 2), (4, 9))
    assert rising([(1, 1.0), (2, 4.0), (3, 2.0)]) == ((1, 1), (2, 3), (3, 3))
    assert rising([]) == ()
    slow_first = CostCurve.measured({"verify": ((1, 50.0), (2, 10.0), (3, 12.0))})
    assert slow_first.cost(3) == 24


@given(st.lists(st.floats(0.5, 100), min_size=1, max_size=12))
def test_smoothing_keeps_the_sum_and_never_falls(values):
    made = [c for _, c in rising(list(enumerate(values, 1)))]
    assert all(a <= b for a, b in zip(made, made[1:], strict=False))
    assert math.isclose(sum(made), sum(values), rel_tol=1e-9)
    if values == sorted(values):
        assert made == values


def test_the_processor_has_a_name():
    assert cost.cpu_model() and "\n" not in cost.cpu_model()
