"""Attention as one masked softmax: the training forward's counterpart of the tiled order."""

import torch
from torch import Tensor

Optional = Tensor | None


def dense_attention(q: Tensor, k: Tensor, visible: Tensor, sink: Tensor, entries: Optional,
                    chosen: Optional) -> tuple[Tensor, Optional]:
    """q [B, T, H, D], k [B, S, D], visible [B, T, S] -> o [B, T, H, D], weights on the entries."""
    batch, rows, heads, size = q.shape
    flat = q.reshape(batch, rows * heads, size) * size**-0.5
    parts = [_scores(flat, k, visible, heads)]
    if entries is not None:
        parts.append(_scores(flat, entries, chosen, heads))
    weights = _softmax(parts, sink)
    o = _values(weights[0], k)
    if entries is not None:
        o = o + _values(weights[1], entries)
    return o.view(batch, rows, heads, size), weights[1] if entries is not None else None


def banded_attention(q: Tensor, k: Tensor, window: int, sink: Tensor, entries: Optional,
                     chosen: Optional) -> tuple[Tensor, Optional]:
    """As `dense_attention` with a causal window, T a multiple of it.

    A block of `window` queries only meets the keys of its own block and of the one before.
    """
    batch, rows, heads, size = q.shape
    blocks = rows // window
    scaled = q * size**-0.5
    before = torch.nn.functional.pad(k, (0, 0, window, 0))[:, :rows]
    pairs = torch.cat((before.view(batch, blocks, window, size),
                       k.view(batch, blocks, window, size)), 2)
    pairs = pairs.view(batch * blocks, 2 * window, size)
    distance = torch.arange(window).unsqueeze(-1) + window - torch.arange(2 * window)
    band = (distance >= 0) & (distance < window)
    real = torch.arange(blocks).view(-1, 1, 1) * window + torch.arange(2 * window) >= window
    mask = (band & real).repeat(batch, 1, 1)
    near = _scores(scaled.reshape(batch * blocks, window * heads, size), pairs, mask, heads)
    parts = [near.view(batch, rows, heads, -1)]
    if entries is not None:
        parts.append(_scores(scaled.view(batch, rows * heads, size), entries, chosen, heads))
    weights = _softmax(parts, sink)
    o = _values(weights[0].view(near.shape), pairs).view(q.shape)
    if entries is not None:
        o = o + _values(weights[1], entries).view(q.shape)
    return o, weights[1].detach().mean(2) if entries is not None else None


def _scores(q: Tensor, keys: Tensor, mask: Tensor, heads: int) -> Tensor:
    """q [B, T·H, D], keys [B, S, D], mask [B, T, S] -> masked scores [B, T, H, S]."""
    scores = (q @ keys.mT).unflatten(1, (-1, heads))  # there may be no keys at all
    return scores.masked_fill(~mask.unsqueeze(2), -torch.inf)


def _softmax(parts: list[Tensor], sink: Tensor) -> tuple[Tensor, ...]:
    """One softmax over all parts and the sink; the weights of each part."""
    sink = sink.view(1, 1, -1, 1).expand(*parts[0].shape[:-1], 1)
    weights = torch.cat((*parts, sink), -1).softmax(-1)
    return weights.split([*(p.shape[-1] for p in parts), 1], -1)[:-1]


def _values(weights: Tensor, keys: Tensor) -> Tensor:
    return weights.flatten(1, -2) @ keys
