"""By which operations the forward pass computes: PyTorch's own, or with float64 sums.

The modules say what is computed. An object of these classes says how: a sum's order is PyTorch's,
which differs between versions and machines. `declared.py` has the order that DeepInfer declares.
"""

import torch
from torch import Tensor, nn


class Native:
    """PyTorch's functions, and its order of additions."""

    exp = staticmethod(torch.exp)
    rsqrt = staticmethod(torch.rsqrt)
    sigmoid = staticmethod(torch.sigmoid)
    silu = staticmethod(nn.functional.silu)
    softplus = staticmethod(nn.functional.softplus)
    sqrt = staticmethod(torch.sqrt)

    def matmul(self, x: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
        """start + x · weightᵀ, fp32 sums of bf16 values. x [..., M, K], weight [..., N, K]."""
        y = x @ weight.mT
        return y if start is None else start + y

    def linear_fp32(self, x: Tensor, weight: Tensor) -> Tensor:
        """x · weightᵀ of fp32 values. x [..., K], weight [N, K]."""
        return self.matmul(x, weight)

    def mix(self, weights: Tensor, streams: Tensor, start: Tensor | None = None) -> Tensor:
        """start + weights · streams, a sum over few streams. [..., M, hc], [..., hc, d]."""
        y = weights @ streams
        return y if start is None else start + y

    def sum(self, x: Tensor) -> Tensor:
        """The sum of each row of many values."""
        return x.sum(-1)

    def mean(self, x: Tensor, *, keepdim: bool = False) -> Tensor:
        """The mean of each row of many values."""
        return x.mean(-1, keepdim=keepdim)

    def add(self, x: Tensor, dim: int, *, keepdim: bool = False) -> Tensor:
        """The sum of a few tensors, side by side along `dim`."""
        return x.sum(dim, keepdim=keepdim)

    def softmax(self, x: Tensor, dim: int) -> Tensor:
        """Softmax over a few values along `dim`."""
        return x.softmax(dim)

    def cos_sin(self, angle: Tensor) -> tuple[Tensor, Tensor]:
        return angle.cos(), angle.sin()


class Wide(Native):
    """Matrix products summed in float64: what another order of additions may do at most."""

    def matmul(self, x: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
        y = (x.double() @ weight.double().mT).float()
        return y if start is None else start + y
