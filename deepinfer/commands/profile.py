"""`deepinfer profile`: time steps on this machine, for the budget of adaptive drafts.

The result lies beside no Program but in the cache, keyed by the Program's digest, the processor,
the threads and the ISA level. It changes how many drafts are verified, and so speed; never a bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deepinfer.commands.output import Progress, emit, emit_json, say, table
from deepinfer.commands.run import check_threads, open_llm
from deepinfer.program import Program
from deepinfer.runtime.cost import PHASES, Machine, save
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.request import SamplingParams
from deepinfer.runtime.verdict import Drafter

Array = np.ndarray[Any, Any]
Steps = dict[str, list[tuple[int, float]]]
ROUNDS = 5  # whole sweeps; what slows the machine for a while slows all sizes alike
PROMPT = 8  # tokens: the shorter, the more of the time goes into what is measured


class Runs(Protocol):
    """What is timed: a device."""

    def run(self, phase_name: str, inputs: Mapping[str, Array], *, trace: Iterable[str] = ()
            ) -> dict[str, Array]: ...


class Stopwatch:
    """A device that notes how long its steps take; all else is left to the device it wraps.

    Args:
        device: runs the steps. clock: nanoseconds of some clock.
    """

    def __init__(self, device: Runs, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._device, self._clock = device, clock
        self.times: dict[str, dict[int, list[int]]] = {name: defaultdict(list) for name in PHASES}

    def run(self, phase_name: str, inputs: Mapping[str, Array], *, trace: Iterable[str] = ()
            ) -> dict[str, Array]:
        begun = self._clock()
        outputs = self._device.run(phase_name, inputs, trace=trace)
        spent = self._clock() - begun
        size = self._size(phase_name, inputs)
        if size:
            self.times[phase_name][size].append(spent)
        return outputs

    def _size(self, phase_name: str, inputs: Mapping[str, Array]) -> int:
        """Rows of a step, drafting requests of a draft; 0: not one to count."""
        if phase_name not in self.times:
            return 0
        if phase_name != "draft":
            return len(inputs["positions"])
        drafting, block = len(inputs["anchor"]), len(inputs["calibration"])
        # After a prefill a draft also takes in the prompt: that is no part of a round.
        return drafting if len(inputs["positions"]) <= drafting * (block + 1) else 0

    def medians(self) -> Steps:
        """(size, median nanoseconds) by phase, the sizes ascending."""
        return {name: [(n, float(statistics.median(found[n]))) for n in sorted(found)]
                for name, found in self.times.items() if found}

    def forget(self) -> None:
        for found in self.times.values():
            found.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def run(args: argparse.Namespace) -> int:
    check_threads(args.threads)
    if args.kernels:
        from deepinfer.commands.profile_kernels import run_kernels

        return run_kernels(args)
    with open_engine(args) as (program, engine, watch, most), Progress() as progress:
        facts = program.manifest["facts"]
        measure(engine, watch, batches(most), int(facts.get("block", 0)),
                int(facts["vocab_size"]), rounds=ROUNDS, report=progress)
        machine = Machine.of(program, watch)
        assert machine is not None  # cpu devices say what they are
    steps = watch.medians()
    path = save(machine, steps)
    if args.json:
        emit_json({"path": str(path), **asdict(machine), "steps": steps})
    else:
        emit(table([("phase", "rows", "median"), *(
            (name, n, f"{ns / 1000:.1f} us") for name, found in steps.items() for n, ns in found)]))
    say(f"costs of Program {program.digest[:16]} with {machine.threads} threads at level "
        f"{machine.isa}: {path}")
    return 0


@contextmanager
def open_engine(args: argparse.Namespace) -> Iterator[tuple[Program, Engine, Stopwatch, int]]:
    """The Program, an engine that times its steps, the stopwatch, and the most requests at once."""
    with open_llm(args, Path(args.model)) as llm:
        watch, sizes = Stopwatch(llm.engine.device), llm.engine.sizes
        # Nothing but the steps: no cache that saves work, no worker that shares the cores.
        engine = Engine(llm.program, watch, sizes, max_model_len=llm.engine.max_model_len,
                        max_num_batched_tokens=llm.program.manifest["limits"][
                            "max_num_batched_tokens"],
                        draft="fixed", prefix_cache="off", overlap=False)
        yield llm.program, engine, watch, sizes.num_slots


def batches(most: int) -> list[int]:
    """Numbers of requests to time: powers of two, and the most."""
    return sorted({min(2**i, most) for i in range(most.bit_length() + 1)})


def measure(engine: Engine, watch: Stopwatch, requests: Sequence[int], block: int, vocab: int, *,
            rounds: int, report: Callable[[str, int, int], None] | None = None) -> None:
    """Run steps of every size, sweep after sweep; the first sweep only warms up.

    Args:
        requests: numbers of requests at once. block: drafts of a block; 0: there is no draft.
        vocab: token ids are below it.
    """
    for sweep in range(rounds + 1):
        if sweep == 1:
            watch.forget()
        for done, count in enumerate(requests):
            if report is not None:
                report("timing steps", sweep * len(requests) + done, (rounds + 1) * len(requests))
            _sweep(engine, count, block, vocab)
    if report is not None:
        report("timing steps", (rounds + 1) * len(requests), (rounds + 1) * len(requests))


def _sweep(engine: Engine, count: int, block: int, vocab: int) -> None:
    """Steps of ``count`` requests at every width; drafts are made in all of them."""
    params = SamplingParams(max_tokens=2 * PROMPT * (block + 2) ** 2, ignore_eos=True)
    ids = [engine.add_request([(7 * i + j) % vocab for j in range(PROMPT)], params)
           for i in range(count)]
    try:
        begun: set[str] = set()
        for _ in range(4 * count + 16):  # all of them, unless there are not enough pages for all
            begun.update(output.request_id for output in engine.step())
            if len(begun) == count:
                break
        for width in range(block + 1):
            engine.drafter = _wrong(width, vocab)
            for _ in range(3):  # the first may still have the drafts of the width before
                engine.step()
    finally:
        engine.drafter = None
        for request_id in ids:
            engine.abort(request_id)


def _wrong(count: int, vocab: int) -> Drafter:
    """A drafter of ``count`` tokens that the target hardly picks, so that lengths stay put."""
    return lambda request_id, tokens, width: [
        (tokens[-1] + 1 + i) % vocab for i in range(min(count, width))]
