"""The bench: runs trials on engines under given conditions and compares with each request alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from deepinfer.runtime.engine import Engine
from deepinfer.testing.faults import FAULTS
from deepinfer.testing.invariance.compare import Counts, Difference, compare
from deepinfer.testing.invariance.jobs import Job, make_jobs
from deepinfer.testing.invariance.record import Between, OnStep, Run, Served, serve
from deepinfer.testing.invariance.subject import REFERENCE, Setting, Subject, Watch

Drafter: TypeAlias = Callable[[str, Sequence[int], int], list[int]]


@dataclass(frozen=True, slots=True)
class Stage:
    """Requests served together, on the engine that the trial's earlier stages have left.

    Args:
        jobs: added at the start. later: added by ``between`` (and compared like the others).
        between: makes what interferes between steps; made anew for each run.
        untested: names whose results are not compared (neighbours).
        origin: of a job by name: another one whose reference it is compared with.
        logits_only: compare no tokens: the request is there for its rows.
        reopen: on a new engine with the same setting.
    """

    jobs: Sequence[Job]
    later: Sequence[Job] = ()
    between: Callable[[], Between] | None = None
    untested: frozenset[str] = frozenset()
    origin: Mapping[str, Job] = field(default_factory=dict)
    logits_only: bool = False
    reopen: bool = False

    @property
    def tested(self) -> dict[str, Job]:
        """The jobs to compare by name, each as the job whose reference it must equal."""
        return {j.name: self.origin.get(j.name, j) for j in (*self.jobs, *self.later)
                if j.name not in self.untested}


@dataclass(frozen=True, slots=True)
class Trial:
    """One varied condition.

    Args:
        label: names it. setting: of the engine. stages: in order. drafter: makes what takes the
            place of the model's drafts, from the bench.
    """

    label: str
    setting: Setting
    stages: Sequence[Stage]
    drafter: Callable[[Bench], Drafter] | None = None


class Bench:
    """A subject, the requests to try it with, and what each of them gives alone.

    Args:
        subject: under test. requests, seed, texts: see ``make_jobs``.
        fault: name of a fault to inject; the references stay without it.
        share: another bench whose jobs and references are taken over.
    """

    def __init__(self, subject: Subject, *, requests: int, seed: int,
                 texts: Sequence[Sequence[int]] = (), fault: str | None = None,
                 share: Bench | None = None) -> None:
        self.subject, self.requests, self.seed = subject, requests, seed
        self.texts, self.fault = texts, fault
        self.facts: Mapping[str, Any] = subject.program.manifest["facts"]
        self._alone: dict[Any, Served] = {} if share is None else share._alone

    @cached_property
    def jobs(self) -> list[Job]:
        return make_jobs(self.facts, count=self.requests, seed=self.seed, texts=self.texts,
                         grammar=self.subject.grammar)

    def with_fault(self, name: str, requests: int) -> Bench:
        """The same bench with a fault, and with no more than this many requests."""
        return Bench(self.subject, requests=min(requests, self.requests), seed=self.seed,
                     texts=self.texts, fault=name, share=self)

    @contextmanager
    def open(self, setting: Setting) -> Iterator[tuple[Engine, Watch]]:
        """An engine on a watched device, with the fault if there is one."""
        watches: list[Watch] = []

        def wrap(device: Any, given: Setting) -> Watch:
            if self.fault is not None:
                device = FAULTS[self.fault](device, given, self.facts)
            watches.append(Watch(device))
            return watches[-1]

        engine = self.subject.engine(setting, wrap)
        try:
            yield engine, watches[-1]
        finally:
            engine.close()

    def alone(self, job: Job) -> Served:
        """What a request gives on an engine of its own: the reference, computed once."""
        key = (job.prompt, repr(job.params))
        if key not in self._alone:
            clean = Bench(self.subject, requests=0, seed=0)
            trial = Trial("reference", REFERENCE, [Stage([job])])
            self._alone[key] = clean.serve(trial)[0].served[job.name]
        return self._alone[key]

    def serve(self, trial: Trial, *, also: OnStep | None = None, trace: Sequence[str] = ()
              ) -> list[Run]:
        """Run a trial's stages."""
        runs: list[Run] = []
        stages = list(trial.stages)
        while stages:
            with self.open(trial.setting) as (engine, watch):
                if trial.drafter is not None:
                    engine.drafter = trial.drafter(self)
                while stages:
                    stage = stages.pop(0)
                    between = None if stage.between is None else stage.between()
                    runs.append(serve(engine, stage.jobs, between=between, also=also, trace=trace))
                    runs[-1].device = watch
                    if stages and stages[0].reopen:
                        break
        return runs

    def compare(self, trial: Trial, runs: Sequence[Run], counts: Counts) -> list[Difference]:
        """The first difference of every tested request of a trial."""
        found = []
        for stage, run in zip(trial.stages, runs, strict=True):
            expected = {name: self.alone(job) for name, job in stage.tested.items()}
            found += compare(trial.label, expected, run, counts, logits_only=stage.logits_only)
        return found
