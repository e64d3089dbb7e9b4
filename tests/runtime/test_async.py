"""AsyncEngine: iterators, cancellation, coalescing, shutdown, errors, several event loops."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from deepinfer.async_engine import AsyncEngine, AsyncStream
from deepinfer.errors import DeepInferError, RequestError
from deepinfer.llm import LLM
from deepinfer.runtime.params import SamplingParams, child_seed
from tests.runtime.fake_engine import FakeEngine, expected, says

WAIT = 30.0


class Gate:
    """Lets an engine's steps through one by one. Args: open_at: from this step on, all of them."""

    def __init__(self, open_at: int = 10**9) -> None:
        self.open_at = open_at
        self._passes = threading.Semaphore(0)
        self.reached = threading.Semaphore(0)

    def __call__(self, step: int) -> None:
        self.reached.release()
        if step < self.open_at:
            assert self._passes.acquire(timeout=WAIT)

    def open(self, steps: int | None = None) -> None:
        """Let some steps through; None: all."""
        if steps is None:
            self.open_at = 0
        self._passes.release(1 if steps is None else steps)


async def collect(stream: AsyncStream) -> list:
    return [output async for output in stream]


async def until(condition: Callable[[], bool]) -> None:
    """Give the loop to others until something has happened."""
    end = asyncio.get_running_loop().time() + WAIT
    while not condition():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0)


def test_outputs_hold_all_so_far_and_the_last_one_is_whole():
    async def main() -> None:
        async with AsyncEngine(FakeEngine(says("Zoë and 3 €"))) as engine:
            outputs = await collect(engine.add_request("hello", {"max_tokens": 50}))
            assert outputs[-1].text == "Zoë and 3 €" and outputs[-1].finish_reason == "stop"
            assert all(not o.finished for o in outputs[:-1])
            for a, b in zip(outputs, outputs[1:], strict=False):
                assert b.text.startswith(a.text)
                assert b.token_ids[:len(a.token_ids)] == a.token_ids
            assert outputs[-1].metrics.steps == len(outputs[-1].token_ids)
            assert (await engine.stats()).requests == 1

    asyncio.run(main())


def test_many_requests_share_the_steps():
    async def main() -> None:
        gate = Gate(open_at=2)
        fake = FakeEngine(on_step=gate)
        async with AsyncEngine(fake) as engine:
            streams = [engine.add_request([3 + i], SamplingParams(max_tokens=8, seed=i))
                       for i in range(16)]
            gate.open()
            got = await asyncio.gather(*map(collect, streams))
        for i, outputs in enumerate(got):
            assert outputs[-1].token_ids == expected([3 + i], 8, i)
        assert fake.steps <= 9  # those that came while the first step ran joined at the second

    asyncio.run(main())


def test_a_late_consumer_gets_fewer_outputs_and_misses_nothing():
    async def main() -> None:
        fake = FakeEngine()
        async with AsyncEngine(fake) as engine:
            slow = engine.add_request([3], SamplingParams(max_tokens=40))
            await collect(engine.add_request([4], SamplingParams(max_tokens=60)))
            outputs = await collect(slow)  # only now
            assert len(outputs) == 1 and outputs[0].token_ids == expected([3], 40)
            assert await collect(slow) == []

    asyncio.run(main())


def test_n_completions():
    async def main() -> None:
        async with AsyncEngine(FakeEngine()) as engine:
            outputs = await collect(engine.add_request([3], SamplingParams(
                n=3, seed=2, max_tokens=4)))
            last = {o.index: o for o in outputs}
            assert sorted(last) == [0, 1, 2] and sum(o.finished for o in outputs) == 3
            for i, output in last.items():
                assert output.token_ids == expected([3], 4, child_seed(2, i))

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancel", "aclose", "drop", "break"])
def test_a_consumer_that_leaves_aborts_its_request(how):
    async def main() -> None:
        gate = Gate()
        fake = FakeEngine(on_step=gate)
        async with AsyncEngine(fake) as engine:
            stream = engine.add_request([3], SamplingParams(max_tokens=10**6), "mine")
            other = engine.add_request([4], SamplingParams(max_tokens=3))
            gate.open(1)
            assert not (await anext(stream)).finished
            if how == "cancel":
                waiting = asyncio.create_task(anext(stream))
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                assert await collect(stream) == []
            elif how == "aclose":
                await stream.aclose()
                await stream.aclose()
            elif how == "break":
                gate.open(1)
                async for _ in stream:
                    break
            stream = None
            gc.collect()
            gate.open()
            assert (await collect(other))[-1].token_ids == expected([4], 3)
            await engine.stats()  # what came before it in the queue is done
            assert fake.aborted == ["mine"] and not fake.running

    asyncio.run(main())


def test_a_timeout_aborts():
    async def main() -> None:
        gate = Gate()
        fake = FakeEngine(on_step=gate)
        async with AsyncEngine(fake) as engine:
            stream = engine.add_request([3], request_id="late")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await anext(stream)
            gate.open()
            await engine.stats()
            assert fake.aborted in (["late"], []) and not fake.running

    asyncio.run(main())


def test_abort_gives_a_last_output():
    async def main() -> None:
        gate = Gate()
        fake = FakeEngine(on_step=gate)
        async with AsyncEngine(fake) as engine:
            stream = engine.add_request([3], SamplingParams(max_tokens=99, n=2), "both")
            gate.open(1)
            await anext(stream)
            aborting = asyncio.create_task(engine.abort("both"))
            await asyncio.sleep(0)
            gate.open()
            assert await aborting
            rest = await collect(stream)
            ended = {o.index: o for o in rest if o.finished}
            assert sorted(ended) == [0, 1] and fake.aborted == ["both", "both.1"]
            assert {o.finish_reason for o in ended.values()} == {"abort"}
            assert all(o.token_ids for o in ended.values())
            assert not await engine.abort("both") and not await engine.abort("nobody")

    asyncio.run(main())


def test_a_bad_request_raises_from_its_iterator_only():
    async def main() -> None:
        gate = Gate()
        async with AsyncEngine(FakeEngine(on_step=gate)) as engine:
            good = engine.add_request([3], SamplingParams(max_tokens=2), "same")
            bad = [(engine.add_request([512]), "the prompt is bad"),
                   (engine.add_request(""), "the prompt is empty"),
                   (engine.add_request([4], None, "same"), "id 'same' is in use")]
            gate.open()
            for stream, message in bad:
                with pytest.raises(RequestError, match=message):
                    await collect(stream)
            assert (await collect(good))[-1].token_ids == expected([3], 2)
            with pytest.raises(RequestError, match="temperature is nan"):
                engine.add_request([3], {"temperature": float("nan")})

    asyncio.run(main())


def test_one_consumer_only():
    async def main() -> None:
        gate = Gate()
        async with AsyncEngine(FakeEngine(on_step=gate)) as engine:
            stream = engine.add_request([3], SamplingParams(max_tokens=1))
            first = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            with pytest.raises(RequestError, match="two consumers wait"):
                await anext(stream)
            gate.open()
            assert (await first).finished

    asyncio.run(main())


def test_an_error_of_the_engine_ends_all_iterators_with_it():
    async def main() -> None:
        boom, gate = OSError("the device is gone"), Gate(open_at=2)

        def on_step(step: int) -> None:
            gate(step)
            if step == 3:
                raise boom

        fake = FakeEngine(on_step=on_step)
        engine = AsyncEngine(fake)
        streams = [engine.add_request([i], SamplingParams(max_tokens=99)) for i in (3, 4)]
        gate.open()
        for stream in streams:
            with pytest.raises(OSError) as caught:
                await collect(stream)
            assert caught.value is boom
            assert await collect(stream) == []
        with pytest.raises(DeepInferError, match="the engine has ended: the device is gone\n"
                                                 "  where: AsyncEngine\n  next:  make a new"):
            engine.add_request([5])
        with pytest.raises(OSError, match="gone"):
            await engine.stats()
        assert not await engine.abort("x")
        await engine.aclose()
        assert sorted(fake.aborted) == sorted(fake.added) and not fake.running

    asyncio.run(main())


def test_stopping_aborts_and_draining_finishes():
    async def main(drain: bool) -> None:
        gate = Gate()
        fake = FakeEngine(on_step=gate)
        engine = AsyncEngine(fake)
        stream = engine.add_request([3], SamplingParams(max_tokens=20))
        gate.open(1)
        await anext(stream)
        for _ in range(2):  # the thread is inside its second step
            await asyncio.to_thread(gate.reached.acquire)
        closing = asyncio.create_task(engine.aclose(drain=drain))
        await asyncio.sleep(0)
        late = engine.add_request([4])
        gate.open()
        last = (await collect(stream))[-1]
        await closing
        with pytest.raises(DeepInferError, match="the engine was stopped, expected a running one"):
            await collect(late)
        if drain:
            assert last.token_ids == expected([3], 20) and fake.aborted == []
        else:
            assert last.finish_reason == "abort" and len(fake.aborted) == 1
        engine.stop()
        assert not engine._thread._thread.is_alive() and fake.closed == 0

    asyncio.run(main(True))
    asyncio.run(main(False))


def test_several_event_loops():
    fake = FakeEngine()
    engine = AsyncEngine(fake)
    got: dict[int, list[int]] = {}
    together = threading.Barrier(3)

    def serve(i: int) -> None:
        async def main() -> None:
            outputs = await collect(engine.add_request([i], SamplingParams(max_tokens=30)))
            got[i] = outputs[-1].token_ids

        together.wait(WAIT)
        asyncio.run(main())

    threads = [threading.Thread(target=serve, args=(i,)) for i in (3, 4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    engine.stop()
    assert got == {i: expected([i], 30) for i in (3, 4, 5)}


def test_a_loop_that_ended_loses_its_requests_and_no_others():
    gate = Gate()
    fake = FakeEngine(on_step=gate)
    engine = AsyncEngine(fake)
    kept = []

    async def leave() -> None:
        kept.append(engine.add_request([3], SamplingParams(max_tokens=10**6), "lost"))

    async def stay() -> None:
        other = engine.add_request([4], SamplingParams(max_tokens=5))
        gate.open()
        assert (await collect(other))[-1].token_ids == expected([4], 5)
        await until(lambda: fake.aborted == ["lost"])

    asyncio.run(leave())
    asyncio.run(stay())
    engine.stop()
    assert not fake.running


def test_an_llm_is_shared_and_stays_open():
    async def main() -> None:
        fake = FakeEngine()
        llm = LLM.of(fake)
        async with AsyncEngine(llm) as engine:
            stream = engine.add_request([3], SamplingParams(max_tokens=200))
            mine = await asyncio.to_thread(llm.generate, [4], {"max_tokens": 7})
            assert mine[0].token_ids == expected([4], 7)
            assert (await collect(stream))[-1].token_ids == expected([3], 200)
        assert llm.generate([5], {"max_tokens": 2})[0].token_ids == expected([5], 2)
        llm.close()
        assert fake.closed == 1

    asyncio.run(main())


def test_closing_the_llm_ends_its_iterators():
    async def main() -> None:
        gate = Gate()
        llm = LLM.of(FakeEngine(on_step=gate))
        engine = AsyncEngine(llm)
        stream = engine.add_request([3], SamplingParams(max_tokens=10**6))
        await asyncio.to_thread(gate.reached.acquire)
        closing = asyncio.create_task(asyncio.to_thread(llm.close))
        await until(lambda: len(llm.delivery.turn._waiting) == 1)
        gate.open()
        await closing
        assert (await collect(stream))[-1].finish_reason == "abort"
        with pytest.raises(DeepInferError, match="the engine is closed"):
            await collect(engine.add_request([3]))
        await engine.aclose()

    asyncio.run(main())


def test_an_engine_of_its_own_is_closed_with_it(monkeypatch):
    fake, given = FakeEngine(), {}

    def make(source, **settings):
        given.update(settings, source=source)
        return LLM.of(fake)

    class Made(LLM):
        def __new__(cls, source, **settings):
            return make(source, **settings)

    monkeypatch.setattr("deepinfer.async_engine.LLM", Made)
    engine = AsyncEngine("model", max_num_seqs=3)
    assert given == {"source": "model", "max_num_seqs": 3}
    engine.stop()
    engine.stop()
    assert fake.closed == 1
    with pytest.raises(RequestError, match=r"settings \['draft'\] for an engine that is made"):
        AsyncEngine(FakeEngine(), draft="off")


def test_a_dropped_engine_ends_its_thread():
    engine = AsyncEngine(FakeEngine())
    thread = engine._thread._thread
    del engine
    gc.collect()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_a_process_that_forgets_to_stop_it_ends():
    code = ("import asyncio\nfrom deepinfer.async_engine import AsyncEngine\n"
            "from tests.runtime.fake_engine import FakeEngine\n"
            "engine = AsyncEngine(FakeEngine())\n"
            "async def main():\n"
            "    global stream\n"
            "    stream = engine.add_request([3], {'max_tokens': 10**9})\n"
            "    print((await anext(stream)).finished)\n"
            "asyncio.run(main())\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          timeout=WAIT * 2)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
