"""Grammars without a grammar library: what is allowed depends on how many tokens there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from deepinfer.errors import RequestError
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.masks import pack_mask
from tests.runtime.fake_sampler import BYTES, VOCAB

Array = np.ndarray[Any, Any]


def grammar_of(phase: int, length: int, crash: int = -1, broken: bool = False
               ) -> dict[str, str]:
    """``structured`` of a request: a third of the bytes, another one at each token.

    Args:
        phase: which third comes first. length: tokens after which nothing can follow.
        crash: the matcher raises when asked about this token; -1: never. broken: compiling fails.
    """
    return {"regex": f"{phase},{length},{crash},{int(broken)}"}


def allowed_at(phase: int, made: int) -> Array:
    """bool[512] after so many tokens."""
    ids = np.arange(VOCAB)
    return (ids % 3 == (made + phase) % 3) & (ids >= BYTES.start) & (ids < BYTES.stop)


class FakeMatcher:
    """Args: as of ``grammar_of``. accepted: tokens so far."""

    def __init__(self, phase: int, length: int, crash: int) -> None:
        self.phase, self.length, self.crash = phase, length, crash
        self.accepted: list[int] = []

    @property
    def finished(self) -> bool:
        return len(self.accepted) >= self.length

    def mask(self) -> Array:
        return self._mask_at(len(self.accepted))

    def _mask_at(self, made: int) -> Array:
        if made == self.crash:
            raise RequestError("the matcher is out of memory")
        return pack_mask(allowed_at(self.phase, made))

    def accept(self, token: int) -> bool:
        assert not self.finished
        if not allowed_at(self.phase, len(self.accepted))[token]:
            return False
        self.accepted.append(token)
        return True

    def draft_masks(self, drafts: Sequence[int]) -> list[Array | None]:
        """Of the next token and of the one after each draft, None from the first illegal draft or
        failure on: as in the real one, it fails only where the output really goes there."""
        made = len(self.accepted)
        masks: list[Array | None] = [self._mask_at(made)]
        for k, draft in enumerate(drafts):
            legal = masks[-1] is not None and allowed_at(self.phase, made + k)[draft]
            at = made + k + 1
            masks.append(self._mask_at(at) if legal and at < self.length and at != self.crash
                         else None)
        return masks


class FakeCompiler:
    """Compiles at once, or later when ``release`` is called.

    Args:
        hold: do so.
    """

    def __init__(self, hold: bool = False) -> None:
        self.hold, self.closed = hold, False
        self.held: list[tuple[Future[Any], str]] = []
        self.matchers: list[FakeMatcher] = []

    def submit(self, structured: Mapping[str, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.held.append((future, structured["regex"]))
        if not self.hold:
            self.release()
        return future

    def release(self) -> None:
        """Finish what was submitted."""
        for future, source in self.held:
            phase, length, crash, broken = map(int, source.split(","))
            if not future.set_running_or_notify_cancel():
                continue
            if broken:
                future.set_exception(RequestError("the grammar is broken"))
            else:
                matcher = FakeMatcher(phase, length, crash)
                self.matchers.append(matcher)
                future.set_result(_Grammar(matcher))
        self.held = []

    def close(self) -> None:
        self.closed = True


class _Grammar:
    def __init__(self, matcher: FakeMatcher) -> None:
        self._matcher = matcher

    def matcher(self, end_ids: object = ()) -> FakeMatcher:
        return self._matcher


def with_fake_grammars(engine: Engine, *, hold: bool = False) -> FakeCompiler:
    """Give an engine (made with a tokenizer) a compiler of these grammars."""
    compiler = FakeCompiler(hold)
    engine.structured._compiler = compiler
    return compiler
