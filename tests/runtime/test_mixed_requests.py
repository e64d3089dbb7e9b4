"""64 different requests at once, compiled: each gets the bits of its solo, draft-free run.

Greedy and sampled, stop strings, JSON and choices, penalties, biases, prefix hits, aborts, forced
preemptions, adaptive and fixed drafts, all in one engine. Cases A3, A4, B1, B10, C3, D5.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.runtime.engine import StepRecord
from deepinfer.runtime.request import RequestOutput

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 22, 333]}},
          "required": ["a", "b"], "additionalProperties": False}
COUNT = 64


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts with shared beginnings and every kind of parameter."""
    rng = np.random.default_rng(5)
    shared = [rng.integers(3, 259, 120).tolist() for _ in range(3)]
    made = []
    for i in range(COUNT):
        prompt = [0, *shared[i % 3][:(7 * i) % 110], *rng.integers(3, 259, i % 5 + 1).tolist()]
        given: dict[str, Any] = {"max_tokens": 6 + i % 17, "seed": i, "logprobs": 2,
                                 "temperature": 0 if i % 3 == 0 else 0.8 + 0.1 * (i % 4)}
        match i % 8:
            case 1:
                given |= {"repetition_penalty": 1.3, "presence_penalty": 0.5}
            case 2:
                given |= {"frequency_penalty": 0.7, "logit_bias": {70: 2.0, 80: -3.0}}
            case 3:
                given |= {"structured": {"json": SCHEMA}, "max_tokens": 40}
            case 4:
                given |= {"structured": {"choice": ["yes", "no", "perhaps"]}}
            case 5:
                given |= {"stop": ["a", "e", "\n"], "top_p": 0.9}
            case 6:
                given |= {"allowed_token_ids": list(range(60, 110)), "min_tokens": 4, "top_k": 9}
            case 7:
                given |= {"prompt_logprobs": 1, "draft_width": i % 6, "min_p": 0.05}
        made.append((prompt, SamplingParams(**given)))
    return made


def result(out: RequestOutput) -> tuple[Any, ...]:
    """All that a request's bits decide."""
    return (out.token_ids, out.text, out.finish_reason, out.stop_reason, out.logprobs,
            out.prompt_logprobs, out.error)


def serve(llm: LLM, asked: Sequence[tuple[list[int], SamplingParams]], seed: int
          ) -> tuple[dict[str, RequestOutput], set[str], list[StepRecord]]:
    """All of them, arriving over time, with forced preemptions and aborts of extra requests."""
    engine, rng = llm.engine, random.Random(seed)
    records: list[StepRecord] = []
    engine.on_step = records.append
    waiting, extra = list(range(len(asked))), set()
    rng.shuffle(waiting)
    done: dict[str, RequestOutput] = {}
    while waiting or engine.has_unfinished():
        for _ in range(rng.randrange(4)):
            if waiting:
                i = waiting.pop()
                engine.add_request(*asked[i], request_id=f"r{i}")
        if rng.random() < 0.2 and waiting:
            name = f"x{len(extra)}"
            extra.add(name)
            engine.add_request(asked[rng.randrange(len(asked))][0], SamplingParams(max_tokens=30),
                               request_id=name)
        if rng.random() < 0.4:
            engine.preempt(f"r{rng.randrange(len(asked))}")
        if rng.random() < 0.15 and extra:
            engine.abort(rng.choice(sorted(extra)))
        done |= {out.request_id: out for out in engine.step() if out.finished}
        engine.check()
    engine.on_step = None
    return done, extra, records


@pytest.fixture(scope="module")
def alone(tiny, compiled) -> tuple[list[Any], list[Any]]:
    """The requests, and the result of each by itself: no drafts, no cache, no overlap."""
    asked = requests()
    with LLM(tiny, program=compiled, progress=False, draft="off", prefix_cache="off",
             overlap=False) as llm:
        return asked, [result(llm.generate([p], q)[0]) for p, q in asked]


@pytest.mark.parametrize("settings", [
    {"draft": "adaptive"}, {"draft": "fixed", "overlap": False},
    {"draft": "fixed", "snapshot_interval": 1, "prefill_chunk": 20}], ids=str)
def test_each_equals_its_solo_run(tiny, compiled, alone, settings):
    asked, expected = alone
    with LLM(tiny, program=compiled, progress=False, **settings) as llm:
        pool = llm.engine.pool
        before = pool.free_pages, pool.free_slots
        done, extra, records = serve(llm, asked, seed=3)
        assert (pool.free_pages, pool.free_slots) == before
        stats = llm.stats()
    for i, want in enumerate(expected):
        assert result(done[f"r{i}"]) == want, i
    # All of it occurred.
    assert stats.preemptions > 3 and stats.hit_tokens > 0 and 0 < stats.accepted < stats.verified
    assert extra - done.keys(), "no request was aborted"
    assert max(len(r.rows) for r in records) == 8
    assert {r.phase for r in records} >= {"prefill", "verify"}
    reasons = {(out.finish_reason, type(out.stop_reason)) for out in done.values()}
    assert {("length", type(None)), ("stop", str)} <= reasons
    for i, (_, params) in enumerate(asked):
        if params.structured is not None and done[f"r{i}"].finish_reason == "stop":
            assert done[f"r{i}"].text[0] in "{ynp"
