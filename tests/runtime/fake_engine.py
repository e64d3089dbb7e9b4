"""An engine without a model: the API of ``Engine``, one token a step for each request.

The next token depends on (prompt, output so far, seed) alone, so it is known what a request must
give, whatever else happens. What it holds and what was done to it can be read off.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepinfer.errors import RequestError
from deepinfer.graph.byte_tokenizer import byte_level_tokenizer
from deepinfer.runtime.outputs import RequestMetrics, RequestOutput, TokenLogprobs, Usage
from deepinfer.runtime.params import SamplingParams
from deepinfer.runtime.text import Detokenizer, StopTexts, Text

VOCAB = 512
EOS = 1


def by_hash(prompt: Sequence[int], output: Sequence[int], seed: int) -> int:
    """A printable ASCII character's token."""
    key = f"{list(prompt)} {list(output)} {seed}".encode()
    return text().tokenizer.token_to_id(chr(97 + zlib.crc32(key) % 26))


_TEXT: list[Text] = []


def text() -> Text:
    """The tokenizer of the random checkpoints."""
    if not _TEXT:
        _TEXT.append(Text(byte_level_tokenizer(VOCAB), 0))
    return _TEXT[0]


def says(answer: str) -> Callable[[Sequence[int], Sequence[int], int], int]:
    """A model that gives this text, then the end of text."""
    ids = [*text().tokenizer.encode(answer, add_special_tokens=False).ids, EOS]
    return lambda prompt, output, seed: ids[min(len(output), len(ids) - 1)]


@dataclass
class FakeStats:
    steps: int
    requests: int


@dataclass
class _Running:
    output: RequestOutput
    params: SamplingParams
    detokenizer: Detokenizer
    stops: StopTexts


class FakeEngine:
    """Args: choose: the next token. on_step: called with the step's number before it runs."""

    def __init__(self, choose: Callable[[Sequence[int], Sequence[int], int], int] = by_hash, *,
                 on_step: Callable[[int], object] = lambda step: None, max_model_len: int = 4096
                 ) -> None:
        self.choose, self.on_step, self.max_model_len = choose, on_step, max_model_len
        self.text: Text | None = text()
        self.running: dict[str, _Running] = {}
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.steps, self.closed, self._next = 0, 0, 0
        self.inside = False

    def new_id(self) -> str:
        self._next += 1
        return str(self._next - 1)

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None,
                    request_id: str | None = None, index: int = 0) -> str:
        self._enter()
        params = params or SamplingParams()
        assert params.n == 1, "the front door makes the children"
        request_id = self.new_id() if request_id is None else request_id
        try:
            if request_id in self.running:
                raise RequestError(f"request id '{request_id}' is in use", where="request_id")
            if not len(prompt_token_ids) or max(prompt_token_ids) >= VOCAB:
                raise RequestError("the prompt is bad", where="prompt")
        finally:
            self.inside = False
        output = RequestOutput(request_id, list(prompt_token_ids), "", [], None, None, None,
                               Usage(len(prompt_token_ids), 0),
                               None if params.logprobs is None else [], index=index)
        self.running[request_id] = _Running(output, params, Detokenizer(text()),
                                            StopTexts(tuple(params.stop)))
        self.added.append(request_id)
        return request_id

    def has_unfinished(self) -> bool:
        return bool(self.running)

    def abort(self, request_id: str) -> bool:
        self._enter()
        self.inside = False
        found = self.running.pop(request_id, None)
        if found is not None:
            self.aborted.append(request_id)
        return found is not None

    def step(self) -> list[RequestOutput]:
        self._enter()
        try:
            self.steps += 1
            self.on_step(self.steps)
            outputs = [self._advance(request) for request in list(self.running.values())]
        finally:
            self.inside = False
        for output in outputs:
            if output.finished:
                del self.running[output.request_id]
        return outputs

    def _advance(self, request: _Running) -> RequestOutput:
        old, params = request.output, request.params
        token = self.choose(old.prompt_token_ids, old.token_ids, params.seed)
        ids = [*old.token_ids, token]
        ended = token == EOS and not params.ignore_eos
        matched = request.stops.add(request.detokenizer.add(token))
        reason: Any = "stop" if ended or matched else (
            "length" if len(ids) >= params.max_tokens else None)
        request.output = replace(
            old, token_ids=ids, finish_reason=reason,
            text=request.stops.text if reason else request.stops.safe,
            stop_reason=request.stops.matched or (token if ended else None),
            usage=Usage(old.usage.prompt_tokens, len(ids)),
            logprobs=None if old.logprobs is None else [
                *old.logprobs, TokenLogprobs(-float(len(ids)), [])],
            metrics=RequestMetrics(tokens=len(ids), steps=len(ids)))
        return request.output

    def stats(self) -> FakeStats:
        self._enter()
        self.inside = False
        return FakeStats(self.steps, len(self.added))

    def close(self) -> None:
        self.closed += 1
        self.running.clear()

    def _enter(self) -> None:
        """An engine is not thread-safe: two calls at once are a fault of its owner."""
        assert not self.inside and not self.closed
        self.inside = True


def expected(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """What a request gives with ``by_hash``."""
    ids: list[int] = []
    while len(ids) < count:
        ids.append(by_hash(prompt, ids, seed))
    return ids
