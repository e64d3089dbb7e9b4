"""Attention as one online softmax over tiles of 64 keys. Source: spec §2.4, §11.5."""

from dataclasses import dataclass

import torch
from quant import Precision
from torch import Tensor, nn

TILE = 64


@dataclass
class Tile:
    """Keys [B, R or 1, S, D], which of them are seen, bool [(B,) R, S], by the queries `rows`."""

    keys: Tensor
    mask: Tensor
    rows: slice

    @staticmethod
    def make(keys: Tensor, mask: Tensor) -> "Tile":
        """Leave out the queries before the first and after the last that sees any of the keys."""
        seen = mask.any(-1).view(-1, mask.shape[-2]).any(0).nonzero()
        rows = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0)
        return Tile(keys if keys.shape[1] == 1 else keys[:, rows], mask[..., rows, :], rows)


def window_tiles(k: Tensor, visible: Tensor, first: int) -> list[Tile]:
    """Keys [B, S, D] from position `first` on, cut at absolute multiples of 64."""
    before = first % TILE  # the first tile begins before the first key
    k = nn.functional.pad(k, (0, 0, before, 0))
    visible = nn.functional.pad(visible, (before, 0))
    spans = [slice(a, a + TILE) for a in range(0, k.shape[1], TILE)]
    return [Tile.make(k[:, None, s], visible[..., s]) for s in spans]


def rank_tiles(entries: Tensor, chosen: Tensor) -> list[Tile]:
    """Each query's chosen entries packed in ascending position, cut at ranks 64, 128, ..."""
    most = int(chosen.sum(-1).max()) if chosen.numel() else 0
    order = (~chosen).to(torch.uint8).sort(dim=-1, stable=True).indices[..., :most]
    batch = torch.arange(entries.shape[0]).view(-1, 1, 1)
    tiles = []
    for a in range(0, most, TILE):
        picks = order[..., a : a + TILE]
        tiles.append(Tile.make(entries[batch, picks], chosen.gather(-1, picks)))
    return tiles


def online_softmax(q: Tensor, tiles: list[Tile], sink: Tensor, precision: Precision) -> Tensor:
    """Running maximum, P rounded to bf16 for P·V only, the denominator sums fp32 P.

    q [B, T, H, D] -> o [B, T, H, D], fp32.
    """
    by = precision.arithmetic
    maximum = torch.full(q.shape[:-1], -1e30)
    total, o = torch.zeros(q.shape[:-1]), torch.zeros(q.shape)
    for tile in tiles:
        keys, rows = tile.keys, tile.rows
        scores = by.matmul(q[:, rows], keys) * torch.tensor(q.shape[-1] ** -0.5)
        scores = scores.masked_fill(~tile.mask.unsqueeze(-2), -torch.inf)
        new = torch.maximum(maximum[:, rows], scores.amax(-1))
        fade = by.exp(maximum[:, rows] - new)
        weights = by.exp(scores - new.unsqueeze(-1))
        total[:, rows] = total[:, rows] * fade + by.sum(weights)
        faded = o[:, rows] * fade.unsqueeze(-1)
        o[:, rows] = by.matmul(precision.round(weights), keys.mT, faded)
        maximum[:, rows] = new
    return o / (total + by.exp(sink - maximum)).unsqueeze(-1)
