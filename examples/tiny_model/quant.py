"""Number formats of the release as differentiable fake quantisers (spec §6.2, §6.3).

Every function takes and returns fp32 tensors that hold only values of the target format; the
gradient passes straight through. `Precision` says which of the release's roundings are on.
"""

from dataclasses import dataclass, field

import torch
from arithmetic import Native
from torch import Tensor

FP8_MAX, FP4_MAX = 448.0, 6.0


@dataclass
class Precision:
    """How faithfully a forward pass follows the release.

    Args:
        bf16: round activations to bf16 wherever the release stores them (off in training: fp32).
        tiled: attention as one online softmax over absolute 64-wide tiles with bf16 P (spec
            §11.5) instead of a dense softmax.
        arithmetic: by which operations and in which order of additions.
        quantize: fake-quantise weights and activations at all.
        weights_ready: weights already hold values of their format (a loaded checkpoint).
    """

    bf16: bool = True
    tiled: bool = True
    arithmetic: Native = field(default_factory=Native)
    quantize: bool = True
    weights_ready: bool = False

    def round(self, x: Tensor) -> Tensor:
        """bf16(x), or x when activations stay fp32."""
        return _StraightThrough.apply(x, to_bf16) if self.bf16 else x

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """x · weightᵀ in fp32, before any rounding. x [..., in], weight [out, in]."""
        return self.arithmetic.matmul(x, weight)


class _StraightThrough(torch.autograd.Function):
    """quantise(x) with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x, quantise):
        return quantise(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def to_bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


def _round_mantissa(x: Tensor, bits: int, smallest: float) -> Tensor:
    """Round to nearest even at `bits` mantissa bits; below `smallest` the grid stops refining."""
    binade = (x.abs().clamp_min(smallest).view(torch.int32) & 0x7F800000).view(torch.float32)
    # Adding 1.5·2^(e+23-bits) leaves exactly `bits` mantissa bits below the binade 2^e of x.
    magic = binade * (1.5 * 2.0 ** (23 - bits))
    return (x + magic) - magic


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 value, ties to even; |x| must be ≤ 448."""
    return _round_mantissa(x, 3, 2.0**-6)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 value (0, .5, 1, 1.5, 2, 3, 4, 6), ties to the even code; |x| ≤ 6."""
    return _round_mantissa(x, 1, 1.0)


def power_above(x: Tensor) -> Tensor:
    """2^ceil(log2 x) from the bits of a positive normal fp32 x."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def _blocks(x: Tensor, block: int) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, block)


def fp8_parts(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """Activation fp8: values on the e4m3 grid [..., K/block, block], scales [..., K/block, 1]."""
    blocks = _blocks(x, block)
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = power_above(amax * torch.tensor(1 / FP8_MAX))
    return round_e4m3((blocks / scale).clamp(-FP8_MAX, FP8_MAX)), scale


def fp8(x: Tensor, block: int = 32) -> Tensor:
    """Activations and window KV: e4m3, one ue8m0 scale per `block` of the last axis."""
    def quantise(x):
        values, scale = fp8_parts(x, block)
        return (values * scale).view(x.shape)
    return _StraightThrough.apply(x, quantise)


def fp4_parts(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """Index fp4 and MXFP4 weights: values on the e2m1 grid and ue8m0 scales, blocked."""
    blocks = _blocks(x, block)
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(FP4_MAX * 2.0**-126)
    scale = power_above(amax / FP4_MAX)
    return round_e2m1((blocks / scale).clamp(-FP4_MAX, FP4_MAX)), scale


def fp4(x: Tensor, block: int = 32) -> Tensor:
    """Index queries and keys, expert weights: e2m1, one ue8m0 scale per 32."""
    def quantise(x):
        values, scale = fp4_parts(x, block)
        return (values * scale).view(x.shape)
    return _StraightThrough.apply(x, quantise)


def fp4_e4m3(x: Tensor, block: int = 16) -> Tensor:
    """Compressed KV: e2m1, one e4m3 scale per 16."""
    def quantise(x):
        blocks = _blocks(x, block)
        amax = blocks.abs().amax(-1, keepdim=True).clamp_min(FP4_MAX * 2.0**-9)
        scale = round_e4m3((amax / FP4_MAX).clamp_max(FP8_MAX))
        values = round_e2m1((blocks / scale).clamp(-FP4_MAX, FP4_MAX))
        return (values * scale).view(x.shape)
    return _StraightThrough.apply(x, quantise)


def fp8_tile_parts(weight: Tensor, tile: int = 32) -> tuple[Tensor, Tensor]:
    """Weight fp8: values on the e4m3 grid [out, in] and one scale per tile [out/32, in/32]."""
    rows, columns = weight.shape
    tiles = weight.view(rows // tile, tile, columns // tile, tile)
    amax = tiles.abs().amax((1, 3), keepdim=True).clamp_min(1e-30)
    scale = power_above(amax / FP8_MAX)
    values = round_e4m3((tiles / scale).clamp(-FP8_MAX, FP8_MAX))
    return values.view(rows, columns), scale.view(rows // tile, columns // tile)


def fp8_tile(weight: Tensor) -> Tensor:
    """Weights of the quantised linears: e4m3 with one ue8m0 scale per 32 x 32 tile."""
    def quantise(weight):
        values, scale = fp8_tile_parts(weight)
        return values * scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
    return _StraightThrough.apply(weight, quantise)
