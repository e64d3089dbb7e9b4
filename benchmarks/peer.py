"""The peer: the PyTorch module of `examples/tiny_model` as a plain decoder with caches.

The module runs whole texts, for training. Here its layers, with the weights of any checkpoint, run
a prompt and then one token at a time, as such a decoder is commonly written: keys of the window
in a ring, compressed entries and index keys in buffers of a fixed length, picked entries gathered,
experts as one grouped product. In ``Plain`` precision nothing is quantised and all is bf16, but
for the mixes of the hyper-connections; in the release's precision the same code shows that it
computes what the Program computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "examples" / "tiny_model"))  # plain imports there

from arithmetic import Native  # noqa: E402
from attention import Attention, Compressor, Indexer, window  # noqa: E402
from engram import Engram  # noqa: E402
from layers import HyperMix, Rotary, collapse  # noqa: E402
from load import load  # noqa: E402
from moe import Experts, MoE, gated  # noqa: E402
from quant import Precision, fp4, fp4_e4m3, fp8  # noqa: E402


class AsWeights(Native):
    """PyTorch's operations, products in the weight's element type."""

    def matmul(self, x: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
        return super().matmul(x.to(weight.dtype), weight, start)


class Plain(Precision):
    """No quantisers and one element type throughout."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(bf16=False, tiled=False, quantize=False, weights_ready=True,
                         arithmetic=AsWeights())
        self.dtype = dtype

    def round(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class GroupedExperts(nn.Module):
    """`Experts` without a loop over experts that got no row."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = experts.w1, experts.w2, experts.w3
        self.limit, self.precision = experts.limit, experts.precision

    def forward(self, x: Tensor, picks: Tensor, weights: Tensor) -> Tensor:
        precision, per_token = self.precision, picks.shape[1]
        quantise = fp8 if precision.quantize else (lambda x: x)
        chosen, order = picks.flatten().sort(stable=True)
        ends = torch.searchsorted(chosen, torch.arange(len(self.w1)), right=True).int()

        def product(rows: Tensor, weight: Tensor) -> Tensor:
            if rows.dtype is torch.bfloat16:
                return nn.functional.grouped_mm(rows, weight.mT, offs=ends)
            parts = rows.tensor_split(ends[:-1].long())
            return torch.cat([p @ w.mT for p, w in zip(parts, weight, strict=True)])

        x = quantise(x)[order // per_token]
        g, v = (precision.round(product(x, w)) for w in (self.w1, self.w3))
        hidden = weights.flatten()[order].unsqueeze(-1) * gated(
            g, v, self.limit, precision)
        y = precision.round(product(quantise(precision.round(hidden)), self.w2))
        return y[order.argsort()].unflatten(0, (-1, per_token)).sum(1)


class Peer:
    """A batch of equally long texts in lockstep.

    Args:
        model: from ``load_peer``. capacity: positions of a text.
        compiled: run the model's parts through torch.compile, once for all layers; it changes the
            model. The whole of a step takes the compiler longer than anybody waits: the mixes of
            the hyper-connections alone unroll to a thousand operations.
    """

    def __init__(self, model: Any, capacity: int, *, compiled: bool = False) -> None:
        self.model, self.precision, self.cfg = model, model.precision, model.cfg
        self.dtype, self.capacity = model.embed.weight.dtype, capacity
        self.steps = {"prefill": self._prefill, "decode": self._decode}
        self.attend = attend
        if compiled:
            self.attend = torch.compile(attend)
            _compile_parts(model)

    def reset(self, batch: int) -> None:
        """Forget all texts, and make room for so many."""
        cfg = self.cfg
        made = partial(torch.zeros, dtype=self.dtype)
        self.tokens = np.zeros((batch, 0), np.int64)
        self.ring = [made(batch, cfg.sliding_window, cfg.head_dim) for _ in self.model.layers]
        self.entries: dict[int, Tensor] = {}
        self.index_keys: dict[int, Tensor] = {}
        self.pending: dict[int, Tensor] = {}
        for index in cfg.kv_source_layer_ids:  # one entry more, where open groups are written
            count = self.capacity // cfg.compress_ratios[index] + 1
            self.entries[index] = made(batch, count, cfg.head_dim)
            self.index_keys[index] = made(batch, count, cfg.index_head_dim)
            self.pending[index] = made(batch, 1, cfg.hidden_size)

    @torch.no_grad()
    def prefill(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Run prompts of equal length from their start; logits [B, V] of their last tokens."""
        self.reset(len(ids))
        return self._step("prefill", np.array(ids, np.int64))

    @torch.no_grad()
    def decode(self, ids: Sequence[int]) -> Tensor:
        """One more token of each text; logits [B, V]."""
        return self._step("decode", np.array(ids, np.int64)[:, None])

    def _step(self, name: str, ids: Any) -> Tensor:
        at = self.tokens.shape[1]
        self.tokens = np.concatenate((self.tokens, ids), 1)
        before = self.tokens[:, max(0, at - self.cfg.engram_max_ngram_size + 1):]
        rows = [torch.from_numpy(h(before)[:, -ids.shape[1]:])
                for h in self.model.hashes.values()]
        return self.steps[name](torch.from_numpy(ids), torch.tensor(at), rows)

    def _prefill(self, ids: Tensor, at: Tensor, rows: list[Tensor]) -> Tensor:
        return self._forward(ids, torch.arange(ids.shape[1]), rows, self._whole)

    def _decode(self, ids: Tensor, at: Tensor, rows: list[Tensor]) -> Tensor:
        return self._forward(ids, at.view(1), rows, self._one)

    def _forward(self, ids: Tensor, positions: Tensor, rows: list[Tensor],
                 attention: Callable[..., Tensor]) -> Tensor:
        """The model on ids [B, T]; logits of the last row."""
        streams, pre = self.model.streams(ids)
        pre, shared = pre.to(self.dtype), {}
        engrams = dict(zip(self.model.hashes, rows, strict=True))
        for index, block in enumerate(self.model.layers):
            if index in engrams:
                streams = block.engram(streams, engrams[index], None)
            streams, pre = block(streams, pre, partial(
                attention, block.attn, index, positions=positions, shared=shared))
        return self.model.logits(collapse(streams[:, -1], pre[:, -1], self.precision))

    def _whole(self, attn: Attention, index: int, u: Tensor, *, positions: Tensor, shared: dict
               ) -> Tensor:
        """Attention of whole prompts: the window in blocks that meet themselves and the block
        before, then each row's picks."""
        size, count = self.cfg.sliding_window, u.shape[1]
        qr, q = attn.queries(u, positions)
        k = attn.keys(u, positions)
        kept = min(size, count)
        self.ring[index].index_copy_(1, positions[-kept:] % size, k[:, -kept:])
        if attn.roles.compresses:
            latents = attn.compressor(u)
            groups = torch.arange(latents.shape[1])
            self._keep(attn, index, latents, groups, groups, shared)
            self.pending[index].copy_(u[:, -1:])
        picked, real = self._select(attn, u, qr, positions, shared)
        if count % size or count == size:
            o = self.attend(q, k, window(positions, positions, size), picked, real, attn.attn_sink)
        else:
            blocks = count // size
            near = nn.functional.pad(k, (0, 0, size, 0))[:, :count]
            near = torch.cat((near.unflatten(1, (blocks, size)), k.unflatten(1, (blocks, size))), 2)
            own = torch.arange(size).unsqueeze(-1)
            key = torch.arange(2 * size) - size
            seen = (key <= own) & (key > own - size)
            seen = seen & ((torch.arange(blocks).view(-1, 1, 1) > 0) | (key >= 0))
            split = [None if t is None else t.unflatten(1, (blocks, size)).flatten(0, 1)
                     for t in (q, picked, real)]
            o = self.attend(split[0], near.flatten(0, 1), seen.repeat(len(q), 1, 1), *split[1:],
                       attn.attn_sink).unflatten(0, (-1, blocks)).flatten(1, 2)
        return attn.output(self.precision.round(o), positions)

    def _one(self, attn: Attention, index: int, u: Tensor, *, positions: Tensor, shared: dict
             ) -> Tensor:
        """Attention of one more token: over the ring and its picks."""
        size, ratio = self.cfg.sliding_window, attn.roles.ratio
        qr, q = attn.queries(u, positions)
        self.ring[index].index_copy_(1, positions % size, attn.keys(u, positions))
        if attn.roles.compresses:
            group = positions // ratio
            pair = u if ratio == 1 else torch.cat((self.pending[index], u), 1)
            closed = positions % ratio == ratio - 1
            self._keep(attn, index, attn.compressor(pair), group,
                       torch.where(closed, group, self.entries[index].shape[1] - 1), shared)
            self.pending[index].copy_(u)
        picked, real = self._select(attn, u, qr, positions, shared)
        seen = (torch.arange(size) <= positions).view(1, 1, -1)
        o = self.attend(q, self.ring[index], seen, picked, real, attn.attn_sink)
        return attn.output(self.precision.round(o), positions)

    def _keep(self, attn: Attention, index: int, latents: Tensor, groups: Tensor, slots: Tensor,
              shared: dict) -> None:
        """Write a source layer's entries and index keys of these groups."""
        positions, quantize = groups * attn.roles.ratio, self.precision.quantize
        entries = attn.rotary(latents, positions)
        indexer = attn.indexer
        keys = indexer.rotary(indexer.k_norm(indexer.wk(latents)), positions)
        self.entries[index].index_copy_(1, slots, fp4_e4m3(entries) if quantize else entries)
        self.index_keys[index].index_copy_(1, slots, fp4(keys) if quantize else keys)
        shared["source"] = index

    def _select(self, attn: Attention, u: Tensor, qr: Tensor, positions: Tensor, shared: dict
                ) -> tuple[Tensor | None, Tensor | None]:
        """Each row's picked entries [B, T, k, D] and which of them there are [B, T, k]."""
        if not attn.roles.ratio:
            return None, None
        entries, keys = self.entries[shared["source"]], self.index_keys[shared["source"]]
        if len(positions) > 1:  # a prompt: no entry lies behind its end
            entries, keys = (t[:, : max(1, len(positions) // attn.roles.ratio)]
                             for t in (entries, keys))
        if attn.roles.selects:
            scores = attn.indexer.scores(u, qr, keys, positions)
            if attn.roles.makes_candidates:
                shared["candidates"] = attn.indexer.candidates(scores, positions)
            if attn.roles.uses_candidates:
                scores = scores.masked_fill(~shared["candidates"], -torch.inf)
            best, shared["picks"] = self.best(scores, min(self.cfg.index_topk, scores.shape[-1]))
            shared["real"] = best > -torch.inf
        texts = torch.arange(len(u)).view(-1, 1, 1)
        return entries[texts, shared["picks"]], shared["real"]


    @staticmethod
    def best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The largest scores of each row and where they are; among equals, whichever is faster."""
        return scores.topk(count, -1)


def _compile_parts(model: Any) -> None:
    """Layers of one kind share what is compiled for their parts, by their code and sizes."""
    torch._dynamo.config.cache_size_limit = 64  # kinds of layers, times sizes of a step
    for module in model.modules():
        if isinstance(module, (Compressor, Engram, HyperMix, MoE)):
            module.compile()
        if isinstance(module, Attention):
            for name in ("queries", "keys", "output"):
                setattr(module, name, torch.compile(getattr(module, name)))
        if isinstance(module, Indexer):
            module.scores = torch.compile(module.scores)


def load_peer(path: Path, dtype: torch.dtype = torch.bfloat16, precision: Precision | None = None
              ) -> Any:
    """The module of a checkpoint, for ``Peer``; precision: None for ``Plain`` in ``dtype``.

    Parameters are of one type, but for the mixes of the hyper-connections, whose results are
    rounded; angles of rotation stay fp32.
    """
    dtype = dtype if precision is None else torch.float32
    model = load(path, Plain(dtype) if precision is None else precision)
    angles = {m: m.theta.clone() for m in model.modules() if isinstance(m, Rotary)}
    mixes = [m for m in model.modules() if isinstance(m, HyperMix)]
    apart = {id(p) for m in mixes for p in m.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if id(parameter) not in apart:
            parameter.data = parameter.data.to(dtype)
    for module, theta in angles.items():
        module.theta = theta
    if dtype is not torch.float32:
        for module in mixes:
            module.register_forward_hook(lambda _, __, out: tuple(x.to(dtype) for x in out))
    for block in model.layers:
        block.ffn.experts = GroupedExperts(block.ffn.experts)
    return model


def attend(q: Tensor, k: Tensor, seen: Tensor, picked: Tensor | None, real: Tensor | None,
           sink: Tensor) -> Tensor:
    """One softmax over shared keys and each row's own picks, with a sink in the denominator.

    Args:
        q: [N, R, H, D]. k: [N, S, D], keys and values. seen: bool [(N,) R, S].
        picked: [N, R, P, D]. real: bool [N, R, P]. sink: [H].
    """
    heads, scaled = q.shape[2], q * q.shape[-1] ** -0.5
    near = (scaled.flatten(1, 2) @ k.mT).unflatten(1, (-1, heads))
    parts = [near.masked_fill(~seen.unsqueeze(-2), -torch.inf)]
    if picked is not None:
        far = scaled @ picked.mT
        parts.append(far.masked_fill(~real.unsqueeze(-2), -torch.inf))
    parts.append(sink.view(-1, 1).expand(*q.shape[:-1], 1).to(q.dtype))
    weights = torch.cat(parts, -1).softmax(-1)
    o = (weights[..., : k.shape[1]].flatten(1, 2) @ k).unflatten(1, (-1, heads))
    return o if picked is None else o + weights[..., k.shape[1]:-1] @ picked
