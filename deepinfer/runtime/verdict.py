"""Verdicts: what becomes of the tokens that a step chose, and the drafts for the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from deepinfer.errors import RequestError
from deepinfer.numerics.functions import exp, log
from deepinfer.numerics.sums import lane_sum
from deepinfer.runtime.ahead import Ahead
from deepinfer.runtime.batch import Rows
from deepinfer.runtime.commit import commit, commit_prompt
from deepinfer.runtime.draft import AcceptStats, WidthPolicy, accept
from deepinfer.runtime.draft_batch import Anchors, Committed, Context
from deepinfer.runtime.execute import Drafts, Executor, Masks, TargetStep
from deepinfer.runtime.rejection import Filters, verify
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampler import Sampled
from deepinfer.runtime.steady import Steady
from deepinfer.runtime.timeline import Timeline

Array = np.ndarray[Any, Any]
Verification = Literal["exact", "rejection", "block"]
Drafter: TypeAlias = Callable[[str, list[int], int], list[int]]  # (id, tokens, width) -> drafts
METHODS = ("exact", "rejection", "block")


@dataclass(frozen=True, slots=True)
class Round:
    """One step's outcome.

    Args:
        accepted: drafts that stood, by request that verified any. committed: rows whose tokens are
            final. drafting: requests that go on and want drafts.
        changed: requests that got a token or ended.
        notes: (request, drafts verified, drafts accepted), to be counted when there is time.
    """

    accepted: dict[str, int] = field(default_factory=dict)
    committed: list[Committed] = field(default_factory=list)
    drafting: list[Request] = field(default_factory=list)
    changed: list[Request] = field(default_factory=list)
    notes: list[tuple[Request, int, int]] = field(default_factory=list)


class Verdicts:
    """Args:
        executor: runs the phases. policy: how many drafts are verified.
        verification: "exact", "rejection" or "block".

    Raises:
        RequestError: an unknown verification.
    """

    def __init__(self, executor: Executor, policy: WidthPolicy, verification: Verification) -> None:
        if verification not in METHODS:
            raise RequestError(f"verification is {verification!r}, expected one of "
                               f"{', '.join(METHODS)}", where="Engine", next="choose one of them")
        self.executor, self.policy, self.verification = executor, policy, verification
        self.accepts = AcceptStats()
        self._window = int(executor.facts["window"])
        self._values: Mapping[str, str] = executor.facts["values"]
        self._draft_logits: dict[str, Array] = {}  # what drafts were sampled from, for rejection

    def assign_widths(self, running: Sequence[Request], reserve: int = 0) -> None:
        """How many of its drafts each decoding request verifies in the coming step.

        Args:
            reserve: rows of the step that are no drafts' and no anchors'.
        """
        decoding = [r for r in running if r.decoding]
        most = [(r.request_id, min(self.width(r), len(r.drafts))) for r in decoding]
        for request, width in zip(decoding, self.policy.widths(most, reserve), strict=True):
            request.width = width

    def width(self, request: Request) -> int:
        """Drafts that can matter: none past the last token the request may choose."""
        return max(0, min(request.most_drafts, request.max_len - len(request.tokens) - 1))

    def target(self, batch: Sequence[Rows], masks: Masks, trace: Sequence[str],
               ahead: Ahead | None = None) -> Callable[[], TargetStep]:
        """What runs the target, with what judging needs besides its outputs.

        Args:
            ahead: the step, where it is made already.
        """
        names = list(trace)
        if self._draft_logits:
            names += [self._values["adjusted"], self._values["logits"]]
        return self.executor.target(batch, masks, dict.fromkeys(names),
                                    *((ahead.phase, ahead.inputs) if ahead else ()))

    def judge(self, batch: Sequence[Rows], step: TargetStep, number: int, now: float) -> Round:
        """Commit what the step chose. Each request's error ends that request only.

        Args:
            number: of the step. now: seconds of the engine's clock.
        """
        made = Round()
        row = kept_row = 0
        tokens = step.sampled.tokens.tolist()
        for rows in batch:
            request, count, kept_from = rows.request, len(rows.sampled), rows.kept.start
            final, before = rows.end, len(request.tokens)
            if rows.forced:
                self._commit_forced(rows, step.sampled, row, number, now)
            elif count:
                kept = self._commit_run(rows, step, row, tokens[row:row + count], number, now,
                                        made)
                final = rows.end - count + max(kept, 1)
            if len(request.tokens) > before or request.finished:
                made.changed.append(request)
            request.computed = final
            # The draft's rings need the last window of rows whose tokens are final.
            first = max(kept_from, final - self._window)
            if first < final:
                made.committed.append(Committed(request, first, final,
                                                kept_row + first - kept_from))
            if not request.finished and request.decoding and self.width(request):
                made.drafting.append(request)
            made.notes.append((request, len(rows.drafts),
                               made.accepted.get(request.request_id, 0)))
            request.drafts = []
            row += count
            kept_row += rows.end - kept_from
        return made

    def _commit_run(self, rows: Rows, step: TargetStep, row: int, chosen: list[int], number: int,
                    now: float, made: Round) -> int:
        """Commit the accepted drafts and the token after them; how many tokens that was."""
        request, drafts = rows.request, list(rows.drafts)
        sampled = step.sampled
        logits = self._draft_logits.pop(request.request_id, None)
        if drafts and logits is not None:
            part = slice(row, row + len(chosen))
            verdict = verify(drafts, step.outputs[self._values["adjusted"]][part],
                             logits[:len(drafts)], _filters(request), seed=request.params.seed,
                             position=len(request.tokens), method=self._method())
            count, chosen = verdict.accepted, [*drafts[:verdict.accepted], verdict.token]
            sampled = _restated(sampled, row, chosen, step.outputs[self._values["logits"]])
        else:
            count = accept(drafts, chosen)
        kept = commit(request, chosen[:count + 1], sampled, row, step=number, now=now)
        if drafts:
            made.accepted[request.request_id] = count
        return kept

    def _method(self) -> Literal["rejection", "block"]:
        return "block" if self.verification == "block" else "rejection"

    def _commit_forced(self, rows: Rows, sampled: Sampled, row: int, number: int, now: float
                       ) -> None:
        """Prompt logprobs; and where the rows end with the last known token, the one after it."""
        request = rows.request
        inside = max(0, min(rows.end + 1, request.prompt_len) - rows.start - 1)
        commit_prompt(request, sampled, row, rows.start + 1, inside, step=number)
        if rows.end == len(request.tokens) and not request.finished:
            last = row + len(rows) - 1
            commit(request, [int(sampled.tokens[last])], sampled, last, step=number, now=now)

    def draft(self, step: TargetStep, made: Round, masks: Mapping[int, Array]
              ) -> Callable[[], Drafts] | None:
        """What runs the draft; None if there is nothing to run it on.

        Args:
            masks: allowed first drafts by index into ``made.drafting``.
        """
        if not made.committed and not made.drafting:
            return None
        return self.executor.draft(step, Context.of(made.committed), Anchors.of(made.drafting),
                                   masks, own_noise=self.verification != "exact")

    def draft_at_once(self, step: TargetStep, steady: Steady) -> Callable[[], Drafts] | None:
        """What runs the draft, if no request's tokens must be committed for that to be known."""
        if not step.sampled.finite or self.verification != "exact":
            return None
        with Timeline.host(self.executor.timeline):
            found = steady.judge(step.sampled.tokens, step.inputs["tokens"])
        return None if found is None else self.executor.draft(step, *found)

    def hand_out(self, made: Round, proposed: Drafts, drafter: Drafter | None) -> None:
        """Give each drafting request its drafts.

        Args:
            drafter: replaces the model's proposals (tests).
        """
        tokens, confidences = proposed.tokens.tolist(), proposed.confidences.tolist()
        for i, request in enumerate(made.drafting):
            name = request.request_id
            if drafter is not None:
                request.drafts = drafter(name, list(request.tokens), self.width(request))
                self.policy.observe(name, request.drafts)
                continue
            request.drafts = tokens[i]
            self.policy.observe(name, tokens[i], confidences[i])
            if proposed.logits is not None and not _filters(request).greedy:
                self._draft_logits[name] = proposed.logits[i]

    def count(self, made: Round) -> None:
        """Note what a round did in the statistics."""
        for request, verified, accepted in made.notes:
            request.metrics.steps += 1
            if verified:
                self.accepts.add(verified, accepted)
                request.metrics.drafts.add(verified, accepted)
        made.notes.clear()

    def forget(self, request: Request) -> None:
        """A request is gone, or its state is."""
        self.policy.forget(request.request_id)
        self._draft_logits.pop(request.request_id, None)


def _filters(request: Request) -> Filters:
    p = request.params
    return Filters(p.temperature, max(0, p.top_k), p.top_p, p.min_p)


def _restated(sampled: Sampled, row: int, tokens: Sequence[int], logits: Array) -> Sampled:
    """With other tokens from ``row`` on, and their logprobs as the op ``logprobs`` gives them."""
    chosen, ids = sampled.chosen.copy(), sampled.tokens.copy()
    for at, token in enumerate(tokens, row):
        x = logits[at] - logits[at].max()
        ids[at], chosen[at] = token, (x - log(lane_sum(exp(x[None]))))[token]
    return replace(sampled, tokens=ids, chosen=chosen)
