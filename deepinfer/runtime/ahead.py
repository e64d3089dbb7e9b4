"""Ahead: the inputs of the next step, made while the device works on this one.

Of a decode step that follows a decode step all but the tokens is known before the first one ends;
of a verify step all but the drafts, once the tokens of the step before are committed: who takes
part, where its rows lie, what its sampler reads. Only what does not need another decision is
prepared; anything else (a prefill, a grammar, penalties, too few pages) is left to the step.

While the same requests decode, two sets of arrays take turns: one is read by the step that runs,
the other, which the step before has read, is moved on in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.program import Phase
from deepinfer.runtime.batch import Layout, Rows, build_inputs
from deepinfer.runtime.request import Request
from deepinfer.runtime.steady import Steady

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step that waits for its tokens.

    Args:
        phase: "decode" or "verify". batch: rows whose last tokens are noise until ``fill``.
        inputs: of the phase. steady: if its tokens may be judged in arrays.
        held: what else its inputs depend on, by request; None: too much to move them on.
    """

    phase: str
    batch: list[Rows]
    inputs: dict[str, Array]
    steady: Steady | None
    held: list[tuple[Any, ...]] | None = None

    @staticmethod
    def decode(phase: Phase, requests: Sequence[Request], facts: Mapping[str, Any],
               pages_per_seq: int, past: Ahead | None = None) -> Ahead | None:
        """The decode step after the one that runs, or None if that may end a request or if it
        needs what is not known yet.

        Args:
            requests: of which a decode row is running, with pages up to the next one.
            past: the step before the one that runs; it may become the one that is asked for.
        """
        if any(_needs_tokens(r) or len(r.tokens) + 1 >= r.max_len for r in requests):
            return None
        if past is not None and past._move_on(requests):
            return past
        blank = (int(facts["noise_token"]),)
        batch = [Rows(r, len(r.tokens), len(r.tokens) + 1, "all", blank) for r in requests]
        held = None
        if all(r.write_from <= len(r.tokens) and _is_plain(r) for r in requests):
            held = [_held(r) for r in requests]
        return Ahead(phase.name, batch,
                     build_inputs(phase, batch, facts, pages_per_seq=pages_per_seq), None, held)

    def _move_on(self, requests: Sequence[Request]) -> bool:
        """Move this step two tokens on; False (and nothing is done) if its inputs would differ in
        more than positions, tokens and new pages. By two, rows close the same groups."""
        batch, inputs = self.batch, self.inputs
        width = inputs["lookback"].shape[1] if "lookback" in inputs else 1
        if self.held is None or len(requests) != len(batch) or any(
                rows.request is not r or len(r.tokens) != rows.start + 2 or rows.start < width
                for rows, r in zip(batch, requests, strict=True)):
            return False
        now = [_held(r) for r in requests]
        if any(a[1:] != b[1:] for a, b in zip(now, self.held, strict=True)):
            return False
        for row, (old, new) in enumerate(zip(self.held, now, strict=True)):
            if old[0] is not new[0] and "pages" in inputs:
                inputs["pages"][row, :len(new[0])] = new[0]
        self.held[:] = now
        for rows in batch:
            rows.move(2)
        for name in _MOVING:
            if name in inputs:
                inputs[name] += 2
        if width > 1:
            inputs["lookback"][:, 1:] = [r.tokens[:-width:-1] for r in requests]
        return True

    @staticmethod
    def verify(phase: Phase, requests: Sequence[Request], widths: Sequence[int],
               facts: Mapping[str, Any], pages_per_seq: int) -> Ahead | None:
        """The next step of these requests, or None if it needs what is not known yet.

        Args:
            requests: decoding, with pages up to their drafts' ends. widths: drafts of each.
        """
        if not any(widths) or any(map(_needs_tokens, requests)):
            return None
        blank = int(facts["noise_token"])
        batch = [Rows(r, r.computed, len(r.tokens) + w, "all", (blank,) * w)
                 for r, w in zip(requests, widths, strict=True)]
        return Ahead(phase.name, batch,
                     build_inputs(phase, batch, facts, pages_per_seq=pages_per_seq),
                     Steady.of(batch, int(facts["window"])))

    def fill(self) -> list[Rows] | None:
        """Put the tokens in; None if a request has ended or has too few drafts after all."""
        return self._fill_tokens() if self.phase == "decode" else self._fill_drafts()

    def _fill_tokens(self) -> list[Rows] | None:
        for rows in self.batch:
            if rows.request.finished or len(rows.request.tokens) != rows.end:
                return None
            rows.drafts = ()
        tokens = self.inputs["tokens"]
        tokens[:] = [rows.request.tokens[-1] for rows in self.batch]
        if "lookback" in self.inputs:
            self.inputs["lookback"][:, 0] = tokens
        return self.batch

    def _fill_drafts(self) -> list[Rows] | None:
        batch = self.batch
        for rows in batch:
            width = len(rows.drafts)
            rows.drafts = tuple(rows.request.drafts[:width])
            if len(rows.drafts) < width:
                return None
        tokens, width = self.inputs["tokens"], len(batch[0].drafts)
        if any(len(rows.drafts) != width for rows in batch):
            lookback = self.inputs.get("lookback")
            layout = Layout(batch, 1 if lookback is None else lookback.shape[1])
            tokens[:] = layout.tokens
            if lookback is not None:
                lookback[:] = layout.lookback
            return batch
        shape = (len(batch), 1 + width)
        tokens = tokens.reshape(shape)
        tokens[:, 1:] = [rows.drafts for rows in batch]
        if "lookback" in self.inputs:
            lookback = self.inputs["lookback"].reshape(*shape, -1)
            for back in range(min(width, lookback.shape[2])):
                lookback[:, back + 1:, back] = tokens[:, 1:shape[1] - back]
        return batch


_MOVING = ("positions", "entry_positions", "group_positions", "kept_positions", "sample_position")


def _held(request: Request) -> tuple[Any, ...]:
    """Its pages, and what else of it a decode step's inputs depend on."""
    return (request.pages, request.slot, request.window_floor, request.replay_floor)


def _is_plain(request: Request) -> bool:
    """Whether what its sampler reads is the same at every position but for that position."""
    return request.sampling.counts is None and not request.sampling.masks.any


def _needs_tokens(request: Request) -> bool:
    """Whether what its sampler reads depends on the tokens that are not known yet."""
    return request.matcher is not None or request.sampling.penalises
