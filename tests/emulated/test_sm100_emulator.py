"""The sm100 emulator itself: formats, TMA, swizzle, and tiny programs whose faults are known."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deepinfer.errors import ToolchainError
from deepinfer.ir import ELEMENTWISE, op
from deepinfer.ir.types import F32, TensorType
from deepinfer.targets.base import LoweredKernel
from deepinfer.testing.emulators.objects import build
from deepinfer.testing.emulators.sm100.driver import HERE, SCHEDULES, Emulation, Report
from deepinfer.testing.emulators.sm100.mutate import mutants
from deepinfer.testing.emulators.sm100.source import adapt

Array = np.ndarray[Any, Any]


@op("x:f32[A] -> y:f32[A]", order=ELEMENTWISE)
def emulator_probe(x: Array) -> Array:
    """y = x: a carrier for hand-written kernels."""
    return x


def run(body: str, *, threads: int = 64, shared: int = 0, schedule: str = "eager",
        maps: dict[str, Any] | None = None, x: Array | None = None) -> tuple[Array, Report]:
    """Run ``body`` with float* y, const float* x, and a tensor map of x if ``maps`` is given."""
    parameter = "__grid_constant__ const CUtensorMap x_desc" if maps else "const float* x"
    text = (f'extern "C" __global__ void __launch_bounds__({threads}, 1) '
            f"probe(float* y, {parameter}) {{\n"
            f"  extern __shared__ __align__(1024) uchar buf[];\n{body}\n}}\n")
    name = ("x_desc", "const CUtensorMap") if maps else ("x", "const float*")
    launch = {"grid": [1, 1, 1], "threads": threads, "dynamic_smem": shared,
              "tensor_maps": {"x_desc": maps} if maps else {}}
    lowered = LoweredKernel("probe", text, (("y", "float*"), name), launch)
    given = np.arange(threads, dtype=np.float32) if x is None else x
    (y,), report = Emulation(lowered, emulator_probe).run(
        (given,), (TensorType(given.shape, F32),), {"A": given.size}, schedule)
    return y, report


EXCHANGE = """
  float* s = (float*)buf;
  s[threadIdx.x] = x[threadIdx.x];
  %s
  y[threadIdx.x] = s[63 - threadIdx.x];"""


def test_a_clean_kernel_is_clean_under_every_schedule() -> None:
    for schedule in SCHEDULES:
        y, report = run(EXCHANGE % "__syncthreads();", shared=256, schedule=schedule)
        assert report.clean(), report.texts
        assert y.tolist() == list(range(63, -1, -1))


def test_a_race_is_reported_even_where_the_numbers_are_right() -> None:
    y, report = run("""
  float* s = (float*)buf;
  if (threadIdx.x == 0) s[0] = x[0];
  if (threadIdx.x == 63) y[63] = s[0]; else y[threadIdx.x] = 0;""", shared=256)
    assert report.counts == {"race": 4} and y[63] == 0  # 4 bytes


def test_a_barrier_of_one_warp_does_not_order_two() -> None:
    assert "race" in run(EXCHANGE % "__syncwarp();", shared=256)[1].counts


@pytest.mark.parametrize(("body", "kind"), [
    ("y[threadIdx.x] = ((float*)buf)[threadIdx.x];", "uninitialised"),
    ("((float*)buf)[64 + threadIdx.x] = 0; y[threadIdx.x] = 0;", "out-of-bounds"),
    ("y[threadIdx.x] = x[threadIdx.x + 1];", "out-of-bounds"),
    ("if (threadIdx.x < 32) __syncthreads(); y[threadIdx.x] = 0;", "deadlock"),
    ("if (threadIdx.x != 5) __syncwarp(); y[threadIdx.x] = 0;", "deadlock"),
    ("*(float*)(buf + 2) = 0; y[threadIdx.x] = 0;", "alignment"),
    ("y[threadIdx.x] = 0; y[threadIdx.x] = 0;", "written-twice"),
    ("auto b = (Barrier*)buf; b->arrive(); y[threadIdx.x] = 0;", "mbarrier"),
    ("if (threadIdx.x < 32) tl::tmem_allocate((uint*)buf, 48); y[threadIdx.x] = 0;", "tmem"),
    ("if (threadIdx.x < 32) tl::tmem_allocate((uint*)buf, 64); y[threadIdx.x] = 0;", "exit"),
])
def test_faults_are_reported_by_kind(body: str, kind: str) -> None:
    assert kind in run(body, shared=256)[1].counts


def test_atomics_do_not_race_with_each_other_but_with_loads() -> None:
    body = """
  int* s = (int*)buf;
  if (threadIdx.x == 0) s[0] = 0;
  __syncthreads();
  AtomicAdd(&s[0], 1);
  %s
  y[threadIdx.x] = s[0];"""
    y, report = run(body % "__syncthreads();", shared=256)
    assert report.clean() and (y == 64).all()
    assert "race" in run(body % ";", shared=256)[1].counts


def test_an_output_that_is_not_written_is_counted() -> None:
    assert run("if (threadIdx.x) y[threadIdx.x] = 0;")[1].unwritten == 4


def test_what_the_emulator_does_not_know_does_not_compile() -> None:
    with pytest.raises(ToolchainError, match="cluster_sync"):
        run("tl::cluster_sync();")


LOAD = """
  auto full = (Barrier*)(buf + 8192);
  if (threadIdx.x == 0) { full->init(1); tl::fence_barrier_init(); }
  __syncthreads();
  if (threadIdx.x == 0) {
    full->arrive_and_expect_tx(%d);
    tl::tma_load(x_desc, *full, buf, %s);
  }
  %s
  for (int i = threadIdx.x; i < %d; i += 64) y[i] = ((float*)buf)[i];"""
WAIT = "full->wait(0);"


def tensor_map(**changes: Any) -> dict[str, Any]:
    return {"operand": "x", "dtype": 7, "rank": 2, "dims": [20, 8], "strides": [4, 80],
            "box": [16, 8], "element_strides": [1, 1], "interleave": 0, "swizzle": 0, "l2": 0,
            "oob": 0, **changes}


def test_tma_fills_what_is_outside_with_zeros() -> None:
    x = np.arange(160, dtype=np.float32)
    body = LOAD % (512, "8, 1", WAIT, 128)
    body += "\n  for (int i = 128 + threadIdx.x; i < 160; i += 64) y[i] = 0;"
    for schedule in SCHEDULES:
        y, report = run(body, shared=8208, maps=tensor_map(), x=x, schedule=schedule)
        assert report.clean(), report.texts
        wanted = np.zeros((8, 16), np.float32)
        wanted[:7, :12] = x.reshape(8, 20)[1:, 8:]
        assert np.array_equal(y[:128].reshape(8, 16), wanted)


@pytest.mark.parametrize(("mode", "span"), [(1, 32), (2, 64), (3, 128)])
def test_swizzle_permutes_the_chunks_of_a_row(mode: int, span: int) -> None:
    """Chunk c (16 bytes) of row r lies at chunk c ^ (r of its period): PTX's swizzle tables."""
    width = span // 4
    x = np.arange(8 * width, dtype=np.float32)
    y, report = run(LOAD % (x.nbytes, "0, 0", WAIT, x.size), shared=8208, x=x,
                    maps=tensor_map(dims=[width, 8], strides=[4, 4 * width], box=[width, 8],
                                    swizzle=mode))
    assert report.clean(), report.texts
    flat, chunks = y.reshape(-1, 4), span // 16
    for row in range(8):
        for chunk in range(chunks):
            moved = chunk ^ (row * span // 128 % chunks)
            at = row * width + chunk * 4
            assert flat[row * chunks + moved].tolist() == x[at:at + 4].tolist(), (row, chunk)


def test_a_missing_wait_is_a_race_and_shows_only_when_copies_are_late() -> None:
    x = np.arange(160, dtype=np.float32)
    body = LOAD % (512, "0, 0", ";", 128)
    eager, lazy = (run(body, shared=8208, maps=tensor_map(), x=x, schedule=s)
                   for s in ("eager", "lazy"))
    assert "race" in eager[1].counts and eager[0][1] == 1
    assert "race" in lazy[1].counts and not lazy[0][1] == 1


@pytest.mark.parametrize(("changes", "kind"), [
    ({"strides": [4, 84]}, "tma"), ({"box": [16, 300]}, "tma"), ({"swizzle": 1}, "tma")])
def test_illegal_tensor_maps_are_reported(changes: dict[str, Any], kind: str) -> None:
    x = np.arange(160, dtype=np.float32)
    assert kind in run(LOAD % (512, "0, 0", ";", 128), shared=1 << 16, x=x,
                       maps=tensor_map(**changes))[1].counts


def _formats() -> ctypes.CDLL:
    names = ("e4m3_value", "e2m1_value", "ue8m0_value")
    text = '#include "formats.h"\nextern "C" {\n' + "".join(
        f"float {n}(int b) {{ return emu::{n}(b); }}\n" for n in names)
    text += "int e4m3_bits(float f) { return emu::e4m3_bits(f); }\n"
    text += "int bf16_bits(float f) { return emu::bf16_bits(f); }\n}\n"
    library = ctypes.CDLL(str(build("sm100-formats", {"formats": text},
                                    ("-std=c++20", "-O2", "-fPIC", f"-I{HERE.parent}"),
                                    [HERE.parent / "formats.h"])))
    for n in names:
        getattr(library, n).restype = ctypes.c_float
    for n in ("e4m3_bits", "bf16_bits"):
        getattr(library, n).argtypes = [ctypes.c_float]
    return library


def test_formats_are_those_of_ml_dtypes() -> None:
    library = _formats()
    kinds: list[tuple[str, int, Any]] = [
        ("e4m3_value", 256, ml_dtypes.float8_e4m3fn), ("e2m1_value", 16, ml_dtypes.float4_e2m1fn),
        ("ue8m0_value", 256, ml_dtypes.float8_e8m0fnu)]
    for name, count, dtype in kinds:
        decode: Callable[[int], float] = getattr(library, name)
        wanted = np.arange(count, dtype=np.uint8).view(dtype).astype(np.float32)
        assert np.array_equal(np.array([decode(i) for i in range(count)], np.float32), wanted,
                              equal_nan=True), name
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(4000) * np.exp2(rng.integers(-14, 9, 4000))).astype(np.float32)
    values = np.concatenate([values, np.float32([0, -0.0, 2**-10, 3 * 2**-10, 447, 449, -448])])
    clipped = np.clip(values, -448, 448)
    assert [library.e4m3_bits(v) for v in values.tolist()] \
        == clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).tolist()
    assert [library.bf16_bits(v) for v in values.tolist()] \
        == values.astype(ml_dtypes.bfloat16).view(np.uint16).tolist()


def test_the_source_is_changed_in_three_places_only() -> None:
    cuda = ('#include <a.h>\nextern "C" __global__ void __launch_bounds__(32, 1) '
            "f(float* __restrict__ y, int N) {\n  extern __shared__ __align__(1024) uchar b[];\n"
            "  __shared__ __align__(16) uint64_t m[2];\n}\n")
    made = adapt(cuda)
    assert made.statics == ((16, 16),)
    assert "#include <a.h>" not in made.text and "f((float*)a[0], *(int*)a[1]);" in made.text
    with pytest.raises(ToolchainError, match="no kernel"):
        adapt("void f() {}")


def test_each_mutant_differs_in_one_line() -> None:
    text = "void __launch_bounds__(1) f() {\n  full[0].init(1);\n  full[0].wait(0);\n  a = b;\n}\n"
    found = list(mutants(text))
    assert [m.kind for m in found] == ["no init", "wrong count", "no wait", "wrong phase"]
    for m in found:
        pairs = zip(text.splitlines(), m.text.splitlines(), strict=True)
        assert [i for i, (a, b) in enumerate(pairs, 1) if a != b] == [m.line]
