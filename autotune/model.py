"""A static cost model: ranks schedules before anything is built, whether there is a device or not.

Its numbers are *modelled*: they come from a machine's published facts and a few rules about what a
knob does, and no measurement is fitted. They order what to try, and halving tries only the first of
them; nothing is applied on them.

    time = launch + max(bytes / bandwidth, operations / peak) / use, of whole waves

    bytes: what the op must move, and its weights again for each further block of rows
    use: the part of the machine that has work, of whole waves of blocks (or of ranges of items);
    a kernel without double buffers pays for copies and arithmetic one after the other
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.space import Candidate, Sizes
from deepinfer.errors import TargetError
from deepinfer.ir.types import Kind, Sym
from deepinfer.targets.base import Extent, load_target

LABEL = "modelled"
PASSES = ("rows", "tokens")  # knobs: rows that share one reading of the weights
DEPTH = ("stages", "buffers")  # knobs: blocks in flight; one does not overlap with arithmetic
CACHE_SPEED = 4  # a cache is taken to be this much faster than memory
UNITS = 148  # multiprocessors a GPU is taken to have: its facts do not say
LAUNCH_NS = 2000.0
ITEM_NS = 60.0  # of one work item of a cpu kernel


@dataclass(frozen=True, slots=True)
class Modelled:
    """A modelled time.

    Args:
        ns: nanoseconds. bound: "memory" or "arithmetic". use: part of the machine that has work.
    """

    ns: float
    bound: str
    use: float


def rates(target: str) -> tuple[float, float]:
    """Bytes and operations per nanosecond of a target's machine, from its facts; for cpu, of a
    desktop CPU of eight cores (``codegen.cost`` takes the same)."""
    facts = load_target(target).facts
    peak = facts.get("fp8_dense_flops") or facts.get("mxfp8_flops")
    memory = facts.get("memory_bytes_per_second")
    return (memory.value / 1e9 if memory else 40.0), (peak.value / 1e9 if peak else 400.0)


def model(candidate: Candidate, sizes: Sizes, launch: Mapping[str, Any], threads: int = 8
          ) -> Modelled:
    """The modelled time of one schedule at one size.

    Args:
        launch: of the lowered kernel (``LoweredKernel.launch``); empty on cpu. threads: of cpu.
    """
    problem, knobs = candidate.problem, dict(candidate.schedule.items)
    nbytes, operations = problem.work(sizes)
    bandwidth, peak = rates(problem.target)
    rows = max((n for _, n in sizes), default=1)
    share = next((knobs[k] for k in PASSES if k in knobs), rows)
    again = (-(-rows // share) - 1) * _weight_bytes(candidate)
    memory = nbytes / bandwidth + again / (bandwidth * CACHE_SPEED)
    padded = -(-rows // share) * share / rows if launch else 1.0
    arithmetic = operations * padded / peak
    if problem.target == "cpu":
        count = items(candidate, sizes)
        use, extra = waves(count, threads), count / threads * ITEM_NS
    else:
        use, extra = waves(_blocks(launch, candidate, sizes), _slots(launch, problem.target)), 0.0
    depth = next((knobs[k] for k in DEPTH if k in knobs), 2)
    both = memory + arithmetic if depth < 2 else max(memory, arithmetic) * (1 + 0.1 / depth)
    return Modelled(LAUNCH_NS + both / use + extra,
                    "memory" if memory >= arithmetic else "arithmetic", use)


def waves(blocks: int, slots: int) -> float:
    """The part of ``slots`` that has work, of the whole waves that ``blocks`` need."""
    return 1.0 if blocks <= 0 else blocks / (-(-blocks // slots) * slots)


def items(candidate: Candidate, sizes: Sizes) -> int:
    """The work items of a cpu kernel."""
    spec = candidate.problem.spec(candidate.schedule)
    extent = Extent.parse(candidate.problem.kernel().items, spec)
    return -(-(dict(sizes)[extent.sym] if extent.sym else 1) * extent.mul // extent.div)


def _weight_bytes(candidate: Candidate) -> int:
    return sum(v.type.nbytes({}) for v in candidate.problem.node().inputs if v.kind is Kind.WEIGHT)


def _blocks(launch: Mapping[str, Any], candidate: Candidate, sizes: Sizes) -> int:
    spec, bound = candidate.problem.spec(), dict(sizes)
    dims = {k: bound[d.name] * d.times if isinstance(d, Sym) else d for k, d in spec.dims.items()}
    grid = launch["grid"]
    return math.prod(_size(g, dims) for g in (grid if isinstance(grid, list) else [grid]))


def _size(expression: int | str, dims: Mapping[str, int]) -> int:
    if isinstance(expression, int):
        return expression
    from deepinfer.targets.sm100.lower import evaluate_size

    return evaluate_size(expression, dims)


def _slots(launch: Mapping[str, Any], target: str) -> int:
    """Blocks that the machine holds at a time, by its threads and its on-chip memory."""
    facts = load_target(target).facts
    if "grid" in launch and not isinstance(launch["grid"], list):
        return int(facts["cube_cores"].value)  # groups of cores that divide the rows themselves
    smem = int(launch.get("dynamic_smem", 0))
    by_memory = int(facts["smem_per_sm"].value) // smem if smem else 32
    by_threads = int(facts["warps_per_sm"].value) * 32 // int(launch["threads"])
    if not min(by_memory, by_threads):
        raise TargetError(f"a block needs {smem} bytes of shared memory and {launch['threads']} "
                          "threads, more than the machine has", where=f"target {target}",
                          next="shrink the schedule")
    return UNITS * min(by_memory, by_threads)
