"""Building blocks: norms, linears, rotary positions, hyper-connections. Source: spec §2.0-2.3."""

import math
from types import SimpleNamespace

import torch
from quant import Precision, fp8, fp8_tile
from torch import Tensor, nn

# One attribute per field of `text_config` in config.json.
Config = SimpleNamespace


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))


class Norm(nn.Module):
    """RMSNorm: w ⊙ (x · rsqrt(mean(x²) + eps)), fp32, then bf16."""

    def __init__(self, size: int, eps: float, precision: Precision) -> None:
        super().__init__()
        self.weight, self.eps, self.precision = nn.Parameter(torch.ones(size)), eps, precision

    def forward(self, x: Tensor) -> Tensor:
        by = self.precision.arithmetic
        scale = by.rsqrt(by.mean(x.square(), keepdim=True) + self.eps)
        return self.precision.round(self.weight * (x * scale))


class Linear(nn.Module):
    """y = x · Wᵀ with a bf16 weight; the output is bf16, or fp32 where the release says so."""

    def __init__(self, inputs: int, outputs: int, precision: Precision, *,
                 fp32: bool = False) -> None:
        super().__init__()
        self.weight, self.precision, self.fp32 = parameter(outputs, inputs), precision, fp32

    def forward(self, x: Tensor) -> Tensor:
        # A bf16 weight is rounded in training too when activations are.
        y = self.precision.matmul(x, self.precision.round(self.weight))
        return y if self.fp32 else self.precision.round(y)


class Linear8(nn.Module):
    """Quantised linear: fp8 weight tiles, activations fake-quantised to fp8 per 32, bf16 out."""

    def __init__(self, inputs: int, outputs: int, precision: Precision) -> None:
        super().__init__()
        self.weight, self.precision = parameter(outputs, inputs), precision

    def quantised(self) -> Tensor:
        ready = self.precision.weights_ready or not self.precision.quantize
        return self.weight if ready else fp8_tile(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = fp8(x) if self.precision.quantize else x
        return self.precision.round(self.precision.matmul(x, self.quantised()))


class Rotary(nn.Module):
    """Rotation of adjacent channel pairs of the last R channels. Source: spec §2.1."""

    def __init__(self, cfg: Config, ratio: int, precision: Precision) -> None:
        super().__init__()
        self.size, self.precision = cfg.qk_rope_head_dim, precision
        pairs = torch.arange(self.size // 2, dtype=torch.float64)
        base = cfg.compress_rope_theta if ratio else cfg.rope_theta
        theta = base ** (-2 * pairs / self.size)
        if ratio and getattr(cfg, "rope_scaling", None):
            theta = self._yarn(cfg.rope_scaling, base, theta, pairs)
        self.register_buffer("theta", theta.float(), persistent=False)

    def _yarn(self, yarn: dict, base: float, theta: Tensor, pairs: Tensor) -> Tensor:
        def correction(turns: float) -> float:
            length = yarn["original_max_position_embeddings"]
            return self.size * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base))

        low = max(math.floor(correction(yarn["beta_fast"])), 0)
        high = min(math.ceil(correction(yarn["beta_slow"])), self.size - 1)
        ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
        return theta * (1 - ramp) + theta / yarn["factor"] * ramp

    def forward(self, x: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
        """Rotate x [..., T, (heads,) D] by its positions, which broadcast against x.shape[:-1]."""
        angle = positions.float().unsqueeze(-1) * self.theta
        cos, sin = self.precision.arithmetic.cos_sin(angle)
        sin = -sin if inverse else sin
        rest, tail = x[..., : -self.size], x[..., -self.size :]
        even, odd = tail[..., 0::2], tail[..., 1::2]
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        return torch.cat((rest, self.precision.round(turned)), -1)


class HyperMix(nn.Module):
    """The coefficients pre, post and C of one sublayer's hyper-connection. Source: spec §2.3."""

    def __init__(self, cfg: Config, precision: Precision) -> None:
        super().__init__()
        self.hc, self.eps, self.hc_eps = cfg.hc_mult, cfg.rms_norm_eps, cfg.hc_eps
        self.iterations, self.precision = cfg.hc_sinkhorn_iters, precision
        mixes = (2 + self.hc) * self.hc
        self.fn = parameter(mixes, self.hc * cfg.hidden_size)
        self.base, self.scale = parameter(mixes), parameter(3)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams [..., hc, d] -> pre [..., hc], post [..., hc], C [..., hc, hc]."""
        flat, hc, by = streams.flatten(-2), self.hc, self.precision.arithmetic
        rms = by.rsqrt(by.mean(flat.square(), keepdim=True) + self.eps)
        mixes = by.linear_fp32(flat, self.fn) * rms
        pre, post, matrix = mixes.split((hc, hc, hc * hc), -1)
        pre_base, post_base, matrix_base = self.base.split((hc, hc, hc * hc))
        pre = by.sigmoid(pre * self.scale[0] + pre_base) + self.hc_eps
        post = 2 * by.sigmoid(post * self.scale[1] + post_base)
        matrix = (matrix * self.scale[2] + matrix_base).unflatten(-1, (hc, hc))
        return pre, post, self.sinkhorn(matrix)

    def sinkhorn(self, matrix: Tensor) -> Tensor:
        """Alternate row and column normalisation, `iterations` of each, columns last."""
        by = self.precision.arithmetic
        # Tokens go last: sums over 4 rows or columns are then sums of long vectors.
        matrix = (by.softmax(matrix, -1) + self.hc_eps).movedim((-2, -1), (0, 1)).contiguous()
        matrix = _Sinkhorn.apply(matrix, self.iterations, self.hc_eps, by)
        return matrix.movedim((0, 1), (-2, -1)).contiguous()


class _Sinkhorn(torch.autograd.Function):
    """Columns, then rows and columns in turn; matrix [row, column, ...]."""

    @staticmethod
    def forward(ctx, matrix, iterations, eps, arithmetic):
        ctx.axes = [0] + [1, 0] * (iterations - 1)
        saved = []
        for axis in ctx.axes:
            total = arithmetic.add(matrix, axis, keepdim=True) + eps
            matrix = matrix / total
            saved += [matrix, total]
        ctx.save_for_backward(*saved)
        return matrix

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        for step in reversed(range(len(ctx.axes))):
            matrix, total = ctx.saved_tensors[2 * step : 2 * step + 2]
            grad = (grad - (grad * matrix).sum(ctx.axes[step], keepdim=True)) / total
        return grad, None, None, None


def collapse(streams: Tensor, pre: Tensor, precision: Precision) -> Tensor:
    """hc_pre: the weighted sum of the streams, bf16. [..., hc, d], [..., hc] -> [..., d]."""
    return precision.round(precision.arithmetic.mix(pre.unsqueeze(-2), streams).squeeze(-2))


def spread(y: Tensor, streams: Tensor, post: Tensor, matrix: Tensor,
           precision: Precision) -> Tensor:
    """hc_post: post_c · y + Σ_c' C[c', c] · X_c', bf16."""
    own = post.unsqueeze(-1) * y.unsqueeze(-2)
    return precision.round(precision.arithmetic.mix(matrix.mT, streams, own))
