"""Formats and quantisers against ml_dtypes and direct formulas, and numpy = C bit for bit."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from deepinfer.errors import DeepInferError
from deepinfer.numerics import formats

SOURCE = '#include "formats.h"\n'
SIGNATURES = {
    "di_bf16_to_f32": "uint16_t->float",
    "di_f32_to_bf16": "float->uint16_t",
    "di_e4m3_to_f32": "uint8_t->float",
    "di_f32_to_e4m3": "float->uint8_t",
    "di_round_to_e4m3": "float->float",
    "di_ue8m0_to_f32": "uint8_t->float",
    "di_e2m1_to_f32": "uint8_t->float",
    "di_f32_to_e2m1": "float->uint8_t",
    "di_amax": "float,float->float",
    "di_fp8_scale": "float->uint8_t",
    "di_fp4_scale_ue8m0": "float->uint8_t",
    "di_fp4_scale_e4m3": "float->uint8_t",
    "di_quantize_fp8": "float,uint8_t->uint8_t",
    "di_fake_quantize_fp8": "float,uint8_t->uint16_t",
    "di_quantize_fp4_ue8m0": "float,uint8_t->uint8_t",
    "di_quantize_fp4_e4m3": "float,uint8_t->uint8_t",
}
BYTES = np.arange(256, dtype=np.uint8)
ALL_BF16 = np.arange(65536, dtype=np.uint16).view(formats.BF16)
QUANTIZERS = {
    "fp8": (formats.quantize_fp8, 32),
    "fp4_ue8m0": (formats.quantize_fp4_ue8m0, 32),
    "fp4_e4m3": (formats.quantize_fp4_e4m3, 16),
}


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def float_patterns() -> np.ndarray:
    """Every bf16, its fp32 neighbours, the midpoints after it, and random fp32 bit patterns."""
    top = np.arange(65536, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    random = np.random.default_rng(1).integers(0, 2**32, 200_000, np.uint32)
    return np.concatenate([(top[:, None] | low).ravel(), random]).view(np.float32)


def ties(values: np.ndarray) -> np.ndarray:
    """The midpoints of neighbouring values with the floats on either side, both signs."""
    middle = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    around = [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))]
    return np.concatenate([*around, *(-part for part in around)])


# ---- one number at a time


def test_bf16_in_c_equals_ml_dtypes(micro) -> None:
    widened = micro.call("di_bf16_to_f32", np.float32, ALL_BF16.view(np.uint16))
    np.testing.assert_array_equal(bits(widened), bits(formats.f32(ALL_BF16)))
    x = float_patterns()
    with np.errstate(all="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(micro.call("di_f32_to_bf16", np.uint16, x), expected)
    np.testing.assert_array_equal(formats.to_bf16(x).view(np.uint16), expected)


def test_e4m3_in_c_equals_numpy(micro) -> None:
    np.testing.assert_array_equal(
        bits(micro.call("di_e4m3_to_f32", np.float32, BYTES)), bits(formats.decode_e4m3(BYTES))
    )
    x = np.concatenate([float_patterns(), ties(formats.decode_e4m3(BYTES[:127]))])
    encoded = formats.encode_e4m3(x).view(np.uint8)
    np.testing.assert_array_equal(micro.call("di_f32_to_e4m3", np.uint8, x), encoded)
    nan = np.isnan(x)
    assert nan.any() and (encoded[nan & np.signbit(x)] == 0xFF).all()
    assert (encoded[nan & ~np.signbit(x)] == 0x7F).all()
    assert ((encoded[~nan] & 0x7F) < 0x7F).all()


@pytest.mark.parametrize("flush", [False, True])
def test_rounding_to_e4m3_without_a_code_equals_encoding_and_decoding(micro, flush) -> None:
    x = np.concatenate([float_patterns(), ties(formats.decode_e4m3(BYTES[:127]))])
    expected = formats.decode_e4m3(formats.encode_e4m3(x).view(np.uint8))
    assert np.isnan(expected).any() and (np.abs(expected) == 448).any() and (expected == 0).any()
    got = micro.call("di_round_to_e4m3", np.float32, x, flush=flush)
    np.testing.assert_array_equal(bits(got), bits(expected))


def test_fake_quantising_a_number_equals_its_code_decoded(micro) -> None:
    """All scales that ``di_fp8_scale`` gives, the NaN scale among them, on every bf16."""
    scales = np.unique(micro.call("di_fp8_scale", np.uint8, np.abs(formats.f32(ALL_BF16))))
    assert scales[-1] == 255 and len(scales) > 100
    x, scale = (np.ascontiguousarray(a).ravel() for a in np.broadcast_arrays(
        formats.f32(ALL_BF16), scales[:, None]))
    codes = micro.call("di_quantize_fp8", np.uint8, x, scale)
    with np.errstate(all="ignore"):
        value = formats.decode_e4m3(codes) * formats.decode_ue8m0(scale)
    np.testing.assert_array_equal(micro.call("di_fake_quantize_fp8", np.uint16, x, scale),
                                  formats.to_bf16(value).view(np.uint16))


def test_ue8m0_and_e2m1_in_c_equal_numpy(micro) -> None:
    np.testing.assert_array_equal(
        bits(micro.call("di_ue8m0_to_f32", np.float32, BYTES)), bits(formats.decode_ue8m0(BYTES))
    )
    codes = BYTES[:16]
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(
        bits(micro.call("di_e2m1_to_f32", np.float32, codes)), bits(expected)
    )
    x = np.concatenate([float_patterns(), ties(expected[:8])])
    encoded = formats.encode_e2m1(x)
    np.testing.assert_array_equal(micro.call("di_f32_to_e2m1", np.uint8, x), encoded)
    number = ~np.isnan(x)
    with np.errstate(all="ignore"):
        by_ml_dtypes = x[number].astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(encoded[number], by_ml_dtypes)


def test_decoders_are_right_under_flush_to_zero(micro) -> None:
    decoders = {"di_e4m3_to_f32": formats.decode_e4m3, "di_ue8m0_to_f32": formats.decode_ue8m0}
    for name, reference in decoders.items():
        got = micro.call(name, np.float32, BYTES, flush=True)
        np.testing.assert_array_equal(bits(got), bits(reference(BYTES)))
    x = float_patterns()
    np.testing.assert_array_equal(
        micro.call("di_f32_to_e4m3", np.uint8, x, flush=True),
        micro.call("di_f32_to_e4m3", np.uint8, x),
    )


@pytest.mark.parametrize("code", range(127))
def test_e4m3_decodes_by_the_ocp_formula(code: int) -> None:
    exponent, mantissa = code >> 3, code & 7
    value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    decoded = formats.decode_e4m3(np.array([code, code | 0x80], np.uint8))
    assert decoded.tolist() == [value, -value]


def test_e2m1_ties_go_to_the_even_code() -> None:
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, -0.1, -5, np.inf, -np.inf], np.float32)
    assert formats.encode_e2m1(x).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 8, 14, 7, 15]


def test_packing_puts_the_even_element_in_the_low_nibble() -> None:
    codes = np.array([[1, 2, 15, 0]], np.uint8)
    packed = formats.pack_e2m1(codes)
    assert packed.tolist() == [[0x21, 0x0F]]
    assert formats.unpack_e2m1(packed).tolist() == codes.tolist()
    assert formats.decode_e2m1(packed).tolist() == [[0.5, 1.0, -6.0, 0.0]]


# ---- scales


def quantizer_input(block: int) -> np.ndarray:
    """One block per bf16 as its amax (and per some fp32 patterns), filled with smaller values."""
    random = np.random.default_rng(2)
    amax = np.concatenate([formats.f32(ALL_BF16), float_patterns()[::16]])
    fill = random.uniform(-1, 1, (amax.size, block)).astype(np.float32)
    with np.errstate(all="ignore"):
        x = fill * amax[:, None]
    x[np.arange(amax.size), random.integers(0, block, amax.size)] = amax
    return x


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_quantizer_in_c_equals_numpy(micro, kind: str) -> None:
    quantize, block = QUANTIZERS[kind]
    x = quantizer_input(block)
    q, sf = quantize(x, block)
    codes = q.view(np.uint8) if kind == "fp8" else formats.unpack_e2m1(q)
    amax = np.zeros(len(x), np.float32)
    for column in x.T:
        amax = micro.call("di_amax", np.float32, amax, column)
    scale_name = {"fp8": "di_fp8_scale"}.get(kind, kind.replace("fp4", "di_fp4_scale"))
    scale = micro.call(scale_name, np.uint8, amax)
    np.testing.assert_array_equal(scale, sf[:, 0].view(np.uint8))
    repeated = np.repeat(scale[:, None], block, axis=1)
    np.testing.assert_array_equal(micro.call(f"di_quantize_{kind}", np.uint8, x, repeated), codes)


def power_of_two_at_least(x: Fraction) -> Fraction:
    scale = Fraction(1)
    while scale < x:
        scale *= 2
    while scale / 2 >= x:
        scale /= 2
    return scale


@pytest.mark.parametrize(("kind", "limit"), [("fp8", 448), ("fp4_ue8m0", 6)])
def test_ue8m0_scale_is_the_smallest_power_of_two_that_fits(kind: str, limit: int) -> None:
    quantize, block = QUANTIZERS[kind]
    size = formats.f32(ALL_BF16[1:0x7F80:37])
    sf = formats.decode_ue8m0(quantize(np.repeat(size[:, None], block, 1), block)[1][:, 0])
    floor = Fraction(float(np.float32(1e-4))) if kind == "fp8" else 6 * Fraction(2) ** -126
    for amax, scale in zip(size.tolist(), sf.tolist(), strict=True):
        assert scale == power_of_two_at_least(max(Fraction(amax), floor) / limit), amax


def test_e4m3_scale_divides_by_six_for_every_bf16() -> None:
    amax = formats.f32(ALL_BF16[:0x7F80])
    sf = formats.quantize_fp4_e4m3(np.repeat(amax[:, None], 16, 1))[1][:, 0]
    exact = np.clip(np.maximum(amax.astype(np.float64), 6 * 2.0**-9) / 6, 0, 448)
    expected = exact.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(sf.view(np.uint8), expected.view(np.uint8))


def test_smallest_scales_come_from_the_floors() -> None:
    zeros = np.zeros((1, 32), np.float32)
    codes = [quantize(zeros, block)[1].view(np.uint8)[0, 0] for quantize, block in
             QUANTIZERS.values()]  # fmt: skip
    assert codes == [127 - 22, 1, 1]


# ---- whole rows


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_quantized_value_is_the_nearest_code(kind: str) -> None:
    quantize, block = QUANTIZERS[kind]
    x = formats.to_bf16(np.random.default_rng(4).normal(0, 3, (8, 128)))
    q, sf = quantize(x, block)
    grid = formats.decode_e4m3(BYTES) if kind == "fp8" else formats._E2M1_DECODE
    grid = np.unique(grid[np.isfinite(grid)])
    values = formats.decode_e4m3(q) if kind == "fp8" else formats.decode_e2m1(q)
    scaled = formats.f32(x) / np.repeat(formats.f32(sf), block, -1)
    limited = np.clip(scaled, grid[0], grid[-1])
    best = np.abs(limited[..., None] - grid).min(-1)
    np.testing.assert_array_equal(np.abs(limited - values), best)
    assert np.unique(values).size > 10


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_requantizing_the_dequantized_row_changes_nothing(kind: str) -> None:
    quantize, block = QUANTIZERS[kind]
    x = formats.to_bf16(np.random.default_rng(5).normal(0, 1, (16, 96)))
    q, sf = quantize(x, block)
    back = _dequantize(kind, q, sf)
    exact = formats.decode_e4m3(q) if kind == "fp8" else formats.decode_e2m1(q)
    exact = exact * np.repeat(formats.f32(sf), block, -1)
    np.testing.assert_array_equal(formats.f32(back), exact)
    np.testing.assert_array_equal(bits(_dequantize(kind, *quantize(back, block))), bits(back))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_a_nan_or_infinity_is_not_hidden(kind: str, bad: float) -> None:
    quantize, block = QUANTIZERS[kind]
    x = np.ones((3, 2 * block), np.float32)
    x[1, block + 3] = bad
    q, sf = quantize(x, block)
    back = formats.f32(_dequantize(kind, q, sf))
    expected = np.zeros(back.shape, bool)
    expected[1, block:] = True
    np.testing.assert_array_equal(np.isnan(back), expected)
    assert sf.view(np.uint8)[1, 1] == (0x7F if kind == "fp4_e4m3" else 255)
    codes = q.view(np.uint8)[1, q.shape[1] // 2 :]
    assert (codes == (0x7F if kind == "fp8" else 0)).all()


def _dequantize(kind: str, q: np.ndarray, sf: np.ndarray) -> np.ndarray:
    block = QUANTIZERS[kind][1]
    if kind == "fp8":
        return formats.dequantize_fp8(q, sf, block)
    return formats.dequantize_fp4(q, sf, block)


def test_weight_tiles_use_the_scale_of_their_row_and_column() -> None:
    random = np.random.default_rng(6)
    w = formats.encode_e4m3(random.normal(0, 50, (40, 70)))
    sf = random.integers(118, 136, (2, 3)).astype(np.uint8).view(formats.UE8M0)
    got = formats.f32(formats.dequantize_fp8_tile(w, sf))
    for i, k in [(0, 0), (31, 31), (32, 31), (31, 32), (39, 69), (39, 63), (5, 64)]:
        expected = formats.f32(w)[i, k] * formats.f32(sf)[i // 32, k // 32]
        assert got[i, k] == expected


def test_misuse_is_named() -> None:
    with pytest.raises(DeepInferError, match=r"33 elements, expected a multiple of 32"):
        formats.quantize_fp8(np.zeros((2, 33), np.float32))
    with pytest.raises(DeepInferError, match=r"shape \(2, 3\), expected \(2, 2\)"):
        formats.dequantize_fp8(np.zeros((2, 64), np.uint8), np.zeros((2, 3), np.uint8))
    with pytest.raises(DeepInferError, match=r"shape \(1, 2\), expected \(2, 2\)"):
        formats.dequantize_fp8_tile(np.zeros((33, 64), np.uint8), np.zeros((1, 2), np.uint8))
