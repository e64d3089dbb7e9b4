"""Serving requests while noting what they give and under which conditions they were computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from deepinfer.errors import DeepInferError
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.request import RequestOutput, TokenLogprobs
from deepinfer.runtime.timeline import Timeline
from deepinfer.testing.invariance.jobs import Job

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Logits:
    """One computation of a row of logits.

    Args:
        position: of the row; they are about the token after it. step, phase: where it ran.
        row: f32[vocabulary].
    """

    position: int
    step: int
    phase: str
    row: Array


@dataclass(slots=True)
class Served:
    """All that a request gave.

    Args:
        prompt, tokens: what came in and what came out. logprobs: as asked for.
        finish_reason: as reported.
        logits: every row that was computed of its final tokens, again after a preemption.
    """

    prompt: tuple[int, ...]
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    logits: list[Logits] = field(default_factory=list)

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt, *self.tokens]


@dataclass(slots=True)
class Run:
    """What requests gave, and the evidence of how they were served.

    Args:
        served: by request. calls: of ``step``. steps: of the target's phases that ran.
        requests, rows: the most that one step held. shared: steps of more than one request.
        mixed: steps with prompt rows and generated ones together.
        beside: by request, the others that shared a step with it. places: its places in the batch.
        pages: its page tables, each as it first was complete. cuts: where its prompt was cut.
        hits: prompt tokens taken from a cache. preempted: times by request. asked: how often the
            check asked for it; aborted: likewise.
        drafted, accepted: tokens. lengths: how often 0, 1, .. drafts were accepted.
        widths: drafts verified at once.
        bad_steps: steps in which some row's logits were not finite. phases: steps by phase.
        device: it ran on, wrapped by ``Watch``. timeline: of host and device work.
    """

    served: dict[str, Served] = field(default_factory=dict)
    calls: int = 0
    steps: int = 0
    requests: int = 0
    rows: int = 0
    shared: int = 0
    mixed: int = 0
    beside: dict[str, set[str]] = field(default_factory=dict)
    places: dict[str, set[int]] = field(default_factory=dict)
    pages: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    cuts: dict[str, set[int]] = field(default_factory=dict)
    hits: Counter[str] = field(default_factory=Counter)
    preempted: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    aborted: int = 0
    drafted: int = 0
    accepted: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    widths: set[int] = field(default_factory=set)
    bad_steps: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    device: Any = None
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def overlapped(self) -> int:
        """How often another thread was given host work to do beside a call of the device."""
        return sum(kind == "beside" for kind, _, _ in self.timeline.spans)


OnStep: TypeAlias = Callable[[Any], None]


class Recorder:
    """Attaches itself to an engine and fills a ``Run``.

    Args:
        engine: to watch. also: called with every step's record as well.
        trace: more values to copy out, for ``also``.
    """

    def __init__(self, engine: Engine, *, also: OnStep | None = None, trace: Sequence[str] = ()
                 ) -> None:
        self.run = Run()
        self.prompts: dict[str, tuple[int, ...]] = {}
        self._also = also
        facts = engine.program.manifest["facts"]
        self._logits: str = facts["values"]["logits"]
        self._page = int(facts["page_size"])
        self._rows: dict[str, list[tuple[int, list[int], Logits]]] = {}
        engine.trace = tuple(dict.fromkeys((self._logits, *trace)))
        engine.on_step, engine.timeline = self._step, self.run.timeline

    def finished(self, output: RequestOutput) -> None:
        """Keep a request's output, with the logits whose rows saw its final tokens.

        A row that a refused draft led to is dropped: it answers a question nobody asked.
        """
        name = output.request_id
        served = Served(tuple(output.prompt_token_ids), list(output.token_ids), output.logprobs,
                        output.finish_reason)
        final = served.sequence
        served.logits = [row for start, seen, row in self._rows.pop(name, [])
                         if final[start:row.position + 1] == seen]
        self.run.served[name] = served

    def _step(self, record: Any) -> None:
        run, inputs = self.run, record.inputs
        names = [r.request_id for r in record.rows]
        run.steps += 1
        run.phases[record.phase] += 1
        run.requests = max(run.requests, len(names))
        run.rows = max(run.rows, len(inputs["tokens"]))
        run.shared += len(names) > 1
        kinds = set()
        for index, row in enumerate(record.rows):
            name = row.request_id
            prompt_len = len(self.prompts.get(name, ()))
            kinds.add(row.start < prompt_len)
            run.beside.setdefault(name, set()).update(n for n in names if n != name)
            run.places.setdefault(name, set()).add(index)
            if row.end >= prompt_len:
                table = inputs["pages"][index][:-(-prompt_len // self._page)]
                run.pages.setdefault(name, set()).add(tuple(table.tolist()))
            if row.start < prompt_len:
                run.cuts.setdefault(name, set()).add(row.start)
        run.mixed += len(kinds) == 2
        self._note(record)
        logits = record.outputs[self._logits]
        run.bad_steps += not np.isfinite(logits).all()
        for q, (name, position, start, seen) in enumerate(sampled_rows(record)):
            self._rows.setdefault(name, []).append(
                (start, seen, Logits(position, record.step, record.phase, logits[q].copy())))
        if self._also is not None:
            self._also(record)

    def _note(self, record: Any) -> None:
        run = self.run
        run.hits.update(record.hits)
        run.preempted.update(record.preempted)
        for name, drafts in record.drafted.items():
            if drafts:
                accepted = int(record.accepted.get(name, 0))
                run.drafted += len(drafts)
                run.accepted += accepted
                run.lengths[accepted] += 1
                run.widths.add(len(drafts))


def sampled_rows(record: Any) -> list[tuple[str, int, int, list[int]]]:
    """Of each sampled row of a step: the request, its position, the position of the request's first
    row in the step, and the tokens of the step's rows up to it."""
    inputs = record.inputs
    owner = inputs.get("kept_request", inputs["request"])
    position = inputs.get("kept_positions", inputs["positions"])
    picked = inputs.get("sample_rows", np.arange(len(owner)))
    out = []
    for row in picked.tolist():
        index, at = int(owner[row]), int(position[row])
        first = int(inputs["spans"][index][1])
        start = int(inputs["positions"][first])
        seen = inputs["tokens"][first:first + at - start + 1].tolist()
        out.append((record.rows[index].request_id, at, start, seen))
    return out


class Live:
    """A run in progress, for those who interfere with it between steps."""

    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        self.engine, self.recorder, self.run = engine, recorder, recorder.run
        self.made: dict[str, int] = {}  # output tokens handed out so far

    def add(self, *jobs: Job) -> None:
        for job in jobs:
            self.recorder.prompts[job.name] = job.prompt
            self.made[job.name] = 0
            self.engine.add_request(list(job.prompt), job.params, job.name)

    def preempt(self, name: str) -> bool:
        """Take a running request's state away; it is computed again later."""
        done = self.engine.preempt(name)
        self.run.asked += done
        return done

    def abort(self, name: str) -> bool:
        done = self.engine.abort(name)
        self.run.aborted += done
        return done


# Called before each step with the run and the number of the call; True: more is still to come.
Between: TypeAlias = Callable[[Live, int], bool]


def serve(engine: Engine, jobs: Sequence[Job], *, between: Between | None = None,
          also: OnStep | None = None, trace: Sequence[str] = ()) -> Run:
    """Serve requests to their ends, checking the engine's state after every step.

    Args:
        jobs: added at the start. between: see ``Between``. also, trace: see ``Recorder``.

    Raises:
        DeepInferError: the engine's own check fails, or the requests do not finish.
    """
    recorder = Recorder(engine, also=also, trace=trace)
    live = Live(engine, recorder)
    live.add(*jobs)
    more = True
    while more or engine.has_unfinished():
        more = between is not None and between(live, recorder.run.calls)
        outputs = engine.step()
        recorder.run.calls += 1
        for output in outputs:
            live.made[output.request_id] = len(output.token_ids)
            if output.finished:
                recorder.finished(output)
        engine.check()
        _bound(live)
    return recorder.run


def _bound(live: Live) -> None:
    rows = sum(len(p) for p in live.recorder.prompts.values())
    most = 1000 + 20 * rows
    if live.run.calls > most:
        left = sorted(live.made.keys() - live.run.served.keys())
        raise DeepInferError(f"requests {left} are not done after {live.run.calls} steps, expected "
                             f"{most} at most",
                             where="invariance.serve",
                             next="this is a fault of the scheduler: please report it")

