"""Kernels of a graph's nodes, what a caller may cut, and the plan of a phase."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer.codegen.emit import lower_graph, lower_kernels, plan_phase
from deepinfer.codegen.select import instances, select
from deepinfer.errors import IRError, NoKernelError, PassError, TargetError, ToolchainError
from deepinfer.graph.limits import Limits
from deepinfer.graph.make_model import tiny_config
from deepinfer.graph.v41_flash import forward
from deepinfer.ir import Attrs, Builder, Sym, TensorType
from deepinfer.ir.types import F32
from deepinfer.targets.base import Extent, KernelTable, Pass, Spec, load_target
from tests.codegen.fake_target import target
from tests.ir.graphs import ROWS, Ops, small

ALL = ("scale", "halves", "store")


def test_no_kernel():
    with pytest.raises(NoKernelError, match="op 'store' has no kernel on target 'fake'") as caught:
        select(small(Ops()), target("scale", "halves"))
    assert caught.value.where == "graph prefill at layers.0"
    assert "deepinfer inspect kernels" in caught.value.next


def test_equal_specs_share_a_kernel():
    ops = Ops()
    launches = select(small(ops), target(*ALL))
    assert [x.node.op.name for x in launches] == ["scale", "store", "scale", "halves"]
    assert len(instances(launches)) == 4  # by=3.0 and by=2.0 are two kernels
    assert str(launches[0].instance.spec.schedule) == "tile=16"  # the first of the space
    assert launches[0].extent == Extent("num_tokens", 1, 1)
    same = select(small_again(2.0), target(*ALL))
    assert same[0].instance.symbol == same[2].instance.symbol and len(instances(same)) == 3
    assert same[0].instance.symbol.startswith("scale_")


def small_again(by):
    from deepinfer.ir import OPS

    for name in ALL:
        OPS.pop(name)
    return small(Ops(), by)


def test_plan():
    plan = plan_phase(small(Ops()), target(*ALL))
    told = plan.describe()
    assert told["sizes"] == [["num_tokens", 8], ["num_slots", 16]] and told["scratch_bytes"] == 128
    assert told["outputs"] == ["layers.0.attn.scale", "layers.0.attn.halves.lo"]
    assert told["values"][0] == {"name": "x", "kind": "input", "dtype": "f32",
                                 "shape": [["num_tokens", 1], 4]}
    assert [v["name"] for v in told["values"] if "offset" in v] == [
        v.name for n in plan.graph.nodes for v in n.outputs]
    seen = []
    done = lower_kernels(instances(plan.launches), lambda instance: instance.symbol,
                         lambda what, n, total: seen.append((n, total)))
    assert seen == [(n, 4) for n in range(5)]
    assert list(done) == sorted(x.instance.symbol for x in plan.launches)


def test_outputs_are_temps():
    graph = small(Ops())
    with pytest.raises(IRError, match=r"output \$x is input"):
        plan_phase(replace(graph, outputs=(graph.inputs[0],)), target(*ALL))


def test_a_pass_that_fails_is_named():
    seen = []
    good = Pass("keep", lambda g: g, True, "")
    bad = Pass("break", lambda g: replace(g, nodes=g.nodes[1:]), True, "")
    with pytest.raises(PassError, match="is used before it is defined") as caught:
        lower_graph(small(Ops()), replace(target(*ALL), passes=(good, bad)),
                    lambda name, graph: seen.append(name))
    assert caught.value.where.startswith("pass break on graph prefill; ") and seen == ["keep"]


@pytest.mark.parametrize(("items", "expected"), [
    ("N", Extent("num_tokens", 2, 1)), ("N*C", Extent("num_tokens", 8, 1)),
    ("N*heads/16", Extent("num_tokens", 6, 16)), ("C/16", Extent(None, 4, 16)),
    ("C/N", "cannot form the items 'C/N'"), ("N*N", "cannot form the items"),
    ("N*q", "cannot form the items 'N[*]q'"), ("N+1", "cannot read the items 'N[+]1'"),
    ("", "cannot read the items ''"), ("N*", "cannot read"),
])
def test_extents(items, expected):
    spec = Spec(Ops().scale, {"N": Sym("num_tokens", 8, 2), "C": 4}, {}, Attrs({"heads": 3}))
    if isinstance(expected, Extent):
        assert Extent.parse(items, spec) == expected
    else:
        with pytest.raises(TargetError, match=expected) as caught:
            Extent.parse(items, spec)
        assert caught.value.where == "kernel scale"


def test_specs_tell_kernels_apart():
    ops = Ops()

    def key(c, by, dim, order=None):
        with Builder("g") as b:
            x = b.input("x", TensorType((dim, c), F32))
            ops.scale(x, b.weight("w", TensorType((c,), F32)), by=by)
        return Spec.of(b.nodes[0]).key()

    base = key(4, 2.0, ROWS.shape[0])
    assert base == key(4, 2.0, Sym("other", 99))  # symbolic dims are alike
    assert len({base, key(8, 2.0, ROWS.shape[0]), key(4, 3.0, ROWS.shape[0]), key(4, 2.0, 8)}) == 4


def test_equal_keys_lower_to_equal_texts():
    """A Program's bytes must not depend on what was compiled before, with other limits."""
    cpu, cfg = load_target("cpu"), tiny_config()
    texts: dict[str, dict[int, str]] = {}
    for length in (64, 256):
        graph = forward(cfg, Limits.for_model(cfg, max_model_len=length), "decode")
        for launch in select(lower_graph(graph, cpu), cpu):
            x = launch.instance
            if {"P", "T"} & set(x.spec.dynamic()):  # sizes that follow the limits
                made = cpu.lower(x.kernel.program(x.spec), "k").text
                texts.setdefault(x.spec.key(), {})[length] = made
    assert len(texts) > 6
    assert all(found[64] == found[256] for found in texts.values())


def test_targets():
    with pytest.raises(TargetError, match="no target 'gpu', expected one of cpu, sm100"):
        load_target("gpu")
    cpu = load_target("cpu")
    assert "rms_norm" in cpu.kernels and cpu.kernels["rms_norm"].op == "rms_norm"
    assert "nothing" not in cpu.kernels and cpu.kernels.get("nothing") is None
    assert len(cpu.kernels) == len(list(cpu.kernels)) == len(set(cpu.kernels))


def test_a_kernel_whose_package_is_missing(tmp_path, monkeypatch):
    package = tmp_path / "kernels_without_tilelang"
    package.mkdir()
    (package / "scale.py").write_text("import tilelang.not_there\n")
    (package / "halves.py").write_text("import not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    table = KernelTable("kernels_without_tilelang", ("scale", "halves"))
    with pytest.raises(ToolchainError, match="tilelang.not_there is not installed") as caught:
        table["scale"]
    assert "pip install 'deepinfer-compiler[compile]'" in caught.value.next
    with pytest.raises(ModuleNotFoundError, match="not_there"):  # a fault of ours stays one
        table["halves"]
