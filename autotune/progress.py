"""Shows a run: a rich bar on a terminal, plain lines elsewhere, JSON events for machines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from autotune.search import Outcome
from autotune.space import Task


def duration(seconds: float) -> str:
    """A length of time with two units at most: "1 h 5 min", "12 s"."""
    whole = round(seconds)
    for unit, name, below, lower in ((3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit} {name}" + (f" {rest} {lower}" if rest else "")
    return f"{whole} s"


def title(task: Task) -> str:
    """A kernel in a few words: its op, its fixed dims, and the sizes among its attributes."""
    both = {**task.problem.spec().dims, **task.problem.attrs}
    fixed = {k: v for k, v in both.items() if isinstance(v, int) and not isinstance(v, bool)}
    return f"{task.problem.op} {' '.join(f'{k}={v}' for k, v in fixed.items())}".rstrip()


class Progress:
    """Listens to a session. Use it as a context manager.

    Args:
        stream: where progress goes, stderr. events: writes JSON events to stdout, too.
        clock: seconds, monotonic.
    """

    def __init__(self, stream: TextIO | None = None, *, events: bool = False,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._events, self._clock = stream or sys.stderr, events, clock
        self._bar: Any = None
        self._task: Any = None
        self._done = self._total = self._fresh = 0
        self._kernel, self._kernels, self._failures = 0, 0, 0
        self._best, self._begun = "", clock()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str, /, **detail: Any) -> None:
        handler = getattr(self, f"_on_{what}", None)
        if handler is not None:
            handler(**detail)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, total=self._total,
                             best=self._best, failures=self._failures)

    def say(self, text: str) -> None:
        """A line of progress, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._out, flush=True)

    def _event(self, what: str, **detail: Any) -> None:
        if self._events:
            print(json.dumps({"event": what, **detail}), flush=True)

    def left(self) -> str:
        """The time that is left at the rate so far, in words."""
        if not self._fresh:
            return "unknown"
        rate = (self._clock() - self._begun) / self._fresh
        return duration(rate * max(0, self._total - self._done))

    def _on_begin(self, total: int, kernels: int) -> None:
        self._total, self._kernels, self._begun = total, kernels, self._clock()
        if self._out.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar("[progress.description]{task.description}", BarColumn(),
                            MofNCompleteColumn(), "visits, left", TimeRemainingColumn(),
                            TextColumn("{task.fields[best]}"),
                            TextColumn("failures {task.fields[failures]}"),
                            console=Console(file=self._out))
            self._task = self._bar.add_task("tuning", total=total, best="", failures=0)
            self._bar.start()
        self._event("begin", visits=total, kernels=kernels)
        self.say(f"tuning {kernels} kernels: at most {total} visits")

    def _on_kernel(self, task: Task, visited: int) -> None:
        self._kernel += 1
        count = len(task.problem.schedules())
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._kernel}/{self._kernels} "
                             f"{title(task)[:40]}")
        else:
            of = "" if visited == count else f"{visited} of "
            self.say(f"[{self._kernel}/{self._kernels}] {title(task)}: {of}{count} schedules at "
                     f"{len(task.points)} sizes; {self._done}/{self._total} visits, "
                     f"left {self.left()}, failures {self._failures}")
        self._event("kernel", kernel=task.problem.key, schedules=count, visited=visited)

    def _on_quarantine(self, candidate: Any, failure: Any) -> None:
        self._failures += 1
        self.say(f"  quarantined {candidate.problem.op} {candidate.schedule}: {failure.kind}: "
                 f"{failure.reason}")
        self._event("quarantine", kernel=candidate.problem.key, schedule=str(candidate.schedule),
                    kind=failure.kind, reason=failure.reason)

    def _on_unchecked(self, candidate: Any, failure: Any) -> None:
        self.say(f"  {candidate.problem.op} was not compared with its reference: {failure.reason}")

    def _on_sample(self, candidate: Any, sizes: Any, rung: int, ns: tuple[int, ...]) -> None:
        self._done += 1
        self._fresh += 1
        self._event("sample", kernel=candidate.problem.key, schedule=str(candidate.schedule),
                    sizes=dict(sizes), rung=rung, ns=list(ns))

    def _on_verdict(self, outcome: Outcome) -> None:
        verdict = outcome.verdict
        assert verdict is not None
        schedule = outcome.task.problem.schedules()[verdict.winner]
        name = f"{schedule} x{verdict.gain:.3f}" if verdict.winner else "the default stays"
        self._best = f"{outcome.task.problem.op}: {name}"
        self.say(f"  {name}: {verdict.reason} ({outcome.measured} visits measured, "
                 f"{outcome.reused} reused)")
        self._event("verdict", kernel=outcome.task.problem.key, schedule=str(schedule),
                    winner=verdict.winner, gain=verdict.gain, gains=list(verdict.gains),
                    measured=outcome.measured, reused=outcome.reused)

    def _on_progress(self, done: int, total: int) -> None:
        self._done, self._total = done, total
