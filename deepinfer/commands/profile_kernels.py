"""`deepinfer profile --kernels`: where the time of a step goes, op by op.

Bytes and operations are what `codegen/cost.py` counts for the ops that ran: each weight once a
step, of experts the expected number. They are of use for what streams weights or multiplies.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.codegen.cost import work
from deepinfer.codegen.emit import lower_graph
from deepinfer.commands.output import emit, emit_json, table
from deepinfer.commands.run import open_llm
from deepinfer.compiler import build_graphs, read_config
from deepinfer.errors import RequestError
from deepinfer.graph.limits import Limits
from deepinfer.ir.graph import Node
from deepinfer.ir.text import graph_digest
from deepinfer.program import Program
from deepinfer.runtime.devices.cpu import CpuDevice
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.request import SamplingParams
from deepinfer.targets.base import load_target

Array = np.ndarray[Any, Any]
DECODE_STEPS = 16


@dataclass(slots=True)
class Spent:
    """What an op took, over all its launches and steps."""

    launches: int = 0
    ns: int = 0
    bytes: int = 0
    flops: int = 0


@dataclass
class KernelClock:
    """A device whose launches are timed; all else is left to the device.

    Args:
        device: runs the steps. nodes: of each phase, one a launch; empty where they are unknown.
    """

    device: CpuDevice
    nodes: Mapping[str, tuple[Node, ...]]
    steps: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    work: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    def run(self, phase_name: str, inputs: Mapping[str, Array], *, trace: Iterable[str] = ()
            ) -> dict[str, Array]:
        sizes = self.device.step_sizes(phase_name, inputs)
        counted = self.work.setdefault(phase_name, defaultdict(lambda: [0, 0]))
        for node in self.nodes.get(phase_name, ()):
            nbytes, flops = work(node, sizes)
            counted[node.op.name][0] += nbytes
            counted[node.op.name][1] += flops
        self.steps[phase_name] += 1
        return self.device.run(phase_name, inputs, trace=trace)

    def restart(self) -> None:
        self.device.time_launches()
        self.steps.clear()
        self.work.clear()

    def spent(self, phase: str) -> dict[str, Spent]:
        """By op, the slowest first."""
        assert self.device.launch_ns is not None
        found: dict[str, Spent] = defaultdict(Spent)
        launches = self.device.program.phases[phase].launches
        for (op, _, _), ns in zip(launches, self.device.launch_ns[phase], strict=True):
            found[op].launches += 1
            found[op].ns += int(ns)
        for op, (nbytes, flops) in self.work.get(phase, {}).items():
            found[op].bytes, found[op].flops = nbytes, flops
        return dict(sorted(found.items(), key=lambda item: -item[1].ns))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)


def phase_nodes(program: Program, model: Path) -> dict[str, tuple[Node, ...]]:
    """The nodes of each phase, for the phases that this version lowers as the Program has them."""
    target = load_target(program.target)
    sources = build_graphs(read_config(model), Limits(**program.manifest["limits"]))
    graphs = {name: lower_graph(graph, target) for name, graph in sources.items()}
    return {name: tuple(graph.nodes) for name, graph in graphs.items()
            if program.manifest["phases"][name]["graph_digest"] == graph_digest(graph)}


def check(name: str, given: int, most: int) -> None:
    """Raises RequestError for a size that does not fit into a step."""
    if not 1 <= given <= most:
        raise RequestError(f"{name} is {given}, expected 1..{most}", where=f"--{name}",
                           next="choose a number in that range")


def run_kernels(args: argparse.Namespace) -> int:
    """One prompt of ``args.tokens`` tokens, then steps of ``args.batch`` requests."""
    with open_llm(args, Path(args.model)) as llm:
        device = llm.engine.device
        assert isinstance(device, CpuDevice)
        clock = KernelClock(device, phase_nodes(llm.program, Path(args.model)))
        rows = int(llm.program.manifest["limits"]["max_num_batched_tokens"])
        check("tokens", args.tokens, min(rows, llm.engine.max_model_len - 1))
        check("batch", args.batch, llm.engine.sizes.num_slots)
        engine = Engine(llm.program, clock, llm.engine.sizes,
                        max_model_len=llm.engine.max_model_len, max_num_batched_tokens=rows,
                        draft="off", prefix_cache="off", overlap=False)
        vocab = int(llm.program.manifest["facts"]["vocab_size"])
        found = {f"prefill of {args.tokens} tokens": _prefill(engine, clock, args.tokens, vocab),
                 f"decode of {args.batch} requests": _decode(engine, clock, args.batch, vocab)}
        device.time_launches(False)
    if args.json:
        emit_json({name: {op: {"ns": s.ns / steps, "launches": s.launches,
                               "bytes": s.bytes / steps, "flops": s.flops / steps}
                          for op, s in ops.items()} for name, (steps, ops) in found.items()})
    else:
        emit("\n\n".join(_table(name, *what) for name, what in found.items()))
    return 0


def _prefill(engine: Engine, clock: KernelClock, tokens: int, vocab: int
             ) -> tuple[int, dict[str, Spent]]:
    for warm in (True, False):
        clock.restart()
        engine.add_request([(7 * i + warm) % vocab for i in range(tokens)],
                           SamplingParams(max_tokens=1, ignore_eos=True))
        while engine.has_unfinished():
            engine.step()
    return 1, clock.spent("prefill")


def _decode(engine: Engine, clock: KernelClock, batch: int, vocab: int
            ) -> tuple[int, dict[str, Spent]]:
    for i in range(batch):
        engine.add_request([(7 * i + j) % vocab for j in range(8)],
                           SamplingParams(max_tokens=DECODE_STEPS + 2, ignore_eos=True))
    engine.step()
    engine.step()
    clock.restart()
    while engine.has_unfinished():
        engine.step()
    return max(1, clock.steps["decode"]), clock.spent("decode")


def _table(name: str, steps: int, ops: Mapping[str, Spent]) -> str:
    whole = sum(s.ns for s in ops.values()) or 1
    rows: list[tuple[str, ...]] = [("op", "launches", "time", "share", "GB/s", "GFLOP/s")]
    for op, s in ops.items():
        rows.append((op, str(s.launches), f"{s.ns / steps / 1e6:.3f} ms",
                     f"{100 * s.ns / whole:.1f} %", *(
                         f"{n / s.ns:.1f}" if n and s.ns else "" for n in (s.bytes, s.flops))))
    return f"{name}: {whole / steps / 1e6:.2f} ms\n" + table(rows)
