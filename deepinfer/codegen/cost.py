"""What a step costs on paper: nanoseconds of a nominal machine for each number of rows.

The runtime weighs drafts against it (spec §5.5), so only ratios matter; no bit of a result depends
on a cost. All counts are exact integers: equal graphs have equal costs on every machine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.types import I32, I64, UE8M0, Kind, Sym
from deepinfer.targets.base import Target

CONTEXT = 1024  # positions that an unselective reader of a paged cache is taken to see
PER_ELEMENT = 8  # operations an elementwise op is taken to need per value it reads or writes


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a machine is taken to be.

    Args:
        bytes, flops: per microsecond. launch_ns: of starting one kernel on all cores.
    """

    bytes: int
    flops: int
    launch_ns: int

    @staticmethod
    def of(target: Target) -> Rates:
        """From the target's facts; where it has none, a desktop CPU of eight cores."""
        facts = target.facts
        bandwidth = facts.get("memory_bytes_per_second")
        peak = facts.get("fp8_dense_flops") or facts.get("mxfp8_flops")
        return Rates(int(bandwidth.value) // 10**6 if bandwidth else 40_000,
                     int(peak.value) // 10**6 if peak else 400_000, 2000)


def speculation_costs(graphs: Mapping[str, Graph], target: Target) -> dict[str, list[list[int]]]:
    """``step_costs`` of the lowered phases that the width of drafts is weighed by: "verify" by
    rows, "draft" by drafting requests; none for a model without drafts."""
    counts = {"verify": "num_tokens", "draft": "num_drafting"}
    return {n: step_costs(graphs[n], target, count) for n, count in counts.items() if n in graphs}


def step_costs(graph: Graph, target: Target, count: str) -> list[list[int]]:
    """The cost of a step of a lowered graph at each of its sizes.

    cost(n) = sum over nodes of launch + max(bytes / bandwidth, flops / peak); it never falls in n.

    Args:
        graph: a lowered phase. target: whose rates to take.
        count: the run-time size that is varied, from 1 to its maximum ("num_tokens"); the step's
            other sizes follow it up to their own.

    Returns:
        [[n, nanoseconds], ...], as the manifest holds it.
    """
    rates, largest = Rates.of(target), _maxima(graph)
    alike: dict[object, Node] = {}
    times: Counter[object] = Counter()
    for node in graph.nodes:  # layers repeat: each distinct node is counted once per size
        key = (node.op.name, node.attrs, tuple((v.kind, v.type) for v in node.inputs))
        alike.setdefault(key, node)
        times[key] += 1
    return [[n, sum(times[key] * _ns(node, {s: min(n, m) for s, m in largest.items()}, rates)
                    for key, node in alike.items())]
            for n in range(1, largest.get(count, 0) + 1)]


def _maxima(graph: Graph) -> dict[str, int]:
    found: dict[str, int] = {}
    for value in graph.values():
        for sym in value.type.symbols():
            found[sym.name] = max(sym.max, found.get(sym.name, 0))
    return found


def _ns(node: Node, sizes: Mapping[str, int], rates: Rates) -> int:
    nbytes, flops = work(node, sizes)
    return rates.launch_ns + max(-(-nbytes * 1000 // rates.bytes), -(-flops * 1000 // rates.flops))


def work(node: Node, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Bytes moved and operations done by one node; each weight is read once a step."""
    made = [*node.outputs, *(v for v in node.inputs if v.kind is Kind.TEMP)]
    counts = [math.prod(v.type.concrete(sizes)) for v in made]
    nbytes = sum(n * v.type.dtype.bits // 8 for n, v in zip(counts, made, strict=True))
    flops = PER_ELEMENT * sum(counts)
    rows = node.outputs[0].type.concrete(sizes)[0] if node.outputs else 0
    for index, value in enumerate(node.inputs):
        if value.kind is Kind.WEIGHT:
            more, operations = _weight(node, index, rows)
        elif value.kind is Kind.STATE and value not in node.writes():
            more, operations = _state(node, index, rows)
        else:
            continue
        nbytes, flops = nbytes + more, flops + operations
    return nbytes, flops


def _weight(node: Node, index: int, rows: int) -> tuple[int, int]:
    """A weight is a table that rows look things up in, a stack of experts of which the rows touch
    some, or a matrix that every row is multiplied with; integer operands tell which."""
    operands, weight = node.op.signature.inputs, node.inputs[index]
    shape = weight.type.concrete({})
    whole = math.prod(shape) * weight.type.dtype.bits // 8
    others = [o for o, v in zip(operands, node.inputs, strict=True) if v.kind is not Kind.WEIGHT]
    indexed = any(v.type.dtype in (I32, I64) for v in node.inputs)
    scales = weight.type.dtype is UE8M0
    if indexed and len(shape) > 2:
        each = 0 if scales else 2 * math.prod(shape[1:])
        return expected_experts(shape[0], rows, whole // shape[0]), rows * each
    if indexed and not any(operands[index].dims[0] in o.dims for o in others):
        return rows * (whole // shape[0]), 0
    return whole, 0 if scales else 2 * rows * math.prod(shape)


@cache
def _untouched(experts: int, pairs: int) -> tuple[int, int]:
    """((experts - 1) ^ pairs, experts ^ pairs): the chance that no pair meets an expert."""
    return (experts - 1) ** pairs, experts**pairs


def expected_experts(experts: int, pairs: int, unit: int) -> int:
    """``unit`` times the expected number of distinct experts, rounded down.

    E * (1 - (1 - 1/E)^pairs): each (row, expert) pair is taken to fall on any of the E experts with
    equal chance. Real routers are less even, and rows of one request more alike.
    """
    missed, all_ways = _untouched(experts, pairs)
    return unit * experts * (all_ways - missed) // all_ways


def _state(node: Node, index: int, rows: int) -> tuple[int, int]:
    """Each row reads a slot, or the entries it picked, or, without picks, those of CONTEXT; and
    forms two products with each: of its query, and of the weight that the entry gets."""
    type, attrs = node.inputs[index].type, node.attrs
    if isinstance(type.shape[0], Sym) and type.shape[0].name == "num_slots":
        entries = _int(type.shape[1])
    else:
        picks = [v.type.shape[1] for v in node.inputs
                 if v.kind is Kind.TEMP and v.type.dtype is I32 and len(v.type.shape) == 2]
        entries = (_int(picks[0]) * _int(attrs.get("block")) if picks
                   else CONTEXT // _int(attrs.get("ratio")))
    held = rows * entries * math.prod(tuple(_int(d) for d in type.shape[2:]))
    scales = node.op.signature.inputs[index].name.endswith("_sf")
    query = _int(node.inputs[0].type.shape[-1])
    return held * type.dtype.bits // 8, 0 if scales else 4 * rows * entries * query


def _int(value: object) -> int:
    return value if isinstance(value, int) else 1  # an attribute that is absent, a dim of the step
