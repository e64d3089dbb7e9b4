"""The engine: the only thing with state. It schedules requests, runs steps and commits results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.errors import DeepInferError, RequestError
from deepinfer.program import Program
from deepinfer.runtime.batch import Rows, build_inputs
from deepinfer.runtime.pages import StateSizes
from deepinfer.runtime.request import (
    Request,
    RequestOutput,
    SamplingParams,
    Usage,
    check_prompt,
    is_int,
)
from deepinfer.runtime.sampler import Sampled
from deepinfer.runtime.scheduler import Scheduler
from deepinfer.runtime.text import Detokenizer, StopTexts, Text

Array = np.ndarray[Any, Any]
LOGITS = "head.logits"  # the value that ``score`` traces


class Device(Protocol):
    """What the engine needs of a device: one call per step. It holds weights and state."""

    def run(self, phase_name: str, inputs: Mapping[str, Array], *, trace: Iterable[str] = ()
            ) -> dict[str, Array]:
        """The phase's outputs and the traced values, by name."""


class Engine:
    """Serves requests with one Program on one device. Not thread-safe.

    Args:
        program: what to run; all model facts come from its manifest.
        device: holds the weights and state of at least ``sizes``.
        sizes: state of the device. max_num_batched_tokens: rows of one step.
        max_model_len: tokens of a request, prompt and output; default: the Program's.
        prefill_chunk: rows of a prefill chunk; None: the largest that always fits.
        text: the tokenizer; without it outputs have no text and requests no stop texts.
        model: the checkpoint's directory, for ``fingerprint``.

    Raises:
        RequestError: settings that do not fit each other.
    """

    def __init__(self, program: Program, device: Device, sizes: StateSizes, *,
                 max_num_batched_tokens: int, max_model_len: int | None = None,
                 prefill_chunk: int | None = None, text: Text | None = None,
                 model: Path | None = None) -> None:
        self.program, self.device, self.sizes, self.text = program, device, sizes, text
        self.facts: Mapping[str, Any] = program.manifest["facts"]
        self.max_model_len = max_model_len or int(self.facts["max_model_len"])
        self.scheduler = Scheduler(sizes, max_num_batched_tokens=max_num_batched_tokens,
                                   chunk=prefill_chunk)
        self.steps = 0  # steps run; each is one call of the device
        self._eos = frozenset(self.facts["eos"])
        self._model = model
        self._fingerprint: str | None = None
        self._requests: dict[str, Request] = {}
        self._texts: dict[str, tuple[Detokenizer, StopTexts]] = {}
        self._next_id = 0

    @property
    def fingerprint(self) -> str:
        """sha256 over all weights; with the Program's digest it says what results depend on.

        It reads every byte of the checkpoint once, when first asked for.
        """
        if self._fingerprint is None:
            if self._model is None:
                raise DeepInferError("the engine was made without a checkpoint directory",
                                     where="Engine.fingerprint", next="pass model=")
            with CheckpointReader(self._model) as reader:
                self._fingerprint = reader.fingerprint()
        return self._fingerprint

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None,
                    request_id: str | None = None) -> str:
        """Queue a request; the next ``step`` may run it.

        Returns:
            Its id.

        Raises:
            RequestError: the request cannot be served. Others are not affected.
        """
        params = SamplingParams() if params is None else params
        prompt = check_prompt(prompt_token_ids, int(self.facts["vocab_size"]),
                              self.max_model_len - 1)
        if params.stop and self.text is None:
            raise RequestError(f"stop is {params.stop!r}, expected none: the model has no "
                               "tokenizer.json", where="SamplingParams",
                               next="use stop_token_ids")
        if request_id is None:
            request_id = self.new_id()
        elif request_id in self._requests:
            raise RequestError(f"request id '{request_id}' is in use, expected a new one",
                               where="request_id", next="choose another or let the engine choose")
        longest = min(len(prompt) + params.max_tokens, self.max_model_len)
        request = Request(request_id, params, prompt, len(prompt), longest)
        self.scheduler.add(request)
        self._requests[request_id] = request
        if self.text is not None:
            self._texts[request_id] = (Detokenizer(self.text), StopTexts(tuple(params.stop)))
        return request_id

    def new_id(self) -> str:
        """An id that no request of this engine has had from here before."""
        while True:
            self._next_id += 1
            if str(self._next_id - 1) not in self._requests:
                return str(self._next_id - 1)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free what it holds. False if it is not (or no longer) here."""
        request = self._requests.get(request_id)
        if request is not None:
            self._forget(request)
        return request is not None

    def step(self) -> list[RequestOutput]:
        """Run one step: at most one call of the device.

        Returns:
            What each request that got a token, or failed, has so far.
        """
        batch = self.scheduler.schedule()
        if not batch:
            return []
        sampled = Sampled.of(*self._run(batch, ()))
        outputs, row = [], 0
        for rows in batch:
            rows.request.computed = rows.end
            if rows.sample == "last":
                self._commit(rows.request, sampled, row)
                outputs.append(self._output(rows.request))
                row += 1
                if rows.request.finish_reason is not None:
                    self._forget(rows.request)
        return outputs

    def score(self, token_ids: Sequence[int], chunk: int | None = None) -> Array:
        """The logits after every position of a text; it runs alone, between steps.

        Args:
            token_ids: up to max_model_len ids. chunk: rows of a step; no bit depends on it.

        Returns:
            f32[len(token_ids), vocab_size]; row i is about the token after token_ids[i].

        Raises:
            RequestError: bad ids or chunk, or all state is held by running requests.
        """
        limit = self.scheduler.max_num_batched_tokens
        ids = check_prompt(token_ids, int(self.facts["vocab_size"]), self.max_model_len)
        chunk = min(limit, len(ids)) if chunk is None else chunk
        if not is_int(chunk) or not 1 <= chunk <= limit:
            raise RequestError(f"chunk is {chunk}, expected 1..{limit}", where="score",
                               next="lower it or raise max_num_batched_tokens")
        request = Request(f"score-{self.new_id()}", SamplingParams(temperature=0), ids, len(ids),
                          len(ids) + 1)
        taken = self.scheduler.pool.take(request.request_id, self.sizes.pages_for(len(ids)))
        if taken is None:
            raise RequestError(f"no state is free: {self.scheduler.pool.free_slots} slots, "
                               f"{self.scheduler.pool.free_pages} pages", where="score",
                               next="finish or abort the running requests first")
        request.slot, request.pages = taken
        logits = np.empty((len(ids), int(self.facts["vocab_size"])), np.float32)
        try:
            for start in range(0, len(ids), chunk):
                rows = Rows(request, start, min(start + chunk, len(ids)), "all")
                logits[start:rows.end] = self._run([rows], (LOGITS,), "prefill")[1][LOGITS]
        finally:
            self.scheduler.pool.release(request.request_id)
        return logits

    def check(self) -> None:
        """Every page and slot is free or held by one running request (tests call it each step).

        Raises:
            DeepInferError: names the page, slot or request.
        """
        self.scheduler.pool.check()
        running = {r.request_id for r in self.scheduler.requests if r.slot is not None}
        if self.scheduler.pool.owners != running:
            raise DeepInferError(f"state is held by {sorted(self.scheduler.pool.owners)}, running "
                                 f"are {sorted(running)}", where="Engine",
                                 next="this is a fault of the engine: please report it")

    def close(self) -> None:
        """Drop all requests and close the device."""
        for request_id in list(self._requests):
            self.abort(request_id)
        close = getattr(self.device, "close", None)
        if close is not None:
            close()

    def _run(self, batch: Sequence[Rows], trace: Iterable[str], phase_name: str | None = None
             ) -> tuple[Any, dict[str, Array]]:
        """One call: "decode" when every request has the one row it samples, else "prefill"."""
        if phase_name is None:
            single = all(len(rows) == 1 and rows.sample == "last" for rows in batch)
            phase_name = "decode" if single else "prefill"
        phase = self.program.phases[phase_name]
        inputs = build_inputs(phase, batch, pages_per_seq=self.sizes.pages_per_seq,
                              max_ngram=int(self.facts["max_ngram"]))
        self.steps += 1
        return phase, self.device.run(phase_name, inputs, trace=trace)

    def _commit(self, request: Request, sampled: Sampled, row: int) -> None:
        """Append the chosen token and see whether it ends the request."""
        params = request.params
        if sampled.not_finite(row):
            request.finish_reason = "error"
            request.error = RequestError(
                f"the logits at position {request.computed - 1} are not finite",
                where=f"request {request.request_id}, step {self.steps}",
                next="check the weights with `deepinfer score`")
            return
        token = int(sampled.tokens[row])
        request.tokens.append(token)
        if params.logprobs is not None:
            request.logprobs.append(sampled.logprobs(row, params.logprobs))
        made = len(request.tokens) - request.prompt_len
        active = made >= params.min_tokens
        ends = token in params.stop_token_ids or (token in self._eos and not params.ignore_eos)
        if active and ends:
            request.finish_reason, request.stop_reason = "stop", token
        elif self._stops_text(request, token, active):
            request.finish_reason = "stop"
        elif len(request.tokens) >= request.max_len:
            request.finish_reason = "length"

    def _stops_text(self, request: Request, token: int, active: bool) -> bool:
        if request.request_id not in self._texts:
            return False
        detokenizer, stops = self._texts[request.request_id]
        found = stops.add(detokenizer.add(token), active=active)
        request.stop_reason = stops.matched
        return found

    def _output(self, request: Request) -> RequestOutput:
        text, finished = "", request.finish_reason is not None
        if request.request_id in self._texts:
            detokenizer, stops = self._texts[request.request_id]
            if finished and stops.matched is None:
                stops.add(detokenizer.finish(), active=False)
            text = stops.text if finished else stops.safe
        output = request.output
        return RequestOutput(
            request.request_id, request.tokens[:request.prompt_len], text, output,
            request.finish_reason, request.stop_reason, request.error,
            Usage(request.prompt_len, len(output)),
            None if request.params.logprobs is None else list(request.logprobs))

    def _forget(self, request: Request) -> None:
        self.scheduler.remove(request)
        self._requests.pop(request.request_id, None)
        self._texts.pop(request.request_id, None)
