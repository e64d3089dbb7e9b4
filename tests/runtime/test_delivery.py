"""Who gets which output: n completions, streams, threads that share an engine, shutdown."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from dataclasses import replace

import pytest

from deepinfer import AsyncEngine
from deepinfer.api.delivery import Delivery, FairLock
from deepinfer.errors import DeepInferError, RequestError
from deepinfer.llm import LLM
from deepinfer.runtime.params import SamplingParams, child_seed
from tests.runtime.fake_device import expected_tokens, fake_engine
from tests.runtime.fake_engine import FakeEngine, expected, says, text

WAIT = 30.0  # seconds after which a thread is taken for stuck


def made(**given) -> tuple[LLM, FakeEngine]:
    engine = FakeEngine(**given)
    return LLM.of(engine), engine


def test_n_completions_come_together_in_order():
    """Case B5: child 0 equals the run with n = 1, each child samples with a seed of its own."""
    llm, engine = made()
    params = SamplingParams(n=4, seed=5, max_tokens=8)
    [output] = llm.generate([[3, 4]], params)
    assert [child.index for child in output.outputs] == [0, 1, 2, 3]
    for i, child in enumerate(output.outputs):
        assert child.token_ids == expected([3, 4], 8, child_seed(5, i))
    assert len({tuple(child.token_ids) for child in output.outputs}) == 4
    assert output.token_ids == output.outputs[0].token_ids == llm.generate(
        [3, 4], SamplingParams(seed=5, max_tokens=8))[0].token_ids
    assert output.finished and output.usage.completion_tokens == 32
    assert len(engine.added) == 5 and engine.aborted == []


def test_children_that_end_early_leave_the_others_alone():
    ends = says("ab")
    llm, _ = made(choose=lambda p, o, s: ends(p, o, s) if s == 5 else 40)
    output = llm.generate([3], SamplingParams(n=3, seed=5, max_tokens=6))[0]
    assert [len(child.token_ids) for child in output.outputs] == [3, 6, 6]
    assert [child.finish_reason for child in output.outputs] == ["stop", "length", "length"]


def test_results_do_not_depend_on_the_place_in_the_list():
    """Case B5: a shared params object gives equal prompts equal outputs."""
    llm, _ = made()
    params = SamplingParams(max_tokens=5, seed=9)
    a, b, c, d = llm.generate([[3], [4], [3], [5]], params)
    assert a.token_ids == c.token_ids == expected([3], 5, 9)
    assert b.token_ids == expected([4], 5, 9) and d.token_ids == expected([5], 5, 9)


def test_a_bad_prompt_with_n_ends_alone():
    llm, engine = made()
    good, bad = llm.generate([[3], [512]], SamplingParams(n=2, max_tokens=2))
    assert len(good.outputs) == 2 and good.finish_reason == "length"
    assert bad.finish_reason == "error" and "the prompt is bad" in str(bad.error)
    assert not engine.running


def test_what_is_submitted_before_an_error_is_taken_back():
    engine = FakeEngine()
    delivery = Delivery(engine)
    engine.add_request([3], request_id="x.1")
    with delivery.turn, pytest.raises(RequestError, match="'x.1' is in use"):
        delivery.submit([3], SamplingParams(n=3), lambda index, output: None, "x")
    assert engine.aborted == ["x"] and list(engine.running) == ["x.1"]


def test_the_deltas_of_a_stream_join_to_the_whole():
    answer = "Zoë has 3 € in ENDless words"
    llm, _ = made(choose=says(answer))
    params = SamplingParams(max_tokens=100, logprobs=0, stop="END?")
    deltas = list(llm.stream([3], params))
    [whole] = llm.generate([3], params)
    assert "".join(d.text for d in deltas) == whole.text == answer
    assert sum((d.token_ids for d in deltas), []) == whole.token_ids
    assert sum((d.logprobs for d in deltas), []) == whole.logprobs
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert deltas[-1].usage == whole.usage
    assert any(d.text == "" for d in deltas[:-1])  # half a character, or what may be a stop text


def test_a_stream_never_shows_a_stop_text():
    """Case B7."""
    llm, _ = made(choose=says("abENDc"))
    deltas = list(llm.stream([3], {"max_tokens": 50, "stop": ["END"]}))
    assert "".join(d.text for d in deltas) == "ab" and deltas[-1].stop_reason == "END"


def test_the_children_of_a_stream_alternate():
    llm, _ = made()
    deltas = list(llm.stream([3], SamplingParams(n=2, seed=1, max_tokens=3)))
    assert [d.index for d in deltas] == [0, 1, 0, 1, 0, 1]
    for i in range(2):
        tokens = sum((d.token_ids for d in deltas if d.index == i), [])
        assert tokens == expected([3], 3, child_seed(1, i))


@pytest.mark.parametrize("how", ["close", "with", "drop", "drop before the first"])
def test_a_stream_that_ends_early_aborts_its_request(how):
    llm, engine = made()
    stream = llm.stream([3], SamplingParams(n=2))
    if how == "with":
        with stream:
            next(stream)
    elif how == "close":
        next(stream)
        stream.close()
        stream.close()
        assert list(stream) == []
    elif how == "drop":
        next(stream)
    del stream
    gc.collect()
    assert engine.aborted == ["0", "0.1"] and not engine.running


def test_a_stream_dropped_inside_a_step_is_aborted_at_the_next():
    """The finaliser may come while its own thread steps: it must not wait for the turn."""
    streams = []
    llm, engine = made(on_step=lambda step: streams.clear())
    streams.append(llm.stream([3], SamplingParams(max_tokens=50)))
    assert llm.generate([4], SamplingParams(max_tokens=3))[0].token_ids == expected([4], 3)
    assert engine.steps == 3 and engine.aborted == ["0"]


def test_a_finished_stream_aborts_nothing():
    llm, engine = made()
    stream = llm.stream([3], SamplingParams(max_tokens=2))
    assert len(list(stream)) == 2
    del stream
    gc.collect()
    assert engine.aborted == []


def test_an_error_in_a_step_ends_the_stream_and_frees_it():
    def fail(step: int) -> None:
        if step == 2:
            raise OSError("the device is gone")

    llm, engine = made(on_step=fail)
    stream = llm.stream([3])
    next(stream)
    with pytest.raises(OSError, match="gone"):
        next(stream)
    assert engine.aborted == ["0"] and list(stream) == []
    assert llm.generate([3], SamplingParams(max_tokens=2))[0].finished


def test_a_stream_and_calls_of_the_same_thread_interleave():
    llm, engine = made()
    stream = llm.stream([3], SamplingParams(max_tokens=20))
    first = next(stream)
    other = llm.generate([4], SamplingParams(max_tokens=5))[0]
    late = next(stream)  # what the other call's steps brought comes at once
    assert other.token_ids == expected([4], 5) and engine.steps == 6
    assert first.token_ids + late.token_ids == expected([3], 6)
    assert first.token_ids + late.token_ids + sum((d.token_ids for d in stream), []
                                                  ) == expected([3], 20)


def test_an_abort_behind_ones_back_is_seen():
    engine = FakeEngine(on_step=lambda step: step == 3 and engine.running.clear())
    llm = LLM.of(engine)
    output = llm.generate([3], SamplingParams(max_tokens=50))[0]
    assert output.finish_reason == "abort" and output.token_ids == expected([3], 2)


def test_closing_ends_streams_and_calls_once():
    llm, engine = made()
    with llm:
        stream = llm.stream([3])
        next(stream)
    llm.close()
    assert engine.closed == 1
    [last] = stream
    assert last.finish_reason == "abort" and last.token_ids == []
    for call in (lambda: llm.generate([3]), lambda: llm.stream([3]), llm.stats,
                 lambda: llm.score([3])):
        with pytest.raises(DeepInferError, match="the engine is closed, expected an open one"):
            call()


def test_closing_from_another_thread_ends_a_call():
    stepped, closing = threading.Event(), threading.Event()

    def on_step(step: int) -> None:
        stepped.set()
        assert closing.wait(WAIT)

    llm, engine = made(on_step=on_step)
    got = []
    caller = threading.Thread(target=lambda: got.extend(llm.generate([[3], [4]], {
        "max_tokens": 10**6})))
    caller.start()
    assert stepped.wait(WAIT)
    closer = threading.Thread(target=llm.close)
    closer.start()
    waits_for_turn(llm.delivery.turn, 1)
    closing.set()
    closer.join(WAIT)
    caller.join(WAIT)
    assert [x.finish_reason for x in got] == ["abort", "abort"] and engine.closed == 1


def waits_for_turn(turn: FairLock, count: int) -> None:
    """Return once so many threads wait for the turn."""
    end = time.monotonic() + WAIT
    while len(turn._waiting) < count:
        assert time.monotonic() < end


def test_threads_share_batches_and_get_their_own_outputs():
    gate = threading.Barrier(3)
    llm, engine = made(on_step=lambda step: step == 1 and waits_for_turn(llm.delivery.turn, 2))
    got = {}

    def call(i: int) -> None:
        gate.wait(WAIT)
        got[i] = llm.generate([i], SamplingParams(max_tokens=10 + i))[0].token_ids

    callers = [threading.Thread(target=call, args=(i,)) for i in (3, 4, 5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(WAIT)
    assert got == {i: expected([i], 10 + i) for i in (3, 4, 5)}
    assert engine.steps <= 10 + 5 + 2  # one after the other it would be 42


def test_the_lock_is_handed_over_in_the_order_of_asking():
    lock, order, threads = FairLock(), [], []

    def take(i: int) -> None:
        with lock:
            order.append(i)

    with lock:
        assert not lock.try_acquire()
        for i in range(4):
            threads.append(threading.Thread(target=take, args=(i,)))
            threads[-1].start()
            waits_for_turn(lock, i + 1)
        lock_holder_again = threading.Thread(target=take, args=(9,))
        lock_holder_again.start()
        waits_for_turn(lock, 5)
    for thread in (*threads, lock_holder_again):
        thread.join(WAIT)
    assert order == [0, 1, 2, 3, 9]
    assert lock.try_acquire() and not lock.try_acquire()
    lock.release()


def test_an_interrupted_wait_gives_up_its_place(monkeypatch):
    lock = FairLock()

    class Interrupted:
        def __init__(self) -> None:
            self.taken = 0

        def acquire(self) -> None:
            self.taken += 1
            if self.taken == 2:
                raise KeyboardInterrupt

        def release(self) -> None:
            pytest.fail("handed over to someone who left")

    with lock:
        monkeypatch.setattr("deepinfer.api.delivery.threading.Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.__enter__()
        monkeypatch.undo()
        assert not lock._waiting
    assert lock.try_acquire()


def test_stats_and_encode():
    llm, engine = made()
    llm.generate([3], SamplingParams(max_tokens=2))
    assert (llm.stats().steps, llm.stats().requests) == (2, 1)
    assert list(llm.encode("hi")) == text().encode("hi") and llm.encode([5]) == [5]
    engine.text = None
    with pytest.raises(RequestError, match="no tokenizer.json\n  where: prompt\n  next:  pass tok"):
        llm.stream("hi")


def test_a_long_batch_shows_a_bar(monkeypatch):
    shown = []
    from contextlib import contextmanager

    @contextmanager
    def bar(show: bool):
        shown.append(show)
        yield (lambda *report: shown.append(report)) if show else None

    monkeypatch.setattr("deepinfer.llm.progress_bar", bar)
    llm = LLM.of(FakeEngine(), progress=True)
    llm.generate([[3], [4]], [{"max_tokens": 1}, {"max_tokens": 2}])
    assert shown[0] is True and shown[1:] == [("requests, 2 tokens", 0, 2),
                                              ("requests, 3 tokens", 1, 2)]
    shown.clear()
    llm.generate([3])
    assert shown == [False]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("draft", ["fixed", "off"])
def test_the_engine_itself_behind_the_front_door(program, overlap, draft):
    """Completions, a stream, one that is left and tasks, on a device without a model."""
    engine, _ = fake_engine(program, text=text(), overlap=overlap, draft=draft)
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=1)
    with LLM.of(engine) as llm:
        first, second = llm.generate([[5, 6, 7], [8, 9]], replace(params, n=2))
        for output, prompt in ((first, [5, 6, 7]), (second, [8, 9])):
            assert [c.index for c in output.outputs] == [0, 1]
            assert all(c.token_ids == expected_tokens(prompt, 8) for c in output.outputs)
        deltas = list(llm.stream([5, 6, 7], params))
        assert len(deltas) > 1 and "".join(d.text for d in deltas) == first.text
        assert sum((d.token_ids for d in deltas), []) == first.token_ids
        assert sum((d.logprobs for d in deltas), []) == first.outputs[0].logprobs
        with llm.stream([5, 6], replace(params, max_tokens=40)) as left:
            next(left)
        assert not engine.has_unfinished()

        async def last(served: AsyncEngine, prompt: list[int]):
            return [output async for output in served.add_request(prompt, params)][-1]

        async def main() -> None:
            async with AsyncEngine(llm) as served:
                got = await asyncio.gather(*(last(served, [i, i + 1]) for i in range(5, 13)))
            assert [o.token_ids for o in got] == [
                expected_tokens([i, i + 1], 8) for i in range(5, 13)]
            assert all(o.metrics.first_token_seconds > 0 and o.metrics.steps for o in got)

        asyncio.run(main())
        engine.check()
        assert llm.stats().running == 0 and llm.stats().free_slots == engine.sizes.num_slots
        assert (llm.stats().verified > 0) == (draft == "fixed")
