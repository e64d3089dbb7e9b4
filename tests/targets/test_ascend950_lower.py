"""ascend950 kernels at the model's shapes: they lower and pass their gates; no CANN is needed."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deepinfer.codegen.cache import cached_lower
from deepinfer.codegen.select import Instance
from deepinfer.errors import TargetError, ToolchainError
from deepinfer.ir.op import OPS
from deepinfer.ir.types import Dim
from deepinfer.targets.ascend950 import build as building
from deepinfer.targets.ascend950.gates import (
    FAILED,
    PASSED,
    SKIPPED,
    check_object,
    check_text,
    require,
)
from deepinfer.targets.ascend950.kernels._scaled_gemm import step_k
from deepinfer.targets.ascend950.lower import lower
from deepinfer.targets.ascend950.target import TARGET
from deepinfer.targets.ascend950.toolchain import compile_object, find
from deepinfer.targets.base import Kernel, LoweredKernel, Schedule, Spec
from tests.targets.sm100_cases import OPERANDS

CACHE = Path(tempfile.gettempdir()) / "deepinfer-test-objects"


def spec_of(name: str, schedule: Schedule | None = None) -> tuple[Kernel, Spec]:
    """The kernel and its spec at the shapes of V4.1-Flash, at its default schedule if none."""
    op, kernel = OPS[name], TARGET.kernels[name]
    given, attrs = OPERANDS[name]
    full = op.attrs(attrs)
    unifier = op.unifier(full)
    unifier.unify(tuple(given))
    dims: dict[str, Dim] = dict(unifier.dims)
    plain = Spec(op, dims, dict(unifier.dtypes), full)
    return kernel, replace(plain, schedule=schedule or kernel.space(plain)[0])


@cache
def lowered(name: str, schedule: Schedule | None = None) -> LoweredKernel:
    kernel, spec = spec_of(name, schedule)
    return cached_lower(TARGET, CACHE / "lowered")(Instance(kernel, spec, name))


def statuses(kernel: LoweredKernel) -> dict[str, str]:
    return {g.name: g.status for g in check_text(kernel)}


def broken(name: str, old: str, new: str) -> dict[str, str]:
    kernel = lowered(name)
    assert old in kernel.text
    return statuses(replace(kernel, text=kernel.text.replace(old, new)))


def test_every_kernel_has_a_case() -> None:
    assert OPERANDS.keys() == TARGET.kernels.keys()


SCHEDULES = [(name, schedule) for name in TARGET.kernels
             for schedule in spec_of(name)[0].space(spec_of(name)[1])]


@pytest.mark.parametrize(("name", "schedule"), SCHEDULES, ids=str)
def test_every_schedule_lowers_and_passes_the_gates(name: str, schedule: Schedule) -> None:
    kernel = lowered(name, schedule)
    require(check_text(kernel), name)
    assert set(statuses(kernel).values()) == {PASSED}
    signature = spec_of(name)[1].op.signature
    operands = {o.name for o in (*signature.inputs, *signature.outputs)}
    dims = set(spec_of(name)[1].dynamic())
    assert {parameter for parameter, _ in kernel.params} <= operands | dims
    mixed = name in ("linear_fp8", "linear_fp4", "sparse_attention")
    assert kernel.launch["cores"] == ("mixed" if mixed else "vector")
    assert kernel.launch["grid"] == (32 if mixed else 64)


@pytest.mark.parametrize("name", ["linear_fp8", "linear_fp4"])
def test_a_product_of_the_cube_unit_takes_a_whole_step_of_k(name: str) -> None:
    """TileLang splits a step that does not fit L0, differently for different tiles of rows."""
    _, spec = spec_of(name)
    for schedule in spec_of(name)[0].space(spec):
        step = step_k(spec.dims["K"])
        product = f"_gemm_l1<{schedule['tokens']}, {step}, 128, {step},"
        assert product in lowered(name, schedule).text


def test_compiles() -> None:
    if find() is None:
        assert check_object(None).status == SKIPPED == "skipped: no CANN"
        with pytest.raises(ToolchainError, match="bisheng is not found"):
            compile_object(lowered("norm_quant"), CACHE)
        pytest.skip("no CANN: only the text was checked")
    for name in TARGET.kernels:
        assert check_object(compile_object(lowered(name), CACHE)).status == PASSED


@pytest.mark.parametrize(("name", "old", "new", "gate"), [
    ("norm_quant", "PIPE_MTE2, static_cast<event_t>(1)", "PIPE_MTE2, static_cast<event_t>(9)",
     "event ids"),
    ("norm_quant", "asc_sync_wait(PIPE_MTE2, PIPE_V,", "asc_sync_notify(PIPE_MTE2, PIPE_V,",
     "balance"),
    ("linear_fp8", "asc_sync_intra_arrive(PIPE_MTE3,", "asc_sync_intra_wait(PIPE_MTE3,", "balance"),
    ("linear_fp8", "& 1) + 16)", "& 1) + 36)", "flag ids"),
    ("linear_fp8", "_gemm_l1<64, 256,", "_gemm_l1<72, 256,", "products"),
    ("linear_fp8", "_gemm_l1<64, 256, 128, 256,", "_gemm_l1<64, 256, 256, 256,", "L0B"),
    ("norm_quant", "__launch_bounds__(512)", "__launch_bounds__(4096)", "threads"),
    ("norm_quant", "asc_syncthreads", "asc_brew_tea", "names"),
])
def test_gates_refuse(name: str, old: str, new: str, gate: str) -> None:
    assert broken(name, old, new)[gate] == FAILED


def test_a_copy_that_starts_inside_a_unit_is_refused() -> None:
    kernel = lowered("norm_quant")
    line = next(x for x in kernel.text.splitlines() if "asc_copy_ub2gm" in x and "sf[" in x)
    odd = line.replace("& 1) * ", "& 1) * 3 * ")  # 160 scales: 480 bytes a half is whole, 481 not
    text = kernel.text.replace(line, odd.replace("* 3 * 160", "* 161"))
    assert text != kernel.text
    assert statuses(replace(kernel, text=text))["alignment"] == FAILED


@pytest.mark.parametrize("space", ["ub", "l1", "l0c"])
def test_too_much_memory_is_refused(space: str) -> None:
    """TileLang lowers 512 KiB of L0C or of UB without a complaint."""
    kernel = lowered("linear_fp8")
    memory: dict[str, Any] = {**kernel.launch["memory"], space: 1 << 20}
    with pytest.raises(TargetError, match=rf"{space.upper()}: 1048576 bytes, at most \d+"):
        require(check_text(replace(kernel, launch={**kernel.launch, "memory": memory})), "x")


def test_simt_functions_leave_less_of_ub() -> None:
    kernel = lowered("sparse_attention")
    assert 200 * 1024 < kernel.launch["memory"]["ub"] <= 216 * 1024
    memory = {**kernel.launch["memory"], "ub": 240 * 1024}
    full = replace(kernel, launch={**kernel.launch, "memory": memory})
    assert statuses(full)["UB"] == FAILED
    assert statuses(replace(full, text=full.text.replace("__simt_vf__", "")))["UB"] == PASSED


def test_a_shape_the_kernel_cannot_do_is_refused() -> None:
    kernel, spec = spec_of("linear_fp4")
    with pytest.raises(TargetError, match="K = 5152, expected a multiple of 64"):
        kernel.build(replace(spec, dims={**spec.dims, "K": 5152}))


def test_what_tilelang_refuses_is_named() -> None:
    with pytest.raises(ToolchainError, match="TileLang could not lower it"):
        lower(None, "nothing")


def test_build_writes_source_launch_data_and_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "find", lambda: None)
    files = building.build({}, {"norm_quant": lowered("norm_quant")}, {}, cache=CACHE)
    assert sorted(files) == ["src/norm_quant.asc", "src/norm_quant.json"]
    described = json.loads(files["src/norm_quant.json"])
    assert described["launch"]["cores"] == "vector"
    assert ["compiles", "skipped: no CANN", "bisheng is not found"] in described["gates"]


def test_sources_alone_start_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "find", lambda: "bisheng")
    monkeypatch.setattr(building, "compile_object", None)  # calling it would fail
    kernels = {"norm_quant": lowered("norm_quant")}
    files = building.build({}, kernels, {}, cache=CACHE, binaries=False)
    gates = json.loads(files["src/norm_quant.json"])["gates"]
    assert ["compiles", "not checked", "only sources were asked for"] in gates
    with pytest.raises(TypeError):
        building.build({}, kernels, {}, cache=CACHE)
    monkeypatch.setattr(building, "compile_object", lambda kernel, cache: b"no ELF")
    with pytest.raises(TargetError, match="compiles: 6 bytes of ELF"):
        building.build({}, kernels, {}, cache=CACHE)
