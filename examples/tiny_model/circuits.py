"""Attention heads that copy, set at the start of training.

A model that sees a few million tokens does not find out by itself that text repeats itself: that
takes two attention layers, each worth nothing without the other. So both are there from the start,
and training keeps and refines what pays; at the rate of all other weights it would undo them before
it finds out (`in_circuit`). In the first layer a head writes beside each token a code of the token
before it. In later layers a head looks where the token before is the current one, and writes a code
of the token there, which the output layer reads as a logit.
"""

from dataclasses import dataclass

import torch
from attention import Attention
from layers import Config
from model import Model

COPYING = (1, 5)  # layers: one with window keys only, and the source of the ratio-1 entries
LEVEL = 4.0  # of the channel that is the same for all tokens
GAIN = 0.25  # of a copied code in a logit
SHARP = 9.0  # of a match in a score
SINK = 9.0  # of a copying head: above what tokens that do not match score
NEARBY = 3  # pairs of channels, the fastest ones, that tell a position from its neighbours
STEADY = 14  # rotated channels, the slowest ones, that hardly turn within a window
STEADY_INDEX = 12  # the same within a whole text
QUIET = 0.16  # of what Engram writes, random at first


@dataclass(frozen=True)
class Channels:
    """Where things stand in the residual; channel 0 is constant.

    Args:
        code: names the token. before: the code of the token before. copied: the code of the token
            to repeat. match: how many channels of a code are compared; the others are copied.
    """

    code: slice
    before: slice
    copied: slice
    match: int

    @staticmethod
    def of(cfg: Config) -> "Channels":
        size = min(cfg.head_dim - cfg.qk_rope_head_dim, (cfg.hidden_size - 1) // 4)
        match, end = size // 2, 1 + 2 * size
        return Channels(slice(1, 1 + size), slice(1 + size, end),
                        slice(end, end + size - match + min(STEADY, size)), match)


def in_circuit(name: str) -> bool:
    """Whether a parameter belongs to an attention layer with such a head."""
    return any(name.startswith(f"layers.{layer}.attn.") for layer in (0, *COPYING))


@torch.no_grad()
def set_circuits(model: Model) -> None:
    """Overwrite the initial weights of the heads, of the embedding and of the output layer."""
    at = Channels.of(model.cfg)
    embed, head = model.embed.weight, model.head.weight
    embed[:, 0] = LEVEL
    embed[:, at.before] = 0
    embed[:, at.copied] = 0
    for layer in model.cfg.engram_layer_ids:
        model.layers[layer].engram.wkv.weight[-model.cfg.hidden_size:] *= QUIET
    _look_back(model.layers[0].attn, at)
    for layer in COPYING:
        _copy(model.layers[layer].attn, at)
    codes = embed[:, at.code]
    steady = at.copied.stop - at.copied.start - codes[:, at.match:].shape[1]
    head[:, at.copied] = GAIN * torch.cat((codes[:, at.match:], codes[:, :steady]), 1)


def _look_back(attn: Attention, at: Channels) -> None:
    """Head 0 attends to the position before; there it finds the code."""
    key, query, still = _first_head(attn)
    size = at.code.stop - at.code.start
    key[:still] = 0
    key[:size, at.code] = torch.eye(size)
    attn.wq_a.weight[0] = 0
    attn.wq_a.weight[0, 0] = 2.6
    for pair in range(NEARBY):
        angle, row = attn.rotary.theta[pair], still + 2 * pair
        key[row:row + 2] = 0
        key[row, 0] = 1.05
        # The key's direction, turned back by one position.
        query[row, 0], query[row + 1, 0] = 2.6 * angle.cos(), -2.6 * angle.sin()
    _write(attn, torch.arange(size), at.before)


def _copy(attn: Attention, at: Channels) -> None:
    """Head 0 finds where the token before is the current one, and copies the token there."""
    key, query, _ = _first_head(attn)
    size, head = at.code.stop - at.code.start, attn.cfg.head_dim
    steady = at.copied.stop - at.copied.start - (size - at.match)
    for keys in (key, attn.compressor.wkv.weight) if attn.roles.compresses else (key,):
        keys[:size] = 0
        keys[:at.match, at.before.start:at.before.start + at.match] = torch.eye(at.match)
        keys[at.match:size, at.code.start + at.match:at.code.stop] = torch.eye(size - at.match)
        keys[head - steady:] = 0
        keys[head - steady:, at.code.start:at.code.start + steady] = torch.eye(steady)
    attn.wq_a.weight[:at.match] = 0
    attn.wq_a.weight[:at.match, at.code.start:at.code.start + at.match] = torch.eye(at.match)
    query[:at.match, :at.match] = SHARP * torch.eye(at.match)
    attn.attn_sink[0] = SINK
    _write(attn, torch.cat((torch.arange(at.match, size), torch.arange(head - steady, head))),
           at.copied)
    if attn.roles.compresses:
        _select(attn, min(STEADY_INDEX, at.match))


def _select(attn: Attention, steady: int) -> None:
    """The indexer's head 0 scores entries by the same match."""
    index, size = attn.indexer, attn.cfg.index_head_dim
    index.wk.weight[:] = 0
    index.wk.weight[size - steady:, :steady] = torch.eye(steady)
    index.wq_b.weight[:size] = 0
    index.wq_b.weight[size - steady:size, :steady] = torch.eye(steady)
    index.weights_proj.weight[0] = 0
    index.weights_proj.weight[0, 0] = 1


def _first_head(attn: Attention) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Weights of the keys, those of head 0's queries (set to 0), channels that are not rotated."""
    size = attn.cfg.head_dim
    query = attn.wq_b.weight[:size]
    query.zero_()
    return attn.wkv.weight, query, size - attn.cfg.qk_rope_head_dim


def _write(attn: Attention, source: torch.Tensor, target: slice) -> None:
    """Channels `source` of head 0's output go to the channels `target` of the residual."""
    rank = torch.arange(len(source))
    attn.wo_a.weight[rank] = 0
    attn.wo_a.weight[rank, source] = 1
    attn.wo_b.weight[:, rank] = 0
    attn.wo_b.weight[torch.arange(target.start, target.stop), rank] = 1
