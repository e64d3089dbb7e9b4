"""The engine: the only thing with state. It schedules requests, runs steps and commits results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.errors import DeepInferError, RequestError
from deepinfer.program import Program
from deepinfer.runtime.ahead import Ahead
from deepinfer.runtime.batch import Rows
from deepinfer.runtime.beside import Beside
from deepinfer.runtime.calibration import load_calibration
from deepinfer.runtime.cost import CostCurve, Machine
from deepinfer.runtime.draft import Mode, WidthPolicy
from deepinfer.runtime.execute import Device, Executor, Masks, TargetStep
from deepinfer.runtime.grammar_spec import GrammarLimits
from deepinfer.runtime.pages import PagePool
from deepinfer.runtime.prefix import Hit, PrefixCache
from deepinfer.runtime.replay import kept_tokens
from deepinfer.runtime.request import Request, RequestOutput, SamplingParams, check_prompt, is_int
from deepinfer.runtime.scheduler import Scheduler
from deepinfer.runtime.state import PARTS, StateSizes
from deepinfer.runtime.stats import EngineStats, StepRecord
from deepinfer.runtime.steady import Steady
from deepinfer.runtime.store import PageStore
from deepinfer.runtime.structured import Structured
from deepinfer.runtime.text import Text
from deepinfer.runtime.timeline import Timeline
from deepinfer.runtime.verdict import Drafter, Round, Verdicts, Verification

Array = np.ndarray[Any, Any]
T = TypeVar("T")


class Engine:
    """Serves requests with one Program on one device. Not thread-safe.

    Args:
        program: what to run; all model facts come from its manifest.
        device: holds the weights and state of at least ``sizes``.
        sizes: state of the device. max_num_batched_tokens: rows of one step.
        max_model_len: tokens of a request, prompt and output; default: the Program's.
        prefill_chunk: rows of a prefill chunk; None: the largest that always fits.
        text: the tokenizer; without it outputs have no text and requests no stop texts.
        model: the checkpoint's directory, for ``fingerprint`` and the draft's calibration.
        prefix_cache: "exact" (bits of a cold run), "replay" (approximate: the last window before a
            hit's end is computed again instead of kept), or "off".
        cache_dir: a directory where cached prefixes outlive the engine, shared by processes.
        cache_dir_bytes: of all its entries; what was used least recently goes first.
        snapshot_interval: pages per snapshot of the rings, in "exact".
        replay: bounded replay of the prompt by the layers after the cut (approximate): "off",
            "mask" (all rows computed) or "compact" (only those kept; the same bits as "mask").
        keep_tokens: positions at a prompt's end that those layers compute; default: the model's.
        draft: "fixed", "adaptive" or "off"; no output depends on it. draft_width: drafts a step.
        verification: "exact" (the target's own tokens), or "rejection" or "block", which keep only
            the target's distribution.
        overlap: prepare outputs while the device works; no output depends on it.
        grammar_limits: on the size of structured output's grammars and the time they take.
        fingerprint: of the weights, where it is known.

    Raises:
        RequestError: settings that do not fit each other.
    """

    def __init__(self, program: Program, device: Device, sizes: StateSizes, *,
                 max_num_batched_tokens: int, max_model_len: int | None = None,
                 prefill_chunk: int | None = None, text: Text | None = None,
                 model: Path | None = None, prefix_cache: Any = "exact",
                 cache_dir: str | Path | None = None, cache_dir_bytes: int | None = None,
                 snapshot_interval: int = 8,
                 replay: str = "off", keep_tokens: int | None = None, draft: Mode = "fixed",
                 draft_width: int | None = None, verification: Verification = "exact",
                 overlap: bool = True, grammar_limits: GrammarLimits | None = None,
                 fingerprint: str = "") -> None:
        self.program, self.device, self.sizes, self.text = program, device, sizes, text
        self.facts: Mapping[str, Any] = program.manifest["facts"]
        self.max_model_len = max_model_len or int(self.facts["max_model_len"])
        self._eos = frozenset(self.facts["eos"])
        self._model, self._fingerprint = model, fingerprint
        if not self.facts["block"]:
            draft = "off"
        curve = CostCurve.load(program, Machine.of(program, device))
        self.policy = WidthPolicy.of(self.facts, draft, draft_width, curve)
        self._drafts = self.policy.width > 0
        self.replay, self._keep = replay, kept_tokens(
            replay, keep_tokens, window=int(self.facts["window"]), drafts=self.policy.width,
            default=int(self.facts["replay_keep"]), can_replay=bool(self.facts["replay"]),
            where="Engine")
        block = int(self.facts["block"])
        calibration = (1.0,) * block if model is None else load_calibration(model, block)
        self.executor = Executor(program, device, sizes.pages_per_seq, calibration)
        self.pool = PagePool(sizes.num_pages, sizes.num_slots)
        parts = [p for p in PARTS if p == "encoder" or (replay == "off" and (
            p != "draft" or self._drafts))]
        digest = str(program.manifest.get("digest", ""))
        identity = f"{digest} {self.fingerprint if cache_dir else ''} {replay} {self._keep}"
        self.prefix = PrefixCache(
            self.pool, device, self.facts, prefix_cache, snapshot_interval, sizes.snapshot_bytes,
            identity, None if cache_dir is None else PageStore(
                cache_dir, identity, max_bytes=cache_dir_bytes),
            parts=parts, keep_tokens=self._keep or 1)
        self.scheduler = Scheduler(
            sizes, self.pool, self.prefix, max_num_batched_tokens=max_num_batched_tokens,
            draft_width=self.policy.width, chunk=prefill_chunk, keep_tokens=self._keep,
            on_admit=self._admitted, on_preempt=self._publish_pages)
        self.verdicts = Verdicts(self.executor, self.policy, verification)
        self.structured = Structured(text, int(self.facts["vocab_size"]), self._eos,
                                     grammar_limits)
        self.overlap = overlap
        self.steps = 0  # steps run; each has one call of the target and at most one of the draft
        self.trace: tuple[str, ...] = ()  # values of the target phase that StepRecord holds
        self.on_step: Callable[[StepRecord], None] | None = None
        self.drafter: Drafter | None = None  # replaces the model's drafts
        self._stats = EngineStats()
        self._requests: dict[str, Request] = {}
        self._changed: list[Request] = []  # their outputs are due
        self._outputs: list[RequestOutput] = []  # made and not handed out
        self._hits: dict[str, int] = {}
        self._ahead: Ahead | None = None
        self._past: tuple[Ahead | None, Ahead | None] = (None, None)  # the last two that ran
        self._next_id = 0
        self._worker = Beside() if overlap else None

    @property
    def fingerprint(self) -> str:
        """sha256 over all weights; with the Program's digest it says what results depend on.

        Where it is not known yet, every byte of the checkpoint is read, when first asked for.
        """
        if not self._fingerprint:
            if self._model is None:
                raise DeepInferError("the engine was made without a checkpoint directory",
                                     where="Engine.fingerprint", next="pass model=")
            with CheckpointReader(self._model) as reader:
                self._fingerprint = reader.fingerprint()
        return self._fingerprint

    @property
    def timeline(self) -> Timeline | None:
        """Set one to have host and device work recorded."""
        return self.executor.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self.executor.timeline = timeline

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None,
                    request_id: str | None = None, index: int = 0) -> str:
        """Queue a request; the next ``step`` may run it.

        Args:
            index: which of the n completions of a caller's request this is.

        Returns:
            Its id.

        Raises:
            RequestError: the request cannot be served. Others are not affected.
        """
        params = SamplingParams() if params is None else params
        if request_id is None:
            request_id = self.new_id()
        elif request_id in self._requests:
            raise RequestError(f"request id '{request_id}' is in use, expected a new one",
                               where="request_id", next="choose another or let the engine choose")
        request = Request.make(
            request_id, prompt_token_ids, params, vocab_size=int(self.facts["vocab_size"]),
            eos=self._eos, max_model_len=self.max_model_len, text=self.text, now=time.monotonic())
        request.index, request.arrival = index, self._next_id
        self._next_id += 1
        request.most_drafts = self.policy.width_of(params.draft_width)
        if self._keep and params.prompt_logprobs is None:
            request.replay_floor = max(0, request.prompt_len - self._keep)
            request.keep_from = request.replay_floor if self.replay == "compact" else 0
        self.sizes.require_room(request_id, request.positions)
        if params.structured is not None:
            self.structured.submit(request)
        else:
            self.scheduler.add(request)
        self._requests[request_id] = request
        self._ahead = None
        return request_id

    def new_id(self) -> str:
        """An id that no request of this engine has had from here before."""
        while True:
            self._next_id += 1
            if str(self._next_id - 1) not in self._requests:
                return str(self._next_id - 1)

    def has_unfinished(self) -> bool:
        return bool(self._requests or self._changed or self._outputs)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free what it holds. False if it is not (or no longer) here."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._ahead = None
        self._publish_pages(request)
        self._forget(request)
        self._changed = [r for r in self._changed if r is not request]
        self._outputs = [o for o in self._outputs if o.request_id != request_id]
        return True

    def preempt(self, request_id: str) -> bool:
        """Take a running request's state away, as if others needed it. False if it holds none."""
        self._ahead = None
        request = self._requests.get(request_id)
        return request is not None and self.scheduler.preempt(request)

    def step(self) -> list[RequestOutput]:
        """Run one step: a call of the target and, where drafts are wanted, one of the draft.

        Returns:
            What requests that got a token, or failed, have so far: those of this step, or with
            ``overlap`` and without drafts those of the step before.
        """
        with Timeline.host(self.timeline):
            batch, make, steady = self._next_step()
        if make is None:
            return self._hand_out()
        self.steps += 1
        step = self._beside(make, partial(self._meanwhile, batch))
        try:
            round_ = self._finish(batch, step, steady)
        except BaseException:
            self._ahead = None
            for rows in batch:  # what the draft's rings hold is not known: compute it again
                if rows.request.finished:
                    self._forget(rows.request)
                else:
                    self.scheduler.preempt(rows.request, damaged=True)
            raise
        with Timeline.host(self.timeline):
            self._note(batch, step, round_.accepted)
            for rows in batch:
                self._publish_pages(rows.request)
                if rows.request.finished:
                    self._forget(rows.request)
        return self._hand_out() if not self.overlap else self._made()

    def _finish(self, batch: Sequence[Rows], step: TargetStep, steady: Steady | None) -> Round:
        """Commit the step's tokens and run the draft; in a steady step both at once."""
        judged: list[Round] = []

        def judge() -> Round:
            if not judged:
                judged.append(self.verdicts.judge(batch, step, self.steps, time.monotonic()))
                self._changed += judged[0].changed
            return judged[0]

        def beside_the_draft() -> None:
            self.verdicts.count(judge())
            self._make_outputs()
            self._prepare_verify()

        draft = None if steady is None else self.verdicts.draft_at_once(step, steady)
        if draft is None:
            with Timeline.host(self.timeline):
                first = self.structured.first_masks(judge().drafting, self.steps)
            draft = self.verdicts.draft(step, judge(), first) if self._drafts else None
            if draft is None or not self.overlap:
                self.verdicts.count(judge())
        if draft is not None:
            proposed = self._beside(draft, beside_the_draft)
            with Timeline.host(self.timeline):
                self.verdicts.hand_out(judge(), proposed, self.drafter)
        return judge()

    def _next_step(self) -> tuple[list[Rows], Callable[[], TargetStep] | None, Steady | None]:
        """The rows of the step and what runs them, if there is anything to do; and what is known
        of it by now if it is steady."""
        ahead, self._ahead = self._ahead, None
        batch = ahead.fill() if ahead is not None else None
        self._past = (self._past[1], ahead if batch is not None else None)
        if ahead is not None and batch is not None:
            return batch, self.verdicts.target(batch, {}, self.trace, ahead), ahead.steady
        batch, masks = self._schedule()
        return batch, self.verdicts.target(batch, masks, self.trace) if batch else None, None

    def _meanwhile(self, batch: Sequence[Rows]) -> None:
        """What is done while the target works on ``batch``."""
        self._make_outputs()
        running = self.scheduler.running
        if (not self._drafts and self._all_go_on() and len(batch) == len(running)
                and self.scheduler.extend(running, [1] * len(running))):
            self._keep_ahead(Ahead.decode(self.program.phases["decode"], running, self.facts,
                                          self.sizes.pages_per_seq, self._past[0]))

    def _prepare_verify(self) -> None:
        """The next step, where it is known by now: all go on, and none needs a decision."""
        running = [r for r in self.scheduler.running if not r.finished]
        widths = [self.verdicts.width(r) for r in running]
        if (self.policy.mode == "fixed" and self.drafter is None and self._all_go_on()
                and self.scheduler.extend(running, widths)):
            self._keep_ahead(Ahead.verify(self.program.phases["verify"], running, widths,
                                          self.facts, self.sizes.pages_per_seq))

    def _all_go_on(self) -> bool:
        """Whether all decode and nobody waits to join."""
        return not (self.scheduler.waiting or self.structured.waiting) and all(
            r.decoding for r in self.scheduler.running if not r.finished)

    def _keep_ahead(self, ahead: Ahead | None) -> None:
        self._ahead = ahead
        prepare = getattr(self.device, "prepare", None)
        if ahead is not None and prepare is not None:
            prepare(ahead.phase, ahead.inputs, trace=self.trace)

    def _schedule(self) -> tuple[list[Rows], Masks]:
        for request in self.structured.ready(wait=not self.scheduler.requests):
            if request.request_id not in self._requests:
                continue  # aborted meanwhile
            if request.finished:
                self._changed.append(request)
                self._forget(request)
            else:
                self.scheduler.add(request)
        self.verdicts.assign_widths(self.scheduler.running, self.scheduler.prefill_rows)
        batch = self.scheduler.schedule()
        batch, masks, failed = self.structured.mask(batch, self.steps + 1)
        for request in failed:
            self._changed.append(request)
            self._forget(request)
        return batch, masks

    def _beside(self, work: Callable[[], T], meanwhile: Callable[[], None]) -> T:
        """Do ``work`` and, on the worker thread, ``meanwhile``; without overlap, only ``work``.

        The device's calls stay on this thread: none of them waits for another to wake up.
        """
        if self._worker is None:
            return work()

        if self.timeline is not None:
            meanwhile = self.timeline.timed("beside", meanwhile)
        self._worker.begin(meanwhile)
        try:
            return work()
        finally:
            self._worker.end()

    def _make_outputs(self) -> None:
        """The outputs of what changed; they wait here, so that a failing step loses none."""
        changed, self._changed = dict.fromkeys(self._changed), []
        self._outputs += [request.result() for request in changed]

    def _made(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _hand_out(self) -> list[RequestOutput]:
        self._make_outputs()
        return self._made()

    def _note(self, batch: Sequence[Rows], step: TargetStep, accepted: Mapping[str, int]) -> None:
        preempted, self.scheduler.preempted = self.scheduler.preempted, []
        self._stats.add(batch, accepted, len(preempted))
        if self.on_step is not None:
            self.on_step(StepRecord.of(self.steps, step, batch, accepted,
                                       [r.request_id for r in preempted], self._hits))
        self._hits = {}

    def _admitted(self, request: Request, hit: Hit) -> None:
        """A request got its state: it goes on where the cache ends."""
        request.computed, request.write_from = hit.replay_from, hit.length
        request.window_floor = hit.replay_from if hit.replay_from < hit.length else 0
        metrics = request.metrics
        if metrics.admitted is None:
            metrics.admitted = time.monotonic()
            metrics.cached_tokens = min(hit.length, request.prompt_len)
        self._stats.hit_tokens += hit.length
        if hit.length:
            self._hits[request.request_id] = hit.length

    def _publish_pages(self, request: Request) -> None:
        """Offer what a request has computed to others; not what led to an error."""
        if request.slot is None or request.finish_reason == "error":
            return
        put = self.prefix.finish if request.finished else self.prefix.commit
        put(request.request_id, request.tokens, request.computed, request.slot,
            request.params.cache_salt, request.params.cache_class, request.prompt_len)

    def _forget(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.verdicts.forget(request)
        self.structured.forget(request)
        self._requests.pop(request.request_id, None)

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
        name = str(self.facts["values"]["logits"])
        logits = np.empty((len(ids), int(self.facts["vocab_size"])), np.float32)
        try:
            request.slot = self.pool.take_slot(request.request_id)
            if request.slot is None or not self.pool.grow(request.request_id,
                                                          self.sizes.pages_for(len(ids))):
                raise RequestError(f"no state is free: {self.pool.free_slots} slots, "
                                   f"{self.pool.free_pages} pages", where="score",
                                   next="finish or abort the running requests first")
            request.pages = self.pool.table(request.request_id)
            for start in range(0, len(ids), chunk):
                rows = Rows(request, start, min(start + chunk, len(ids)), "all")
                step = self.executor.target([rows], trace=(name,), phase="prefill")()
                logits[start:rows.end] = step.outputs[name]
        finally:
            self.pool.release(request.request_id)
        return logits

    def check(self) -> None:
        """Every page and slot is free, cached, or held by running requests (tests call it often).

        Raises:
            DeepInferError: names the page, slot or request.
        """
        self.prefix.check()
        running = {r.request_id for r in self.scheduler.running}
        if self.pool.owners != running:
            raise DeepInferError(f"state is held by {sorted(self.pool.owners)}, running "
                                 f"are {sorted(running)}", where="Engine",
                                 next="this is a fault of the engine: please report it")

    def stats(self) -> EngineStats:
        """Counts since the engine was made, and what it holds now."""
        return self._stats.now(self.steps, len(self.scheduler.running), len(self._requests),
                               self.pool, self.verdicts.accepts)

    def close(self) -> None:
        """Drop all requests and close the device."""
        for request_id in list(self._requests):
            self.abort(request_id)
        if self._worker is not None:
            self._worker.close()
        self.structured.close()
        close = getattr(self.device, "close", None)
        if close is not None:
            close()


__all__ = ["Engine", "EngineStats", "StepRecord"]
