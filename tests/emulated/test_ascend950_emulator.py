"""The ascend950 emulator itself: tiny programs whose faults are known, and formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer.errors import ToolchainError
from deepinfer.ir import ELEMENTWISE, op
from deepinfer.ir.types import F32, TensorType
from deepinfer.targets.base import LoweredKernel
from deepinfer.testing.emulators.ascend950.driver import SCHEDULES, Emulation, Report
from deepinfer.testing.emulators.ascend950.mutate import mutants, survey
from deepinfer.testing.emulators.ascend950.source import adapt

Array = np.ndarray[Any, Any]


@op("x:f32[A] -> y:f32[A]", order=ELEMENTWISE)
def npu_probe(x: Array) -> Array:
    """y = x: a carrier for hand-written kernels."""
    return x


def run(body: str, *, thread: str = "", kind: str = "__vector__", schedule: str = "eager",
        size: int = 64, grid: int = 1) -> tuple[Array, Report]:
    """Run ``body`` with float* x, float* y and UB at ``ub``; ``thread`` is a vector function's."""
    text = (f"__simt_vf__ __launch_bounds__(64) inline void vf(__ubuf__ float* ub, "
            f"__gm__ float* x, __gm__ float* y) {{\n{thread}\n}}\n"
            f'extern "C" __global__ {kind} void probe(__gm__ float* x, __gm__ float* y) {{\n'
            f"  __ubuf__ float *ub = (__ubuf__ float *)0;\n"
            f"  __cbuf__ float *l1 = (__cbuf__ float *)0;\n{body}\n}}\n")
    lowered = LoweredKernel("probe", text, (("x", "float*"), ("y", "float*")), {"grid": grid})
    (y,), report = Emulation(lowered, npu_probe).run(
        (np.arange(size, dtype=np.float32),), (TensorType((size,), F32),), {"A": size}, schedule)
    return y, report


L2, ST = "(asc_load_l2_cache_mode)0", "(asc_store_l2_cache_mode)0"
LOAD = f"asc_copy_gm2ub_align((uint8_t*)(ub), (uint8_t*)x, 1, 256, 0, 0, 0, {L2}, 256, 256);"
STORE = f"asc_copy_ub2gm_align((uint8_t*)y, (uint8_t*)(ub + 64), 1, 256, {ST}, 256, 256);"
CALL = "asc_vf_call<vf>(cce::dim3(64), ub, x, y);"
DOUBLE = "ub[64 + threadIdx.x] = 2 * ub[threadIdx.x];"


def event(what: str, source: str, target: str, event: int = 0) -> str:
    return f"asc_sync_{what}(PIPE_{source}, PIPE_{target}, static_cast<event_t>({event}));"


def both(source: str, target: str) -> str:
    return event("notify", source, target) + event("wait", source, target)


CLEAN = "\n".join((LOAD, both("MTE2", "V"), CALL, both("V", "MTE3"), STORE))


def test_a_clean_kernel_is_clean_under_every_schedule() -> None:
    for schedule in SCHEDULES:
        y, report = run(CLEAN, thread=DOUBLE, schedule=schedule)
        assert report.clean(), report.texts
        assert y.tolist() == [2.0 * i for i in range(64)]


@pytest.mark.parametrize(("source", "target"), [("MTE2", "V"), ("V", "MTE3")])
def test_a_missing_event_is_a_race_even_where_the_numbers_are_right(source: str, target: str
                                                                    ) -> None:
    """A read by the vector core's threads counts as much as one by a copy."""
    broken = CLEAN.replace(both(source, target), "")
    runs = {s: run(broken, thread=DOUBLE, schedule=s) for s in SCHEDULES}
    assert all("race" in report.counts for _, report in runs.values())
    assert set(runs["eager"][1].counts) == {"race"} and runs["eager"][0][63] == 126
    assert any(y[63] != 126 for y, _ in runs.values()), "some schedule makes the numbers wrong"


def test_a_write_after_a_read_is_a_race() -> None:
    again = CLEAN + "\n" + LOAD
    assert set(run(again, thread=DOUBLE)[1].counts) == {"race"}
    assert run(again.replace(CALL, CALL + both("V", "MTE2")), thread=DOUBLE)[1].clean()


def test_copies_of_one_pipe_need_a_barrier() -> None:
    twice = CLEAN.replace(LOAD, LOAD + LOAD)
    assert set(run(twice, thread=DOUBLE)[1].counts) == {"race"}
    fixed = CLEAN.replace(LOAD, LOAD + "asc_sync_pipe(PIPE_MTE2);" + LOAD)
    assert run(fixed, thread=DOUBLE)[1].clean()


def test_a_barrier_of_a_copy_pipe_does_not_hold_the_scalar_unit() -> None:
    """TileLang emits this where a copied index is read by the scalar unit."""
    read = LOAD + "asc_sync_pipe(PIPE_MTE2); y[0] = ub[3];"
    assert "race" in run(read, schedule="lazy")[1].counts
    y, report = run(LOAD + both("MTE2", "S") + "for (int i = 0; i < 64; i++) y[i] = ub[i];")
    assert report.clean() and y[3] == 3


@pytest.mark.parametrize(("body", "kind"), [
    (CLEAN.replace("(0));", "(8));"), "event id"),
    (CLEAN + event("notify", "V", "MTE2"), "unmatched"),
    (event("notify", "V", "MTE2") * 2 + event("wait", "V", "MTE2") * 2 + CLEAN, "event overflow"),
    (CLEAN + event("wait", "V", "MTE2"), "deadlock"),
    (CLEAN + "asc_sync_intra_wait(PIPE_V, 3);", "deadlock"),
    (CLEAN.replace("(ub)", "(ub + 1)"), "alignment"),
    (CLEAN.replace("(ub)", "(ub + 63488)"), "out of bounds"),
    (CLEAN.replace("(uint8_t*)x", "(uint8_t*)(x + 8)"), "out of bounds"),
    (CLEAN.replace("1, 256, (asc_st", "1, 260, (asc_st"), "out of bounds"),
    (CLEAN + "ub[1 << 30] = 0;", "out of bounds"),
    (CLEAN.replace(LOAD, ""), "uninitialised"),
    (CLEAN.replace("(uint8_t*)y", "(uint8_t*)x"), "read-only"),
    (LOAD, "unwritten"),
])
def test_faults_are_named(body: str, kind: str) -> None:
    _, report = run(body, thread=DOUBLE)
    assert kind in report.counts or (kind == "unwritten" and report.unwritten), report.texts


def test_blocks_may_not_write_the_same_output() -> None:
    assert "race" in run(CLEAN, thread=DOUBLE, grid=2)[1].counts


@pytest.mark.parametrize(("thread", "kind"), [
    ("ub[64 + threadIdx.x] = x[0]; ub[64 + (threadIdx.x + 1) % 64] = x[0];", "thread race"),
    ("ub[threadIdx.x] = x[0]; ub[64 + threadIdx.x] = ub[63 - threadIdx.x];", "thread race"),
    ("ub[64 + threadIdx.x] = ub[(threadIdx.x + 3) % 64];", ""),
    ("ub[threadIdx.x] = x[0]; asc_syncthreads(); ub[64 + threadIdx.x] = ub[63 - threadIdx.x];", ""),
    ("if (threadIdx.x < 32) asc_syncthreads(); ub[64 + threadIdx.x] = 0;", "divergence"),
    ("if (threadIdx.x < 7) asc_syncthreads(); else asc_shfl_xor(1, 1); ub[64 + threadIdx.x] = 0;",
     "divergence"),
    ("ub[128] = 0; ub[64 + threadIdx.x] = 0;", "thread race"),
    ("asc_atomic_add((int32_t*)ub, 1); ub[64 + threadIdx.x] = 0;", ""),
    ("asc_atomic_add((int32_t*)ub, 1); ub[64 + threadIdx.x] = ub[0];", "thread race"),
])
def test_threads(thread: str, kind: str) -> None:
    _, report = run(CLEAN, thread=thread)
    assert list(report.counts) == ([kind] if kind else []), report.texts


def test_warp_operations() -> None:
    y, report = run(CLEAN, thread="""
  float v = ub[threadIdx.x];
  float up = asc_shfl_up(v, 2), other = asc_shfl_xor(v, 5), most = asc_reduce_max(v);
  uint32_t odd = asc_ballot(threadIdx.x % 2);
  ub[64 + threadIdx.x] = up + 100 * other + 10000 * most + (odd == 0xAAAAAAAA ? 0.5f : 0);""")
    i = np.arange(64)
    lane, warp = i % 32, i // 32 * 32
    up = np.where(lane < 2, i, i - 2)
    assert report.clean()
    assert np.array_equal(y, (up + 100 * (warp + (lane ^ 5)) + 10000 * (warp + 31) + 0.5)
                          .astype(np.float32))


MIXED = f"""
  if ASC_IS_AIC {{
    asc_sync_intra_wait(PIPE_MTE1, 1);
    asc_sync_intra_wait(PIPE_MTE1, 17);
    asc_copy_l12l0a((float*)(__ca__ float *)0, l1, 0, 0, 1, 1, 1, 1);
    asc_sync_intra_arrive(PIPE_MTE1, 2);
    asc_sync_intra_arrive(PIPE_MTE1, 18);
  }}
  if ASC_IS_AIV {{
    int sid = asc_get_sub_block_id();
    {LOAD}
    {both("MTE2", "MTE3")}
    asc_copy_ub2l1((void*)(l1 + sid * 64), (void*)ub, 1, 8, 0, 0);
    asc_sync_intra_arrive(PIPE_MTE3, 1);
    asc_sync_intra_wait(PIPE_MTE3, 2);
    if (sid) {{ {STORE.replace("ub + 64", "ub")} }}
  }}"""


def test_flags_between_cores() -> None:
    for schedule in SCHEDULES:
        _, report = run(MIXED, kind="__mix__(1, 2)", schedule=schedule)
        assert report.clean(), report.texts
    for flag in (1, 17):
        _, report = run(MIXED.replace(f"asc_sync_intra_wait(PIPE_MTE1, {flag});", ""),
                        kind="__mix__(1, 2)")
        assert {"race", "unmatched"} <= set(report.counts), "each vector core counts"
    _, report = run(MIXED.replace("wait(PIPE_MTE3, 2)", "wait(PIPE_MTE3, 3)"), kind="__mix__(1, 2)")
    assert "deadlock" in report.counts


def test_an_unknown_name_is_not_emulated() -> None:
    with pytest.raises(ToolchainError, match="asc_brew_tea"):
        run("asc_brew_tea();")
    with pytest.raises(ToolchainError, match="no kernel"):
        adapt("int main() {}")


def test_mutants_change_one_line_each_and_are_counted() -> None:
    text = "  asc_syncthreads();\n  asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(1));\n"
    made = list(mutants(text))
    assert [m.kind for m in made] == ["no thread barrier", "no wait", "wrong event"]
    assert made[2].text.endswith("static_cast<event_t>(1 ^ 1));\n")
    found = survey(text, lambda t: "" if "^" in t else "race: somewhere")
    assert found.outcomes == {"race": 2, "survived": 1} and len(found.survivors) == 1
