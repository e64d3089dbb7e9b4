"""64 mixed requests at once: each gives what it gives alone and without drafts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from deepinfer.runtime.request import SamplingParams
from tests.runtime.engine_cases import collect, drain, outcome, require_all_free, solo, watch
from tests.runtime.fake_device import expected_tokens, fake_engine, fake_program
from tests.runtime.fake_grammar import grammar_of, with_fake_grammars
from tests.runtime.test_text import TEXT

LIMIT = 160
PROGRAM = fake_program(page_size=8, max_model_len=LIMIT)
SHARED = [[3 + (seed + i * i) % 256 for i in range(90)] for seed in (0, 11)]
STOPS = ["qu", "0", "\u00e9", *"aeiou!?"]


def request_of(number: int) -> tuple[list[int], SamplingParams]:
    """Prompts with common beginnings, and every kind of params in turn."""
    rng = random.Random(number)
    prompt = [*SHARED[number % 2][:rng.randrange(90)],
              *(3 + rng.randrange(256) for _ in range(1 + rng.randrange(12)))]
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.8, "seed": number}, {"stop": STOPS},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.25},
        {"structured": grammar_of(number % 3, 5 + number % 20)},
        {"temperature": 1.5, "top_k": 40, "stop": STOPS[3:], "min_tokens": 6,
         "seed": 2**63 + number},
        {"prompt_logprobs": 1, "logit_bias": {20: 3, 21: 3.5}, "presence_penalty": 1},
        {"structured": grammar_of(1, 50, crash=number % 9), "draft_width": 0},
        {"temperature": 0.5, "structured": grammar_of(2, 9), "frequency_penalty": 2},
        {"stop_token_ids": list(range(3, 60)), "min_tokens": 2, "echo": True},
        {"allowed_token_ids": [70, 71, 72, 80], "frequency_penalty": 1, "draft_width": 2},
    ]
    return prompt, SamplingParams(**{
        "max_tokens": 8 + rng.randrange(40), "temperature": 0, "logprobs": number % 3,
        **kinds[number % len(kinds)]})


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    return [outcome(solo(PROGRAM, *request_of(n), max_model_len=LIMIT, text=TEXT))
            for n in range(64)]


@pytest.mark.parametrize("settings", [
    {"draft": "adaptive"},
    {"draft": "fixed", "prefix_cache": "replay", "replay": "compact"},
    {"draft": "off", "replay": "mask"},
    {"draft": "adaptive", "overlap": False, "snapshot_interval": 1, "prefill_chunk": 8},
])
def test_mixed_requests(alone, settings):
    """Greedy and sampled, stop texts, penalties, grammars, prefix hits, aborts, forced
    preemptions and drafts, in a pool that holds a part of them; a crash of a grammar ends its own
    request only."""
    rng = random.Random(7)
    engine, device = fake_engine(PROGRAM, max_model_len=LIMIT, max_num_seqs=8, num_pages=60,
                                 max_num_batched_tokens=64, text=TEXT,
                                 **{"snapshot_interval": 2, **settings})
    with_fake_grammars(engine)
    records = watch(engine)
    unsent, names, done, aborted = list(range(64)), {}, {}, set()
    rng.shuffle(unsent)
    while unsent or engine.has_unfinished():
        for number in unsent[:rng.randrange(4)]:
            names[number] = engine.add_request(*request_of(number))
            unsent.remove(number)
        if rng.random() < 0.1:
            engine.preempt(rng.choice(list(names.values()) or ["none"]))
        if len(aborted) < 5 and rng.random() < 0.2 and names:
            number = rng.choice(list(names)[-8:])
            aborted |= {number} if engine.abort(names[number]) else set()
        collect(engine, done)
    for number, name in names.items():
        if number in aborted:
            assert name not in done
        else:
            assert outcome(done[name]) == alone[number], number
    stats = engine.stats()
    assert aborted and stats.preemptions > 3 and stats.hit_tokens > 50
    assert (stats.accepted > 50) is (settings["draft"] != "off")
    assert max(len(r.rows) for r in records) == 8
    reasons = {found["reason"] for found in alone} | {type(found["stop"]) for found in alone}
    assert reasons >= {"stop", "length", "error", str, int, type(None)}
    require_all_free(engine)


@pytest.mark.parametrize("crash", [{"crash": 0}, {"crash": 2}, {"broken": True}])
def test_a_grammar_that_fails_ends_its_request_only(program, crash):
    """When it is compiled, at its first mask, and later."""
    engine, _ = fake_engine(program, text=TEXT)
    with_fake_grammars(engine)
    sound = SamplingParams(max_tokens=9, temperature=0, structured=grammar_of(1, 20))
    before = engine.add_request([5, 6], sound)
    bad = engine.add_request([5, 6], SamplingParams(max_tokens=9, temperature=0,
                                                    structured=grammar_of(0, 20, **crash)))
    after = engine.add_request([5, 7], sound)
    plain = engine.add_request([5], SamplingParams(max_tokens=9, temperature=0))
    done = drain(engine, most=50)
    assert done.keys() == {before, bad, after, plain}
    assert done[bad].finish_reason == "error" and (
        len(done[bad].token_ids) == crash.get("crash", 0))
    assert done[plain].token_ids == expected_tokens([5], 9)
    assert outcome(done[after]) == outcome(solo(program, [5, 7], sound, text=TEXT))
    require_all_free(engine)


def test_a_grammar_that_compiles_late(program):
    """Others run meanwhile; an abort before it is ready leaves nothing; close waits for nobody."""
    engine, _ = fake_engine(program, text=TEXT, draft="off", overlap=False)
    compiler = with_fake_grammars(engine, hold=True)
    params = SamplingParams(max_tokens=5, temperature=0, structured=grammar_of(1, 20))
    late, gone = engine.add_request([5, 6], params), engine.add_request([5, 6], params)
    plain = engine.add_request([5], SamplingParams(max_tokens=5, temperature=0))
    shown = [[out.request_id for out in engine.step()] for _ in range(2)]
    assert shown == [[plain], [plain]] and engine.abort(gone)
    compiler.release()
    done = drain(engine)
    assert done.keys() == {late, plain}
    assert outcome(done[late]) == outcome(solo(program, [5, 6], params, text=TEXT))
    engine.add_request([5, 6], params)
    engine.close()
    assert compiler.closed and all(future.cancelled() for future, _ in compiler.held)


@pytest.mark.parametrize("draft", ["off", "fixed"])
def test_nothing_is_left_to_choose(program, draft):
    """A grammar and allowed ids that share no id end the request with an error that says so."""
    engine, _ = fake_engine(program, text=TEXT, draft=draft)
    with_fake_grammars(engine)
    name = engine.add_request([5], SamplingParams(
        max_tokens=9, temperature=0, allowed_token_ids=[3, 4], structured=grammar_of(0, 9)))
    other = engine.add_request([6], SamplingParams(max_tokens=9, temperature=0))
    done = drain(engine)
    assert "output token 2 has no allowed id" in done[name].error.what
    assert done[name].token_ids == [3, 4] and done[name].finish_reason == "error"
    assert done[other].token_ids == expected_tokens([6], 9)
