"""Number formats of the checkpoint and the caches, and the dynamic quantisers that produce them.

bf16, e4m3 and ue8m0 arrays use the ml_dtypes types. e2m1 is stored packed: uint8, two codes per
byte along the last axis, element 2j in the low nibble (logical [..., K], stored [..., K/2]).
`targets/cpu/micro/formats.h` is the same in C and gives the same bits.

A block that holds a NaN or an infinity has no finite scale. Its scale code is NaN (ue8m0 255,
e4m3 0x7F), so it dequantises to NaN; its data codes are 0x7F (e4m3) or 0 (e2m1, which has no NaN).
Source: spec §6.2, §6.3, §11.8.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import DeepInferError

Array = NDArray[Any]
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
UE8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)

E4M3_MAX, E2M1_MAX = 448.0, 6.0
_E4M3_NAN, _UE8M0_NAN = 0x7F, 255
# The release multiplies by the fp32 inverse; dividing could give another scale for an fp32 amax.
_INVERSE_448, _INVERSE_6 = np.float32(1 / 448), np.float32(1 / 6)
_E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_DECODE = np.concatenate([_E2M1_VALUES, -_E2M1_VALUES])


def to_bf16(x: Array) -> Array:
    """Round to bf16, to nearest even; a NaN becomes the quiet NaN of its sign (0x7FC0, 0xFFC0)."""
    with np.errstate(all="ignore"):
        return np.asarray(x, np.float32).astype(BF16)


def f32(x: Array) -> F32:
    """Widen bf16, e4m3 or ue8m0 (or any numpy number) to float32; exact for those three."""
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(np.float32)


def decode_e4m3(codes: Array) -> F32:
    """e4m3 (or its uint8 codes) to float32: bias 7, largest 448, no infinity, NaN 0x7F and 0xFF."""
    return f32(np.asarray(codes).view(E4M3))


def encode_e4m3(x: Array) -> Array:
    """float32 to e4m3, nearest even, saturating at +-448; a NaN becomes the NaN code of its sign.

    Infinities saturate too: the quantisers mark them in the scale before they come here.
    """
    with np.errstate(all="ignore"):
        values = np.asarray(x, np.float32)
        return np.clip(values, np.float32(-E4M3_MAX), np.float32(E4M3_MAX)).astype(E4M3)


def decode_ue8m0(codes: Array) -> F32:
    """ue8m0 (or its uint8 codes) to float32: 2^(code - 127), 255 is NaN; code 0 is denormal."""
    return f32(np.asarray(codes).view(UE8M0))


def pack_e2m1(codes: Array) -> U8:
    """e2m1 codes u8[..., K] (0..15) to packed u8[..., K/2], element 2j in the low nibble."""
    codes = np.asarray(codes, np.uint8)
    _require_multiple("pack_e2m1", codes.shape[-1], 2)
    return (codes[..., 0::2] & np.uint8(15)) | (codes[..., 1::2] << np.uint8(4))


def unpack_e2m1(packed: Array) -> U8:
    """Packed e2m1 u8[..., K/2] to codes u8[..., K]."""
    packed = np.asarray(packed, np.uint8)
    pairs = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def decode_e2m1(packed: Array) -> F32:
    """Packed e2m1 u8[..., K/2] to float32 [..., K]; code 8 is -0."""
    return _E2M1_DECODE[unpack_e2m1(packed)]


def encode_e2m1(x: Array) -> U8:
    """float32 to e2m1 codes u8 (unpacked), nearest, ties to the even code, saturating at +-6.

    0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4. The sign is kept (-0.1
    becomes -0). There is no NaN code: a NaN becomes a zero of its sign.
    """
    values = np.asarray(x, np.float32)
    size = np.abs(values)
    code = np.where(np.signbit(values), np.uint8(8), np.uint8(0))
    for tie in (0.25, 1.25, 2.5, 5.0):
        code += size > np.float32(tie)
    for tie in (0.75, 1.75, 3.5):
        code += size >= np.float32(tie)
    return code


def _require_multiple(who: str, size: int, block: int) -> None:
    if size % block:
        raise DeepInferError(
            f"the last axis has {size} elements, expected a multiple of {block}",
            where=who,
            next="pad the axis with zeros, or use a block that divides it",
        )


def _blocks(who: str, x: Array, block: int) -> tuple[F32, F32, NDArray[np.bool_]]:
    """x as f32[..., K/block, block], its amax per block (1 if not finite), and which are finite."""
    _require_multiple(who, np.shape(x)[-1], block)
    values = f32(x)
    values = values.reshape(*values.shape[:-1], values.shape[-1] // block, block)
    amax: F32 = np.max(np.abs(values), axis=-1)  # numpy's max keeps a NaN
    finite = np.isfinite(amax)
    return values, np.where(finite, amax, np.float32(1)), finite


def _ue8m0_ceil(x: F32) -> U8:
    """The ue8m0 code of 2^ceil(log2(x)): the exponent, plus one if any significand bit is set."""
    return ((x.view(np.uint32) + np.uint32(0x7FFFFF)) >> 23).astype(np.uint8)


def _times_inverse_scale(values: F32, scale_codes: U8) -> F32:
    """values / 2^(code - 127) as a product with the inverse power of two, exact in fp32."""
    inverse = ((np.uint32(254) - scale_codes.astype(np.uint32)) << 23).view(np.float32)
    return values * inverse[..., None]


def quantize_fp8(x: Array, block: int = 32) -> tuple[Array, Array]:
    """Activations and window KV to e4m3 with one power-of-two scale per block.

    amax = max(max |x|, 1e-4); s = 2^ceil(log2(amax * fp32(1/448))) on the bits;
    q = e4m3(clamp(x / s, +-448)).

    Args: x bf16|f32[..., K]; block, elements per scale along K.
    Returns: (q e4m3[..., K], sf ue8m0[..., K/block]).
    Raises: DeepInferError if block does not divide K.
    Source: spec §6.3 "act fp8".
    """
    values, amax, finite = _blocks("quantize_fp8", x, block)
    with np.errstate(all="ignore"):
        code = _ue8m0_ceil(np.maximum(amax, np.float32(1e-4)) * _INVERSE_448)
        q = encode_e4m3(_times_inverse_scale(values, code)).view(np.uint8)
    q = np.where(finite[..., None], q, np.uint8(_E4M3_NAN))
    sf = np.where(finite, code, np.uint8(_UE8M0_NAN))
    return q.reshape(np.shape(x)).view(E4M3), sf.view(UE8M0)


def quantize_fp4_ue8m0(x: Array, block: int = 32) -> tuple[U8, Array]:
    """Index queries and keys to e2m1 with one power-of-two scale per block.

    amax = max(max |x|, 6 * 2^-126); s = 2^ceil(log2(amax * fp32(1/6))); q = e2m1(x / s).

    Args: x bf16|f32[..., K]; block, elements per scale along K.
    Returns: (packed e2m1 u8[..., K/2], sf ue8m0[..., K/block]).
    Raises: DeepInferError if block does not divide K.
    Source: spec §6.3 "index q/k fp4".
    """
    values, amax, finite = _blocks("quantize_fp4_ue8m0", x, block)
    with np.errstate(all="ignore"):
        code = _ue8m0_ceil(np.maximum(amax, np.float32(6 * 2.0**-126)) * _INVERSE_6)
        q = encode_e2m1(_times_inverse_scale(values, code))
    q = np.where(finite[..., None], q, np.uint8(0)).reshape(np.shape(x))
    sf = np.where(finite, code, np.uint8(_UE8M0_NAN))
    return pack_e2m1(q), sf.view(UE8M0)


def quantize_fp4_e4m3(x: Array, block: int = 16) -> tuple[U8, Array]:
    """Compressed KV to e2m1 with one e4m3 scale per block.

    s = e4m3(min(max(max |x|, 6 * 2^-9) * fp32(1/6), 448)); q = e2m1(x / s), an fp32 division.

    Args: x bf16|f32[..., K]; block, elements per scale along K.
    Returns: (packed e2m1 u8[..., K/2], sf e4m3[..., K/block]).
    Raises: DeepInferError if block does not divide K.
    Source: spec §6.3 "compressed KV fp4"; the limit of 448 as in SGLang.
    """
    values, amax, finite = _blocks("quantize_fp4_e4m3", x, block)
    with np.errstate(all="ignore"):
        scale = encode_e4m3(np.maximum(amax, np.float32(6 * 2.0**-9)) * _INVERSE_6)
        q = encode_e2m1(values / f32(scale)[..., None])
    q = np.where(finite[..., None], q, np.uint8(0)).reshape(np.shape(x))
    sf = np.where(finite, scale.view(np.uint8), np.uint8(_E4M3_NAN))
    return pack_e2m1(q), sf.view(E4M3)


def dequantize_fp8(q: Array, sf: Array, block: int = 32) -> Array:
    """q e4m3[..., K] times sf ue8m0[..., K/block] per block, to bf16[..., K].

    Exact unless the product leaves bf16's range.
    Raises: DeepInferError if the shapes do not fit.
    """
    return _scaled("dequantize_fp8", decode_e4m3(q), sf, block)


def dequantize_fp4(packed: Array, sf: Array, block: int) -> Array:
    """Packed e2m1 u8[..., K/2] times sf (ue8m0 or e4m3)[..., K/block], to bf16[..., K]; exact.

    Raises: DeepInferError if the shapes do not fit.
    """
    return _scaled("dequantize_fp4", decode_e2m1(packed), sf, block)


def dequantize_fp8_tile(w: Array, sf: Array, tile: int = 32) -> Array:
    """Weight e4m3[N,K] times sf ue8m0[ceil(N/32), ceil(K/32)], one scale per tile, to bf16[N,K].

    Raises: DeepInferError if the shapes do not fit.
    Source: spec §6.2.
    """
    rows, columns = np.shape(w)
    expected = (-(-rows // tile), -(-columns // tile))
    _require_shape("dequantize_fp8_tile", np.shape(sf), expected)
    scale = np.repeat(np.repeat(f32(sf), tile, axis=0), tile, axis=1)[:rows, :columns]
    with np.errstate(all="ignore"):
        return to_bf16(decode_e4m3(w) * scale)


def _scaled(who: str, values: F32, sf: Array, block: int) -> Array:
    _require_multiple(who, values.shape[-1], block)
    _require_shape(who, np.shape(sf), (*values.shape[:-1], values.shape[-1] // block))
    with np.errstate(all="ignore"):
        return to_bf16(values * np.repeat(f32(sf), block, axis=-1))


def _require_shape(who: str, actual: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if actual != expected:
        raise DeepInferError(
            f"the scales have shape {actual}, expected {expected}",
            where=who,
            next="pass the scale factors that belong to this tensor, one per block",
        )
