"""The dynamic quantisers of activations and caches, as codes and scales or as rounded bf16."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from deepinfer.ir import Order, op
from deepinfer.numerics import formats

Array = NDArray[Any]

BLOCK_MAX = Order("block of C", "none", (), "nearest, ties to the even code")


@op("x:bf16[N,C] -> q:e4m3[N,C], sf:ue8m0[N,C/block]", order=BLOCK_MAX)
def quantize_fp8(x: Array, *, block: int = 32) -> tuple[Array, Array]:
    """Activations and window KV to e4m3 with one power-of-two scale per block.

    s = 2^ceil(log2(max(amax, 1e-4) * fp32(1/448))); q = e4m3(clamp(x/s, +-448)).

    Args:
        x: rows. block: elements per scale along C. A block with a NaN or inf gets NaN codes.
    Source: spec §6.3 "act fp8".
    """
    return formats.quantize_fp8(x, block)


@op("x:bf16[N,C] -> y:bf16[N,C]", order=BLOCK_MAX)
def fake_quantize_fp8(x: Array, *, block: int = 32) -> Array:
    """``quantize_fp8`` and back: y = bf16(q * s), exact, for targets whose GEMM takes bf16.

    Args:
        x: rows. block: elements per scale along C. A block with a NaN or inf becomes NaN.
    Source: spec §6.3 "act fp8".
    """
    return formats.dequantize_fp8(*formats.quantize_fp8(x, block), block)


@op("x:bf16[N,C] -> q:e2m1[N,C], sf:ue8m0[N,C/block]", order=BLOCK_MAX)
def quantize_fp4(x: Array, *, block: int = 32) -> tuple[Array, Array]:
    """Index queries and keys to e2m1 with one power-of-two scale per block.

    s = 2^ceil(log2(max(amax, 6 * 2^-126) * fp32(1/6))); q = e2m1(x/s).

    Args:
        x: rows. block: elements per scale along C. A block with a NaN or inf gets a NaN scale.
    Source: spec §6.3 "index q/k fp4".
    """
    return formats.quantize_fp4_ue8m0(x, block)


@op("x:bf16[N,C] -> y:bf16[N,C]", order=BLOCK_MAX)
def fake_quantize_fp4(x: Array, *, block: int = 32) -> Array:
    """``quantize_fp4`` and back: y = bf16(q * s), exact.

    Args:
        x: rows. block: elements per scale along C. A block with a NaN or inf becomes NaN.
    Source: spec §6.3 "index q/k fp4".
    """
    return formats.dequantize_fp4(*formats.quantize_fp4_ue8m0(x, block), block)


@op("x:bf16[N,C] -> q:e2m1[N,C], sf:e4m3[N,C/block]", order=BLOCK_MAX)
def quantize_fp4_e4m3(x: Array, *, block: int = 16) -> tuple[Array, Array]:
    """Compressed KV to e2m1 with one e4m3 scale per block.

    s = e4m3(min(max(amax, 6 * 2^-9) * fp32(1/6), 448)); q = e2m1(x/s), an fp32 division.

    Args:
        x: rows. block: elements per scale along C. A block with a NaN or inf gets a NaN scale.
    Source: spec §6.3 "compressed KV fp4".
    """
    return formats.quantize_fp4_e4m3(x, block)
