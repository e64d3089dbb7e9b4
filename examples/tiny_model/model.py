"""The V4.1-Flash forward pass over whole texts, written from the specification alone.

It serves training (dense masks, straight-through quantisers) and, with the release's roundings
on, as a second reading of `spec/v41_flash.md` to compare the compiled model with.
"""

import torch
from attention import Attention, attend
from engram import Engram, NgramHash
from layers import Config, HyperMix, Linear, Linear8, Norm, collapse, spread
from moe import MoE
from quant import Precision
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and experts inside hyper-connections. Source: spec §2.3."""

    def __init__(self, cfg: Config, index: int, experts: int, top: int,
                 precision: Precision) -> None:
        super().__init__()
        self.precision = precision
        self.attn_norm = Norm(cfg.hidden_size, cfg.rms_norm_eps, precision)
        self.ffn_norm = Norm(cfg.hidden_size, cfg.rms_norm_eps, precision)
        self.hc_attn, self.hc_ffn = HyperMix(cfg, precision), HyperMix(cfg, precision)
        self.attn = Attention(cfg, index, precision)
        self.ffn = MoE(cfg, experts, top, precision)

    def forward(self, streams: Tensor, pre: Tensor, attention, image: Tensor | None = None,
                forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Each sublayer collapses the streams with the `pre` of the sublayer before it.

        Args:
            streams: [B, T, hc, d]. pre: [B, T, hc] of the previous layer's experts.
            attention: called on the normed input, gives the attention sublayer's output.
        """
        attn_pre, post, matrix = self.hc_attn(streams)
        y = attention(self.attn_norm(collapse(streams, pre, self.precision)))
        streams = spread(y, streams, post, matrix, self.precision)
        ffn_pre, post, matrix = self.hc_ffn(streams)
        u = self.ffn_norm(collapse(streams, attn_pre, self.precision))
        y = self.ffn(u, image, forced)
        return spread(y, streams, post, matrix, self.precision), ffn_pre


class Model(nn.Module):
    """The target: logits for every position. Source: spec §2.2."""

    def __init__(self, cfg: Config, token_map, precision: Precision | None = None) -> None:
        super().__init__()
        self.cfg, self.precision = cfg, precision or Precision()
        self.embed = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(
            Block(cfg, i, cfg.n_routed_experts, cfg.num_experts_per_tok, self.precision)
            for i in range(cfg.num_hidden_layers))
        self.hashes = {}
        for which, layer in enumerate(cfg.engram_layer_ids):
            self.layers[layer].engram = Engram(cfg, which, self.precision)
            self.hashes[layer] = NgramHash(cfg, which, token_map)
        self.norm = Norm(cfg.hidden_size, cfg.rms_norm_eps, self.precision)
        self.head = Linear(cfg.hidden_size, cfg.vocab_size, self.precision, fp32=True)
        if cfg.num_nextn_predict_layers:
            self.draft = Draft(cfg, self.precision)

    def streams(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The first streams and the first `pre`: hc copies of the embedding, one-hot at 0."""
        x = self.precision.round(self.embed(ids))
        streams = x.unsqueeze(-2).expand(*x.shape[:-1], self.cfg.hc_mult, -1)
        pre = torch.zeros(*ids.shape, self.cfg.hc_mult)
        pre[..., 0] = 1
        return streams, pre

    def forward(self, ids: Tensor, *, image: Tensor | None = None, keep: int | None = None,
                forced: dict | None = None, watch=None) -> tuple[Tensor, Tensor, dict]:
        """Run whole texts from position 0.

        Args:
            ids: int64 [B, T]. image: bool [B, T], tokens of image spans.
            keep: bounded replay: from the last KV source on, no window key before the last `keep`.
            forced: {"experts": {layer: [B*T, k]}, "chosen": {layer: bool [B, T, N]}} picks to use.
            watch: called as watch(layer, streams, pre) before each layer; may replace both.

        Returns: h bf16 [B, T, d] before the final norm (see `logits`), the DSpark taps
            [B, T, taps·d], and the aux dict of indexer scores for training.
        """
        cfg, forced = self.cfg, forced or {}
        positions = torch.arange(ids.shape[1])
        streams, pre = self.streams(ids)
        shared: dict = {"forced": forced.get("chosen")}
        taps, aux = [], {}
        for index, block in enumerate(self.layers):
            if watch is not None:
                streams, pre = watch(index, streams, pre)
            if index in self.hashes:
                mask = image.numpy() if image is not None else None
                rows = torch.from_numpy(self.hashes[index](ids.numpy(), mask))
                streams = block.engram(streams, rows, image)
            if index in cfg.dspark_target_layer_ids:
                total = self.precision.arithmetic.add(streams, -2)
                taps.append(self.precision.round(total / cfg.hc_mult))
            replayed = keep is not None and index >= max(cfg.kv_source_layer_ids)
            floor = max(0, ids.shape[1] - keep) if replayed else 0
            shared["layer"] = index

            def attention(u, block=block, floor=floor):
                return block.attn(u, positions, shared, floor)

            experts = forced.get("experts", {}).get(index)
            streams, pre = block(streams, pre, attention, image, experts)
            if block.attn.roles.selects and "attention" in shared:
                aux[index] = (shared["scores"], shared.pop("attention"))
        if watch is not None:
            streams, pre = watch(len(self.layers), streams, pre)
        return collapse(streams, pre, self.precision), torch.cat(taps, -1), aux

    def logits(self, h: Tensor) -> Tensor:
        """fp32 logits of collapsed streams h [..., d]."""
        return self.head(self.norm(h))


class Draft(nn.Module):
    """DSpark: stages that draft a block of tokens after an anchor. Source: spec §5.1-5.3."""

    def __init__(self, cfg: Config, precision: Precision) -> None:
        super().__init__()
        self.cfg, self.precision = cfg, precision
        self.stages = nn.ModuleList(
            Block(cfg, cfg.num_hidden_layers + i, cfg.dspark_n_routed_experts,
                  cfg.dspark_num_experts_per_tok, precision)
            for i in range(cfg.num_nextn_predict_layers))
        size, rank = cfg.hidden_size, cfg.dspark_markov_rank
        self.main_proj = Linear8(len(cfg.dspark_target_layer_ids) * size, size, precision)
        self.main_norm = Norm(size, cfg.rms_norm_eps, precision)
        self.norm = Norm(size, cfg.rms_norm_eps, precision)
        self.markov_embed = nn.Embedding(cfg.vocab_size, rank)
        self.markov_head = Linear(rank, cfg.vocab_size, precision, fp32=True)
        self.confidence = Linear(size + rank, 1, precision, fp32=True)

    def context(self, taps: Tensor) -> list[Tensor]:
        """Each stage's keys of the committed tokens 0.., from the taps [B, T, taps·d]."""
        mixed = self.main_norm(self.main_proj(taps))
        positions = torch.arange(taps.shape[1])
        return [stage.attn.keys(mixed, positions) for stage in self.stages]

    def hidden(self, streams: Tensor, pre: Tensor, positions: Tensor, context: list[Tensor],
               visible: Tensor, first: int = 0) -> Tensor:
        """h of block rows, not normalised.

        Args:
            streams, pre: of the block's tokens. positions: of the block rows, [(B,) R].
            context: per stage [B, S, D]; keys seen are context and block rows, in this order.
            visible: bool [(B,) R, S + R]. first: the position of context row 0.
        """
        for stage, keys in zip(self.stages, context, strict=True):
            def attention(u, stage=stage, keys=keys):
                _, q = stage.attn.queries(u, positions)
                own = torch.cat((keys, stage.attn.keys(u, positions)), 1)
                o = attend(q, own, visible, stage.attn.attn_sink, self.precision, first=first)
                return stage.attn.output(o, positions)

            streams, pre = stage(streams, pre, attention)
        return collapse(streams, pre, self.precision)

    def markov(self, previous: Tensor) -> Tensor:
        """The Markov state e of the token before a drafted one, bf16 [..., rank]."""
        return self.precision.round(self.markov_embed(previous))

    def confidences(self, h: Tensor, e: Tensor) -> Tensor:
        """Raw acceptance logits, before the per-position temperatures. [..., d], [..., rank]."""
        return self.confidence(torch.cat((h, e), -1)).squeeze(-1)


@torch.no_grad()
def draft_block(model: Model, taps: Tensor, anchor: int,
                choose=lambda logits: int(logits.argmax())) -> tuple[list[int], Tensor, Tensor]:
    """Draft greedily after the committed tokens of `taps` [1, P, taps·d] and the token `anchor`.

    Returns: the drafted tokens, their confidence logits [block] and logits [block, V].
    """
    cfg, draft = model.cfg, model.draft
    count = taps.shape[1]
    first = max(0, count - cfg.sliding_window)
    ids = torch.tensor([[anchor] + [cfg.dspark_noise_token_id] * (cfg.dspark_block_size - 1)])
    positions = torch.arange(count, count + cfg.dspark_block_size)
    context = [keys[:, first:] for keys in draft.context(taps)]
    seen = torch.ones(len(positions), count - first + len(positions), dtype=torch.bool)
    h = draft.hidden(*model.streams(ids), positions, context, seen, first)[0]
    logits = model.head(draft.norm(h))
    tokens, confidences, previous = [], [], anchor
    for step in range(cfg.dspark_block_size):
        e = draft.markov(torch.tensor(previous))
        logits[step] += draft.markov_head(e)
        confidences.append(draft.confidences(h[step], e))
        previous = choose(logits[step])
        tokens.append(previous)
    return tokens, torch.stack(confidences), logits
