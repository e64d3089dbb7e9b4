"""The engine on a device that knows what it should be asked."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from deepinfer.errors import DeepInferError, RequestError
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.request import RequestOutput, SamplingParams
from deepinfer.runtime.text import Text
from tests.runtime.fake_device import History, expected_tokens, fake_engine
from tests.runtime.test_text import TEXT, ids_of

GO_ON = {"ignore_eos": True, "temperature": 0}


def drain(engine: Engine) -> dict[str, RequestOutput]:
    """Step until nothing is left, checking the state after every step."""
    done = {}
    while engine.has_unfinished():
        for out in engine.step():
            if out.finished:
                done[out.request_id] = out
        engine.check()
    return done


def test_several_requests_of_any_length(program):
    engine, device = fake_engine(program)
    prompts = [[100 + n] * n for n in (1, 2, 7, 8, 9, 30, 16, 5)]
    ids = [engine.add_request(p, SamplingParams(max_tokens=n + 1, **GO_ON))
           for n, p in enumerate(prompts)]
    done = drain(engine)
    for n, (prompt, name) in enumerate(zip(prompts, ids, strict=True)):
        out = done[name]
        assert out.token_ids == expected_tokens(prompt, n + 1) and out.finish_reason == "length"
        assert out.prompt_token_ids == prompt and out.error is None and out.logprobs is None
        assert (out.usage.prompt_tokens, out.usage.completion_tokens) == (len(prompt), n + 1)
    assert device.calls == engine.steps
    kinds = {(phase, len(set(x["positions"].tolist()) & {0})) for phase, x in device.steps}
    assert {"prefill", "decode"} == {phase for phase, _ in kinds}
    # Steps with decode rows and prompt rows together did occur, and full ones as well.
    spans = [np.diff(x["spans"][:, 1:], axis=1).ravel() for phase, x in device.steps]
    assert any(1 in s and max(s) > 1 for s in spans) and max(map(len, spans)) == 4
    assert engine.scheduler.pool.free_pages == engine.sizes.num_pages


def test_a_step_of_decodes_uses_the_decode_phase(program):
    engine, device = fake_engine(program)
    engine.add_request([5, 6], SamplingParams(max_tokens=3, **GO_ON))
    drain(engine)
    assert [phase for phase, _ in device.steps] == ["prefill", "decode", "decode"]
    assert engine.step() == [] and device.calls == 3


def test_end_of_text_and_stop_ids(program):
    script = [10, 11, 1, 12, 13, 14]

    def choose(history: History) -> int:
        return script[len(history) - 2]

    engine, _ = fake_engine(program, choose=choose)
    params = [dict(), dict(ignore_eos=True), dict(stop_token_ids=[11, 10]), dict(max_tokens=2),
              dict(stop_token_ids=[11], min_tokens=3), dict(min_tokens=4, stop_token_ids=[12]),
              dict(max_tokens=3)]
    names = [engine.add_request([8, 9], SamplingParams(**{"max_tokens": 6, **p})) for p in params]
    done = drain(engine)
    got = [(len(done[n].token_ids), done[n].finish_reason, done[n].stop_reason) for n in names]
    assert got == [(3, "stop", 1), (6, "length", None), (1, "stop", 10), (2, "length", None),
                   (3, "stop", 1), (4, "stop", 12), (3, "stop", 1)]


def test_stop_texts_and_text_while_streaming(program):
    script = ids_of("ab€ENDc".encode())

    def choose(history: History) -> int:
        return script[len(history) - 1]

    engine, _ = fake_engine(program, choose=choose, text=TEXT)
    stopping = engine.add_request([8], SamplingParams(max_tokens=9, stop=["END", "zz"]))
    cut = engine.add_request([8], SamplingParams(max_tokens=4))
    shown: dict[str, list[str]] = {stopping: [], cut: []}
    last = {}
    while engine.has_unfinished():
        for out in engine.step():
            shown[out.request_id].append(out.text)
            last[out.request_id] = out
    assert shown[stopping] == ["a", "ab", "ab", "ab", "ab€", "ab€", "ab€", "ab€"]
    assert last[stopping].stop_reason == "END" and last[stopping].finish_reason == "stop"
    assert last[stopping].token_ids == script[:8]
    assert shown[cut] == ["a", "ab", "ab", "ab\ufffd"] and last[cut].finish_reason == "length"


def test_without_a_tokenizer(program):
    engine, _ = fake_engine(program)
    with pytest.raises(RequestError, match="has no tokenizer.json"):
        engine.add_request([8], SamplingParams(stop="x"))
    engine.add_request([8], SamplingParams(max_tokens=1))
    assert drain(engine)["0"].text == ""


def test_logprobs(program):
    engine, _ = fake_engine(program)
    two = engine.add_request([8, 9], SamplingParams(max_tokens=2, logprobs=2, **GO_ON))
    zero = engine.add_request([8, 9], SamplingParams(max_tokens=1, logprobs=0, **GO_ON))
    done = drain(engine)
    first, second = done[two].logprobs
    token = done[two].token_ids[0]
    assert first.chosen == -2 and first.top == [(token, -2), ((token + 1) % 512, -3)]
    assert second.chosen == -3 and done[zero].logprobs[0].top == []


def test_logits_that_are_not_finite_end_that_request_only(program):
    sick = [40, 41]
    engine, _ = fake_engine(program, nan=lambda h: h[:2] == (40, 41) and len(h) == 4)
    a = engine.add_request(sick, SamplingParams(max_tokens=5, **GO_ON))
    b = engine.add_request([42], SamplingParams(max_tokens=5, **GO_ON))
    done = drain(engine)
    assert done[a].finish_reason == "error" and done[a].token_ids == expected_tokens(sick, 2)
    assert "logits at position 3 are not finite" in done[a].error.what
    assert "step 3" in done[a].error.where
    assert done[b].token_ids == expected_tokens([42], 5)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6, 8])
def test_abort_at_any_time(program, steps):
    engine, _ = fake_engine(program, max_num_seqs=2)
    gone = engine.add_request([7] * 30, SamplingParams(max_tokens=3, **GO_ON))
    other = engine.add_request([9] * 5, SamplingParams(max_tokens=12, **GO_ON))
    waiting = engine.add_request([3], SamplingParams(max_tokens=12, **GO_ON))
    for _ in range(steps):
        engine.step()
    assert engine.abort(gone) is (steps < 6)  # four chunks and two decodes finish it
    assert not engine.abort(gone) and not engine.abort("nobody")
    engine.check()
    again = engine.add_request([7] * 30, SamplingParams(max_tokens=3, **GO_ON))
    done = drain(engine)
    assert gone not in done and done[again].token_ids == expected_tokens([7] * 30, 3)
    assert done[other].token_ids == expected_tokens([9] * 5, 12)
    assert done[waiting].token_ids == expected_tokens([3], 12)
    assert engine.scheduler.pool.free_pages == engine.sizes.num_pages


def test_the_end_of_the_context(program):
    engine, _ = fake_engine(program, max_model_len=20)
    edge = engine.add_request([9] * 19, SamplingParams(max_tokens=5, **GO_ON))
    near = engine.add_request([9] * 17, SamplingParams(max_tokens=5, **GO_ON))
    with pytest.raises(RequestError, match="the prompt has 20 tokens, expected at most 19"):
        engine.add_request([9] * 20)
    done = drain(engine)
    assert done[edge].token_ids == expected_tokens([9] * 19, 1)
    assert done[near].token_ids == expected_tokens([9] * 17, 3)
    assert done[near].finish_reason == "length"


def test_refused_requests_leave_nothing(program):
    engine, _ = fake_engine(program, num_pages=3)
    for prompt, message in [([], "empty"), ([512], "token id 512 is outside"), ("ab", "is 'ab'"),
                            ([5] * 22, "needs 5 pages")]:
        with pytest.raises(RequestError, match=message):
            engine.add_request(prompt, SamplingParams(max_tokens=18))
    assert not engine.has_unfinished()
    engine.add_request([5], request_id="mine")
    with pytest.raises(RequestError, match="request id 'mine' is in use"):
        engine.add_request([5], request_id="mine")
    assert drain(engine).keys() == {"mine"}


def test_request_ids_do_not_collide(program):
    engine, _ = fake_engine(program)
    given = engine.add_request([5], request_id="0")
    assert engine.add_request([5]) != given
    assert len(drain(engine)) == 2


def test_a_device_that_fails_leaves_the_engine_whole(program):
    engine, device = fake_engine(program)
    name = engine.add_request([5] * 10, SamplingParams(max_tokens=4, **GO_ON))
    engine.step()
    run, device.run = device.run, None
    with pytest.raises(TypeError):
        engine.step()
    engine.check()
    device.run = run
    assert drain(engine)[name].token_ids == expected_tokens([5] * 10, 4)


def test_score(program):
    engine, device = fake_engine(program)
    ids = [9, 8, 7, 6, 5, 4, 3, 9, 9, 9, 9]
    whole = engine.score(ids)
    assert whole.shape == (11, 512) and whole.dtype == np.float32 and device.calls == 1
    for chunk in (1, 2, 3, 10, 16):
        assert (engine.score(ids, chunk) == whole).all()
        engine.check()
    assert device.calls == 1 + 11 + 6 + 4 + 2 + 1
    assert engine.score([9] * 64).shape == (64, 512)
    for bad, message in [(0, "chunk is 0, expected 1..16"), (17, "chunk is 17")]:
        with pytest.raises(RequestError, match=message):
            engine.score(ids, bad)
    with pytest.raises(RequestError, match="expected at most 64"):
        engine.score([9] * 65)


def test_score_beside_running_requests(program):
    engine, _ = fake_engine(program, max_num_seqs=2)
    name = engine.add_request([5] * 3, SamplingParams(max_tokens=4, **GO_ON))
    engine.step()
    alone = fake_engine(program)[0].score([9, 8, 7])
    assert (engine.score([9, 8, 7]) == alone).all()
    engine.add_request([5], SamplingParams(max_tokens=4, **GO_ON))
    engine.step()
    with pytest.raises(RequestError, match="no state is free: 0 slots"):
        engine.score([9])
    assert drain(engine)[name].token_ids == expected_tokens([5] * 3, 4)


def test_fingerprint_needs_a_checkpoint(program):
    with pytest.raises(DeepInferError, match="without a checkpoint directory"):
        _ = fake_engine(program)[0].fingerprint


def test_close(program):
    engine, device = fake_engine(program, text=Text(TEXT.tokenizer, None))
    engine.add_request([5])
    engine.close()
    assert device.closed and not engine.has_unfinished()
    engine.check()


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.lists(st.one_of(
    st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 12)),
    st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 8), st.just(0)),
), max_size=25), st.integers(4, 24), st.sampled_from([None, 1, 3]), st.integers(6, 24))
def test_any_sequence_of_moves(program, moves, rows, chunk, pages):
    """Whatever is added, stepped and aborted in between, each output is its solo output."""
    engine, _ = fake_engine(program, max_num_batched_tokens=rows, num_pages=pages,
                            prefill_chunk=chunk and min(chunk, rows - 3))
    wanted, done = {}, {}
    for move, number, output in [*moves, ("step", 1000, 0)]:
        if move == "add" and engine.sizes.pages_for(number + output - 1) <= pages:
            prompt = [10 + len(wanted)] * number
            name = engine.add_request(prompt, SamplingParams(max_tokens=output, **GO_ON))
            wanted[name] = expected_tokens(prompt, output)
        elif move == "abort" and str(number) not in done and engine.abort(str(number)):
            del wanted[str(number)]
        for _ in range(number if move == "step" else 0):
            done.update((x.request_id, x.token_ids) for x in engine.step() if x.finished)
            engine.check()
            if not engine.has_unfinished():
                break
    assert done == wanted
