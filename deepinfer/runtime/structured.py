"""Structured output from the engine's side: grammars compile beside the steps, masks come before.

A request with a grammar joins the queue when its grammar is ready. What it may choose next is known
before a step, since the drafts are: the masks of all its rows are inputs of the call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from deepinfer.errors import DeepInferError, RequestError
from deepinfer.runtime.batch import Rows
from deepinfer.runtime.commit import fail
from deepinfer.runtime.grammar_spec import GrammarLimits
from deepinfer.runtime.request import Request
from deepinfer.runtime.text import Text

Array = np.ndarray[Any, Any]


class Structured:
    """The grammars of an engine's requests.

    Args:
        text: the tokenizer, or None. vocab_size: ids there are. eos: ids that end a text.
        limits: on the size of grammars and the time they take.
    """

    def __init__(self, text: Text | None, vocab_size: int, eos: Collection[int],
                 limits: GrammarLimits | None = None) -> None:
        self._text, self._vocab_size, self._eos = text, vocab_size, tuple(eos)
        self._compiler: Any = None
        self._limits = limits
        self._pending: dict[str, tuple[Request, Future[Any]]] = {}

    def submit(self, request: Request) -> None:
        """Start compiling the grammar of a request.

        Raises:
            RequestError: the model has no tokenizer.
        """
        if self._text is None:
            raise RequestError("structured is given, expected none: the model has no "
                               "tokenizer.json", where="SamplingParams", next="leave it out")
        if self._compiler is None:
            from deepinfer.runtime.grammar import GrammarCompiler

            self._compiler = GrammarCompiler(self._text.tokenizer, self._vocab_size, self._eos,
                                             self._limits)
        assert request.params.structured is not None
        future = self._compiler.submit(request.params.structured)
        self._pending[request.request_id] = (request, future)

    @property
    def waiting(self) -> bool:
        """Whether a grammar is being compiled."""
        return bool(self._pending)

    def ready(self, *, wait: bool) -> list[Request]:
        """Requests whose grammar is compiled, by arrival; those it failed for have ended.

        Args:
            wait: for the first, where nothing else can run.
        """
        if wait and self._pending and not any(f.done() for _, f in self._pending.values()):
            next(iter(self._pending.values()))[1].exception()
        done = [(r, f) for r, f in self._pending.values() if f.done()]
        for request, future in done:
            del self._pending[request.request_id]
            error = future.exception()
            if error is None:
                request.matcher = future.result().matcher(request.params.stop_token_ids)
            elif isinstance(error, DeepInferError):
                fail(request, error)
            else:
                raise error
        return [request for request, _ in done]

    def mask(self, batch: Sequence[Rows], step: int
             ) -> tuple[list[Rows], dict[tuple[str, int], Array], list[Request]]:
        """Mask a step's sampled rows.

        Returns:
            The rows, without drafts that cannot stand and without requests that nothing is left
            for; the masks by request and position; those requests, which have failed.
        """
        left: list[Rows] = []
        found: dict[tuple[str, int], Array] = {}
        failed = []
        for rows in batch:
            request = rows.request
            if request.matcher is None or not rows.sampled:
                left.append(rows)
                continue
            try:
                masks = self._row_masks(rows, step)
            except DeepInferError as error:
                fail(request, error)
                failed.append(request)
                continue
            cut = len(rows.drafts) + 1 - len(masks)
            left.append(replace(rows, end=rows.end - cut, drafts=rows.drafts[:len(masks) - 1]))
            first = rows.end - 1 - len(rows.drafts)
            found |= {(request.request_id, first + k): mask
                      for k, mask in enumerate(masks) if mask is not None}
        return left, found, failed

    def _row_masks(self, rows: Rows, step: int) -> list[Array | None]:
        """The masks of the anchor's row and of the drafts' up to the first that cannot stand.

        Plain decode would never ask about what comes after such a draft, so what fails there is no
        error of the request.
        """
        request, matcher = rows.request, rows.request.matcher
        grammar: list[Array | None] = matcher.draft_masks(list(rows.drafts))  # type: ignore
        at = rows.end - len(rows.drafts)  # index of the token that the anchor's row chooses
        masks = [request.mask_at(at, grammar[0], step)]
        for k, mask in enumerate(grammar[1:], 1):
            try:
                masks.append(None if mask is None else request.mask_at(at + k, mask, step))
            except DeepInferError:
                break
            if mask is None:
                masks.pop()
                break
        return masks

    def first_masks(self, drafting: Sequence[Request], step: int) -> dict[int, Array]:
        """The masks of first drafts by index; what fails here fails at the next step's masks."""
        found = {}
        for i, request in enumerate(drafting):
            matcher: Any = request.matcher
            if matcher is not None:
                try:
                    mask = request.mask_at(len(request.tokens), matcher.mask(), step)
                except DeepInferError:
                    continue
                if mask is not None:
                    found[i] = mask
        return found

    def forget(self, request: Request) -> None:
        """A request is gone."""
        pending = self._pending.pop(request.request_id, None)
        if pending is not None:
            pending[1].cancel()

    def close(self) -> None:
        """Stop compiling."""
        for request, _ in list(self._pending.values()):
            self.forget(request)
        if self._compiler is not None:
            self._compiler.close()
