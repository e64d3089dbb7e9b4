"""Any sequence of moves: what requests give is what their prompts and params say, and no state is
lost, however they are added, stepped, aborted, preempted and starved, and whatever fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deepinfer.program import Program
from deepinfer.runtime.request import RequestOutput, SamplingParams
from tests.runtime.engine_cases import require_all_free
from tests.runtime.fake_device import fake_engine, fake_program
from tests.runtime.fake_grammar import allowed_at, grammar_of, with_fake_grammars
from tests.runtime.fake_sampler import solo_tokens
from tests.runtime.test_text import TEXT

SEEN: Counter[str] = Counter()  # that what the machine is for did occur
CRASH = 4
KINDS: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0),
    "narrow": dict(temperature=0, draft_width=2),
    "sampled": dict(temperature=0.75, seed=3, frequency_penalty=1, repetition_penalty=1.25),
    "scored": dict(temperature=0, prompt_logprobs=1),
    "grammar": dict(temperature=0.5, structured=grammar_of(1, 7)),
    "crash": dict(temperature=0, structured=grammar_of(2, 50, crash=CRASH)),
    "broken": dict(temperature=0, structured=grammar_of(0, 5, broken=True)),
}


@cache
def program() -> Program:
    return fake_program(page_size=8, max_model_len=64)


@dataclass
class Wanted:
    """Of a request: what it must give. shown: tokens handed out so far."""

    kind: str
    prompt: list[int]
    tokens: list[int]
    reason: str
    shown: int = 0

    @staticmethod
    def of(kind: str, prompt: list[int], params: SamplingParams) -> Wanted:
        phase, length = {"grammar": (1, 7), "crash": (2, 50)}.get(kind, (0, 0))
        count = min(params.max_tokens, length or params.max_tokens)
        short = SamplingParams(**{**params.to_json(), "structured": None, "max_tokens": count})
        tokens = solo_tokens(prompt, short, grammar=(
            (lambda made: allowed_at(phase, made)) if length else None))
        reason = "stop" if length == count else "length"
        if kind == "broken" or kind == "crash" and count > CRASH:
            reason, tokens = "error", tokens[:CRASH if kind == "crash" else 0]
        return Wanted(kind, prompt, tokens, reason)

    def check(self, out: RequestOutput) -> None:
        made = len(out.token_ids)
        assert out.token_ids == self.tokens[:made] and made >= self.shown
        assert [x.chosen for x in out.logprobs] == [-len(self.prompt) - k for k in range(made)]
        self.shown = made
        if not out.finished:
            return
        assert out.finish_reason == self.reason, (out, self)
        if self.kind == "scored":
            assert [x.chosen for x in out.prompt_logprobs[1:]] == [
                -n for n in range(1, len(self.prompt))]
        assert made == len(self.tokens)
        assert (out.error is not None) is (self.reason == "error")


class EngineMachine(RuleBasedStateMachine):
    @initialize(draft=st.sampled_from(["off", "fixed", "adaptive"]), overlap=st.booleans(),
                prefix=st.sampled_from(["exact", "replay", "off"]), interval=st.integers(1, 3),
                replay=st.sampled_from(["off", "mask", "compact"]), seqs=st.integers(1, 4),
                rows=st.sampled_from([24, 40]), chunk=st.sampled_from([None, 3, 8]),
                pages=st.integers(7, 20), hold=st.booleans())
    def start(self, draft, overlap, prefix, interval, replay, seqs, rows, chunk, pages, hold):
        width = 0 if draft == "off" else 5
        largest = rows - (seqs - 1) * (1 + width)
        self.engine, self.device = fake_engine(
            program(), draft=draft, overlap=overlap, prefix_cache=prefix, replay=replay, text=TEXT,
            snapshot_interval=interval, max_num_seqs=seqs, max_num_batched_tokens=rows,
            prefill_chunk=chunk and min(chunk, largest), num_pages=pages)
        self.compiler = with_fake_grammars(self.engine, hold=hold)
        self.wanted: dict[str, Wanted] = {}
        self.pages = pages
        self.failing = self.broken = False
        run = self.device.run

        def maybe(*args, **given):
            if self.failing:
                self.failing = False
                raise OSError("the device is lost")
            return run(*args, **given)

        self.device.run = maybe

    @rule(family=st.integers(0, 2), length=st.integers(1, 40), count=st.integers(1, 12),
          kind=st.sampled_from(sorted(KINDS)), salt=st.sampled_from(["", "", "s"]))
    def add(self, family, length, count, kind, salt):
        prompt = [10 + family + i * (family + 1) for i in range(length)]
        self._add(kind, prompt, max_tokens=min(count, 64 - length), cache_salt=salt)

    def _add(self, kind: str, prompt: list[int], **given: Any) -> None:
        params = SamplingParams(ignore_eos=True, logprobs=0, **KINDS[kind], **given)
        if self.engine.sizes.pages_for(len(prompt) + params.max_tokens - 1) > self.pages:
            return
        name = self.engine.add_request(prompt, params)
        assert name not in self.wanted
        self.wanted[name] = Wanted.of(kind, prompt, params)
        SEEN[kind] += 1

    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        self.broken = True  # unless it ends well
        if not self.engine.scheduler.requests:
            self.compiler.release()  # else the engine waits for it
        try:
            outputs = self.engine.step()
        except OSError:
            SEEN["lost"] += 1
            outputs = []
        for out in outputs:
            self.wanted[out.request_id].check(out)
            if out.finished:
                del self.wanted[out.request_id]
        self.engine.check()
        self.broken = False

    @precondition(lambda self: self.wanted)
    @rule(at=st.integers(0, 5))
    def abort(self, at):
        name = list(self.wanted)[at % len(self.wanted)]
        if self.engine.abort(name):
            del self.wanted[name]
            SEEN["aborted"] += 1
        assert not self.engine.abort(name)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(at=st.integers(0, 3), count=st.integers(1, 4))
    def preempt(self, at, count):
        running = self.engine.scheduler.running
        name = running[at % len(running)].request_id
        assert self.engine.preempt(name) and not self.engine.preempt(name)
        SEEN["preempted by hand"] += 1
        self.step(count)

    @rule(length=st.integers(5, 40), count=st.integers(4, 24),
          kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=4))
    def crowd(self, length, count, kinds):
        """Requests that want more pages than there are."""
        for family, kind in enumerate(kinds):
            self._add(kind, [20 + family] * length, max_tokens=min(count, 64 - length))
        self.step(len(kinds))

    @rule(pages=st.integers(0, 12))
    def resize(self, pages):
        self.engine.pool.resize(min(pages, self.engine.sizes.num_pages))
        SEEN["resized"] += 1

    @rule()
    def restore(self):
        self.engine.pool.resize(self.engine.sizes.num_pages)

    @precondition(lambda self: self.compiler.held)
    @rule()
    def compiled(self):
        self.compiler.release()
        SEEN["compiled late"] += 1

    @rule()
    def lose_the_device(self):
        """The next call fails."""
        self.failing = True

    @rule()
    def flush(self):
        self.engine.prefix.clear()

    @invariant()
    def state_is_whole(self):
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self):
        if not hasattr(self, "engine") or self.broken:
            return
        self.restore()
        self.failing = False
        # One request at a time, a row a step, computed twice: that must do.
        for _ in range(20 + 2 * sum(len(w.prompt) + len(w.tokens) for w in self.wanted.values())):
            if not self.engine.has_unfinished():
                break
            self._step()
        assert not self.wanted and not self.engine.has_unfinished()
        require_all_free(self.engine)
        stats = self.engine.stats()
        for name in ("preemptions", "hit_tokens", "accepted"):
            SEEN[name] += getattr(stats, name)
        self.engine.close()
        assert self.device.closed and self.compiler.closed


def run_sequences(count: int) -> None:
    SEEN.clear()
    run_state_machine_as_test(EngineMachine, settings=hypothesis.settings(
        max_examples=count, stateful_step_count=25,
        suppress_health_check=list(hypothesis.HealthCheck)))
    for what in (*KINDS, "aborted", "preempted by hand", "resized", "lost", "compiled late",
                 "preemptions", "hit_tokens", "accepted"):
        assert SEEN[what], f"no sequence had any '{what}'"


def test_some_sequences():
    run_sequences(25)


@pytest.mark.full
def test_two_thousand_sequences():
    run_sequences(2000)
