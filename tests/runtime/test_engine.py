"""The engine on a device that knows what it should be asked."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from deepinfer.errors import DeepInferError, RequestError
from deepinfer.runtime.ahead import Ahead
from deepinfer.runtime.request import SamplingParams
from deepinfer.runtime.text import Text
from deepinfer.runtime.timeline import Timeline
from tests.runtime.engine_cases import GREEDY, STEPWISE, drain, require_all_free, solo, watch
from tests.runtime.fake_device import expected_tokens, fake_engine
from tests.runtime.fake_sampler import solo_tokens
from tests.runtime.test_text import TEXT


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("draft", ["off", "fixed", "adaptive"])
def test_several_requests_of_any_length(program, draft, overlap):
    engine, device = fake_engine(program, draft=draft, overlap=overlap)
    prompts = [[100 + n] * n for n in (1, 2, 7, 8, 9, 30, 16, 5)]
    ids = [engine.add_request(p, SamplingParams(max_tokens=n + 1, **GREEDY))
           for n, p in enumerate(prompts)]
    done = drain(engine)
    for n, (prompt, name) in enumerate(zip(prompts, ids, strict=True)):
        out = done[name]
        assert out.token_ids == expected_tokens(prompt, n + 1) and out.finish_reason == "length"
        assert out.prompt_token_ids == prompt and out.error is None and out.logprobs is None
        assert (out.usage.prompt_tokens, out.usage.completion_tokens) == (len(prompt), n + 1)
    assert device.calls == engine.steps == engine.stats().steps
    phases = [phase for phase, _ in device.steps]
    assert ("decode" if draft == "off" else "verify") in phases and "prefill" in phases
    assert ("draft" in phases) is (draft != "off")
    # Steps with decode rows and prompt rows together did occur, and full ones as well.
    spans = [(x["spans"], x["positions"]) for phase, x in device.steps if phase == "prefill"]
    assert any((p[s[:, 1]] == 0).any() and (p[s[:, 1]] > 0).any() for s, p in spans)
    assert max(len(s) for s, _ in spans) == 4
    require_all_free(engine)


def test_a_step_of_decodes_uses_the_decode_phase(program):
    engine, device = fake_engine(program, **STEPWISE)
    engine.add_request([5, 6], SamplingParams(max_tokens=3, **GREEDY))
    drain(engine)
    assert [phase for phase, _ in device.steps] == ["prefill", "decode", "decode"]
    assert engine.step() == [] and device.calls == 3


def test_when_outputs_are_handed_out(program):
    """With overlap and without drafts a step's outputs come with the next call, else at once."""
    for settings, shown in [
            ({"draft": "off", "overlap": True}, [[], [1], [2], [3]]),
            ({"draft": "off", "overlap": False}, [[1], [2], [3]]),
            ({"draft": "fixed", "overlap": True}, [[1], [2], [3]]),
            ({"draft": "fixed", "overlap": False}, [[1], [2], [3]])]:
        engine, _ = fake_engine(program, **settings)
        engine.add_request([5, 6], SamplingParams(max_tokens=3, draft_width=0, **GREEDY))
        got = []
        while engine.has_unfinished():
            got.append([len(out.token_ids) for out in engine.step()])
        assert got == shown, settings
        assert engine.steps == 3 and engine.step() == []


@pytest.mark.parametrize("draft", ["off", "fixed"])
def test_the_next_step_is_prepared_beside_the_device(program, monkeypatch, draft):
    """And is, but for pages, which are taken earlier, the step that is made without overlap."""
    filled, fill = [], Ahead.fill
    monkeypatch.setattr(Ahead, "fill", lambda ahead: filled.append(fill(ahead)) or filled[-1])
    moved, move_on = [], Ahead._move_on
    monkeypatch.setattr(Ahead, "_move_on", lambda *given: moved.append(move_on(*given))
                        or moved[-1])
    runs = []
    for overlap in (False, True):
        engine, device = fake_engine(program, overlap=overlap, draft=draft)
        for n in range(3):
            engine.add_request([5 + n], SamplingParams(max_tokens=20 + 4 * n, temperature=n,
                                                       seed=n, ignore_eos=True))
        drain(engine)
        runs.append(device.steps)
        assert bool(filled) is overlap
    assert len(runs[0]) == len(runs[1]) and len(filled) > 5
    # Each set of requests needs two steps to move on, and lookbacks none before the first token.
    assert moved.count(True) == (0 if draft == "fixed" else len(filled) - 2 * 3 - 2)
    for (phase, alone), (same, beside) in zip(*runs, strict=True):
        assert phase == same and alone.keys() == beside.keys()
        for name in alone.keys() - {"pages"}:
            assert np.array_equal(alone[name], beside[name]), (phase, name)


def test_a_prepared_decode_step_is_dropped_when_a_request_ends(program, monkeypatch):
    filled, fill = [], Ahead.fill
    monkeypatch.setattr(Ahead, "fill", lambda ahead: filled.append(fill(ahead)) or filled[-1])
    engine, _ = fake_engine(program, draft="off")
    long = expected_tokens([5], 30)
    at = next(n for n in range(4, 20) if long[n] not in long[:n])
    ends = engine.add_request([5], SamplingParams(max_tokens=30, stop_token_ids=[long[at]],
                                                  **GREEDY))
    goes_on = engine.add_request([9], SamplingParams(max_tokens=30, **GREEDY))
    done = drain(engine)
    assert filled.count(None) == 1 and len(filled) > 20
    assert done[ends].token_ids == long[:at + 1] and done[ends].finish_reason == "stop"
    assert done[goes_on].token_ids == expected_tokens([9], 30)
    require_all_free(engine)


@pytest.mark.parametrize("draft", ["off", "fixed"])
def test_the_timeline_counts_host_work_beside_the_device(program, draft):
    engine, _ = fake_engine(program, draft=draft)
    engine.timeline = Timeline()
    engine.add_request([5, 6], SamplingParams(max_tokens=9, **GREEDY))
    drain(engine)
    kinds = [{"beside": "host"}.get(kind, kind) for kind, _, _ in engine.timeline.spans]
    assert kinds.count("device") == engine.steps * (1 if draft == "off" else 2)
    assert kinds.count("host") >= 3 * engine.steps and 0 <= engine.timeline.hidden() < 1
    engine.timeline.spans = [("device", 0, 10), ("beside", 2, 4), ("host", 9, 13)]
    assert engine.timeline.hidden() == 0.5


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6, 8])
def test_abort_at_any_time(program, steps):
    engine, _ = fake_engine(program, max_num_seqs=2, prefill_chunk=8, **STEPWISE)
    gone = engine.add_request([7] * 30, SamplingParams(max_tokens=3, **GREEDY))
    other = engine.add_request([9] * 5, SamplingParams(max_tokens=12, **GREEDY))
    waiting = engine.add_request([3], SamplingParams(max_tokens=12, **GREEDY))
    for _ in range(steps):
        engine.step()
    assert engine.abort(gone) is (steps < 6)  # four chunks and two decodes finish it
    assert not engine.abort(gone) and not engine.abort("nobody")
    engine.check()
    again = engine.add_request([7] * 30, SamplingParams(max_tokens=3, **GREEDY))
    done = drain(engine)
    assert gone not in done and done[again].token_ids == expected_tokens([7] * 30, 3)
    assert done[other].token_ids == expected_tokens([9] * 5, 12)
    assert done[waiting].token_ids == expected_tokens([3], 12)
    require_all_free(engine)


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


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("draft", ["off", "fixed"])
def test_a_device_that_fails_leaves_the_engine_whole(program, draft, overlap):
    """Whichever call fails, all results come in the end, right and once: also those that were due
    from the step before."""
    lengths, failed = [1, 2, 3, 12], 0
    for call in range(1, 16):
        engine, device = fake_engine(program, draft=draft, overlap=overlap, prefill_chunk=8)
        names = [engine.add_request([5 + n] * n, SamplingParams(max_tokens=n, **GREEDY))
                 for n in lengths]
        run, calls = device.run, itertools.count(1)

        def fail(*args, run=run, calls=calls, call=call, **given):
            if next(calls) == call:
                raise OSError("lost")
            return run(*args, **given)

        device.run = fail
        done = []
        while engine.has_unfinished():
            try:
                done += [out for out in engine.step() if out.finished]
            except OSError:
                failed += 1
            engine.check()
        assert [out.request_id for out in sorted(done, key=lambda o: int(o.request_id))] == names
        for out in done:
            n = len(out.prompt_token_ids)
            assert out.token_ids == expected_tokens([5 + n] * n, n)
        require_all_free(engine)
    assert failed >= 10


def test_an_abort_after_a_failed_step(program):
    """What the step before had to say of the request is not said any more."""
    engine, device = fake_engine(program, draft="off", overlap=True)
    gone = engine.add_request([5], SamplingParams(max_tokens=9, **GREEDY))
    other = engine.add_request([6], SamplingParams(max_tokens=9, **GREEDY))
    engine.step()
    run, device.run = device.run, None
    with pytest.raises(TypeError):
        engine.step()
    device.run = run
    assert engine.abort(gone)
    seen = set()
    while engine.has_unfinished():
        seen |= {out.request_id for out in engine.step()}
    assert seen == {other}


def test_score(program):
    engine, device = fake_engine(program, max_num_batched_tokens=24)
    ids = [9, 8, 7, 6, 5, 4, 3, 9, 9, 9, 9]
    whole = engine.score(ids)
    assert whole.shape == (11, 512) and whole.dtype == np.float32 and device.calls == 1
    for chunk in (1, 2, 3, 10, 16):
        assert (engine.score(ids, chunk) == whole).all()
        engine.check()
    assert device.calls == 1 + 11 + 6 + 4 + 2 + 1
    assert engine.score([9] * 64).shape == (64, 512)
    for bad, message in [(0, "chunk is 0, expected 1..24"), (25, "chunk is 25")]:
        with pytest.raises(RequestError, match=message):
            engine.score(ids, bad)
    with pytest.raises(RequestError, match="expected at most 64"):
        engine.score([9] * 65)


def test_score_beside_running_requests(program):
    engine, _ = fake_engine(program, max_num_seqs=2, **STEPWISE)
    name = engine.add_request([5] * 3, SamplingParams(max_tokens=4, **GREEDY))
    engine.step()
    alone = fake_engine(program)[0].score([9, 8, 7])
    assert (engine.score([9, 8, 7]) == alone).all()
    engine.add_request([5], SamplingParams(max_tokens=4, **GREEDY))
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


@pytest.mark.parametrize("neighbours", [[], [dict(temperature=0)], [dict(seed=7)],
                                        [dict(seed=7), dict(temperature=0)]])
def test_noise_is_the_requests_own(program, neighbours):
    """Case B1: a seeded request keeps its tokens with greedy or seeded neighbours, in another row
    of the batch, and after a preemption; another seed gives others."""
    prompt, params = [9, 8, 7], SamplingParams(seed=42, temperature=0.8, max_tokens=16)
    alone = solo(program, prompt, params).token_ids
    assert alone == solo_tokens(prompt, params)
    other = SamplingParams(seed=43, temperature=0.8, max_tokens=16)
    assert solo(program, prompt, other).token_ids != alone
    engine, _ = fake_engine(program)
    for n, given in enumerate(neighbours):
        engine.add_request(prompt, SamplingParams(max_tokens=2 + n, **given))
    name = engine.add_request(prompt, params)
    engine.step()
    assert engine.preempt(name)
    out = drain(engine)[name]
    assert out.token_ids == alone and out.metrics.preemptions == 1


@pytest.mark.parametrize("garbage", [-9, 77])
def test_what_unused_state_holds_does_not_matter(program, garbage):
    """Case D7: pages, rings and pending halves full of something else, as of another request."""
    engine, device = fake_engine(program)
    device.pages[:] = garbage
    for rings in (*device.rings.values(), device.pending):
        rings.data[:] = garbage
    prompts = [[50 + n] * n for n in (1, 7, 8, 9, 15, 16, 17)]
    names = [engine.add_request(p, SamplingParams(max_tokens=9, **GREEDY)) for p in prompts]
    done = drain(engine)
    for name, prompt in zip(names, prompts, strict=True):
        assert done[name].token_ids == expected_tokens(prompt, 9)


def test_what_an_observer_sees(program):
    engine, _ = fake_engine(program, draft="off", prefill_chunk=8)
    engine.trace = ("head.logits",)
    records = watch(engine)
    a = engine.add_request([5] * 10, SamplingParams(max_tokens=2, **GREEDY))
    b = engine.add_request([6], SamplingParams(max_tokens=3, **GREEDY))
    drain(engine)
    rows = [[(r.request_id, r.start, r.end, r.sampled) for r in x.rows] for x in records]
    assert rows == [[(a, 0, 8, 0), (b, 0, 1, 1)], [(b, 1, 2, 1), (a, 8, 10, 1)],
                    [(a, 10, 11, 1), (b, 2, 3, 1)]]
    assert [x.step for x in records] == [1, 2, 3]
    assert [x.phase for x in records] == ["prefill", "prefill", "decode"]
    assert [x.outputs["head.logits"].shape for x in records] == [(1, 512), (2, 512), (2, 512)]
    assert records[1].inputs["positions"].tolist() == [1, 8, 9]
    stats = engine.stats()
    assert (stats.steps, stats.rows, stats.prefill_rows) == (3, 14, 11)
