"""`deepinfer check`: prove that no bit of a request depends on anything but the request."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from deepinfer.commands.output import Progress, emit, emit_json, say, table
from deepinfer.commands.run import check_checkpoint
from deepinfer.errors import RequestError
from deepinfer.program import Program


def run(args: argparse.Namespace) -> int:
    # All that can be wrong with the arguments is found before anything is compiled.
    from deepinfer.testing.invariance.harness import check, check_numbers, choose
    from deepinfer.testing.invariance.model import ModelSubject

    axes = [axis.name for axis in choose(args.axis)]
    check_numbers(args.requests, args.seed)
    model = Path(args.model)
    check_checkpoint(model)
    if args.certificate is not None and not Path(args.certificate).parent.is_dir():
        raise RequestError("its directory does not exist", next="make it first",
                           where=f"--certificate {args.certificate}")
    subject = ModelSubject(model, _program(args))
    texts = _texts(args.text, subject)
    made = check(subject, axes=axes, requests=args.requests, seed=args.seed, texts=texts,
                 controls=not args.no_controls, raises=False,
                 report=lambda what, done, total: say(f"check: {what} ({done}/{total})"))
    if args.certificate is not None:
        made.write(Path(args.certificate))
    if args.json:
        emit_json(made.to_json())
    else:
        emit(show(made.axes))
    say("clean" if made.clean else "not clean: "
        + ", ".join(a.name for a in made.axes if not a.good))
    return 0 if made.clean else 1


def _program(args: argparse.Namespace) -> Program:
    if args.program is not None:
        return Program.load(args.program)
    from deepinfer.compiler import compile

    with Progress() as progress:
        return compile(args.model, report=progress)


def _texts(path: str | None, subject: object) -> list[list[int]]:
    """Token lists of the paragraphs of a text file."""
    from deepinfer.testing.invariance.model import ModelSubject

    if path is None:
        return []
    assert isinstance(subject, ModelSubject)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the text cannot be read: {error}", where=f"--text {path}",
                           next="give a file of UTF-8 text") from None
    return subject.encode(text)


def show(axes: Sequence[object]) -> str:
    """The reports as a table, and under it what went wrong or drifted."""
    from deepinfer.testing.certificate import AxisReport

    reports = [a for a in axes if isinstance(a, AxisReport)]
    rows: list[Sequence[object]] = [
        ("axis", "verdict", "conditions", "requests", "tokens", "bits", "control", "seconds")]
    for a in reports:
        control = "-" if a.control is None else "caught" if a.control.good else "MISSED"
        rows.append((a.name, a.verdict, len(a.conditions), a.counts["requests"],
                     a.counts["tokens"], a.counts["bits"], control, f"{a.seconds:.1f}"))
    notes = []
    for a in reports:
        if not a.good or a.verdict == "skipped":
            notes.append(f"{a.name}: {a.summary}")
        if a.origin is not None:
            notes.append(f"{a.name}: first value that differs: {a.origin['text']}")
        for mode, drift in (a.drift or {}).items():
            notes.append(f"{a.name}: {mode}: {drift}")
    return "\n".join([table(rows), *notes])
