"""What a step must read and compute, counted from graphs: the roofline that a Program runs under.

Bytes are those of weights and caches, in the formats of the checkpoint: a step has to read each at
least once, while its activations can stay in caches. Operations are those of matrix products
(projections, experts, index scores, attention), 2 for a multiply-add.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from deepinfer.compiler import build_graphs
from deepinfer.graph.config import ModelConfig
from deepinfer.graph.limits import Limits
from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.types import Kind, Value
from deepinfer.program import Program
from deepinfer.targets.base import Spec

TABLES = {"embed": 1, "rope": 1, "engram_hash": 1, "engram_gather": 1}  # looked up, not multiplied


@dataclass(frozen=True, slots=True)
class Step:
    """A step whose requests have equally many rows.

    Args:
        rows: of all requests. requests: how many. context: positions of each, its rows included.
        experts: distinct experts met, by the start of a node's location ("layers.3.ffn"); for
            other nodes as many as there are pairs, all if those are more.
        page_size: tokens of a page.
    """

    rows: int
    requests: int
    context: int
    experts: Mapping[str, float] = field(default_factory=dict)
    page_size: int = 128

    @property
    def positions(self) -> range:
        """Those of one request's rows."""
        return range(self.context - self.rows // self.requests, self.context)

    def sizes(self, node: Node) -> dict[str, int]:
        """The node's run-time sizes: rows, but for counts of requests."""
        names = {s.name for v in (*node.inputs, *node.outputs) for s in v.type.symbols()}
        few = {"num_requests", "num_sampled", "num_drafting"}
        return {n: self.requests if n in few else self.rows for n in names}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of a step: bytes that must be read, operations that must be done."""

    nbytes: float
    flops: int


def source_graph(program: Program, phase: str) -> Graph:
    """The graph that a Program's phase was lowered from: shapes and formats of the checkpoint."""
    cfg = ModelConfig.from_json(program.manifest["model"], where=str(program.path))
    return build_graphs(cfg, Limits(**program.manifest["limits"]))[phase]


def traffic(graph: Graph, step: Step) -> Traffic:
    """The sum over a graph's nodes. A weight that several read is counted once; entries that a
    candidate mask throws away again need not be scored."""
    counted: set[Value] = set()
    kept = {n.inputs[0]: n for n in graph.nodes if n.op.name == "candidate_mask"}
    nbytes, flops = 0.0, 0
    for node in graph.nodes:
        masked = next((kept[v] for v in node.outputs if v in kept), None)
        most = None if masked is None else _candidates(masked)
        nbytes += node_bytes(node, step, most, counted)
        counted.update(v for v in node.inputs if v.kind is Kind.WEIGHT)
        flops += node_flops(node, step, most)
    return Traffic(nbytes, flops)


def node_bytes(node: Node, step: Step, most: int | None = None,
               counted: Collection[Value] = ()) -> float:
    """Bytes of weights, but those ``counted`` before, and of caches that one node must read;
    ``most``: entries it scores."""
    total = 0.0
    for value in node.inputs:
        if value.kind is Kind.WEIGHT and value not in counted:
            total += _weight_bytes(node, value, step)
        elif value.kind is Kind.STATE and value not in node.writes():
            total += _state_bytes(node, value, step, most)
    return total


def node_flops(node: Node, step: Step, most: int | None = None) -> int:
    """Operations of one node's matrix products."""
    name, dims, attrs = node.op.name, Spec.of(node).dims, node.attrs
    rows = node.outputs[0].type.concrete(step.sizes(node))[0] if node.outputs else 0

    def dim(letter: str) -> int:
        size = dims[letter]
        assert isinstance(size, int), f"{name}: {letter} is {size}"
        return size

    if name.startswith(("packed_linear", "grouped_", "expert_gate", "expert_down")) or (
            "linear" in name):
        outputs = attrs["m"] if "m" in attrs else None
        if "gate_up" in name:
            return 4 * rows * (int(outputs) if outputs else dim("I")) * dim("C")
        if name.endswith("_down"):
            return 2 * rows * (int(outputs) if outputs else dim("C")) * dim("I")
        return 2 * rows * (int(outputs) if outputs else dim("M")) * dim("K")
    if name in ("hyper_mix", "hyper_enter", "hyper_post_enter"):
        return 2 * rows * dim("M") * dim("C") * int(attrs["hc"])
    if name.endswith("attention"):
        window, picks = int(attrs["window"]), dim("K") if "K" in dims else 0
        ratio = step.page_size // dim("E") if picks else 1
        keys = sum(min(window, p + 1) + min(picks, (p + 1) // ratio) for p in step.positions)
        return 4 * step.requests * keys * dim("H") * dim("D")
    if name.startswith("index_"):
        most = _most(node, most)
        seen = sum(_capped((p + 1) // int(attrs["ratio"]), most) for p in step.positions)
        heads = node.inputs[2 if name == "index_scores" else 1].type.shape[-1]
        assert isinstance(heads, int)
        return 2 * step.requests * seen * heads * dim("I")
    return 0


def _weight_bytes(node: Node, value: Value, step: Step) -> float:
    shape, bits = value.type.concrete({}), value.type.dtype.bits
    whole = math.prod(shape) * bits // 8
    if node.op.name in TABLES:
        rows = math.prod(node.inputs[0].type.concrete(step.sizes(node))[:1])
        looked_up = node.inputs[0].type.concrete(step.sizes(node))[-1] if (
            node.op.name.startswith("engram")) else 1
        return rows * looked_up * whole / shape[0]
    if len(shape) > 2 and node.op.name.startswith(("expert_", "grouped_")) and (
            "linear" not in node.op.name):
        pairs = node.outputs[0].type.concrete(step.sizes(node))[0]
        met = next((n for at, n in step.experts.items() if node.loc.startswith(at)),
                   min(shape[0], pairs))
        return met * whole / shape[0]
    return whole


def _state_bytes(node: Node, value: Value, step: Step, most: int | None) -> float:
    """Entries that the step's rows see of a cache, each read once for a request."""
    shape, attrs, before = value.type.shape, node.attrs, step.positions.start
    each = math.prod(d for d in shape[2:] if isinstance(d, int)) * value.type.dtype.bits / 8
    if node.op.name.endswith("attention"):
        operand = node.op.signature.inputs[node.inputs.index(value)].name
        if operand.startswith("ring"):
            return step.requests * min(int(attrs["window"]) - 1, before) * each
        assert isinstance(shape[1], int)
        picks = node.inputs[next(i for i, o in enumerate(node.op.signature.inputs)
                                 if o.name == "idx")].type.shape[1]
        assert isinstance(picks, int)
        entries = step.context * shape[1] // step.page_size
        return step.requests * min(entries, picks * len(step.positions)) * each
    if node.op.name.startswith("index_"):
        seen = _capped(step.context // int(attrs["ratio"]), _most(node, most))
        return step.requests * seen * each
    if node.op.name == "compress_pairs":
        return step.requests * each  # one open group
    return 0.0


def _candidates(node: Node) -> int:
    """Entries of a row's candidate blocks."""
    blocks = node.inputs[-1].type.shape[1]
    assert isinstance(blocks, int)
    return blocks * int(node.attrs["block"])


def _most(node: Node, most: int | None) -> int | None:
    return _candidates(node) if node.op.name == "index_topk_within" else most


def _capped(count: int, most: int | None) -> int:
    return count if most is None else min(count, most)
