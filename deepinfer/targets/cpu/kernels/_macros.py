"""Statements that several dense kernels share. Buffers are two-dimensional: [row, channel]."""

import tilelang.language as T

from deepinfer.targets.cpu.dialect import LANES, bf16, call, const, f32, fold_lanes

TILE = 16  # outputs of one packed weight tile


@T.macro
def sum_squares(acc, x, row, C):
    """``lane_sum`` of the squares of one bf16 row; the sum is in ``acc[0]``."""
    for l in T.serial(LANES):
        acc[l] = const(0)
    for c in T.serial(C // LANES):
        for l in T.serial(LANES):
            acc[l] = acc[l] + f32(x[row, c * LANES + l]) * f32(x[row, c * LANES + l])
    for l in T.serial(C % LANES):
        tail = C // LANES * LANES + l
        acc[l] = acc[l] + f32(x[row, tail]) * f32(x[row, tail])
    fold_lanes(acc)


@T.macro
def norm_row(acc, x, row, w, y, to, C, eps):
    """``rms_norm`` of row ``row`` of x into row ``to`` of y."""
    sum_squares(acc, x, row, C)
    acc[0] = call("di_rsqrt", acc[0] / const(C) + const(eps))
    for c in T.serial(C):
        y[to, c] = bf16(f32(w[c]) * (f32(x[row, c]) * acc[0]))


@T.macro
def block_amax(amax, x, row, start, block):
    """The largest magnitude of a block, in ``amax[0]``; a NaN stays."""
    amax[0] = const(0)
    for i in T.serial(block):
        amax[0] = call("di_amax", amax[0], f32(x[row, start + i]))


@T.macro
def fake_quantize_row(amax, code, codes, x, row, y, to, C, block, scale, quantize, decode):
    """Quantise row ``row`` of x per block and write what the codes stand for to row ``to`` of y.

    ``scale``, ``quantize`` and ``decode`` name the functions of formats.h; encoding and decoding
    in two loops over ``codes`` lets the compiler vectorise both.
    """
    for g in T.serial(C // block):
        block_amax(amax, x, row, g * block, block)
        code[0] = call(scale, amax[0], type="uint8")
        amax[0] = call("di_ue8m0_to_f32", code[0])
        for i in T.serial(block):
            codes[i] = call(quantize, f32(x[row, g * block + i]), code[0], type="uint8")
        for i in T.serial(block):
            y[to, g * block + i] = bf16(call(decode, codes[i]) * amax[0])


@T.macro
def fake_quantize_fp8_block(x, row, start, y, to, at, block):
    """``fake_quantize_fp8`` of one block of x, from channel ``start`` of row ``row``, into row
    ``to`` of y from channel ``at``; it may be the same place. Without codes: three times as fast
    as ``fake_quantize_row``."""
    amax = T.alloc_local((1,), "int32")  # the bits of it: a maximum that vectorises
    code = T.alloc_local((1,), "uint8")
    amax[0] = 0
    for i in T.serial(block):
        amax[0] = call("di_amax_bits", amax[0], f32(x[row, start + i]), type="int32")
    largest = call("di_float_of_bits", T.cast(amax[0], "uint32"))
    code[0] = call("di_fp8_scale", largest, type="uint8")
    for i in T.serial(block):
        y[to, at + i] = call("di_fake_quantize_fp8", f32(x[row, start + i]), code[0],
                             type="uint16")


@T.macro
def fake_quantize_fp8_row(x, row, y, to, C, block):
    """``fake_quantize_fp8`` of row ``row`` of x into row ``to`` of y."""
    for g in T.serial(C // block):
        fake_quantize_fp8_block(x, row, g * block, y, to, g * block, block)


@T.macro
def silu_mul_row(gate, up, y, row, I, limit):  # noqa: E741 -- the signature's name
    """``silu_mul`` of one row; comparisons, so that a NaN stays one."""
    for i in T.serial(I):
        g = f32(gate[row, i])
        v = f32(up[row, i])
        g_low = T.if_then_else(g > const(limit), const(limit), g)
        v_low = T.if_then_else(v > const(limit), const(limit), v)
        v_fit = T.if_then_else(v_low < const(-limit), const(-limit), v_low)
        y[row, i] = bf16(call("di_silu", g_low) * v_fit)


@T.macro
def quantize_fp8_row(amax, code, x, from_row, q, sf, row, C, block):
    """``quantize_fp8`` of row ``from_row`` of x into row ``row`` of q and sf."""
    for g in T.serial(C // block):
        block_amax(amax, x, from_row, g * block, block)
        code[0] = call("di_fp8_scale", amax[0], type="uint8")
        sf[row, g] = code[0]
        for i in T.serial(block):
            q[row, g * block + i] = call("di_quantize_fp8", f32(x[from_row, g * block + i]),
                                         code[0], type="uint8")


@T.macro
def quantize_fp4_row(amax, code, x, row, q, sf, C, block, scale, quantize):
    """Quantise a row to packed e2m1; ``scale`` and ``quantize`` name functions of formats.h."""
    for g in T.serial(C // block):
        block_amax(amax, x, row, g * block, block)
        code[0] = call(scale, amax[0], type="uint8")
        sf[row, g] = code[0]
        for i in T.serial(block // 2):
            even = call(quantize, f32(x[row, g * block + 2 * i]), code[0], type="uint8")
            odd = call(quantize, f32(x[row, g * block + 2 * i + 1]), code[0], type="uint8")
            q[row, g * (block // 2) + i] = even | (odd << T.uint8(4))


@T.macro
def store_tiles(y, acc, row, n, first, tiles, m, out):
    """Write n rows of some tiles' fp32 sums, ``acc[tiles * n * 16]``, to y from ``row`` on, without
    the padded outputs."""
    for t, i in T.grid(tiles, n):
        for c in T.serial(TILE):
            if (first + t) * TILE + c < m:
                y[row + i, (first + t) * TILE + c] = (
                    bf16(acc[(t * n + i) * TILE + c]) if out == "bf16"
                    else acc[(t * n + i) * TILE + c])
