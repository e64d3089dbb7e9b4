"""Costs on paper: exact, rising, and made of what the rows touch."""

from __future__ import annotations

from fractions import Fraction

import pytest

from deepinfer.codegen import cost
from deepinfer.codegen.emit import lower_graph
from deepinfer.compiler import build_graphs
from deepinfer.graph.limits import Limits
from deepinfer.graph.make_model import tiny_config
from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.types import Kind
from deepinfer.targets.base import Target, load_target


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("cpu")


@pytest.fixture(scope="module")
def graphs(target: Target) -> dict[str, Graph]:
    cfg = tiny_config()
    made = build_graphs(cfg, Limits.for_model(cfg, max_num_seqs=4, max_num_batched_tokens=32))
    return {name: lower_graph(made[name], target) for name in ("verify", "draft")}


def work(graph: Graph, op: str, rows: int, index: int = 0) -> tuple[int, int]:
    sizes = {s: min(rows, m) for s, m in cost._maxima(graph).items()}
    return cost.work([n for n in graph.nodes if n.op.name == op][index], sizes)


def test_costs_cover_every_size_and_never_fall(graphs, target):
    found = cost.speculation_costs(graphs, target)
    assert [n for n, _ in found["verify"]] == list(range(1, 4 * 6 + 1))
    assert [n for n, _ in found["draft"]] == [1, 2, 3, 4]
    for points in found.values():
        costs = [c for _, c in points]
        assert costs == sorted(costs) and costs[0] > 0 and costs[-1] > costs[0]
        assert all(type(c) is int for c in costs)
    # Rows share the weights and the launches: six cost less than six times one.
    assert found["verify"][5][1] < 3 * found["verify"][0][1]
    assert cost.speculation_costs(graphs, target) == found
    assert cost.speculation_costs({}, target) == {}


def test_experts_touched_are_the_expected_number_of_distinct_ones():
    for experts, pairs in ((8, 1), (8, 2), (8, 30), (256, 8), (256, 3000)):
        exact = experts * (1 - Fraction(experts - 1, experts) ** pairs)
        assert cost.expected_experts(experts, pairs, 10**6) == int(exact * 10**6)
    assert cost.expected_experts(8, 1, 100) == 100
    assert cost.expected_experts(8, 100, 100) == 799  # hardly one is missed
    assert cost.expected_experts(8, 0, 100) == 0


def test_a_matrix_is_read_once_and_multiplied_with_every_row(graphs):
    verify = graphs["verify"]
    node = next(n for n in verify.nodes if n.op.name == "packed_linear_fp8")
    weight = sum(v.type.nbytes({}) for v in node.inputs if v.kind is Kind.WEIGHT)
    (one, flops), (two, double) = (work(verify, "packed_linear_fp8", n) for n in (1, 2))
    activations = sum(v.type.nbytes({"num_tokens": 1}) for v in (*node.inputs, *node.outputs)
                      if v.kind is Kind.TEMP)
    assert one == weight + activations and two - one == activations
    k, m = node.inputs[0].type.shape[1], node.outputs[0].type.shape[1]
    assert double == 2 * flops == 2 * (2 * k * m + cost.PER_ELEMENT * (k + m))


def test_experts_are_read_as_rows_touch_them(graphs):
    verify = graphs["verify"]

    def experts(rows: int) -> int:
        node: Node = next(n for n in verify.nodes if n.op.name == "grouped_down")
        moved = sum(v.type.nbytes({"num_tokens": rows}) for v in (*node.inputs, *node.outputs)
                    if v.kind is Kind.TEMP)
        return work(verify, "grouped_down", rows)[0] - moved

    node = next(n for n in verify.nodes if n.op.name == "grouped_down")
    each = sum(v.type.nbytes({}) for v in node.inputs if v.kind is Kind.WEIGHT) // 8
    assert experts(1) == pytest.approx(8 * each * (1 - (7 / 8) ** 2), rel=1e-3)  # two picks a row
    assert experts(1) < experts(2) < experts(24) <= 8 * each
    assert experts(24) > 7.9 * each


def test_a_table_is_read_by_the_row(graphs):
    verify = graphs["verify"]
    for op in ("embed", "engram_gather"):
        one, four = work(verify, op, 1)[0], work(verify, op, 4)[0]
        node = next(n for n in verify.nodes if n.op.name == op)
        whole = sum(v.type.nbytes({}) for v in node.inputs if v.kind is Kind.WEIGHT)
        assert four == 4 * one < whole / 5


def test_attention_reads_the_ring_and_what_was_picked(graphs):
    verify = graphs["verify"]
    window, sparse = work(verify, "window_attention", 1), work(verify, "sparse_attention", 1)
    assert sparse[0] > window[0] and sparse[1] > window[1]
    assert work(verify, "window_attention", 3) == tuple(3 * x for x in window)
    # A free choice reads every key of the context, one among candidates only theirs.
    assert work(verify, "index_topk", 1)[0] > 3 * work(verify, "index_topk_within", 1)[0]


def test_targets_that_say_how_fast_they_are_count_with_it(graphs):
    fast = load_target("sm100")
    assert cost.Rates.of(fast).bytes == 8_000_000
    slow, quick = (cost.step_costs(graphs["verify"], t, "num_tokens")[-1][1]
                   for t in (load_target("cpu"), fast))
    assert quick < slow
