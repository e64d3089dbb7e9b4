"""Router and experts. Source: spec §2.8, §2.9, §11.7."""

import torch
from layers import Config, Linear8, parameter
from quant import Precision, fp4, fp8
from torch import Tensor, nn


def gated(g: Tensor, v: Tensor, limit: float, precision: Precision) -> Tensor:
    """silu(min(g, limit)) · clamp(v, ±limit), fp32."""
    return precision.arithmetic.silu(g.clamp(max=limit)) * v.clamp(-limit, limit)


class SharedExpert(nn.Module):
    def __init__(self, cfg: Config, precision: Precision) -> None:
        super().__init__()
        self.limit, self.precision = cfg.swiglu_limit, precision
        self.w1 = Linear8(cfg.hidden_size, cfg.moe_intermediate_size, precision)
        self.w3 = Linear8(cfg.hidden_size, cfg.moe_intermediate_size, precision)
        self.w2 = Linear8(cfg.moe_intermediate_size, cfg.hidden_size, precision)

    def forward(self, x: Tensor) -> Tensor:
        hidden = gated(self.w1(x), self.w3(x), self.limit, self.precision)
        return self.w2(self.precision.round(hidden))


class Experts(nn.Module):
    """All routed experts of a layer: w1, w3 [E, inner, d], w2 [E, d, inner], MXFP4."""

    def __init__(self, cfg: Config, count: int, precision: Precision) -> None:
        super().__init__()
        self.count, self.limit, self.precision = count, cfg.swiglu_limit, precision
        self.w1 = parameter(count, cfg.moe_intermediate_size, cfg.hidden_size)
        self.w3 = parameter(count, cfg.moe_intermediate_size, cfg.hidden_size)
        self.w2 = parameter(count, cfg.hidden_size, cfg.moe_intermediate_size)

    def forward(self, x: Tensor, picks: Tensor, weights: Tensor) -> Tensor:
        """x [N, d], picks and weights [N, k], picks ascending in each row -> [N, d], fp32."""
        precision, per_token = self.precision, picks.shape[1]
        order = picks.flatten().argsort(stable=True)
        counts = picks.flatten().bincount(minlength=self.count).tolist()
        x = (fp8(x) if precision.quantize else x)[order // per_token]
        g = precision.round(self._grouped(x, self.w1, counts))
        v = precision.round(self._grouped(x, self.w3, counts))
        # The routing weight goes in before w2 and so before its activation is quantised.
        hidden = weights.flatten()[order].unsqueeze(-1) * gated(g, v, self.limit, precision)
        hidden = precision.round(hidden)
        hidden = fp8(hidden) if precision.quantize else hidden
        y = precision.round(self._grouped(hidden, self.w2, counts))
        y = y[order.argsort()].view(-1, per_token, y.shape[-1])
        total = y[:, 0]
        for rank in range(1, per_token):
            total = total + y[:, rank]
        return total

    def _grouped(self, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        if self.precision.quantize and not self.precision.weights_ready:
            weight = fp4(weight)
        parts = zip(x.split(counts), weight.unbind(0), strict=True)
        return torch.cat([self.precision.matmul(rows, w) for rows, w in parts])


class Router(nn.Module):
    """Top-k of sqrt(softplus(z)) + bias; the bias picks but does not weigh."""

    def __init__(self, cfg: Config, count: int, top: int, precision: Precision) -> None:
        super().__init__()
        self.top, self.scale, self.precision = top, cfg.routed_scaling_factor, precision
        self.weight = parameter(count, cfg.hidden_size)
        self.bias, self.bias_vl = parameter(count), parameter(count)
        self.bias.requires_grad_(False)  # moved by the balancing rule, not by gradients
        self.bias_vl.requires_grad_(False)

    def forward(self, u: Tensor, image: Tensor | None,
                forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """u [N, d], image bool [N] -> experts [N, k] ascending, weights [N, k]."""
        by = self.precision.arithmetic
        z = by.matmul(u, self.precision.round(self.weight))
        affinity = by.sqrt(by.softplus(z))
        bias = self.bias
        if image is not None:
            bias = torch.where(image.unsqueeze(-1), self.bias_vl, self.bias)
        ranked = (affinity.detach() + bias).sort(dim=-1, descending=True, stable=True).indices
        picks = ranked[:, : self.top].sort(-1).values if forced is None else forced
        weights = affinity.gather(-1, picks)
        if self.top > 1:
            weights = weights / (by.add(weights, -1, keepdim=True) + 1e-20)
        return picks, self.scale * weights


class MoE(nn.Module):
    def __init__(self, cfg: Config, count: int, top: int, precision: Precision) -> None:
        super().__init__()
        self.precision = precision
        self.gate = Router(cfg, count, top, precision)
        self.experts = Experts(cfg, count, precision)
        self.shared_experts = SharedExpert(cfg, precision)
        self.load = torch.zeros(count)  # tokens per expert since the balancing rule last ran

    def forward(self, u: Tensor, image: Tensor | None = None,
                forced: Tensor | None = None) -> Tensor:
        rows = u.flatten(0, -2)
        flat = image.flatten() if image is not None else None
        self.picks, weights = self.gate(rows, flat, forced)
        if self.training:
            self.load += self.picks.flatten().bincount(minlength=len(self.load))
        y = self.experts(rows, self.picks, weights) + self.shared_experts(rows)
        return self.precision.round(y).view(u.shape)
