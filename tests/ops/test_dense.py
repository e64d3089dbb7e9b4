"""References of the dense ops against float64 formulas written here, and row by row."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deepinfer.checkpoint import layouts
from deepinfer.errors import DeepInferError, IRError
from deepinfer.ir import Builder, TensorType, types
from deepinfer.numerics.rope import rope_table
from deepinfer.ops.embed import embed
from deepinfer.ops.gemm import (
    concat,
    gather_rows,
    grouped_linear_fp8,
    linear,
    linear_fp4,
    linear_fp8,
    silu_mul,
    wide_linear_fp4,
    wide_linear_fp8,
)
from deepinfer.ops.hyper import (
    hyper_collapse,
    hyper_expand,
    hyper_mean,
    hyper_mix,
    hyper_post,
    hyper_start,
)
from deepinfer.ops.norm import norm_fake_quant, norm_quant, rms_norm
from deepinfer.ops.packed import packed_linear_bf16
from deepinfer.ops.quant import (
    fake_quantize_fp4,
    fake_quantize_fp8,
    quantize_fp4,
    quantize_fp4_e4m3,
    quantize_fp8,
)
from deepinfer.ops.rope import rope

BF16, E4M3, UE8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
Array = np.ndarray[Any, Any]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def rows(n: int, *shape: int, seed: int = 0) -> Array:
    g = np.random.default_rng(seed)
    return (g.standard_normal((n, *shape)) * np.exp2(g.integers(-6, 6, (n, *shape)))).astype(BF16)


def floats(n: int, *shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((n, *shape)).astype(np.float32)


def fp8_weight(m: int, k: int) -> tuple[Array, Array, Array]:
    """Codes, scales and float64 values of an fp8 weight."""
    g = np.random.default_rng(3)
    codes = g.integers(0, 0x7F, (m, k)).astype(np.uint8) | g.integers(0, 2, (m, k),
                                                                      np.uint8) << 7
    sf = g.integers(118, 124, (-(-m // 32), k // 32)).astype(np.uint8)
    scale = np.exp2(sf.astype(np.float64) - 127).repeat(32, 0).repeat(32, 1)[:m]
    return codes.view(E4M3), sf.view(UE8M0), codes.view(E4M3).astype(np.float64) * scale


def fp4_weight(m: int, k: int) -> tuple[Array, Array, Array]:
    g = np.random.default_rng(4)
    codes = g.integers(0, 16, (m, k)).astype(np.uint8)
    sf = g.integers(118, 130, (m, k // 32)).astype(np.uint8)
    value = E2M1[codes] * np.exp2(sf.astype(np.float64) - 127).repeat(32, 1)
    return codes[:, ::2] | codes[:, 1::2] << 4, sf.view(UE8M0), value


def near(got: Array, expected: Array, relative: float) -> None:
    """|got - expected| within ``relative`` of the largest expected value of the row."""
    g, e = got.astype(np.float64), np.asarray(expected, np.float64)
    limit = relative * np.abs(e).max(axis=-1, keepdims=True)
    assert (np.abs(g - e) <= limit).all(), float(np.abs(g - e).max())


def test_rms_norm_is_the_formula() -> None:
    x, w = rows(5, 70), rows(1, 70, seed=1)[0]
    v = x.astype(np.float64)
    r = 1 / np.sqrt((v * v).mean(1, keepdims=True) + 0.5)
    near(rms_norm(x, w, eps=0.5), w.astype(np.float64) * v * r, 2.0**-8)
    assert (rms_norm(np.zeros((1, 70), BF16), w, eps=1e-20) == 0).all()


def test_norm_fusions_are_their_parts() -> None:
    x, w = rows(5, 64), rows(1, 64, seed=1)[0]
    normed = rms_norm(x, w, eps=1e-20)
    for got, expected in zip(norm_quant(x, w, eps=1e-20, block=32), quantize_fp8(normed),
                             strict=True):
        assert got.tobytes() == expected.tobytes()
    assert (norm_fake_quant(x, w, eps=1e-20, block=32).tobytes()
            == fake_quantize_fp8(normed).tobytes())


def nearest(x: Array, values: Array) -> Array:
    """The nearest of ``values`` (indexed by code, non-negative); ties to the even code."""
    distance = np.abs(np.abs(x)[..., None] - values)
    tie_break = np.arange(len(values)) % 2
    code = np.lexsort((np.broadcast_to(tie_break, distance.shape), distance), axis=-1)[..., 0]
    return np.sign(x) * values[code]


@pytest.mark.parametrize("block", [32, 64])
def test_fp8_quantiser(block: int) -> None:
    x = rows(4, 128)
    x[1, :block] = 0
    v = x.astype(np.float64).reshape(4, -1, block)
    s = np.exp2(np.ceil(np.log2(np.maximum(np.abs(v).max(-1, keepdims=True), 1e-4) / 448)))
    table = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float64)
    expected = (nearest(v / s, table) * s).reshape(4, -1)
    assert (fake_quantize_fp8(x, block=block).astype(np.float64) == expected).all()
    q, sf = quantize_fp8(x, block=block)
    assert (sf.astype(np.float64) == s[..., 0]).all()
    assert (q.astype(np.float64) * sf.astype(np.float64).repeat(block, 1) == expected).all()


def test_fp4_quantisers() -> None:
    x = rows(4, 64)
    v = x.astype(np.float64).reshape(4, 2, 32)
    s = np.exp2(np.ceil(np.log2(np.abs(v).max(-1, keepdims=True) / 6)))
    expected = (nearest(v / s, E2M1[:8]) * s).reshape(4, -1)
    assert (fake_quantize_fp4(x).astype(np.float64) == expected).all()
    q, sf = quantize_fp4(x)
    codes = np.stack([q & 15, q >> 4], -1).reshape(4, -1)
    assert (E2M1[codes] * sf.astype(np.float64).repeat(32, 1) == expected).all()
    q, sf = quantize_fp4_e4m3(x)
    v = v.reshape(4, 4, 16)
    scale = (np.abs(v).max(-1) / 6).astype(np.float32).astype(E4M3).astype(np.float64)[..., None]
    codes = np.stack([q & 15, q >> 4], -1).reshape(4, 4, 16)
    assert (sf.astype(np.float64) == scale[..., 0]).all()
    assert (E2M1[codes] == nearest((v / scale).clip(-6, 6), E2M1[:8])).all()


def test_rope_is_a_complex_product_and_inverts() -> None:
    theta = np.float32([1.0, 0.25, 0.03])
    table, positions = rope_table(40, theta), np.int32([0, 7, 39])
    x = rows(3, 2 * 10)
    v = x.astype(np.float64).reshape(3, 2, 10)
    z = v[..., 4::2] + 1j * v[..., 5::2]
    z = z * np.exp(1j * positions[:, None, None] * theta.astype(np.float64))
    v[..., 4::2], v[..., 5::2] = z.real, z.imag
    y = rope(x, positions, table, heads=2)
    near(y, v.reshape(3, -1), 2.0**-8)
    assert y[0].tobytes() == x[0].tobytes()  # position 0 rotates by nothing
    near(rope(y, positions, table, heads=2, inverse=True), x.astype(np.float64), 2.0**-6)


def test_linears_are_matrix_products() -> None:
    x, w = rows(3, 64), rows(5, 64, seed=1)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    near(linear(x, w), exact, 2.0**-8)
    near(linear(x, w, out="f32"), exact, 2.0**-18)
    q, sf = quantize_fp8(x)
    wide = fake_quantize_fp8(x)
    for weight, coded, widened in ((fp8_weight(40, 64), linear_fp8, wide_linear_fp8),
                                   (fp4_weight(40, 64), linear_fp4, wide_linear_fp4)):
        codes, scales, value = weight
        exact = wide.astype(np.float64) @ value.T
        near(coded(q, sf, codes, scales, out="f32"), exact, 2.0**-18)
        assert (coded(q, sf, codes, scales).tobytes()
                == widened(wide, codes, scales).tobytes())


def test_grouped_linear() -> None:
    codes, sf, value = fp8_weight(64, 32)
    x = rows(3, 64)
    v = x.astype(np.float64)
    exact = np.concatenate([v[:, :32] @ value[:32].T, v[:, 32:] @ value[32:].T], 1)
    near(grouped_linear_fp8(x, codes, sf, groups=2), exact, 2.0**-8)


def test_silu_mul_clamps() -> None:
    gate, up = rows(3, 40) * 4, rows(3, 40, seed=1)
    g, u = np.minimum(gate.astype(np.float64), 3), np.clip(up.astype(np.float64), -3, 3)
    assert (gate > 3).any() and (np.abs(up.astype(np.float64)) > 3).any()
    near(silu_mul(gate, up, limit=3.0), g / (1 + np.exp(-g)) * u, 2.0**-8)


def test_row_movers() -> None:
    table, ids = rows(9, 6), np.int32([8, 0, 0])
    assert (embed(ids, table) == table[[8, 0, 0]]).all()
    assert (gather_rows(table, ids) == table[[8, 0, 0]]).all()
    assert (concat(table, table[:, :2]) == np.hstack([table, table[:, :2]])).all()
    assert (hyper_expand(table, copies=3)[:, 2] == table).all()
    assert hyper_start(ids, copies=3).tolist() == [[1, 0, 0]] * 3


def sinkhorn(c: Array, iters: int, eps: float) -> Array:
    c = np.exp(c - c.max(2, keepdims=True))
    c = c / c.sum(2, keepdims=True) + eps
    c = c / (c.sum(1, keepdims=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(2, keepdims=True) + eps)
        c = c / (c.sum(1, keepdims=True) + eps)
    return c


def test_hyper_mix_is_the_formula_and_ends_on_columns() -> None:
    x, fn, base = rows(5, 3, 40), floats(15, 120) * np.float32(0.1), floats(15, seed=1)
    scale = np.float32([0.5, 1.5, 2])
    pre, post, comb = hyper_mix(x, fn, base, scale, hc=3, iters=4, hc_eps=1e-3, eps=1e-20)
    v = x.astype(np.float64).reshape(5, -1)
    m = v @ fn.T.astype(np.float64) / np.sqrt((v * v).mean(1, keepdims=True) + 1e-20)
    near(pre, 1 / (1 + np.exp(-(m[:, :3] * 0.5 + base[:3]))) + 1e-3, 1e-5)
    near(post, 2 / (1 + np.exp(-(m[:, 3:6] * 1.5 + base[3:6]))), 1e-5)
    expected = sinkhorn((m[:, 6:] * 2 + base[6:]).reshape(5, 3, 3), 4, 1e-3)
    near(comb, expected, 1e-4)
    assert np.abs(comb.sum(1) - 1).max() < 2e-3  # columns, the last step


def test_hyper_streams_are_the_formulas() -> None:
    x, y, pre, comb = rows(4, 3, 40), rows(4, 40, seed=1), floats(4, 3), floats(4, 3, 3)
    v, u = x.astype(np.float64), y.astype(np.float64)
    near(hyper_collapse(x, pre), np.einsum("nh,nhc->nc", pre, v), 2.0**-8)
    near(hyper_mean(x), v.mean(1), 2.0**-8)
    near(hyper_post(y, x, pre, comb),
         pre[:, :, None] * u[:, None] + np.einsum("ndh,ndc->nhc", comb, v), 2.0**-8)


def row_cases() -> list[Any]:
    """(op, operands with rows first, the other operands, attributes)."""
    x, wide, streams, f8, f4 = rows(6, 64), rows(6, 96), rows(6, 4, 40), fp8_weight, fp4_weight
    codes, table = quantize_fp8(x), rope_table(50, np.float32([1.0, 0.1]))
    w, vector = rows(8, 64, seed=1), rows(1, 64, seed=2)[0]
    pre, comb = floats(6, 4), floats(6, 4, 4)
    mix = (floats(24, 160), floats(24), np.ones(3, np.float32))
    tokens = np.int32([5, 4, 3, 2, 1, 0])
    return [
        (rms_norm, (x,), (vector,), {"eps": 1e-20}),
        (norm_quant, (x,), (vector,), {"eps": 1e-20, "block": 32}),
        (norm_fake_quant, (x,), (vector,), {"eps": 1e-20, "block": 32}),
        (quantize_fp8, (x,), (), {}), (fake_quantize_fp8, (x,), (), {}),
        (quantize_fp4, (x,), (), {}), (fake_quantize_fp4, (x,), (), {}),
        (quantize_fp4_e4m3, (x,), (), {}),
        (linear, (x,), (w,), {"out": "f32"}),
        (linear_fp8, codes, f8(16, 64)[:2], {}), (linear_fp4, codes, f4(16, 64)[:2], {}),
        (wide_linear_fp8, (x,), f8(16, 64)[:2], {}), (wide_linear_fp4, (x,), f4(16, 64)[:2], {}),
        (grouped_linear_fp8, (wide,), f8(96, 32)[:2], {"groups": 3}),
        (packed_linear_bf16, (x,), (layouts.tile16_bf16(w),), {"m": 8}),
        (silu_mul, (x, x), (), {"limit": 2.0}), (concat, (x, wide), (), {}),
        (rope, (x, tokens), (table,), {"heads": 4}),
        (embed, (tokens,), (w,), {}), (hyper_expand, (x,), (), {"copies": 2}),
        (hyper_start, (tokens,), (), {"copies": 2}),
        (hyper_mix, (streams,), mix, {"hc": 4, "iters": 20, "hc_eps": 1e-6, "eps": 1e-20}),
        (hyper_collapse, (streams, pre), (), {}), (hyper_mean, (streams,), (), {}),
        (hyper_post, (rows(6, 40), streams, pre, comb), (), {}),
    ]


@pytest.mark.parametrize("case", row_cases(), ids=lambda c: c[0].name)
def test_a_row_does_not_depend_on_the_others(case: Any) -> None:
    op, by_row, others, attrs = case
    whole = op.run((*by_row, *others), op.attrs(attrs))
    for i in range(len(by_row[0])):
        alone = op.run((*(np.ascontiguousarray(a[i:i + 1]) for a in by_row), *others),
                       op.attrs(attrs))
        for a, b in zip(whole, alone, strict=True):
            assert a[i:i + 1].tobytes() == b.tobytes()


def test_misuse_says_what_is_wrong() -> None:
    with Builder("g") as b, pytest.raises(IRError, match="dim C is 32, expected 64"):
        rms_norm(b.input("x", TensorType((2, 64), types.BF16)),
                 b.weight("w", TensorType((32,), types.BF16)), eps=1e-20)
    with Builder("g") as b, pytest.raises(IRError, match=r"'x' .* dim hc is 4, expected 3"):
        hyper_mix(b.input("x", TensorType((2, 4, 8), types.BF16)),
                  b.weight("fn", TensorType((15, 24), types.F32)),
                  b.weight("base", TensorType((15,), types.F32)),
                  b.weight("scale", TensorType((3,), types.F32)), hc=3, iters=2, hc_eps=1e-6,
                  eps=1e-20)
    x = rows(2, 64)
    with pytest.raises(IRError, match=r"missing \['eps'\]"):
        rms_norm(x, rows(1, 64)[0])
    with pytest.raises(DeepInferError, match="64 elements, expected a multiple of 48"):
        quantize_fp8(x, block=48)
    codes, sf, _ = fp8_weight(64, 32)
    with pytest.raises(IRError, match="expected groups\\*K = 96 columns"):
        grouped_linear_fp8(x, codes, sf, groups=3)
