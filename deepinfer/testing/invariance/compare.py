"""Comparing what a request gave under a condition with what it gives alone, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from deepinfer.runtime.request import TokenLogprobs
from deepinfer.testing.bits import Element, first_element
from deepinfer.testing.invariance.record import Logits, Run, Served

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Counts:
    """How much was compared: requests, tokens, logprobs, rows of logits, and bits in all."""

    requests: int = 0
    tokens: int = 0
    logprobs: int = 0
    rows: int = 0
    bits: int = 0

    def add(self, other: Counts) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a request first differs from the reference.

    Args:
        request: whose. condition: under which. what: "logits", "logprob", "token", "finish" ..
        position: of the row that computed it. step: in which it was computed, if known.
        detail: both values with their bits.
    """

    request: str
    condition: str
    what: str
    position: int
    step: int | None
    detail: str

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return (f"request {self.request} under {self.condition}: {self.what} at position "
                f"{self.position}{step}: {self.detail}")


def compare(condition: str, reference: Mapping[str, Served], run: Run, counts: Counts, *,
            logits_only: bool = False) -> list[Difference]:
    """The first difference of every request that the reference has.

    Args:
        condition: names the run. counts: grows by what was compared.
        logits_only: the requests of ``run`` are others with the same tokens: compare their rows.
    """
    found = []
    for name, expected in reference.items():
        if name not in run.served:
            found.append(Difference(name, condition, "finish", 0, None, "it never finished"))
            continue
        counts.requests += 1
        got = run.served[name]
        pairs = logits(name, condition, expected, got, len(got.sequence), counts) if logits_only \
            else differences(name, condition, expected, got, counts)
        first = min(pairs, key=lambda d: (d.position, _RANK.index(d.what)), default=None)
        if first is not None:
            found.append(first)
    return found


_RANK = ["logits", "logprob", "top logprob", "token", "finish"]


def differences(name: str, condition: str, expected: Served, found: Served, counts: Counts
                ) -> Iterator[Difference]:
    """All differences of one request; what follows a differing token is not comparable."""
    first = len(expected.prompt) - 1  # the row that chooses the first token
    equal = _equal_tokens(expected.tokens, found.tokens)
    counts.tokens += equal
    counts.bits += 32 * equal
    yield from logits(name, condition, expected, found, first + equal, counts)
    for i, (a, b) in enumerate(zip(expected.logprobs or [], found.logprobs or [], strict=False)):
        if i < equal:
            yield from _logprobs(name, condition, first + i, a, b, counts)
    if equal < max(len(expected.tokens), len(found.tokens)):
        want, got = (f"{x[equal]} (0x{x[equal]:08x})" if equal < len(x) else "the end"
                     for x in (expected.tokens, found.tokens))
        yield Difference(name, condition, "token", first + equal, None,
                         f"{got}, expected {want}: token {equal} of the output")
    elif expected.finish_reason != found.finish_reason:
        yield Difference(name, condition, "finish", first + equal, None,
                         f"{found.finish_reason}, expected {expected.finish_reason}")


def logits(name: str, condition: str, expected: Served, found: Served, last: int, counts: Counts
           ) -> Iterator[Difference]:
    """Rows of logits that differ, among the positions up to ``last``."""
    known: dict[int, Logits] = {row.position: row for row in expected.logits}
    for row in found.logits:
        want = known.get(row.position)
        if want is not None and row.position <= last:
            counts.rows += 1
            counts.bits += want.row.nbytes * 8
            element = first_element(want.row, row.row)
            if element is not None:
                yield Difference(name, condition, "logits", row.position, row.step, str(element))


def _equal_tokens(a: list[int], b: list[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _logprobs(name: str, condition: str, position: int, a: TokenLogprobs, b: TokenLogprobs,
              counts: Counts) -> Iterator[Difference]:
    """Chosen and top: they came out of the Program as f32, so as f32 they are exact."""
    counts.logprobs += 1 + len(a.top)
    counts.bits += 32 + 64 * len(a.top)
    element = _f32([a.chosen], [b.chosen])
    if element is not None:
        yield Difference(name, condition, "logprob", position, None, str(element))
    ids = [token for token, _ in a.top], [token for token, _ in b.top]
    if ids[0] != ids[1]:
        yield Difference(name, condition, "top logprob", position, None,
                         f"ids {ids[1]}, expected {ids[0]}")
        return
    element = _f32([x for _, x in a.top], [x for _, x in b.top])
    if element is not None:
        yield Difference(name, condition, "top logprob", position, None, str(element))


def _f32(a: list[float], b: list[float]) -> Element | None:
    return first_element(np.array(a, np.float32), np.array(b, np.float32))
