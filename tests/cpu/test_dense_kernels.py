"""Every dense cpu kernel gives its reference's bits: all ISA levels, schedules and cuts."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deepinfer.checkpoint import layouts
from deepinfer.numerics.rope import rope_table
from deepinfer.ops import embed, fused, gemm, hyper, norm, packed, quant, rope
from deepinfer.targets.base import Kernel
from tests.cpu.harness import Array, check, host_levels, run_kernel

BF16, E4M3, UE8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
ROWS = (1, 3, 17)


def kernel_of(name: str) -> Kernel:
    found = getattr(importlib.import_module(f"deepinfer.targets.cpu.kernels.{name}"), name)
    assert isinstance(found, Kernel) and found.op == name
    return found


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def rows(n: int, *shape: int, seed: int = 0) -> Array:
    """bf16 rows of every magnitude, with zeros, denormals and values near the largest fp8 scale."""
    g = rng(seed + n)
    x = g.standard_normal((n, *shape)) * np.exp2(g.integers(-20, 10, (n, *shape)))
    x[g.random(x.shape) < 0.05] = 0
    tiny = g.random(x.shape) < 0.02
    x[tiny] = np.sign(x[tiny]) * 2.0**-130
    return x.astype(BF16)


def fp8_weight(m: int, k: int) -> tuple[Array, Array]:
    codes = rng(1).integers(0, 256, (m, k)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    sf = rng(2).integers(115, 125, (-(-m // 32), -(-k // 32))).astype(np.uint8)
    return codes.view(E4M3), sf.view(UE8M0)


def fp4_weight(m: int, k: int) -> tuple[Array, Array]:
    codes = rng(1).integers(0, 256, (m, k // 2)).astype(np.uint8)
    return codes, rng(2).integers(115, 130, (m, k // 32)).astype(np.uint8).view(UE8M0)


def verify(op: Any, arrays: tuple[Array, ...], symbolic: str = "N", **attrs: Any) -> None:
    check(op, kernel_of(op.name), arrays, symbolic=symbolic, **attrs)


ALL = pytest.mark.parametrize("n", ROWS)
ENDS = pytest.mark.parametrize("n", (1, 17))  # kernels whose item is one row


@ENDS
def test_norms(n: int) -> None:
    w = rows(1, 96, seed=9)[0]
    verify(norm.rms_norm, (rows(n, 96), w), eps=1e-20)
    verify(norm.norm_quant, (rows(n, 96), w), eps=1e-20, block=32)
    verify(norm.norm_fake_quant, (rows(n, 96), w), eps=1e-20, block=32)


def test_norm_of_a_width_that_is_no_multiple_of_the_lanes() -> None:
    verify(norm.rms_norm, (rows(3, 41), rows(1, 41, seed=9)[0]), eps=1e-6)


@ENDS
def test_quantisers(n: int) -> None:
    x = rows(n, 96)
    verify(quant.quantize_fp8, (x,), block=32)
    verify(quant.fake_quantize_fp8, (x,), block=32)
    verify(quant.quantize_fp4, (x,), block=32)
    verify(quant.fake_quantize_fp4, (x,), block=32)
    verify(quant.quantize_fp4_e4m3, (x,), block=16)


@ENDS
def test_row_movers(n: int) -> None:
    table, tokens = rows(50, 40), rng(n).integers(0, 50, n).astype(np.int32)
    verify(embed.embed, (tokens, table))
    verify(gemm.gather_rows, (table, tokens), symbolic="N,Q")
    verify(gemm.gather_rows, (table.astype(np.float32), tokens), symbolic="N,Q")
    verify(gemm.concat, (rows(n, 40), rows(n, 24, seed=3)))
    verify(gemm.concat, (rows(n, 8).astype(np.float32), rows(n, 5).astype(np.float32)))


@ENDS
def test_silu_mul_clamps(n: int) -> None:
    gate, up = rows(n, 40), rows(n, 40, seed=5)
    assert (np.abs(up.astype(np.float32)) > 10).any()
    verify(gemm.silu_mul, (gate, up), limit=10.0)


@ENDS
def test_silu_mul_fake_quant(n: int) -> None:
    gate, up = rows(n, 96), rows(n, 96, seed=5)
    gate[0, 40] = np.nan
    verify(fused.silu_mul_fake_quant, (gate, up), limit=10.0)


@ENDS
def test_rope(n: int) -> None:
    table = rope_table(64, np.float32([1.0, 0.3, 0.01, 0.002]))
    positions = rng(n).integers(0, 64, n).astype(np.int32)
    for inverse in (False, True):
        verify(rope.rope, (rows(n, 3 * 20), positions, table), heads=3, inverse=inverse)
    verify(rope.rope, (rows(n, 8), positions, table), heads=1)


@ENDS
def test_hyper_streams(n: int) -> None:
    x, y, g = rows(n, 4, 40), rows(n, 40, seed=2), rng(n)
    pre, post = (g.standard_normal((n, 4)).astype(np.float32) for _ in range(2))
    comb = g.random((n, 4, 4), np.float32)
    verify(hyper.hyper_expand, (y,), copies=4)
    verify(hyper.hyper_start, (np.zeros(n, np.int32),), copies=4)
    verify(hyper.hyper_collapse, (x, pre))
    verify(hyper.hyper_post, (y, x, post, comb))
    verify(hyper.hyper_mean, (x,))


@ALL
def test_hyper_mix(n: int) -> None:
    check_mix(n, 32)


def test_hyper_mix_of_a_width_that_is_no_multiple_of_the_lanes() -> None:
    check_mix(6, 10)


def check_mix(n: int, width: int) -> None:
    g = rng(n)
    x = rows(n, 4, width)
    x[0] = np.float32(2.0**-120).astype(BF16)  # its squares and some products underflow
    fn = (g.standard_normal((24, 4 * width)) * 0.1).astype(np.float32)
    fn[5] = 2.0**-25
    base, scale = g.standard_normal(24).astype(np.float32), np.float32([1, 0.5, 2])
    verify(hyper.hyper_mix, (x, fn, base, scale), hc=4, iters=20, hc_eps=1e-6, eps=1e-20)


@ALL
def test_packed_linear_bf16(n: int) -> None:
    w = layouts.tile16_bf16(rows(40, 64, seed=7))
    verify(packed.packed_linear_bf16, (rows(n, 64), w), m=40)


def test_packed_linear_keeps_fp32() -> None:
    w = layouts.tile16_bf16(rows(40, 64, seed=7))
    verify(packed.packed_linear_bf16, (rows(130, 64), w), m=40, out="f32")  # 130: several blocks


@ALL
def test_packed_linear_fp8_by_groups(n: int) -> None:
    codes, sf = fp8_weight(96, 64)
    verify(packed.packed_linear_fp8, (rows(n, 128), layouts.tile16_e4m3(codes),
                                      layouts.tile16_e4m3_sf(sf)), m=96, groups=2)


def test_packed_linear_fp8_with_a_tile_of_padding() -> None:
    codes, sf = fp8_weight(40, 64)
    verify(packed.packed_linear_fp8, (rows(3, 64), layouts.tile16_e4m3(codes),
                                      layouts.tile16_e4m3_sf(sf)), m=40, out="f32")


@pytest.mark.parametrize(("m", "groups"), [(32, 1), (96, 1), (192, 2), (384, 3), (256, 1)])
def test_packed_linear_fp8_fake_quant(m: int, groups: int) -> None:
    """Items of 2, 4 and 8 tiles; groups that hold a whole number of items, and that do not."""
    codes, sf = fp8_weight(m, 64)
    weight = layouts.tile16_e4m3(codes), layouts.tile16_e4m3_sf(sf)
    for n in (0, 1, 99):  # 99: several blocks
        x = rows(n, 64 * groups)
        x[1:2, 7] = np.nan
        verify(fused.packed_linear_fp8_fake_quant, (x, *weight), m=m, groups=groups)


@ALL
def test_packed_linear_fp4(n: int) -> None:
    codes, sf = fp4_weight(40, 64)
    verify(packed.packed_linear_fp4, (rows(n, 64), layouts.tile16_e2m1(codes),
                                      layouts.tile16_e2m1_sf(sf)), m=40)


def test_packed_linear_with_a_ragged_k_and_one_output() -> None:
    w = rows(1, 40, seed=7)
    verify(packed.packed_linear_bf16, (rows(17, 40), layouts.tile16_bf16(w)), m=1, out="f32")


def test_no_rows() -> None:
    w = layouts.tile16_bf16(rows(40, 64, seed=7))
    verify(packed.packed_linear_bf16, (rows(0, 64), w), m=40)
    verify(norm.rms_norm, (rows(0, 96), rows(1, 96)[0]), eps=1e-20)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_row_stays_alone(bad: float) -> None:
    x = rows(6, 96)
    poisoned = x.copy()
    poisoned[2, 40] = bad
    w = rows(1, 96, seed=9)[0]
    tiles = layouts.tile16_bf16(rows(16, 96, seed=7))
    streams, fn = x.reshape(6, 4, 24), rows(24, 96, seed=4).astype(np.float32)
    cases: tuple[tuple[Any, tuple[Array, ...], dict[str, Any]], ...] = (
        (norm.norm_fake_quant, (x, w), {"eps": 1e-20, "block": 32}),
        (quant.quantize_fp8, (x,), {}), (quant.quantize_fp4, (x,), {}),
        (quant.quantize_fp4_e4m3, (x,), {}), (gemm.silu_mul, (x, x), {"limit": 10.0}),
        (packed.packed_linear_bf16, (x, tiles), {"m": 16, "out": "f32"}),
        (hyper.hyper_mix, (streams, fn, np.ones(24, np.float32), np.ones(3, np.float32)),
         {"hc": 4, "iters": 3, "hc_eps": 1e-6, "eps": 1e-20}))
    keep = [0, 1, 3, 4, 5]
    for op, arrays, attrs in cases:
        dirty = tuple(poisoned.reshape(a.shape) if i == 0 else a for i, a in enumerate(arrays))
        for isa in host_levels():
            clean_out = run_kernel(op, kernel_of(op.name), arrays, attrs, isa=isa)
            dirty_out = run_kernel(op, kernel_of(op.name), dirty, attrs, isa=isa)
            for a, b in zip(clean_out, dirty_out, strict=True):
                assert a[keep].tobytes() == b[keep].tobytes(), op.name
            assert any(a[2].tobytes() != b[2].tobytes()
                       for a, b in zip(clean_out, dirty_out, strict=True)), op.name
