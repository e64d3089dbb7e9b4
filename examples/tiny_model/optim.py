"""Initial weights and the optimiser: Muon for matrices, Adam for everything else."""

import math
from collections import defaultdict
from typing import Any

import torch
from circuits import in_circuit
from layers import HyperMix
from model import Block, Model
from team import Team
from torch import Tensor, nn

SINK = 4.0  # near the log-sum of a window's scores at the start: lower ones would never matter
CIRCUIT_RATE = 0.1  # of matrices that hold heads set at the start
TABLE_RATE = 5.0  # a table row is seen so seldom that it needs larger steps
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
            elif name.endswith("attn_sink"):
                p.fill_(SINK)
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
    """One learning rate `scale` in 0..1 drives both parts. Each process of the team updates the
    parameters it owns."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], team: Team, muon_lr: float = 0.02,
                 adam_lr: float = 3e-3) -> None:
        groups: dict[tuple[Any, ...], list[nn.Parameter]] = defaultdict(list)
        self.rest, self.tables = [], set()
        for name, p in named:
            if not p.requires_grad:
                continue
            if p.dim() >= 2 and not any(part in name for part in ADAM_NAMES):
                rate = CIRCUIT_RATE if in_circuit(name) else 1.0
                groups[rate, *p.shape[-2:]].append(p)
            else:
                self.rest.append(p)
                if name.endswith("engram.embed"):
                    self.tables.add(id(p))
        self.team, self.muon_lr, self.adam_lr, self.steps = team, muon_lr, adam_lr, 0
        self.groups = list(groups.values())
        self.rates = [rate for rate, *_ in groups]
        self.state = {name: [torch.zeros_like(p).share_memory_() for p in chosen]
                      for name, chosen in (("muon", [p for g in self.groups for p in g]),
                                           ("mean", self.rest), ("square", self.rest))}
        self.momentum = dict(zip((id(p) for g in self.groups for p in g), self.state["muon"],
                                 strict=True))

    def _own(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        return parameters[self.team.rank::self.team.size]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Average the team's gradients, clip them to norm 1, update."""
        team = self.team
        team.wait()  # all gradients are there
        own = [p for group in [*self.groups, self.rest] for p in self._own(group)]
        gradients = {id(p): team.gradient(p) for p in own}
        team.told[team.rank, 1] = sum(float(g.square().sum()) for g in gradients.values())
        team.wait()
        clip = min(1.0, 1.0 / (math.sqrt(float(team.told[:, 1].sum())) + 1e-6))
        self.steps += 1
        for group, rate in zip(self.groups, self.rates, strict=True):
            self._muon(self._own(group), gradients, clip, rate * scale)
        means, squares = self.state["mean"], self.state["square"]
        own_rest = zip(self._own(self.rest), self._own(means), self._own(squares), strict=True)
        for p, mean, square in own_rest:
            g = gradients[id(p)] * clip
            mean.lerp_(g, 0.1)
            square.lerp_(g.square(), 0.02)
            size = (square / (1 - 0.98 ** self.steps)).sqrt_().add_(1e-10)
            rate = scale * self.adam_lr * (TABLE_RATE if id(p) in self.tables else 1)
            p.addcdiv_(mean, size, value=-rate / (1 - 0.9 ** self.steps))
        team.zero()
        team.wait()  # all parameters are new

    def _muon(self, group: list[nn.Parameter], gradients: dict[int, Tensor], clip: float,
              scale: float) -> None:
        if not group:
            return
        updates = []
        for p in group:
            g, momentum = gradients[id(p)] * clip, self.momentum[id(p)]
            momentum.lerp_(g, 0.05)
            updates.append(g.lerp(momentum, 0.95).reshape(-1, *p.shape[-2:]))
        done = orthogonalise(torch.cat(updates)).split([len(u) for u in updates])
        rows, columns = group[0].shape[-2:]
        rate = scale * self.muon_lr * max(1.0, rows / columns) ** 0.5
        for p, update in zip(group, done, strict=True):
            p.mul_(1 - 0.1 * scale * self.muon_lr).sub_(update.view_as(p), alpha=rate)

    def state_dict(self) -> dict:
        return {"steps": self.steps} | self.state

    def load_state_dict(self, state: dict) -> None:
        self.steps = state["steps"]
        for name, mine in self.state.items():
            for a, b in zip(mine, state[name], strict=True):
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
def balance(model: nn.Module, team: Team, rate: float) -> float:
    """Move each router's bias towards equal load; the largest load over the mean load."""
    worst, routers = 1.0, [m for m in model.modules() if hasattr(m, "load")]
    for moe, load in zip(routers, team.loads[team.rank], strict=True):
        load[:len(moe.load)] = moe.load
        moe.load.zero_()
    team.wait()
    for i, moe in enumerate(routers):
        load = team.loads[:, i, :len(moe.load)].sum(0)
        if load.sum() > 0:
            worst = max(worst, float(load.max() / load.mean()))
            if team.rank == 0:
                moe.gate.bias += rate * torch.sign(load.mean() - load)
                moe.gate.bias_vl.copy_(moe.gate.bias)
    team.wait()
    return worst
