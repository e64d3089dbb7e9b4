"""sm100 kernels at the model's shapes: they lower, pass their gates, and compile where nvcc is."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Barrier

import pytest
import tilelang.language as T

from deepinfer.codegen.emit import lower_graph, lower_kernels, plan_phase
from deepinfer.codegen.select import instances
from deepinfer.errors import NoKernelError, TargetError, ToolchainError
from deepinfer.ir import Builder, Sym, TensorType
from deepinfer.ir.types import BF16, E4M3, UE8M0
from deepinfer.ops.gemm import linear_fp8
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.quant import quantize_fp8
from deepinfer.settings import cache_dir
from deepinfer.targets.base import LoweredKernel, Schedule
from deepinfer.targets.sm100 import build as building
from deepinfer.targets.sm100.gates import (
    FAILED,
    NOT_CHECKED,
    PASSED,
    check_cubin,
    check_resources,
    check_sass,
    check_text,
    require,
)
from deepinfer.targets.sm100.lower import evaluate_size, lower
from deepinfer.targets.sm100.target import TARGET
from deepinfer.targets.sm100.toolchain import Cubin, compile_cubin, disassemble, find
from tests.targets.sm100_cases import OPERANDS, spec_of

CACHE = cache_dir() / "cubins"
SCHEDULES = [(name, schedule) for name in TARGET.kernels
             for schedule in spec_of(name)[0].space(spec_of(name)[1])]
TENSOR = {"linear_fp8": "UTCQMMA", "linear_fp4": "UTCQMMA", "sparse_attention": "UTCHMMA"}


@cache
def lowered(name: str, schedule: Schedule | None = None) -> LoweredKernel:
    kernel, spec = spec_of(name, schedule)
    return lower(kernel.program(spec), name)


def statuses(kernel: LoweredKernel) -> dict[str, str]:
    return {g.name: g.status for g in check_text(kernel)}


def test_every_kernel_has_a_case() -> None:
    assert OPERANDS.keys() == TARGET.kernels.keys()


@pytest.mark.parametrize(("name", "schedule"), SCHEDULES, ids=str)
def test_every_schedule_lowers_and_passes_the_text_gates(name: str, schedule: Schedule) -> None:
    kernel = lowered(name, schedule)
    require(check_text(kernel), name)
    assert set(statuses(kernel).values()) == {PASSED}
    signature = spec_of(name)[1].op.signature
    operands = {o.name for o in (*signature.inputs, *signature.outputs)}
    dims = set(spec_of(name)[1].dynamic())
    for parameter, _ in kernel.params:
        assert parameter.removesuffix("_desc") in operands | dims, parameter
    sizes = {d: 37 for d in dims}
    assert all(evaluate_size(g, sizes) > 0 for g in kernel.launch["grid"])


@pytest.mark.parametrize("name", TARGET.kernels)
def test_compiles_without_spills(name: str) -> None:
    if find("nvcc") is None:
        pytest.skip("no nvcc: only the text was checked")
    kernel = lowered(name)
    cubin = compile_cubin(kernel, CACHE)
    gates = {g.name: g for g in check_cubin(kernel, cubin)}
    require(gates.values(), name)
    assert cubin.data[:4] == b"\x7fELF" and gates["no spills"].status == PASSED
    sass = gates["tcgen05 in SASS"]
    if disassemble(cubin) is None:
        assert sass.status == NOT_CHECKED
    else:
        assert sass.status == PASSED and TENSOR.get(name, "no tcgen05") in sass.detail


@T.prim_func
def warp_gemm(a: T.Tensor((128, 64), "bfloat16"), b: T.Tensor((128, 64), "bfloat16"),
              y: T.Tensor((128, 128), "bfloat16")):
    with T.Kernel(1, threads=128):
        a_shared = T.alloc_shared((128, 64), "bfloat16")
        b_shared = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        T.clear(acc)
        T.copy(a, a_shared)
        T.copy(b, b_shared)
        T.sync_threads()
        T.gemm(a_shared, b_shared, acc, transpose_B=True)
        T.copy(acc, y)


def test_a_gemm_into_a_fragment_is_refused() -> None:
    """TileLang turns it into mma.sync without a word; both the text and the SASS gate see it."""
    kernel = lower(warp_gemm, "warp_gemm")
    assert statuses(kernel)["no warp-level mma"] == FAILED
    with pytest.raises(TargetError, match="no warp-level mma: .*mma_sync"):
        require(check_text(kernel), "warp_gemm")
    if find("nvcc") and find("cuobjdump") and find("nvdisasm"):
        cubin = compile_cubin(kernel, CACHE)
        assert check_sass(kernel, disassemble(cubin)).status == FAILED


def test_too_much_shared_memory_is_refused() -> None:
    """393,216 bytes compile without a complaint of nvcc or ptxas."""
    kernel = lowered("linear_fp8", Schedule((("stages", 8), ("tokens", 128))))
    with pytest.raises(TargetError, match=r"shared memory: \d+ bytes, at most 232448"):
        require(check_text(kernel), "linear_fp8")


def test_tensor_memory_that_is_not_freed_is_refused() -> None:
    kernel = lowered("linear_fp8")
    kept = "".join(line for line in kernel.text.splitlines(True) if "tmem_deallocate" not in line)
    assert statuses(replace(kernel, text=kept))["tensor memory is freed"] == FAILED
    odd = kernel.text.replace("(&(acc[0])), 64)", "(&(acc[0])), 48)")
    assert odd != kernel.text and statuses(replace(kernel, text=odd))["tensor memory"] == FAILED


def test_gates_on_a_cubin() -> None:
    kernel = lowered("linear_fp8")
    assert {g.status for g in check_cubin(kernel, None)} == {NOT_CHECKED}
    assert {g.status for g in check_resources(Cubin(b"", 255, 0))} == {PASSED}
    assert {g.status for g in check_resources(Cubin(b"", 256, 8))} == {FAILED}
    assert check_sass(kernel, None).status == NOT_CHECKED
    assert check_sass(kernel, "UTCQMMA gdesc[UR4] ;").status == PASSED
    assert check_sass(kernel, "HMMA.16816.F32.BF16 R4 ;").status == FAILED
    assert check_sass(lowered("norm_quant"), "UTCQMMA gdesc[UR4] ;").status == FAILED


def test_a_shape_the_kernel_cannot_do_is_refused() -> None:
    kernel, spec = spec_of("linear_fp4")
    with pytest.raises(TargetError, match="K = 5152, expected a multiple of 128"):
        kernel.build(replace(spec, dims={**spec.dims, "K": 5152}))


def test_sizes_are_evaluated_and_nothing_else() -> None:
    assert evaluate_size("(N + 63) // 64 * 2 % 5", {"N": 130}) == 1
    for text in ("M", "__import__('os')", "N if N else 1"):
        with pytest.raises(ToolchainError, match="cannot evaluate"):
            evaluate_size(text, {"N": 1})


def test_build_writes_source_launch_data_and_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "find", lambda tool: None)
    files = building.build({}, {"norm_quant": lowered("norm_quant")}, {}, cache=CACHE)
    assert sorted(files) == ["src/norm_quant.cu", "src/norm_quant.json"]
    described = json.loads(files["src/norm_quant.json"])
    assert described["launch"]["threads"] == 256
    assert ["no spills", NOT_CHECKED, "no nvcc"] in described["gates"]


def test_sources_alone_start_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "find", lambda tool: tool)
    monkeypatch.setattr(building, "compile_cubin", None)  # calling it would fail
    files = building.build({}, {"norm_quant": lowered("norm_quant")}, {}, cache=CACHE,
                           binaries=False)
    gates = json.loads(files["src/norm_quant.json"])["gates"]
    assert ["no spills", NOT_CHECKED, "only sources were asked for"] in gates
    with pytest.raises(TypeError):
        building.build({}, {"norm_quant": lowered("norm_quant")}, {}, cache=CACHE)


def test_cubins_are_made_by_several_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    meet, kernel = Barrier(2, timeout=30), lowered("norm_quant")

    def made(kernel: LoweredKernel, cache: Path) -> Cubin:
        meet.wait()  # passes only if two are here at once
        return Cubin(kernel.symbol.encode(), 10, 0)

    monkeypatch.setattr(building, "find", lambda tool: tool)
    monkeypatch.setattr(building, "compile_cubin", made)
    monkeypatch.setattr("deepinfer.targets.sm100.gates.disassemble", lambda cubin: None)
    kernels = {name: replace(kernel, symbol=name) for name in ("a", "b")}
    files = building.build({}, kernels, {}, cache=CACHE, jobs=2)
    assert (files["bin/a.cubin"], files["bin/b.cubin"]) == (b"a", b"b")


def test_a_graph_goes_through_the_same_passes_selection_and_build_as_cpu(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "find", lambda tool: None)
    with Builder("part") as b:
        x = b.input("x", TensorType((Sym("num_tokens", 64), 256), BF16))
        u = rms_norm(x, b.weight("norm", TensorType((256,), BF16)), eps=1e-20)
        y = linear_fp8(*quantize_fp8(u, block=32), b.weight("w", TensorType((128, 256), E4M3)),
                       b.weight("ws", TensorType((4, 8), UE8M0)))
        graph = lower_graph(b.graph([y]), TARGET)
    assert [n.op.name for n in graph.nodes] == ["norm_quant", "linear_fp8"]
    plan = plan_phase(graph, TARGET)
    kernels = lower_kernels(instances(plan.launches),
                            lambda i: TARGET.lower(i.kernel.program(i.spec), i.symbol))
    files = TARGET.build({"part": plan}, kernels, {}, cache=CACHE)
    symbols = [launch.instance.symbol for launch in plan.launches]
    assert sorted(files) == sorted(f"src/{s}.{kind}" for s in symbols for kind in ("cu", "json"))


def test_an_op_without_a_kernel_is_named() -> None:
    with Builder("part") as b:
        x = b.input("x", TensorType((Sym("num_tokens", 64), 256), BF16))
        graph = b.graph([rms_norm(x, b.weight("norm", TensorType((256,), BF16)), eps=1e-20)])
    with pytest.raises(NoKernelError, match="op 'rms_norm' has no kernel on target 'sm100'"):
        plan_phase(graph, TARGET)
