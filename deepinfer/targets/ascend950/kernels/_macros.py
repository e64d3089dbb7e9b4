"""Pieces of ascend950 kernels that several share."""

import tilelang.ascend.language as T

from deepinfer.targets.ascend950.dialect import bits_of, float_of, inverse_scale, ue8m0_ceil


@T.macro
def encode_block(value, code, scale):
    """One warp quantises a block of 32 values, one a lane, to an e4m3 code and the ue8m0 scale.

    The bits of ``numerics.formats.quantize_fp8``: amax and comparisons in fp32, the scale from the
    exponent, a block with a NaN or inf becomes all NaN codes. All three are locals of one element.
    """
    amax = T.alloc_var("uint32")
    amax = bits_of(value[0]) & T.uint32(0x7FFFFFFF)  # of |value|: ordered as it is, NaN last
    for step in T.unroll(5):
        other = T.alloc_var("uint32")
        other = T.call_extern("uint32", "asc_shfl_xor", amax, 16 >> step)
        amax = T.if_then_else(other > amax, other, amax)
    exponent = T.alloc_var("uint32")
    exponent = ue8m0_ceil(T.max(float_of(amax), T.float32(1e-4)) * T.float32(1 / 448))
    if amax >= T.uint32(0x7F800000):
        code[0] = T.uint8(0x7F)
        scale[0] = T.uint8(0xFF)
    else:
        encoded = T.alloc_local((1,), "float8_e4m3fn")
        encoded[0] = T.cast(value[0] * inverse_scale(exponent), "float8_e4m3fn")
        code[0] = T.reinterpret(encoded[0], "uint8")
        scale[0] = T.cast(exponent, "uint8")


@T.macro
def count_bits(x):
    """x becomes the number of its bits that are set; the C API has no such operation."""
    x[0] = x[0] - ((x[0] >> T.uint32(1)) & T.uint32(0x55555555))
    x[0] = (x[0] & T.uint32(0x33333333)) + ((x[0] >> T.uint32(2)) & T.uint32(0x33333333))
    x[0] = (x[0] + (x[0] >> T.uint32(4))) & T.uint32(0x0F0F0F0F)
    x[0] = (x[0] * T.uint32(0x01010101)) >> T.uint32(24)


@T.macro
def power_of_two(scale, code):
    """2^(code - 127) of a ue8m0 code; code 0 is the denormal 2^-127."""
    bits = T.cast(code, "uint32") << T.uint32(23)
    scale[0] = float_of(T.if_then_else(bits == T.uint32(0), T.uint32(0x400000), bits))


def e2m1(nibble):
    """float32 of an e2m1 code: a sign, two bits of exponent, one of significand."""
    exponent, odd = nibble // 2 % 4, nibble % 2
    twice = T.if_then_else(exponent == 0, odd, (2 + odd) << T.max(exponent - 1, 0))
    return T.cast(T.if_then_else(nibble >= 8, -twice, twice), "float32") * T.float32(0.5)
