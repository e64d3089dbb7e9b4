"""What a ModelConfig must satisfy for the graph to be built from it. Source: spec §1.2, §8, §11."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from deepinfer.errors import CheckpointError

if TYPE_CHECKING:
    from deepinfer.graph.config import ModelConfig

# One quantisation block along K, and the side of an fp8 weight tile.
BLOCK = 32

_POSITIVE = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim "
    "q_lora_rank o_lora_rank o_groups max_position_embeddings sliding_window index_n_heads "
    "index_head_dim index_topk n_routed_experts num_experts_per_tok moe_intermediate_size hc_mult "
    "hc_sinkhorn_iters candidate_topk_blocks candidate_block_size engram_n_heads engram_head_dim "
    "engram_compressed_vocab_size dspark_block_size dspark_markov_rank dspark_n_routed_experts "
    "dspark_num_experts_per_tok swiglu_limit rms_norm_eps hc_eps rope_theta compress_rope_theta "
    "routed_scaling_factor"
).split()
# Constants of the kernels, which hold them in float32; below its normal numbers they lose digits.
_FLOAT32 = "rms_norm_eps hc_eps swiglu_limit routed_scaling_factor".split()
_F32_MIN, _F32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127
# Sizes, positions and ids are int32 on every device.
_I32_MAX = 2**31 - 1
_BLOCKED = (
    "hidden_size head_dim q_lora_rank o_lora_rank moe_intermediate_size index_head_dim "
    "engram_head_dim dspark_markov_rank"
).split()


def check(cfg: ModelConfig) -> None:
    """Raise CheckpointError, naming the field, if the values do not fit together."""
    _check_sizes(cfg)
    _check_rope(cfg)
    _check_layers(cfg)
    _check_candidates(cfg)
    _check_engram(cfg)
    _check_dspark(cfg)


def _require(holds: bool, field: str, actual: object, expected: str) -> None:
    if not holds:
        raise CheckpointError(
            f"{field} is {list(actual) if isinstance(actual, tuple) else actual}; expected "
            f"{expected}",
            where="ModelConfig",
            next=f"correct {field}; deepinfer/graph/config_rules.py holds the rules",
        )


def _check_sizes(cfg: ModelConfig) -> None:
    for field in _POSITIVE:
        actual = getattr(cfg, field)
        _require(actual > 0, field, actual, "more than 0")
        if isinstance(actual, int):
            _require(actual <= _I32_MAX, field, actual, f"at most {_I32_MAX}")
    for field in _FLOAT32:
        actual = getattr(cfg, field)
        _require(_F32_MIN <= actual <= _F32_MAX, field, actual, "a normal float32 number")
    for field in _BLOCKED:
        actual = getattr(cfg, field)
        _require(actual % BLOCK == 0, field, actual, f"a multiple of {BLOCK}")
    heads, groups = cfg.num_attention_heads, cfg.o_groups
    _require(heads % groups == 0, "o_groups", groups, f"a divisor of num_attention_heads {heads}")
    for field, total in (
        ("num_experts_per_tok", cfg.n_routed_experts),
        ("dspark_num_experts_per_tok", cfg.dspark_n_routed_experts),
    ):
        actual = getattr(cfg, field)
        _require(actual <= total, field, actual, f"at most the number of experts, {total}")
    for field in ("bos_token_id", "pad_token_id"):
        _check_token(cfg, field, getattr(cfg, field))
    for token in cfg.eos_token_ids:
        _check_token(cfg, "eos_token_id", token)


def _check_token(cfg: ModelConfig, field: str, token: int | None) -> None:
    fits = token is None or 0 <= token < cfg.vocab_size
    _require(fits, field, token, f"an id below vocab_size {cfg.vocab_size}")


def _check_rope(cfg: ModelConfig) -> None:
    rope, limit = cfg.qk_rope_head_dim, min(cfg.head_dim, cfg.index_head_dim)
    fits = rope % 2 == 0 and rope <= limit
    _require(fits, "qk_rope_head_dim", rope, f"an even number up to {limit}")
    for field in ("rope_theta", "compress_rope_theta"):
        _require(getattr(cfg, field) > 1, field, getattr(cfg, field), "more than 1")
    yarn = cfg.rope_scaling
    if yarn is not None:
        for field in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
            value = getattr(yarn, field)
            _require(value > 0, f"rope_scaling.{field}", value, "more than 0")


def _check_ids(field: str, ids: tuple[int, ...], low: int, high: int) -> None:
    ordered = all(a < b for a, b in pairwise(ids))
    inside = all(low <= i < high for i in ids)
    _require(ordered and inside, field, ids, f"ascending layer numbers from {low} to {high - 1}")


def _check_layers(cfg: ModelConfig) -> None:
    layers, stages, ratios = cfg.num_hidden_layers, cfg.n_stages, cfg.compress_ratios
    _require(stages >= 0, "num_nextn_predict_layers", stages, "0 or more")
    _require(
        len(ratios) == layers + stages,
        "compress_ratios",
        ratios,
        f"{layers + stages} entries: {layers} layers and {stages} DSpark stages",
    )
    for layer, ratio in enumerate(ratios):
        stage = layer >= layers
        expected = "0, as for every DSpark stage" if stage else "0, 1 or 2"
        allowed = ratio in ((0,) if stage else (0, 1, 2))
        _require(allowed, f"compress_ratios[{layer}]", ratio, expected)
    kv_sources, index_sources = cfg.kv_source_layer_ids, cfg.index_source_layer_ids
    _require(bool(kv_sources), "kv_source_layer_ids", kv_sources, "at least one layer")
    for field, ids in (
        ("kv_source_layer_ids", kv_sources),
        ("index_source_layer_ids", index_sources),
    ):
        _check_ids(field, ids, 0, layers)
        _require(all(ratios[i] for i in ids), field, ids, "only layers whose ratio is 1 or 2")
    _require(
        set(kv_sources) <= set(index_sources),
        "index_source_layer_ids",
        index_sources,
        f"all of kv_source_layer_ids {list(kv_sources)}: a new KV cache needs a new selection",
    )
    source = None
    for layer, ratio in enumerate(ratios[:layers]):
        source = layer if layer in kv_sources else source
        if ratio:
            _require(
                source is not None and ratios[source] == ratio,
                "kv_source_layer_ids",
                kv_sources,
                f"a source of ratio {ratio} at or before layer {layer}, which reads that ratio",
            )


def _check_candidates(cfg: ModelConfig) -> None:
    source = cfg.candidate_source_layer_id
    if source is None:
        return
    allowed = [i for i in cfg.index_source_layer_ids if i >= cfg.replay_cut]
    _require(
        source in allowed,
        "candidate_source_layer_id",
        source,
        f"an index source from the last KV source on, one of {allowed}",
    )


def _check_engram(cfg: ModelConfig) -> None:
    if not cfg.engram_layer_ids:
        empty = not cfg.engram_num_embeddings
        _require(empty, "engram_num_embeddings", cfg.engram_num_embeddings, "no entries")
        return
    _check_ids("engram_layer_ids", cfg.engram_layer_ids, 0, cfg.num_hidden_layers)
    ngram, size = cfg.engram_max_ngram_size, cfg.engram_vocab_size
    _require(ngram >= 2, "engram_max_ngram_size", ngram, "2 or more")
    _require(size >= 2, "engram_vocab_size", size, "2 or more")
    _check_token(cfg, "engram_pad_token_id", cfg.engram_pad_token_id)
    rows = tuple(sum(primes) for primes in cfg.engram_primes)
    _require(
        cfg.engram_num_embeddings == rows,
        "engram_num_embeddings",
        cfg.engram_num_embeddings,
        f"{list(rows)}, the sums of the primes from engram_vocab_size {size} on",
    )


def _check_dspark(cfg: ModelConfig) -> None:
    if not cfg.n_stages:
        return
    taps = cfg.dspark_target_layer_ids
    _require(bool(taps), "dspark_target_layer_ids", taps, "at least one layer")
    _check_ids("dspark_target_layer_ids", taps, 0, cfg.num_hidden_layers)
    _check_token(cfg, "dspark_noise_token_id", cfg.dspark_noise_token_id)
