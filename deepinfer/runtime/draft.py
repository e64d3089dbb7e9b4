"""Drafts: which are accepted, how many of them are verified, and what came of it.

How many drafts are verified never changes an output: a draft counts only if it is the very token
the target picks there (DESIGN §6). So a width may follow confidence, load and measured time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from deepinfer.errors import ProgramError, RequestError
from deepinfer.runtime.cost import CostCurve

Mode = Literal["fixed", "adaptive", "off"]
Survival: TypeAlias = tuple[float, ...]  # how likely each draft and all before it are accepted
LEAST = 1e-6  # a draft less likely to survive is never verified


def accept(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """How many drafts are accepted: those before the first that is not the target's own choice.

    Args:
        drafts: the verified ones. chosen: what the target picked after the anchor and after each
            draft, with the noise the draft was sampled with; one more than there are drafts.
            ``chosen[accepted]`` is the next token.

    Source: DESIGN §6.
    """
    assert len(chosen) == len(drafts) + 1
    count = 0
    while count < len(drafts) and drafts[count] == chosen[count]:
        count += 1
    return count


def survival(confidences: Sequence[float], drafts: Sequence[int] = (), eos: Collection[int] = ()
             ) -> Survival:
    """Of each draft, the chance that it is accepted: a_j = c_1 * ... * c_j, in this order, float64.

    Args:
        confidences: of the drafts, each given that those before it are accepted; what is no
            probability (a NaN) counts as 0.
        drafts: their tokens, where those in ``eos`` end the request: what follows survives never.

    Source: spec §5.5.
    """
    rates, product = [], 1.0
    for index, confidence in enumerate(confidences):
        product *= float(confidence) if 0 <= confidence <= 1 else 0.0
        rates.append(product)
        if index < len(drafts) and drafts[index] in eos:
            product = 0.0
    return tuple(rates)


def adaptive_widths(newest: Sequence[Sequence[float]], older: Sequence[Sequence[float] | None],
                    width: int | Sequence[int], curve: CostCurve, reserve: int = 0) -> list[int]:
    """How many of its drafts each request verifies, for the most tokens per time.

    The number of drafts in all is the K with the largest (R + a_1 + ... + a_K) / cost(reserve + R +
    K), a the older rates in descending order, over every K from 0 (no early stop; the smaller K of
    equals). The K drafts are then those with the best newest rates; ties: the earlier position,
    then the earlier request. The budget takes older rates because the newest are not known yet
    while a step is prepared beside the one that makes them.

    Args:
        newest: survival of the drafts at hand, by request in order of admission; empty: none.
        older: the same of two rounds ago; what is missing counts as 1.
        width: drafts a request may verify at most: one number, or one for each.
        curve: cost of a step. reserve: rows of the step besides these requests'.

    Returns:
        A width for each request, 0 and up; its anchor row is verified in any case.

    Source: spec §5.5.
    """
    widths = [width] * len(newest) if isinstance(width, int) else list(width)
    fresh, known = [], []
    for rates, before, most in zip(newest, older, widths, strict=True):
        count = min(len(rates), most)
        past = tuple(before or ())[:count]
        fresh.append(tuple(rates)[:count])
        known.append(past + (1.0,) * (count - len(past)))
    budget = _budget([rate for rate, _, _ in _ranked(known)], len(newest), curve, reserve,
                     sum(most > 0 for most in widths))
    return _take(_ranked(fresh)[:budget], len(newest))


def _ranked(rates: Sequence[Survival]) -> list[tuple[float, int, int]]:
    """(rate, position, request) of all drafts worth a row, the best first."""
    found = [(-rate, position, request) for request, each in enumerate(rates)
             for position, rate in enumerate(each) if rate >= LEAST]
    return [(-rate, position, request) for rate, position, request in sorted(found)]


def _budget(rates: Sequence[float], requests: int, curve: CostCurve, reserve: int,
            drafting: int) -> int:
    """The best number of drafts; ``drafting`` requests pay for a block whatever it is."""
    best, tokens = 0, float(requests)
    highest = tokens / curve.cost(max(1, reserve + requests), drafting)
    for count in range(1, len(rates) + 1):
        tokens += rates[count - 1]
        speed = tokens / curve.cost(reserve + requests + count, drafting)
        if speed > highest:
            best, highest = count, speed
    return best


def _take(chosen: Sequence[tuple[float, int, int]], requests: int) -> list[int]:
    """Rates never rise within a block, so what is chosen of one is its beginning."""
    widths = [0] * requests
    for _, _, request in chosen:
        widths[request] += 1
    return widths


class WidthPolicy:
    """How many drafts each request verifies in a step; keeps what it needs of earlier rounds.

    Args:
        mode: "fixed": all up to the width; "adaptive": ``adaptive_widths``; "off": none.
        block: drafts the model proposes at once; 0: it has no draft stages.
        width: drafts a step at most; None: the block.
        curve: cost of a step, for "adaptive".
        eos: tokens that end a request.

    Raises:
        RequestError: an unknown mode, or a width that is not in 0..block.
    """

    def __init__(self, mode: Mode = "fixed", *, block: int, width: int | None = None,
                 curve: CostCurve | None = None, eos: Collection[int] = ()) -> None:
        if mode not in ("fixed", "adaptive", "off"):
            raise RequestError(f"draft is {mode!r}, expected 'fixed', 'adaptive' or 'off'",
                               where="draft", next="choose one of them")
        self.mode, self.block = mode, block
        self.width = 0 if mode == "off" else check_width(width, block)
        self.curve = curve or CostCurve.flat()
        self._eos = frozenset(eos)
        self._rounds: dict[str, deque[Survival]] = {}

    @staticmethod
    def of(facts: Mapping[str, Any], mode: Mode, width: int | None = None,
           curve: CostCurve | None = None) -> WidthPolicy:
        """For a Program's facts: its rings must hold what the width may overwrite.

        Raises:
            RequestError: as above. ProgramError: the rings are too short.
        """
        policy = WidthPolicy(mode, block=int(facts["block"]), width=width, curve=curve,
                             eos=facts["eos"])
        needed = int(facts["window"]) + 1 + policy.width
        if int(facts["ring"]) < needed:
            raise ProgramError(f"rings hold {facts['ring']} slots, draft_width {policy.width} needs"
                               f" {needed} (window + 1 + draft_width)", where="draft_width",
                               next="lower draft_width or compile for a larger one")
        return policy

    def width_of(self, override: int | None) -> int:
        """The most a request verifies: the engine's width, or its own draft_width if that is less.

        Raises:
            RequestError: it is not in 0..block.
        """
        if override is None or self.mode == "off":
            return self.width
        return min(self.width, check_width(override, self.block))

    def observe(self, request_id: str, drafts: Sequence[int],
                confidences: Sequence[float] | None = None) -> None:
        """Note a new round of drafts; without confidences (another drafter's) all count as 1."""
        if self.mode != "adaptive":
            return
        certain = [1.0] * len(drafts) if confidences is None else confidences
        self._rounds.setdefault(request_id, deque(maxlen=3)).append(
            survival(certain, drafts, self._eos))

    def forget(self, request_id: str) -> None:
        """A request is gone, or its drafts are."""
        self._rounds.pop(request_id, None)

    def widths(self, requests: Sequence[tuple[str, int]], reserve: int = 0) -> list[int]:
        """The drafts of its newest round that each request verifies.

        Args:
            requests: (id, most drafts it may verify) in order of admission. The most is at most
                ``width_of`` it and the drafts it has, and less near the end of a request.
            reserve: as of ``adaptive_widths``.
        """
        most = [max(0, width) for _, width in requests]
        if self.mode != "adaptive":
            return most
        rounds = [tuple(self._rounds.get(request_id, ())) for request_id, _ in requests]
        newest: list[Survival] = [each[-1] if each else () for each in rounds]
        older = [each[0] if len(each) == 3 else None for each in rounds]
        return adaptive_widths(newest, older, most, self.curve, reserve)


def check_width(width: int | None, block: int) -> int:
    """A draft width of a model that drafts ``block`` tokens at once; None: all of them.

    Every width up to the block works and gives the same output; stages do not matter.

    Raises:
        RequestError: names the largest that works.
    """
    if width is None:
        return block
    if isinstance(width, bool) or not isinstance(width, int | np.integer) or not (
            0 <= width <= block):
        reason = f"the model drafts {block} at once" if block else "the model has no draft stages"
        raise RequestError(f"draft_width is {width!r}, expected an int in 0..{block}: {reason}",
                           where="draft_width", next=f"set draft_width to {block} or less")
    return int(width)


@dataclass(slots=True)
class AcceptStats:
    """What became of drafts, by position in the block.

    Args:
        rounds: verifications. drafted: drafts verified at each position. accepted: of these.
    """

    rounds: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """One verification of ``drafted`` drafts, the first ``accepted`` of which were right."""
        assert 0 <= accepted <= drafted
        self.rounds += 1
        missing = [0] * (drafted - len(self.drafted))
        self.drafted += missing
        self.accepted += missing
        for position in range(drafted):
            self.drafted[position] += 1
            self.accepted[position] += position < accepted

    def copy(self) -> AcceptStats:
        """As they are now."""
        return AcceptStats(self.rounds, list(self.drafted), list(self.accepted))

    @property
    def length(self) -> float:
        """Acceptance length: tokens per verification, the target's own included."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 0.0

    @property
    def rates(self) -> list[float]:
        """The share of the drafts verified at each position that was accepted."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]
