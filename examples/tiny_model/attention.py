"""Attention with window, compressed and selected keys. Source: spec §2.4-2.7, §11.2-11.5."""

import torch
from dense import banded_attention, dense_attention
from layers import Config, Linear, Linear8, Norm, Rotary, parameter
from quant import Precision, fp4, fp4_e4m3, fp8
from tiled import online_softmax, rank_tiles, window_tiles
from torch import Tensor, nn


class Roles:
    """What layer `index` owns and whose results it reads."""

    def __init__(self, cfg: Config, index: int) -> None:
        self.ratio = cfg.compress_ratios[index]
        self.compresses = index in cfg.kv_source_layer_ids
        self.selects = index in cfg.index_source_layer_ids
        source = getattr(cfg, "candidate_source_layer_id", None)
        self.makes_candidates = index == source
        self.uses_candidates = self.selects and source is not None and index > source


class Compressor(nn.Module):
    """One KV latent per group of `ratio` tokens, before its rotation. Source: spec §2.5."""

    def __init__(self, cfg: Config, ratio: int, precision: Precision) -> None:
        super().__init__()
        self.ratio, self.precision = ratio, precision
        self.wkv = Linear(cfg.hidden_size, cfg.head_dim, precision, fp32=ratio > 1)
        if ratio > 1:
            self.wgate = Linear(cfg.hidden_size, cfg.head_dim, precision, fp32=True)
        self.norm = Norm(cfg.head_dim, cfg.rms_norm_eps, precision)

    def forward(self, u: Tensor) -> Tensor:
        """u [B, T, d] -> latents [B, T // ratio, D]; an open group gives none."""
        if self.ratio == 1:
            return self.norm(self.wkv(u))
        u = u[:, : u.shape[1] // self.ratio * self.ratio]
        values = self.wkv(u).unflatten(1, (-1, self.ratio))
        by = self.precision.arithmetic
        gates = by.softmax(self.wgate(u).unflatten(1, (-1, self.ratio)), 2)
        return self.norm(self.precision.round(by.add(gates * values, 2)))


class Indexer(nn.Module):
    """Scores compressed entries for each query and picks the best. Source: spec §2.6."""

    def __init__(self, cfg: Config, roles: Roles, precision: Precision) -> None:
        super().__init__()
        self.cfg, self.roles, self.precision = cfg, roles, precision
        heads, size = cfg.index_n_heads, cfg.index_head_dim
        self.wq_b = Linear8(cfg.q_lora_rank, heads * size, precision)
        self.weights_proj = Linear(cfg.hidden_size, heads, precision)
        if roles.compresses:
            self.wk = Linear(cfg.head_dim, size, precision)
            self.k_norm = Norm(size, cfg.rms_norm_eps, precision)
        self.rotary = Rotary(cfg, roles.ratio, precision)

    def keys(self, latents: Tensor) -> Tensor:
        positions = torch.arange(latents.shape[1]) * self.roles.ratio
        keys = self.rotary(self.k_norm(self.wk(latents)), positions)
        return fp4(keys) if self.precision.quantize else keys

    def scores(self, u: Tensor, qr: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """I [B, T, entries]; entries whose group is still open at the query are -inf."""
        cfg = self.cfg
        queries = self.wq_b(qr).unflatten(-1, (cfg.index_n_heads, cfg.index_head_dim))
        queries = self.rotary(queries, positions.unsqueeze(-1))
        queries = fp4(queries) if self.precision.quantize else queries
        constant = torch.tensor((cfg.index_head_dim * cfg.index_n_heads) ** -0.5)
        weights = self.weights_proj(u) * constant
        total = torch.zeros(())
        for head in range(cfg.index_n_heads):
            dots = self.precision.matmul(queries[..., head, :], keys).relu()
            total = total + weights[..., head, None] * dots
        reachable = (positions + 1).unsqueeze(-1) // self.roles.ratio
        return total.masked_fill(torch.arange(keys.shape[1]) >= reachable, -torch.inf)

    def candidates(self, scores: Tensor, positions: Tensor) -> Tensor:
        """The entries inside the best blocks of each query, bool [B, T, entries]."""
        size, entries = self.cfg.candidate_block_size, scores.shape[-1]
        padded = nn.functional.pad(scores, (0, -entries % size), value=-torch.inf)
        blocks = padded.unflatten(-1, (-1, size)).amax(-1)
        newest = ((positions + 1) // self.roles.ratio - 1) // size
        forced = torch.arange(blocks.shape[-1]) == newest.unsqueeze(-1)
        blocks = blocks.masked_fill(forced, torch.inf)
        best = best_mask(blocks, self.cfg.candidate_topk_blocks)
        return best.repeat_interleave(size, -1)[..., :entries]


def best_mask(scores: Tensor, count: int) -> Tensor:
    """The `count` largest finite-or-+inf scores of each row as a mask; ties: lower index."""
    count = min(count, scores.shape[-1])
    if torch.is_grad_enabled():  # training: ties do not matter, and selecting is faster
        picks = scores.topk(count, -1, sorted=False).indices
    else:
        picks = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, picks, True)
    return mask & (scores > -torch.inf)


class Attention(nn.Module):
    """One attention sublayer; `shared` carries what source layers publish (spec §2.7)."""

    def __init__(self, cfg: Config, index: int, precision: Precision) -> None:
        super().__init__()
        self.cfg, self.precision, self.roles = cfg, precision, Roles(cfg, index)
        heads, size, eps = cfg.num_attention_heads, cfg.head_dim, cfg.rms_norm_eps
        self.wq_a = Linear8(cfg.hidden_size, cfg.q_lora_rank, precision)
        self.q_norm = Norm(cfg.q_lora_rank, eps, precision)
        self.wq_b = Linear8(cfg.q_lora_rank, heads * size, precision)
        self.wkv = Linear8(cfg.hidden_size, size, precision)
        self.kv_norm = Norm(size, eps, precision)
        self.wo_a = Linear8(heads * size // cfg.o_groups, cfg.o_groups * cfg.o_lora_rank, precision)
        self.wo_b = Linear8(cfg.o_groups * cfg.o_lora_rank, cfg.hidden_size, precision)
        self.attn_sink = parameter(heads)
        self.rotary = Rotary(cfg, self.roles.ratio, precision)
        if self.roles.compresses:
            self.compressor = Compressor(cfg, self.roles.ratio, precision)
        if self.roles.selects:
            self.indexer = Indexer(cfg, self.roles, precision)

    def forward(self, u: Tensor, positions: Tensor, shared: dict, floor: int = 0) -> Tensor:
        """u [B, T, d] at positions [T] = 0.. -> y [B, T, d]. No window key below `floor`."""
        qr, q = self.queries(u, positions)
        k = self.keys(u, positions)
        entries = chosen = None
        if self.roles.ratio:
            self.select(u, qr, positions, shared)
            entries, chosen = shared["entries"], shared["chosen"]
        size = self.cfg.sliding_window
        if self.precision.tiled or floor or u.shape[1] % size:
            visible = window(positions, positions, size) & (positions >= floor)
            o = attend(q, k, visible, self.attn_sink, self.precision, entries=entries,
                       chosen=chosen)
        else:
            o, weights = banded_attention(q, k, size, self.attn_sink, entries, chosen)
            if self.roles.selects and self.training:
                shared["attention"] = weights  # what the indexer should have scored
        return self.output(o, positions)

    def queries(self, u: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        qr = self.q_norm(self.wq_a(u))
        q = self.wq_b(qr).unflatten(-1, (self.cfg.num_attention_heads, self.cfg.head_dim))
        return qr, self.rotary(q, positions.unsqueeze(-1))

    def keys(self, u: Tensor, positions: Tensor) -> Tensor:
        k = self.rotary(self.kv_norm(self.wkv(u)), positions)
        return fp8(k) if self.precision.quantize else k

    def select(self, u: Tensor, qr: Tensor, positions: Tensor, shared: dict) -> None:
        """Publish compressed entries, index keys, candidates and the selection, if a source."""
        ratio = self.roles.ratio
        if self.roles.compresses:
            latents = self.compressor(u)
            # The indexer learns from the attention it imitates, not through the model.
            shared["index_keys"] = self.indexer.keys(latents.detach())
            entries = self.rotary(latents, torch.arange(latents.shape[1]) * ratio)
            shared["entries"] = fp4_e4m3(entries) if self.precision.quantize else entries
        if self.roles.selects:
            scores = self.indexer.scores(u.detach(), qr.detach(), shared["index_keys"], positions)
            if self.roles.makes_candidates:
                shared["candidates"] = self.indexer.candidates(scores.detach(), positions)
            if self.roles.uses_candidates:
                scores = scores.masked_fill(~shared["candidates"], -torch.inf)
            shared["scores"] = scores
            if shared.get("forced") is not None:
                shared["chosen"] = shared["forced"][shared["layer"]]
            else:
                shared["chosen"] = best_mask(scores.detach(), self.cfg.index_topk)

    def output(self, o: Tensor, positions: Tensor) -> Tensor:
        o = self.rotary(o, positions.unsqueeze(-1), inverse=True)
        groups = o.flatten(-2).unflatten(-1, (self.cfg.o_groups, -1))
        weight = self.wo_a.quantised().unflatten(0, (self.cfg.o_groups, -1))
        z = [self.precision.matmul(groups[..., g, :], weight[g]) for g in range(self.cfg.o_groups)]
        return self.wo_b(self.precision.round(torch.cat(z, -1)))


def window(queries: Tensor, keys: Tensor, size: int) -> Tensor:
    """Which keys lie among the last `size` positions up to the query. bool [T, S]."""
    distance = queries.unsqueeze(-1) - keys
    return (distance >= 0) & (distance < size)


def attend(q: Tensor, k: Tensor, visible: Tensor, sink: Tensor, precision: Precision, *,
           first: int = 0, entries: Tensor | None = None, chosen: Tensor | None = None) -> Tensor:
    """One softmax over window keys and chosen entries, with a sink in the denominator.

    Args:
        q: [B, T, H, D]. k: [B, S, D], keys and values, at positions first, first + 1, ...
        visible: bool [(B,) T, S]. entries: [B, N, D]. chosen: bool [B, T, N].
    """
    if precision.tiled:
        tiles = window_tiles(k, visible, first)
        if entries is not None:
            tiles += rank_tiles(entries, chosen)
        return precision.round(online_softmax(q, tiles, sink, precision))
    o, _ = dense_attention(q, k, visible.expand(q.shape[0], -1, -1), sink, entries, chosen)
    return precision.round(o)
