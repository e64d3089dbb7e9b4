"""The check: every axis in turn, its negative control, and a certificate of the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from deepinfer.errors import DeepInferError, RequestError
from deepinfer.llm import LLM
from deepinfer.program import Program
from deepinfer.runtime.values import is_int
from deepinfer.testing import certificate
from deepinfer.testing.certificate import AxisReport, Certificate, Control, NotInvariant, Verdict
from deepinfer.testing.faults import FAULTS
from deepinfer.testing.invariance import (
    batch_axes,
    draft_axes,
    machine_axes,
    replay,
    state_axes,
)
from deepinfer.testing.invariance.axis import Axis, Outcome
from deepinfer.testing.invariance.bench import Bench, Stage, Trial
from deepinfer.testing.invariance.compare import Counts
from deepinfer.testing.invariance.locate import locate
from deepinfer.testing.invariance.model import ModelSubject
from deepinfer.testing.invariance.subject import REFERENCE, Subject

AXES: dict[str, Axis] = {axis.name: axis for axis in (
    *batch_axes.AXES, *state_axes.AXES, *draft_axes.AXES, *machine_axes.AXES, *replay.AXES)}
REQUESTS, MOST_REQUESTS = 6, 512

Report: TypeAlias = Callable[[str, int, int], None]  # (what, done, total)
Model: TypeAlias = "str | Path | LLM | Callable[[], LLM] | Subject"


def check(model: Model, *, program: Program | str | Path | None = None,
          axes: Sequence[str] | None = None, requests: int = REQUESTS, seed: int = 0,
          controls: bool = True, texts: Sequence[Sequence[int]] = (),
          report: Report | None = None, raises: bool = True) -> Certificate:
    """Show that no bit of a request depends on anything but the request, or where one does.

    Each axis serves the same requests under its varied conditions and compares tokens, logprobs and
    logits bitwise with each request run alone: in an engine of its own, without drafts, cache or
    overlap. It proves that its conditions occurred, and is then run once more with a fault
    injected, which it must catch.

    Args:
        model: a checkpoint directory; or an LLM, or a function that makes one, whose model and
            Program are taken; or a ``Subject``.
        program: for a directory: a Program or its directory; None: compile one.
        axes: names out of ``AXES``; None: all. requests: how many requests. seed: decides them.
        controls: whether to run the negative controls.
        texts: token lists to cut prompts from; without any they are random.
        report: called with each axis's name, how many are done and how many there are.
        raises: whether a certificate that is not clean is raised, or just returned.

    Returns:
        The certificate.

    Raises:
        NotInvariant: it is not clean; a DeterminismError with ``certificate``.
        RequestError: an unknown axis, or a bad number of requests.
    """
    chosen = choose(axes)
    check_numbers(requests, seed)
    subject = subject_of(model, program)
    bench = Bench(subject, requests=requests, seed=seed, texts=texts)
    reports = []
    for done, axis in enumerate(chosen):
        if report is not None:
            report(axis.name, done, len(chosen))
        reports.append(check_axis(bench, axis, controls=controls))
    if report is not None:
        report("done", len(chosen), len(chosen))
    made = Certificate(subject.describe(), reports, {
        "requests": requests, "seed": seed, "controls": controls, "texts": len(texts),
        "axes": [a.name for a in chosen]}, certificate.machine_facts(), certificate.versions(),
        certificate.now())
    if raises and not made.clean:
        raise NotInvariant(made)
    return made


def check_numbers(requests: int, seed: int) -> None:
    """Raises RequestError for a number of requests or a seed that is none."""
    for name, value, low, high in (("requests", requests, 1, MOST_REQUESTS),
                                   ("seed", seed, 0, 2**32 - 1)):
        if not is_int(value) or not low <= value <= high:
            raise RequestError(f"{name} is {value!r}, expected an int in {low}..{high}",
                               where="check", next=f"correct {name}")


def choose(names: Sequence[str] | None) -> list[Axis]:
    """The axes of these names, in the order of the table.

    Raises:
        RequestError: an unknown name, or none.
    """
    wanted = list(AXES) if names is None else list(names)
    unknown = [name for name in wanted if name not in AXES]
    if unknown or not wanted:
        raise RequestError(f"axis {unknown[0] if unknown else 'list'!r} is not known or empty, "
                           f"expected some of {', '.join(AXES)}", where="axes",
                           next="choose among them, or leave axes out for all")
    return [axis for name, axis in AXES.items() if name in wanted]


def subject_of(model: Any, program: Program | str | Path | None) -> Subject:
    """What to check, from whatever names it."""
    if isinstance(model, str | Path):
        return ModelSubject(Path(model), program)
    if isinstance(model, LLM):
        return ModelSubject(model.model, model.program)
    if callable(model):
        with model() as made:
            return ModelSubject(made.model, made.program)
    subject: Subject = model
    return subject


def check_axis(bench: Bench, axis: Axis, *, controls: bool) -> AxisReport:
    """Run one axis and its control."""
    begun, outcome = time.monotonic(), Outcome()
    failed: str | None = None
    try:
        axis.vary(bench, outcome)
    except DeepInferError as error:
        failed = certificate.failure(error)
    verdict, reason = _verdict(axis, outcome, failed)
    origin = _origin(bench, outcome) if verdict == "different" else None
    control = None
    if controls and axis.control is not None and verdict != "skipped":
        control = run_control(bench, axis)
    return AxisReport(
        axis.name, axis.text, verdict, reason, outcome.conditions, asdict(outcome.counts),
        outcome.evidence, [str(d) for d, _ in outcome.differences], origin, control, outcome.drift,
        round(time.monotonic() - begun, 3))


def _verdict(axis: Axis, outcome: Outcome, failed: str | None) -> tuple[Verdict, str | None]:
    if failed is not None:
        return "failed", failed
    if outcome.skipped is not None:
        return "skipped", outcome.skipped
    if outcome.differences:
        return "different", None
    if outcome.missing:
        return "not shown", "; ".join(outcome.missing)
    return ("approximate" if axis.approximate else "equal"), None


def _origin(bench: Bench, outcome: Outcome) -> dict[str, Any] | None:
    """The cause of the first difference that can be run again."""
    for difference, trial in outcome.differences:
        if trial is None:
            continue
        try:
            found = locate(bench, trial, difference)
        except DeepInferError as error:
            return {"text": f"not found: {certificate.failure(error)}"}
        if found is None:
            return {"text": f"no value of the graph differs for request {difference.request} up to "
                            f"position {difference.position}: the runtime chose otherwise, or the "
                            "difference does not come back"}
        return {"text": str(found), **asdict(found)}
    return None


def run_control(bench: Bench, axis: Axis) -> Control:
    """Inject the axis's fault: the reference must not notice it, and the axis must."""
    assert axis.control is not None
    faulty = bench.with_fault(axis.control, axis.requests)
    job = faulty.jobs[0]
    alone = Trial("reference", REFERENCE, [Stage([job])])
    text = str(getattr(FAULTS[axis.control], "text", axis.control))
    outcome = Outcome()
    silent = not faulty.compare(alone, faulty.serve(alone), Counts())
    try:
        axis.vary(faulty, outcome)
    except DeepInferError as error:
        return Control(axis.control, text, True, silent, certificate.failure(error))
    first = str(outcome.differences[0][0]) if outcome.differences else None
    return Control(axis.control, text, first is not None, silent, first)
