"""The knobs of the large cpu kernels change no bit, and what select picks is what the file says."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.shipping import file_text
from deepinfer.checkpoint import layouts
from deepinfer.codegen import schedules
from deepinfer.codegen.emit import lower_graph
from deepinfer.codegen.schedules import Entry, kernel_key
from deepinfer.codegen.select import launch_of, select
from deepinfer.compiler import build_graphs
from deepinfer.graph.limits import Limits
from deepinfer.graph.make_model import tiny_config
from deepinfer.numerics.formats import quantize_fp4_ue8m0, to_bf16
from deepinfer.ops import hyper, moe, packed
from deepinfer.targets.base import Extent, Schedule, Spec, load_target
from tests.cpu.harness import bits, run_kernel

CPU = load_target("cpu")


def rows(n: int, *shape: int) -> np.ndarray:
    return to_bf16(np.random.default_rng(n).standard_normal((n, *shape)).astype(np.float32))


def some(op, arrays, attrs, symbolic="N"):
    """The default schedule, the last one, and one that differs in every knob where there is one."""
    from deepinfer.ir.op import type_of

    full = op.attrs(attrs)
    unifier = op.unifier(full)
    unifier.unify([type_of(a, o.dtype)
                   for a, o in zip(arrays, op.signature.inputs, strict=True)])
    space = CPU.kernels[op.name].space(Spec(op, dict(unifier.dims), dict(unifier.dtypes), full))
    middle = [s for s in space if all(a != b for a, b in
                                      zip(s.items, space[0].items, strict=True))]
    return list(dict.fromkeys([space[0], space[-1], *middle[:1]]))


def check_knobs(op, make, attrs, counts=(0, 1, 5, 131), symbolic="N"):
    """All of ``some`` give the default's bits at each row count, cut in ranges, too."""
    chosen = some(op, make(counts[-1]), attrs)
    assert len(chosen) > 1
    for n in counts:
        arrays = make(n)
        got = [run_kernel(op, CPU.kernels[op.name], arrays, attrs, symbolic=symbolic, isa="generic",
                          schedule=s, ranges=r) for s in chosen for r in (1, 3)]
        for outputs in got[1:]:
            for a, b in zip(got[0], outputs, strict=True):
                assert np.array_equal(bits(a), bits(b)), f"{op.name} of {n} rows"


def test_packed_linear():
    w = layouts.tile16_bf16(rows(16 * 16, 64))
    check_knobs(packed.packed_linear_bf16, lambda n: (rows(n, 64), w), {"m": 16 * 16 - 3})


def test_packed_linear_of_few_tiles():
    w = layouts.tile16_bf16(rows(8, 64))
    check_knobs(packed.packed_linear_bf16, lambda n: (rows(n, 64), w), {"m": 8, "out": "f32"})


def test_grouped_down():
    w, sf = quantize_fp4_ue8m0(rows(4 * 160, 64).reshape(4, 160, 64))
    tiles = layouts.tile16_e2m1(w), layouts.tile16_e2m1_sf(sf)

    def make(n):
        idx = np.sort(np.random.default_rng(n).permuted(
            np.tile(np.arange(4, dtype=np.int32), (n, 1)), axis=1)[:, :2], axis=1)
        return (rows(2 * n, 64), *tiles, *moe.group_rows(idx, experts=4))

    check_knobs(moe.grouped_down, make, {"m": 160}, symbolic="Z")


@pytest.mark.parametrize("op", [hyper.hyper_collapse, hyper.hyper_post])
def test_hyper(op):
    def make(n):
        g = np.random.default_rng(n)
        x, y = rows(n, 4, 512), rows(n, 512)
        pre = g.standard_normal((n, 4)).astype(np.float32)
        comb = g.standard_normal((n, 4, 4)).astype(np.float32)
        return (x, pre) if op is hyper.hyper_collapse else (y, x, pre, comb)

    check_knobs(op, make, {}, counts=(1, 5))


def test_items_may_depend_on_the_schedule():
    spec = Spec(packed.packed_linear_bf16, {"N": 7, "B": 24}, {}, packed.packed_linear_bf16.attrs(
        {"m": 384}), Schedule((("rows", 96), ("split", 2), ("tiles", 8))))
    extent = Extent.parse("B*split/tiles", spec)
    assert (extent.sym, extent.mul, extent.div) == (None, 48, 8)


def test_select_takes_the_shipped_schedule_of_exactly_that_kernel(tmp_path, monkeypatch):
    cfg = tiny_config()
    sources = build_graphs(cfg, Limits.for_model(cfg))
    graphs = {n: lower_graph(sources[n], CPU) for n in ("prefill", "decode")}
    monkeypatch.setattr(schedules, "TARGETS", tmp_path)  # where nothing ships yet
    (tmp_path / "cpu").mkdir()
    before = {n: select(g, CPU) for n, g in graphs.items()}
    first = next(x for x in before["decode"] if x.node.op.name == "packed_linear_fp8")
    other = first.instance.kernel.space(first.instance.spec)[-1]
    key = kernel_key(first.instance.spec)
    (tmp_path / "cpu" / "schedules.json").write_text(
        file_text({(key, "decode"): Entry(key, "decode", other, {})}))
    assert launch_of(first.node, graphs["decode"], CPU).instance.spec.schedule == other
    changed = {n: [(a, b) for a, b in zip(before[n], select(g, CPU), strict=True)
                   if a.instance.symbol != b.instance.symbol] for n, g in graphs.items()}
    assert changed["prefill"] == [] and len(changed["decode"]) > 1
    assert {kernel_key(a.instance.spec) for a, _ in changed["decode"]} == {key}
