"""The GEMM micro-kernels: the bits of the declared order, at every ISA level of this machine."""

from __future__ import annotations

import ctypes
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from deepinfer.checkpoint import layouts
from deepinfer.numerics import formats
from deepinfer.numerics.formats import decode_e2m1, decode_e4m3, decode_ue8m0
from deepinfer.numerics.sums import gemm
from deepinfer.runtime.devices.isa import host_levels
from deepinfer.settings import ISA_LEVELS
from deepinfer.targets.cpu.toolchain import compile_library

M_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 33)
K_SIZES = (32, 64, 160)
FORMATS = ("bf16", "e4m3", "e2m1")
DEFAULT, FLUSH, ROUND_UP = 0x1F80, 0x9FC0, 0x5F80  # MXCSR of the host process

WRAPPER = """
#include "mxcsr.h"
#define CALL(format, weights, ...)                                                          \\
  extern "C" __attribute__((visibility("default"))) uint32_t call_##format(                 \\
      uint16_t* a, int32_t lda, int32_t* rows, weights* w, uint8_t* sf, int32_t k, int32_t m, \\
      int32_t tiles, float* acc, int32_t accumulate, uint32_t mxcsr) {                      \\
    uint32_t host = di_mxcsr_swap(mxcsr);                                                   \\
    if (rows) di_gemm_##format##_rows(a, lda, rows, __VA_ARGS__, k, m, tiles, acc, accumulate); \\
    else di_gemm_##format(a, lda, __VA_ARGS__, k, m, tiles, acc, accumulate);               \\
    return di_mxcsr_swap(host);                                                             \\
  }
CALL(bf16, uint16_t, w)
CALL(e4m3, uint8_t, w, sf)
CALL(e2m1, uint8_t, w, sf)
"""


def pack_e4m3(w, sf):
    return layouts.tile16_e4m3(w), layouts.tile16_e4m3_sf(sf)


def pack_e2m1(w, sf):
    return layouts.tile16_e2m1(w), layouts.tile16_e2m1_sf(sf)


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemm")

    def build_level(level):
        out = folder / f"{level}.so"
        if not out.exists():
            compile_library({"gemm": WRAPPER}, level, out, folder)
        return ctypes.CDLL(str(out))

    return build_level


@pytest.fixture(params=ISA_LEVELS)
def level(request, build):
    library = build(request.param)  # built on every machine, run where the instructions exist
    if request.param not in host_levels():
        pytest.skip(f"this machine cannot execute {request.param}")
    return library


def pointer(array):
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


def run(library, kind, a, packed, *, rows=None, acc=None, mxcsr=DEFAULT, tiles=1):
    """a @ w.T over all column tiles, ``tiles`` a call; also checks that the host's MXCSR comes
    back."""
    w, sf = packed if isinstance(packed, tuple) else (packed, None)
    m, k = (a.shape[0] if rows is None else len(rows)), w.shape[1] * 2
    out = np.full((m, w.shape[0] * 16), np.nan, np.float32)
    rows = None if rows is None else np.asarray(rows, np.int32)
    for tile in range(0, w.shape[0], tiles):
        count = min(tiles, w.shape[0] - tile)
        columns = slice(tile * 16, (tile + count) * 16)
        part = np.full((m, count * 16), np.nan, np.float32)  # without `accumulate` it is not read
        if acc is not None:
            given = acc[:, columns]
            part[:, : given.shape[1]] = given
        part = np.ascontiguousarray(part.reshape(m, count, 16).swapaxes(0, 1))
        scales = None if sf is None else pointer(sf[tile])
        after = getattr(library, f"call_{kind}")(
            *(pointer(a), a.strides[0] // 2, pointer(rows), pointer(w[tile]), scales),
            *(k, m, count, pointer(part), int(acc is not None), ctypes.c_uint32(mxcsr)),
        )
        assert after & 0xFFC0 == mxcsr & 0xFFC0
        out[:, columns] = part.swapaxes(0, 1).reshape(m, count * 16)
    return out


def bits(x):
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def assert_same_bits(actual, expected):
    """Equal bits in the columns of the reference (fp8 tiles are padded to 32); a NaN of the
    reference may have any payload, ours is 0x7FC00000."""
    actual = actual[:, :expected.shape[1]]
    expected = np.where(np.isnan(expected), np.float32(np.nan), expected)
    np.testing.assert_array_equal(bits(actual), bits(expected))


def wide_bf16(rng, shape, low=-60, high=60):
    """Signed bf16 values of random exponents in [low, high), a few of them zero."""
    values = rng.uniform(1, 2, shape) * np.exp2(rng.integers(low, high, shape).astype(float))
    values *= rng.choice([-1.0, 1.0], shape) * (rng.random(shape) > 0.05)
    return values.astype(np.float32).astype(ml_dtypes.bfloat16)


def make_weight(rng, kind, n, k):
    """(what the kernels take, the exact bf16 matrix it stands for)."""
    if kind == "bf16":
        w = wide_bf16(rng, (n, k), -20, 20)
        return layouts.tile16_bf16(w), w
    if kind == "e4m3":
        codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 0x80  # no NaN
        sf = (127 + rng.integers(-20, 21, (-(-n // 32), k // 32))).astype(np.uint8)
        scale = np.repeat(np.repeat(decode_ue8m0(sf), 32, axis=0)[:n], 32, axis=1)
        return pack_e4m3(codes, sf), (decode_e4m3(codes) * scale).astype(ml_dtypes.bfloat16)
    codes = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
    sf = (127 + rng.integers(-20, 21, (n, k // 32))).astype(np.uint8)
    scale = np.repeat(decode_ue8m0(sf), 32, axis=1)
    return pack_e2m1(codes, sf), (decode_e2m1(codes) * scale).astype(ml_dtypes.bfloat16)


# A second, slow witness of the order, in exact rational arithmetic.
def round_f32(exact, zero):
    """`exact` rounded to nearest even in 24 bits, then flushed; `zero` is what 0 becomes."""
    if exact == 0:
        return zero
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    quantum = Fraction(2) ** (exponent - 23)
    rounded = round(size / quantum) * quantum
    return math.copysign(float(rounded) if rounded >= Fraction(2) ** -126 else 0.0, exact)


def daz(x):
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def witness_fma(a, b, c):
    negative = math.copysign(1, a) * math.copysign(1, b) < 0 and math.copysign(1, c) < 0
    return round_f32(Fraction(a) * Fraction(b) + Fraction(c), -0.0 if negative else 0.0)


def witness_gemm(a, w, acc):
    out = np.empty((a.shape[0], w.shape[0]), np.float32)
    for i, n in np.ndindex(out.shape):
        x, y, total = [daz(float(v)) for v in a[i]], [daz(float(v)) for v in w[n]], float(acc[i, n])
        for start in range(0, len(x), 32):
            even = odd = 0.0
            for k in range(start, start + 32, 2):
                even, odd = witness_fma(x[k], y[k], even), witness_fma(x[k + 1], y[k + 1], odd)
            total = witness_fma(1.0, witness_fma(1.0, even, odd), daz(total))
        out[i, n] = total
    return out


@pytest.mark.parametrize("kind", FORMATS)
def test_bits_for_any_number_of_rows(level, kind):
    rng = np.random.default_rng(1)
    for k in K_SIZES:
        a, n = wide_bf16(rng, (M_SIZES[-1], k)), 40  # two tiles and a half
        packed, w = make_weight(rng, kind, n, k)
        expected = gemm(a, w)
        for m in M_SIZES:
            actual = run(level, kind, a[:m], packed)
            assert_same_bits(actual[:, :n], expected[:m])
            assert not bits(actual[:, n:]).any()  # columns of padding


def whole_units(a):
    """Whether each K block of each row consists of whole multiples of 2^-14 of the power of two in
    its largest value, at most 32639 of them: where integers may stand in for the chains."""
    blocks = a.astype(np.float64).reshape(len(a), -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    unit = np.exp2(np.floor(np.log2(np.where(largest, largest, 1))) - 14)
    units = blocks / unit
    return ((units == np.round(units)) & (np.abs(units) <= 32639)).all(-1)


def test_sums_that_are_whole_and_sums_that_are_not(level):
    """e2m1 weights, of which some levels add whole multiples as integers: values at both ends of
    what such a row may hold, and beyond."""
    rng = np.random.default_rng(12)
    n, k = 40, 32 * 9
    a = np.zeros((33, k), np.float32)
    a[:, :64] = rng.normal(size=(33, 64), scale=60).astype(ml_dtypes.float8_e4m3fn)
    a[:3, :32] = decode_e4m3(rng.permutation(127)[:96].reshape(3, 32).astype(np.uint8))
    a[:, 64:96] = np.exp2(rng.integers(-14, 1, (33, 32)).astype(float))  # the least unit
    a[:, 96:128] = np.exp2(rng.integers(-15, 1, (33, 32)).astype(float))  # and less
    a[:, 128:160] = 1 + 126 / 128  # the most units, all of one sign
    a[:, 160:192] = 1 + 127 / 128  # and more, which a signed high byte does not hold
    a[:, 192:224] = wide_bf16(rng, (33, 32), -9, 0)
    a[::2, 224:256] = 448  # zeros elsewhere
    a[:, 256:] = np.where(rng.random((33, 32)) < 0.5, 1 + 126 / 128, -(1 + 126 / 128))
    a = a.astype(ml_dtypes.bfloat16)
    whole = whole_units(a)
    assert whole[:, [2, 4, 7, 8]].all() and not whole[:, 5].any()
    assert all(0 < whole[:, b].sum() < 33 for b in (0, 3, 6)), whole.sum(0)
    packed, w = make_weight(rng, "e2m1", n, k)
    acc = rng.normal(size=(33, n)).astype(np.float32)
    expected = gemm(a, w, acc)
    for m in M_SIZES:
        assert_same_bits(run(level, "e2m1", a[:m], packed, acc=acc[:m], tiles=3), expected[:m])
    one_sign = layouts.tile16_e2m1(np.full((16, k // 2), 0x77, np.uint8))  # all weights 6
    sf = layouts.tile16_e2m1_sf(np.full((16, k // 32), 127, np.uint8))
    expected = gemm(a, np.full((16, k), 6.0, ml_dtypes.bfloat16))
    for m in M_SIZES:
        assert_same_bits(run(level, "e2m1", a[:m], (one_sign, sf)), expected[:m])


@pytest.mark.parametrize("kind", FORMATS)
def test_several_tiles_of_a_call(level, kind):
    """More K blocks than few rows widen at once; rows near 1 and rows that are not."""
    rng = np.random.default_rng(7)
    k, n = 32 * 100, 80
    a = wide_bf16(rng, (100, k), -30, 30)
    a[1, 3000] = 2.0**50
    packed, w = make_weight(rng, kind, n, k)
    acc = rng.normal(size=(100, n)).astype(np.float32)
    expected = gemm(a[:9], w, acc[:9])
    for m in (1, 2, 3, 6, 9):
        actual = run(level, kind, a[:m], packed, acc=acc[:m], tiles=3)
        assert_same_bits(actual, expected[:m])
    together = run(level, kind, a, packed, acc=acc, tiles=5)
    assert_same_bits(together[:9], expected)
    assert_same_bits(run(level, kind, a[96:97], packed, acc=acc[96:97]), together[96:97, :n])


@pytest.mark.parametrize("exponent", [-41, -40, 39, 40])
@pytest.mark.parametrize("scale", [66, 67, 187, 188])
def test_sums_are_scaled_only_where_nothing_is_flushed_or_overflows(level, exponent, scale):
    """At the bounds of near rows and near scales, with products of both signs that cancel."""
    rng = np.random.default_rng(8)
    a = wide_bf16(rng, (4, 64), exponent, exponent + 1)
    a[0, ::2] = -a[0, 1::2]
    w = rng.choice(np.uint8([0x01, 0x81, 0x7E, 0xFE, 0x08]), (16, 64))
    sf = np.full((1, 2), scale, np.uint8)
    expected = gemm(a, (decode_e4m3(w) * np.exp2(scale - 127.0)).astype(ml_dtypes.bfloat16))
    assert np.isfinite(expected).all()
    for m in (1, 2, 4):
        assert_same_bits(run(level, "e4m3", a[:m], pack_e4m3(w, sf))[:, :16], expected[:m])


@pytest.mark.parametrize("kind", ["e4m3", "e2m1"])
def test_a_tile_of_far_scales_between_near_ones(level, kind):
    """Such a tile is multiplied otherwise than its neighbours of the same call, from rows that the
    others have changed to their needs; all K blocks of few rows are widened in three goes."""
    rng = np.random.default_rng(9)
    n, k, far = 128, 32 * 40, 127 + 80
    a = wide_bf16(rng, (6, k), -6, 6)
    if kind == "e4m3":
        codes = rng.integers(0, 0x7F, (n, k)).astype(np.uint8)  # denormal ones too
        assert (codes < 8).any()
        sf = np.full((n // 32, k // 32), 127, np.uint8)
        sf[1], sf[3, 20] = far, far
        values = decode_e4m3(codes) * np.repeat(np.repeat(decode_ue8m0(sf), 32, 0), 32, 1)
        packed = pack_e4m3(codes, sf)
    else:
        codes = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
        sf = np.full((n, k // 32), 127, np.uint8)
        sf[20], sf[100:103, 20] = far, far
        values = decode_e2m1(codes) * np.repeat(decode_ue8m0(sf), 32, 1)
        packed = pack_e2m1(codes, sf)
    expected = gemm(a, values.astype(ml_dtypes.bfloat16))
    assert np.isfinite(expected).all()
    for m in (1, 2, 3, 6):
        for tiles in (1, 3, 8):
            assert_same_bits(run(level, kind, a[:m], packed, tiles=tiles), expected[:m])


@pytest.mark.parametrize("kind", ["e4m3", "e2m1"])
def test_denormal_accumulators_and_sums_are_flushed(level, kind):
    """Few rows of e4m3 are multiplied without DAZ; what they continue from is flushed all the same,
    and so is what remains of a sum that cancels."""
    code, value = (0x01, 2.0**-9) if kind == "e4m3" else (0x11, 0.5)
    product = value * 2.0**-100
    columns = np.full((16, 32 if kind == "e4m3" else 16), code, np.uint8)
    sf = np.full((1 if kind == "e4m3" else 16, 1), 127 - 60, np.uint8)
    packed = (pack_e4m3 if kind == "e4m3" else pack_e2m1)(columns, sf)
    w = np.full((16, 32), value * 2.0**-60).astype(ml_dtypes.bfloat16)
    a = np.zeros((8, 32), np.float32)
    a[1:, 3] = -(2.0**-40)
    a = a.astype(ml_dtypes.bfloat16)
    acc = np.full((8, 16), 2.0**-127, np.float32)
    acc[:, 1], acc[:, 2] = -(2.0**-130), 2.0**-120
    acc[:, 3], acc[:, 4] = product, product * (1 + 2.0**-23)
    expected = gemm(a, w, acc)
    assert (np.abs(acc[:, :2]) < 2.0**-126).all() and not expected[0, :2].any()
    assert expected[0, 2] == acc[0, 2] and not expected[1, 3] and acc[1, 4] != acc[1, 3]
    assert (expected[1, 4] == 0) == (kind == "e4m3")  # flushed; sums of e2m1 are not that small
    for m in (1, 2, 3, 6, 8):
        assert_same_bits(run(level, kind, a[:m], packed, acc=acc[:m])[:, :16], expected[:m])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_alone_and_in_a_large_batch(level, kind):
    rng = np.random.default_rng(2)
    a = wide_bf16(rng, (150, 64))  # more than one chunk of rows at every level
    packed, w = make_weight(rng, kind, 16, 64)
    together = run(level, kind, a, packed)
    assert_same_bits(together, gemm(a, w))
    for i in (0, 5, 95, 96, 149):
        assert_same_bits(run(level, kind, a[i : i + 1], packed), together[i : i + 1])


@pytest.mark.parametrize("kind", FORMATS)
def test_gathered_rows(level, kind):
    rng = np.random.default_rng(3)
    wide = wide_bf16(rng, (50, 128))
    a = wide[:, 32:96]  # a leading dimension that is not K
    packed, w = make_weight(rng, kind, 16, 64)
    expected = gemm(np.ascontiguousarray(a), w)
    for m in (1, 2, 7, 40):
        rows = rng.integers(0, 50, m)
        assert_same_bits(run(level, kind, a, packed, rows=rows), expected[rows])


@pytest.mark.parametrize("mxcsr", [DEFAULT, FLUSH, ROUND_UP])
def test_small_numbers_follow_the_exact_witness(level, mxcsr):
    # Products and sums around 2^-126, denormal operands and accumulators, under any host MXCSR.
    rng = np.random.default_rng(4)
    a, w = wide_bf16(rng, (5, 64), -66, -60), wide_bf16(rng, (16, 64), -66, -60)
    a[1, ::2], a[2, ::3], a[3] = 0, wide_bf16(rng, 22, -133, -120), 0
    w[:, ::9] = wide_bf16(rng, (16, 8), -10, 20)
    w[8:, ::9] = 0
    acc = wide_bf16(rng, (5, 16), -130, -122).astype(np.float32) * np.float32(1 + 2.0**-20)
    acc[0, :3] = -0.0, 2.0**-127, -(2.0**-149)
    expected = witness_gemm(a, w, acc)
    unflushed = a.astype(np.float64) @ w.astype(np.float64).T + acc
    assert (expected != unflushed.astype(np.float32)).mean() > 0.5 and (expected != 0).mean() > 0.5
    assert (np.abs(acc[3]) < 2.0**-126).any() and (np.abs(a[2].astype(float)) < 2.0**-126).any()
    assert_same_bits(gemm(a, w, acc), expected)
    for m in (1, 2, 5):
        actual = run(level, "bf16", a[:m], layouts.tile16_bf16(w), acc=acc[:m], mxcsr=mxcsr)
        assert_same_bits(actual, expected[:m])


def test_flushing_is_decided_after_rounding(level):
    # 2^-126 - 2^-151 rounds up to 2^-126 in 24 bits and stays; 2^-126 - 2^-150 is flushed.
    def bf16(*values):
        return np.array([values], np.float64).astype(ml_dtypes.bfloat16)

    for term, expected in ((2.0**-151, 2.0**-126), (2.0**-150, 0.0)):
        a, w = np.zeros((1, 32)), np.zeros((16, 32))
        a[0, 0], w[:, 0] = 2.0**-63, 2.0**-63
        a[0, 2], w[:, 2] = -term * 2.0**80, 2.0**-80
        actual = run(level, "bf16", bf16(*a[0]), layouts.tile16_bf16(w.astype(ml_dtypes.bfloat16)))
        np.testing.assert_array_equal(actual, np.full((1, 16), expected, np.float32))


@pytest.mark.parametrize("kind", FORMATS)
def test_accumulate_equals_one_longer_sum(level, kind):
    rng = np.random.default_rng(5)
    a = wide_bf16(rng, (20, 96))
    packed, w = make_weight(rng, kind, 16, 96)
    expected = gemm(a, w)
    for m in (1, 3, 20):
        acc = None
        for start in (0, 32, 64):
            if kind == "bf16":
                part = np.ascontiguousarray(packed[:, start // 2 : start // 2 + 16])
            else:
                part = (
                    np.ascontiguousarray(packed[0][:, start // 2 : start // 2 + 16]),
                    np.ascontiguousarray(packed[1][:, start // 32 : start // 32 + 1]),
                )
            acc = run(level, kind, a[:m, start : start + 32], part, acc=acc)
        assert_same_bits(acc, expected[:m])


@pytest.mark.parametrize("m", [1, 2, 4, 9])
@pytest.mark.parametrize("scale", [10, 107, 127, 147, 246, 250])
def test_every_e4m3_code(level, scale, m):
    # Row i of A has a one at k = i: the product reads the weights back.
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F] + [0] * 2, np.uint8)
    if scale == 250:  # small magnitudes alone fit in bf16
        codes[codes & 0x7F > 0x58] = 0
    w = codes.reshape(8, 32)
    one = np.eye(32, dtype=np.float32).astype(ml_dtypes.bfloat16)
    expected = (decode_e4m3(w).astype(np.float64) * 2.0 ** (scale - 127)).astype(np.float32)
    assert np.isfinite(expected).all() and len(np.unique(expected)) > 100
    packed = pack_e4m3(w, np.full((1, 1), scale, np.uint8))
    actual = np.concatenate([run(level, "e4m3", one[i : i + m], packed) for i in range(0, 32, m)])
    np.testing.assert_array_equal(actual[:, :8], expected.T)


@pytest.mark.parametrize("m", [1, 2, 4, 9])
def test_every_e2m1_code_under_scales_of_its_own_per_column(level, m):
    w = formats.pack_e2m1(np.tile(np.arange(16, dtype=np.uint8), (16, 2)))
    one = np.eye(32, dtype=np.float32).astype(ml_dtypes.bfloat16)
    for first in (2, 107, 127, 132, 226, 237):  # near 1 and beyond
        sf = np.arange(first, first + 16, dtype=np.uint8)[:, None]
        expected = (decode_e2m1(w) * np.exp2(sf.astype(np.float64) - 127)).astype(np.float32)
        assert np.isfinite(expected).all()
        packed = pack_e2m1(w, sf)
        actual = [run(level, "e2m1", one[i : i + m], packed) for i in range(0, 32, m)]
        np.testing.assert_array_equal(np.concatenate(actual), expected.T)


@pytest.mark.parametrize("kind", FORMATS)
def test_nan_and_infinity_stay_in_their_rows(level, kind):
    rng = np.random.default_rng(6)
    a = wide_bf16(rng, (24, 64))
    packed, w = make_weight(rng, kind, 16, 64)
    clean = run(level, kind, a, packed)
    a[3, 10], a[5, 63], a[17, 0], a[18, 1] = np.nan, -np.nan, np.inf, -np.inf
    actual = run(level, kind, a, packed)
    bad = [3, 5, 17, 18]
    assert_same_bits(actual, gemm(a, w))
    assert (bits(actual[[3, 5]]) == 0x7FC00000).all() and not np.isfinite(actual[bad]).any()
    assert_same_bits(np.delete(actual, bad, 0), np.delete(clean, bad, 0))


def test_levels_of_this_machine_are_not_only_the_generic_one():
    if len(host_levels()) == 1:
        pytest.skip("this machine executes the generic level only")
    assert host_levels()[:2] == ("generic", "avx2")
