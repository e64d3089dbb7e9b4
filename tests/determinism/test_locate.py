"""A difference is traced to the first value of the graph that differs."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.testing import faults
from deepinfer.testing.invariance import (
    AXES,
    Bench,
    NotInvariant,
    Outcome,
    Setting,
    Stage,
    Trial,
    check,
)
from deepinfer.testing.invariance.compare import Counts
from deepinfer.testing.invariance.locate import Origin, locate
from deepinfer.testing.invariance.state_axes import after_calls
from deepinfer.testing.invariance.subject import Wrap
from tests.determinism.subjects import HashSubject


def origin(bench: Bench, axis: str, fault: str | None = None) -> Origin | None:
    """Where the first difference of an axis with its fault comes from."""
    faulty = bench.with_fault(fault or str(AXES[axis].control), 2)
    outcome = Outcome()
    AXES[axis].vary(faulty, outcome)
    difference, trial = outcome.differences[0]
    assert trial is not None
    return locate(faulty, trial, difference)


def test_a_ring_that_was_not_restored(bench: Bench) -> None:
    """The layer whose ring it was, at the first row after the hit."""
    found = origin(bench, "prefix_hit")
    assert found is not None
    assert (found.layer, found.op, found.loc) == (11, "sparse_attention", "layers.11.attn")
    assert found.position == 8 and found.request == "r0" and found.phase == "prefill"
    assert found.element.expected_bits != found.element.found_bits
    assert str(found).startswith(f"request r0, step {found.step} (prefill), position 8, layer 11, "
                                 "op sparse_attention at layers.11.attn, value ")


def test_logits_that_depend_on_company(bench: Bench) -> None:
    found = origin(bench, "batch_size")
    assert found is not None and found.layer is None
    assert (found.op, found.loc, found.value) == ("linear", "head", "head.logits")
    assert found.element.ulps == 1 and found.element.index == (0,)


def test_noise_of_another_position(bench: Bench) -> None:
    """Equal logits, another token: the sampler is the first to differ."""
    found = origin(bench, "preemption")
    assert found is not None and (found.op, found.value) == ("sample", "head.sampled")


def test_rows_of_refused_drafts_are_not_compared(bench: Bench) -> None:
    """They saw other tokens: only the rows of the tokens that stood can explain anything."""
    first, second = bench.jobs[:2]
    trial = Trial("late company", Setting(draft="fixed"), [
        Stage([first], later=[second], between=lambda: after_calls(4, [second]))])
    faulty = bench.with_fault("kernel_by_rows", 2)
    (run,) = runs = faulty.serve(trial)
    assert run.drafted > run.accepted
    difference, *_ = faulty.compare(trial, runs, Counts())
    found = locate(faulty, trial, difference)
    assert found is not None and found.position == difference.position > len(first.prompt)
    assert (found.op, found.value) == ("linear", "head.logits") and found.element.ulps == 1


def test_a_difference_that_does_not_come_back(bench: Bench) -> None:
    outcome = Outcome()
    faulty = bench.with_fault("kernel_by_rows", 2)
    AXES["batch_size"].vary(faulty, outcome)
    difference, trial = outcome.differences[0]
    assert trial is not None and locate(bench, trial, difference) is None


class Faulty(HashSubject):
    """A subject with a fault of its own."""

    def engine(self, setting: Setting, wrap: Wrap) -> Any:
        facts = self.program.manifest["facts"]
        return super().engine(setting, lambda device, s: wrap(
            faults.KernelByRows(device, s, facts), s))


def test_the_error_of_a_check_names_the_origin() -> None:
    with pytest.raises(NotInvariant) as caught:
        check(Faulty(), axes=["batch_size"], requests=2, seed=1)
    error = caught.value
    assert error.what.startswith("1 of 1 axes are not clean, expected all; batch_size: request r0")
    assert "op linear at head, value head.logits, row 0, element [0]" in error.where
    assert error.next == "repeat it alone with `deepinfer check --axis batch_size`"
    (report,) = error.certificate.axes
    assert report.verdict == "different" and len(report.differences) > 1
    assert report.origin is not None and report.origin["element"]["ulps"] == 1
