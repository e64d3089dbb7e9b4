"""Initial weights and the optimiser: Muon for matrices, Adam for everything else."""

import math
from collections import defaultdict

import torch
from layers import HyperMix
from model import Block, Model
from moe import Router
from torch import Tensor, nn

ADAM_NAMES = ("embed", "head", "hc_attn", "hc_ffn", "gate", "weights_proj", "confidence")


def initialise(model: Model, seed: int) -> None:
    """Unit-gain matrices, small sublayer outputs, streams told apart by their biases."""
    generator = torch.Generator().manual_seed(seed)
    depth = len(model.layers)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2 and "hc_" not in name:
                small = name.endswith(("wo_b.weight", ".w2", "w2.weight"))
                gain = 0.5 / math.sqrt(depth) if small else 1.0
                std = 1.0 if "embed" in name else gain / math.sqrt(p.shape[-1])
                if not name.endswith(("q_weight", "k_weight")):
                    p.normal_(0, std, generator=generator)
        for mix in (m for m in model.modules() if isinstance(m, HyperMix)):
            mix.fn.normal_(0, 1 / math.sqrt(mix.fn.shape[-1]), generator=generator)
            mix.scale.fill_(0.1)
        for index, block in enumerate(m for m in model.modules() if isinstance(m, Block)):
            for mix in (block.hc_attn, block.hc_ffn):
                hc = mix.hc
                mix.base.zero_()
                mix.base[:hc] = -1
                mix.base[index % hc] = 1  # mostly reads, and mostly writes, one stream of its own
                mix.base[hc + index % hc] = 1
                mix.base[2 * hc:] = torch.eye(hc).flatten() * 4
        model.head.weight.mul_(0.5)


class Optimizer:
    """One learning rate `scale` in 0..1 drives both parts."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], muon_lr: float = 0.02,
                 adam_lr: float = 3e-3) -> None:
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        rest = []
        for name, p in named:
            if not p.requires_grad:
                continue
            if p.dim() >= 2 and not any(part in name for part in ADAM_NAMES):
                shapes[tuple(p.shape[-2:])].append(p)
            else:
                rest.append(p)
        self.groups, self.muon_lr, self.adam_lr = list(shapes.values()), muon_lr, adam_lr
        self.momenta = [[torch.zeros_like(p) for p in group] for group in self.groups]
        self.adam = torch.optim.Adam(rest, lr=adam_lr, betas=(0.9, 0.98), eps=1e-10, fused=True)
        self.parameters = [p for group in self.groups for p in group] + rest

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group, momenta in zip(self.groups, self.momenta, strict=True):
            updates = []
            for p, momentum in zip(group, momenta, strict=True):
                momentum.lerp_(p.grad, 0.05)
                updates.append(p.grad.lerp(momentum, 0.95).reshape(-1, *p.shape[-2:]))
            counts = [len(u) for u in updates]
            done = orthogonalise(torch.cat(updates)).split(counts)
            rows, columns = group[0].shape[-2:]
            rate = scale * self.muon_lr * max(1.0, rows / columns) ** 0.5
            for p, update in zip(group, done, strict=True):
                p.mul_(1 - 0.1 * scale * self.muon_lr).sub_(update.view_as(p), alpha=rate)
        for options in self.adam.param_groups:
            options["lr"] = scale * self.adam_lr
        self.adam.step()
        for p in self.parameters:
            p.grad = None

    def state_dict(self) -> dict:
        return {"adam": self.adam.state_dict(), "momenta": self.momenta}

    def load_state_dict(self, state: dict) -> None:
        self.adam.load_state_dict(state["adam"])
        for mine, theirs in zip(self.momenta, state["momenta"], strict=True):
            for a, b in zip(mine, theirs, strict=True):
                a.copy_(b)


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz towards the nearest orthogonal matrix, for a stack [n, rows, columns]."""
    tall = g.shape[1] > g.shape[2]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-12)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


@torch.no_grad()
def balance(model: nn.Module, rate: float) -> float:
    """Move each router's bias towards equal load; the largest load over the mean load."""
    worst = 1.0
    for moe in (m for m in model.modules() if hasattr(m, "load") and isinstance(m.gate, Router)):
        if moe.load.sum() > 0:
            worst = max(worst, float(moe.load.max() / moe.load.mean()))
            moe.gate.bias += rate * torch.sign(moe.load.mean() - moe.load)
            moe.gate.bias_vl.copy_(moe.gate.bias)
            moe.load.zero_()
    return worst
