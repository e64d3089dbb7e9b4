"""The injected faults: each changes what it says and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer.testing.bits import same_bits, ulp_distance
from deepinfer.testing.faults import FAULTS
from deepinfer.testing.invariance import AXES, Setting

FACTS: dict[str, Any] = {
    "outputs": {p: {"token": "token", "logprob": "logprob"} for p in ("prefill", "decode",
                                                                     "verify")},
    "values": {"logits": "logits"},
    "state": [{"name": "ring", "kind": "ring", "part": "encoder", "layer": 0},
              {"name": "half", "kind": "pending", "part": "encoder", "layer": 0}],
}


class Echo:
    """A device that notes its inputs and gives one row a sampled position."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.slot = {"half": np.ones(2, np.float32), "ring": np.ones(2, np.float32)}

    def run(self, phase: str, inputs: Any, *, trace: Any = ()) -> dict[str, Any]:
        self.got.append(dict(inputs))
        n = len(inputs["sample_position"])
        return {"token": np.arange(n, dtype=np.int32), "logprob": -np.ones(n, np.float32),
                "logits": np.ones((n, 3), np.float32)}

    def read_slot(self, slot: int, names: Any) -> dict[str, Any]:
        return {n: self.slot[n].copy() for n in names}

    def write_slot(self, slot: int, arrays: Any) -> None:
        self.slot.update(arrays)


def step(*spans: tuple[int, int, list[int]]) -> dict[str, Any]:
    """Inputs of a step of (slot, first position, tokens), every row sampled."""
    rows, request, positions, tokens = [], [], [], []
    for r, (slot, start, given) in enumerate(spans):
        rows.append((slot, len(tokens), len(tokens) + len(given), 0))
        request += [r] * len(given)
        positions += range(start, start + len(given))
        tokens += given
    arrays = {"spans": rows, "request": request, "positions": positions, "tokens": tokens,
              "sample_position": [p + 1 for p in positions],
              "pages": [[3, 1, 0]] * len(spans)}
    made = {name: np.array(x, np.int32) for name, x in arrays.items()}
    return {**made, "seed": np.arange(7, 7 + len(tokens), dtype=np.uint64)}


ALONE = step((0, 0, [5, 6]))


def changed(fault: Any, phase: str, inputs: dict[str, Any]) -> list[int]:
    """Which rows of logits come out changed."""
    out = fault.run(phase, inputs)
    expected = Echo().run(phase, inputs)
    moved = ulp_distance(out["logits"], expected["logits"]).max(axis=1)
    assert set(moved.tolist()) <= {0, 1}, "a nudge is the smallest change there is"
    return np.flatnonzero(moved).tolist()


def make(name: str, **setting: Any) -> tuple[Any, Echo]:
    device = Echo()
    return FAULTS[name](device, Setting(**setting), FACTS), device


@pytest.mark.parametrize(("name", "phase", "inputs", "rows"), [
    ("kernel_by_rows", "decode", step((0, 4, [5]), (1, 2, [6])), [0, 1]),
    ("order_by_place", "decode", step((0, 4, [5]), (1, 2, [6]), (2, 0, [3])), [1]),
    ("many_rows_kernel", "prefill", step((0, 0, [5, 6]), (1, 0, [7])), [0, 1]),
    ("verify_kernel", "verify", step((0, 4, [5, 6]), (1, 0, [7])), [0, 1]),
])
def test_nudged_rows(name: str, phase: str, inputs: dict[str, Any], rows: list[int]) -> None:
    fault, _ = make(name)
    assert changed(fault, phase, inputs) == rows
    assert changed(fault, "decode", step((0, 6, [5]))) == []


@pytest.mark.parametrize(("name", "setting"), [
    ("sum_by_threads", {"threads": 3}), ("order_by_isa", {"isa": "generic"})])
def test_faults_of_a_setting(name: str, setting: dict[str, Any]) -> None:
    assert changed(make(name)[0], "prefill", ALONE) == []
    assert changed(make(name, **setting)[0], "prefill", ALONE) == [0, 1]


def test_a_used_slot() -> None:
    fault, _ = make("used_slot")
    assert changed(fault, "prefill", ALONE) == []
    assert changed(fault, "decode", step((0, 2, [5]))) == []
    assert changed(fault, "prefill", step((0, 0, [5]), (1, 0, [5]))) == [0]
    assert changed(fault, "decode", step((0, 1, [5]), (1, 1, [5]))) == [0]


def test_a_scale_that_rows_share() -> None:
    fault, device = make("shared_scale")
    assert changed(fault, "prefill", ALONE) == []
    bad = device.run("decode", step((0, 1, [5]), (1, 1, [6])))
    bad["logprob"][1] = np.nan
    device.run = lambda *args, **given: bad  # type: ignore[method-assign]
    out = fault.run("decode", step((0, 1, [5]), (1, 1, [6])))
    assert ulp_distance(out["logits"], bad["logits"]).max(axis=1).tolist() == [1, 0]


def test_faults_of_state() -> None:
    fault, device = make("lost_pending")
    fault.run("prefill", step((0, 2, [5])))
    fault.run("decode", step((0, 3, [5])))
    assert device.slot["half"].tolist() == [1, 1]
    fault.run("prefill", step((0, 3, [5, 6])))
    assert device.slot["half"].tolist() == [0, 0]
    fault, device = make("ring_not_restored")
    fault.write_slot(0, {"ring": np.ones(2), "half": np.ones(2)})
    assert device.slot["ring"].tolist() == [0, 0] and device.slot["half"].tolist() == [1, 1]


def test_faults_of_inputs() -> None:
    fault, device = make("pages_in_a_row")
    fault.run("decode", step((0, 4, [5])))
    assert device.got[0]["pages"].tolist() == [[3, 3, 3]]  # no page above 3 was ever seen
    fault, device = make("first_seed")
    fault.run("decode", step((0, 4, [5]), (1, 4, [6])))
    assert device.got[0]["seed"].tolist() == [7, 7]
    fault, device = make("stale_input", overlap=True)
    for position in (4, 5):
        fault.run("decode", step((0, position, [5])))
    assert [g["sample_position"].tolist() for g in device.got] == [[5], [5]]
    fault, device = make("stale_input")
    for position in (4, 5):
        fault.run("decode", step((0, position, [5])))
    assert device.got[1]["sample_position"].tolist() == [6]


def test_a_resumed_request_is_one_position_off() -> None:
    fault, device = make("resumed_position")
    fault.run("prefill", ALONE)
    fault.run("decode", step((0, 2, [9])))
    fault.run("prefill", step((1, 0, [5, 6, 9])))
    fault.run("decode", step((1, 3, [9])))
    fault.run("prefill", step((1, 0, [8])))
    assert [(g["sample_position"] - g["positions"]).max() for g in device.got] == [1, 1, 2, 2, 1]


def test_one_wrong_draft_is_accepted() -> None:
    fault, _ = make("wrong_draft_accepted")
    inputs = step((0, 4, [50, 0, 61, 2]), (1, 2, [9]))  # Echo chooses 0, 1, 2, 3 and 4
    assert fault.run("verify", inputs)["token"].tolist() == [0, 61, 2, 3, 4]
    assert fault.run("prefill", inputs)["token"].tolist() == [0, 1, 2, 3, 4]


def test_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    fault, _ = make("order_by_process")
    assert changed(fault, "decode", step((0, 2, [5]))) == []
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert changed(fault, "decode", step((0, 2, [5]))) == [0]


def test_drafts_pass_through_and_alone_nothing_changes() -> None:
    for name in FAULTS:
        fault, device = make(name)
        out = fault.run("prefill", ALONE)
        if name != "many_rows_kernel":  # which no reference samples two rows for
            for key, array in Echo().run("prefill", ALONE).items():
                assert same_bits(out[key], array), name
        assert fault.run("draft", {"sample_position": [1]}).keys() == out.keys()
        assert fault.slot is device.slot


def test_every_fault_is_an_axis_control_and_says_what_it_does() -> None:
    assert {a.control for a in AXES.values()} - {None} <= FAULTS.keys()
    assert FAULTS.keys() <= {a.control for a in AXES.values()}
    assert all(getattr(fault, "text", "") for fault in FAULTS.values())
