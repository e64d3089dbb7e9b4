"""The operations and the order of additions that DeepInfer declares for its cpu Program.

What is computed the modules say, as read in the spec. How it is added up and which sequence of
operations stands for exp is no matter of the spec, but a choice; with this one, two readings of the
spec give the same bits or one of them is wrong. Forward only.
"""

import math

import numpy as np
import torch
from arithmetic import Native
from torch import Tensor

from deepinfer.numerics import functions, sums

BLOCK = 32  # elements of K summed in two chains of fused multiply-adds before they are added up
SMALLEST_NORMAL = 2.0**-126
# Rounded to 24 bits with an unbounded exponent, a smaller value stays below 2^-126.
FLUSHED = 2.0**-126 - 2.0**-151
ELEMENTS = 1 << 15  # of a tile's float64 sums: they stay in a core's cache


def _elementwise(function):
    return staticmethod(lambda x: torch.from_numpy(function(x.detach().numpy())))


class Declared(Native):
    """DeepInfer's sequences of operations (`numerics.functions`) and its sums."""

    exp = _elementwise(functions.exp)
    rsqrt = _elementwise(functions.rsqrt)
    sigmoid = _elementwise(functions.sigmoid)
    silu = _elementwise(functions.silu)
    softplus = _elementwise(functions.softplus)
    sqrt = _elementwise(np.sqrt)  # PyTorch's is not always the nearest fp32

    def matmul(self, x: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
        if weight.dim() > 2:
            return _gemm(x.detach(), weight.detach(), start)
        rows = x.detach().reshape(-1, x.shape[-1])
        return _gemm(rows, weight.detach(), start).view(*x.shape[:-1], len(weight))

    def linear_fp32(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.detach().reshape(-1, x.shape[-1]).numpy()
        y = torch.from_numpy(sums.linear_fp32(rows, weight.detach().numpy()))
        return y.view(*x.shape[:-1], len(weight))

    def mix(self, weights: Tensor, streams: Tensor, start: Tensor | None = None) -> Tensor:
        total = start
        for weight, stream in zip(weights.unbind(-1), streams.unbind(-2), strict=True):
            product = weight.unsqueeze(-1) * stream.unsqueeze(-2)
            total = product if total is None else total + product
        return total

    def sum(self, x: Tensor) -> Tensor:
        return torch.from_numpy(sums.lane_sum(x.detach().numpy()))

    def mean(self, x: Tensor, *, keepdim: bool = False) -> Tensor:
        mean = self.sum(x) / x.shape[-1]
        return mean.unsqueeze(-1) if keepdim else mean

    def add(self, x: Tensor, dim: int, *, keepdim: bool = False) -> Tensor:
        first, *others = x.unbind(dim)
        for other in others:
            first = first + other
        return first.unsqueeze(dim) if keepdim else first

    def softmax(self, x: Tensor, dim: int) -> Tensor:
        e = self.exp(x - x.amax(dim, keepdim=True))
        return e / self.add(e, dim, keepdim=True)

    def cos_sin(self, angle: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = functions.cos_sin(angle.numpy())
        return torch.from_numpy(cos), torch.from_numpy(sin)


def _gemm(x: Tensor, weight: Tensor, start: Tensor | None) -> Tensor:
    """x [..., M, K] · weightᵀ [..., N, K] of bf16 values, in the cpu GEMM order, in tiles."""
    batch = torch.broadcast_shapes(x.shape[:-2], weight.shape[:-2])
    out = torch.zeros(*batch, x.shape[-2], weight.shape[-2]) if start is None else start.clone()
    left, right = _chains(x).unsqueeze(-1), _chains(weight).unsqueeze(-2)
    # Without a batch M is cut into tiles, with one its last axis.
    axis = -3 if batch and batch[-1] > 1 else -2
    step = max(1, ELEMENTS * out.shape[axis] // max(1, 2 * out.numel()))
    may_flush = _grain(x) + _grain(weight) < -126
    for a in range(0, out.shape[axis], step):
        tiles = (t if t.shape[axis] == 1 else t.narrow(axis, a, min(step, t.shape[axis] - a))
                 for t in (left, right, out))
        _blocks(*tiles, may_flush)
    return out


def _blocks(left: Tensor, right: Tensor, out: Tensor, may_flush: bool) -> None:
    """Add up all K blocks in `out` [..., M, N]. left [blocks, 16 steps, 2, ..., M, 1]."""
    _flush(out, SMALLEST_NORMAL)
    total = torch.empty(2, *out.shape, dtype=torch.float64)
    rounded = torch.empty(2, *out.shape)
    for rows, columns in zip(left, right, strict=True):
        total.zero_()
        for row, column in zip(rows, columns, strict=True):
            # The product of two bf16 is exact in float64, and a float64 sum of it and an fp32
            # rounds to fp32 as the exact sum does: a fused multiply-add.
            total.addcmul_(row, column)
            if may_flush:
                _flush(total, FLUSHED)
            total.copy_(rounded.copy_(total))
        both = rounded[0] + rounded[1]
        _flush(both, SMALLEST_NORMAL)
        out += both
        _flush(out, SMALLEST_NORMAL)


def _chains(x: Tensor) -> Tensor:
    """x [..., R, K], denormals flushed, as float64 [K blocks, 16 steps, even and odd, ..., R]."""
    values = x.clone()
    _flush(values, SMALLEST_NORMAL)
    values = torch.nn.functional.pad(values, (0, -x.shape[-1] % BLOCK)).double()
    return values.unflatten(-1, (-1, BLOCK // 2, 2)).movedim((-3, -2, -1), (0, 1, 2)).contiguous()


def _grain(x: Tensor) -> int:
    """e where all values are multiples of 2^e: a product's or sum's are too, however rounded.

    So where the grains of two factors add up to no less than -126, nothing becomes denormal.
    """
    size = x.abs().flatten()
    size = torch.cat((size[size >= SMALLEST_NORMAL], torch.ones(1)))
    return math.frexp(float(size.min()))[1] - 1 - 7  # bf16 has 7 bits below the leading one


def _flush(x: Tensor, below: float) -> None:
    """Replace what is smaller by zeros of its sign, in place."""
    small = x.abs() < below
    if small.any():
        x.mul_(torch.where(small, 0.0, 1.0).to(x.dtype))
