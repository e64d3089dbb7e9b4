"""Problems from graphs, their identity, and the inputs made for them."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.commands import tasks_of_model
from autotune.inputs import OF_FP8_ROWS, can_make, make
from autotune.space import Problem, Task
from deepinfer.codegen.emit import lower_graph
from deepinfer.codegen.schedules import kernel_key
from deepinfer.codegen.select import launch_of
from deepinfer.compiler import build_graphs
from deepinfer.errors import TargetError
from deepinfer.graph.limits import Limits
from deepinfer.graph.make_model import tiny_config
from deepinfer.ir.types import Sym
from deepinfer.numerics.formats import dequantize_fp8, quantize_fp8
from deepinfer.targets.base import load_target


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return tasks_of_model("tiny", "cpu", (1, 16, 256))


def test_every_kernel_of_the_model_once(tasks):
    cfg, cpu = tiny_config(), load_target("cpu")
    graphs = [lower_graph(g, cpu) for g in build_graphs(cfg, Limits.for_model(cfg)).values()]
    kernels = {kernel_key(launch_of(n, g, cpu).instance.spec) for g in graphs for n in g.nodes}
    keys = [t.problem.key for t in tasks]
    assert len(keys) == len(set(keys)) == len(kernels)
    uses = sum(len(g.nodes) for g in graphs)
    assert 0 < sum(t.uses for t in tasks) <= uses


def test_the_costliest_come_first(tasks):
    cost = [t.uses * sum(sum(t.problem.work(p)) for p in t.points) for t in tasks]
    assert cost == sorted(cost, reverse=True)


def test_round_trip(tasks):
    for task in tasks:
        again = Task.from_json(task.to_json())
        assert again == task and again.problem.key == task.problem.key
        assert Problem.from_json(task.problem.to_json()).id == task.problem.id


def test_points_are_lowered_to_what_the_phases_hold(tasks):
    assert {p for t in tasks for s in t.points for _, p in s} >= {1, 16, 256}
    few = tasks_of_model("tiny", "cpu", (1, 10**6), ["packed_linear_bf16"])
    assert max(n for t in few for p in t.points for _, n in p) == 2048  # max_num_batched_tokens


def test_an_op_by_name():
    found = tasks_of_model("tiny", "cpu", (1,), ["route"])
    assert {t.problem.op for t in found} == {"route"}
    with pytest.raises(TargetError, match="no lowered graph has the ops nonsense, topk"):
        tasks_of_model("tiny", "cpu", (1,), ["route", "topk", "nonsense"])


def test_shape_names_all_that_is_concrete(tasks):
    found = next(t for t in tasks if t.problem.op == "grouped_down")
    assert found.problem.shape(found.points[-1]) == "Z=512 I=64 E=8 B=8 m=128"
    assert found.problem.dtypes() == "bf16,e2m1,ue8m0,i32,i32->bf16"


def test_rows_of_quantised_products_are_fp8(tasks):
    found = [t for t in tasks if t.problem.op in OF_FP8_ROWS]
    assert {t.problem.op for t in found} >= {"grouped_down", "packed_linear_fp8"}
    for task in found:
        x = make(task.problem, task.points[-1])[0]
        assert np.unique(x).size > 100
        np.testing.assert_array_equal(dequantize_fp8(*quantize_fp8(x)), x)


def test_inputs_are_the_same_every_time_and_differ_between_problems(tasks):
    for task in (t for t in tasks if can_make(t.problem)):
        first, again = (make(task.problem, task.points[0]) for _ in range(2))
        for a, b, value in zip(first, again, task.problem.node().inputs, strict=True):
            assert a.tobytes() == b.tobytes()
            assert a.shape == value.type.storage(dict(task.points[0]))
            assert a.dtype == value.type.dtype.numpy
    linears = [t for t in tasks if t.problem.op == "packed_linear_fp8"]
    starts = {make(t.problem, t.points[0])[1].tobytes()[:32] for t in linears}
    assert len(starts) == len(linears)


@pytest.mark.parametrize("op", ["grouped_gate_up_fake_quant", "grouped_down"])
def test_grouped_rows_are_a_permutation(tasks, op):
    task = next(t for t in tasks if t.problem.op == op)
    for sizes in task.points:
        made = dict(zip((v.name for v in task.problem.node().inputs),
                        make(task.problem, sizes), strict=True))
        order, offsets = made["order"], made["offsets"]
        assert sorted(order) == list(range(len(order)))
        assert offsets[0] == 0 and offsets[-1] == len(order) and (np.diff(offsets) >= 0).all()
        inside = [order[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]
        assert all((np.diff(rows) > 0).all() for rows in inside)


def test_integers_of_unknown_meaning_are_refused(tasks):
    task = next(t for t in tasks if t.problem.op == "kv_write")
    assert not can_make(task.problem)
    with pytest.raises(TargetError, match="no inputs are known for the integer operands of "
                       "'kv_write'"):
        make(task.problem, task.points[0])


@pytest.mark.parametrize("op", ["window_attention", "sparse_attention", "index_topk",
                                "index_topk_candidates", "index_topk_within"])
@pytest.mark.parametrize("requests", [1, 3])
def test_rows_of_a_step_read_a_full_context(tasks, op, requests):
    """Rows of one request follow each other and end where its pages end; every pick is reachable,
    and the reference runs on what was made."""
    problem = next(t for t in tasks if t.problem.op == op).problem
    letters = {"N": 3, "R": requests, "S": requests, "P": 2, "T": 2 * requests}
    sizes = tuple({d.name: letters[letter] for letter, d in problem.spec().dims.items()
                   if isinstance(d, Sym)}.items())
    node, arrays = problem.node(), make(problem, sizes)
    made = dict(zip((v.name for v in node.inputs), arrays, strict=True))
    last = {int(r): int(p) for r, p in zip(made["request"], made["positions"], strict=True)}
    assert sorted(last) == list(range(requests)) and len(set(last.values())) == 1
    (end,) = set(last.values())
    steps = np.diff(made["positions"])[np.diff(made["request"]) == 0]
    assert (steps == 1).all() and len(steps) == 3 - requests
    cache = made.get("keys", made.get("kv"))
    if cache is not None:
        assert end + 1 == 2 * cache.shape[1] * problem.attrs.get("ratio", 1)
        assert sorted(made["pages"].ravel()) == list(range(2 * requests))
    if "idx" in made:
        picks = made["idx"][0]
        assert (np.diff(picks[picks >= 0]) > 0).all() and picks.max() <= end
    outputs = node.op.run(tuple(a.copy() for a in arrays), node.attrs)
    assert all(np.isfinite(o.astype(np.float32)).all() for o in outputs)
