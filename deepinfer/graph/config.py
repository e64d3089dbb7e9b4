"""ModelConfig: the facts of a DeepSeek-V4.1-Flash checkpoint, read from its config.json.

Field names are those of the official `text_config`. Anything that would change the arithmetic and
is not supported is refused by name. Source: spec §1, §11.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deepinfer.errors import CheckpointError
from deepinfer.graph import config_json, config_rules
from deepinfer.numerics.engram import column_primes

CandidateRole = Literal["none", "source", "within"]


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN frequency scaling of the layers that read compressed KV (spec §2.1)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The sizes of the image tower; needed only to know its weight names and shapes."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int
    rope_theta: float = 10000.0
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer does; spec §1.2 has the table for the release.

    Attributes:
        index: layer number; the DSpark stages follow the decoder's last layer.
        ratio: tokens per compressed KV entry that the layer reads, 0 = window attention only.
        is_kv_source: the layer compresses its own KV and makes index keys.
        is_index_source: the layer makes index queries and a new top-k selection.
        kv_source: layer whose compressed KV is read; None where ratio is 0.
        index_source: layer whose top-k selection is read; None where ratio is 0.
        candidates: "source" publishes the candidate blocks, "within" picks inside them.
        engram: position of the layer in `engram_layer_ids`, or None.
        tap: position of the layer in `dspark_target_layer_ids`, or None.
        rope_base: base of the rotary frequencies.
        yarn: scaling of the rotary frequencies, or None.
    """

    index: int
    ratio: int
    is_kv_source: bool
    is_index_source: bool
    kv_source: int | None
    index_source: int | None
    candidates: CandidateRole
    engram: int | None
    tap: int | None
    rope_base: float
    yarn: Yarn | None

    @property
    def is_tap(self) -> bool:
        """True if the stream entering this layer feeds the DSpark stages."""
        return self.tap is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model's architecture. Immutable, checked on construction.

    Raises:
        CheckpointError: a value that is not supported or does not fit the others; names the field.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: Yarn | None
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int = 1
    candidate_block_size: int = 1
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 2
    engram_n_heads: int = 1
    engram_head_dim: int = 32
    engram_vocab_size: int = 2
    engram_pad_token_id: int = 0
    engram_compressed_vocab_size: int = 1
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 1
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 32
    dspark_n_routed_experts: int = 1
    dspark_num_experts_per_tok: int = 1
    # Root of config.json, not text_config.
    vision: VisionConfig | None = None
    image_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        config_rules.check(self)

    @classmethod
    def from_json(cls, root: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """The config of a parsed config.json.

        Args:
            root: the whole JSON object, `text_config` and `quantization_config` nested in it.
            where: named in errors.

        Raises:
            CheckpointError: a field is missing, unknown, or has an unsupported value.
        """
        config_json.check_root(root, where)
        text = config_json.section(root, "text_config", where)
        config_json.check_text(text, cls, where)
        values = config_json.read_fields(cls, text, f"{where}, text_config")
        scaling = values.pop("rope_scaling", None)
        if scaling is not None:
            scaling = Yarn(**config_json.read_yarn(Yarn, scaling, where))
        vision = config_json.section(root, "vision_config", where, optional=True)
        if vision is not None:
            vision = VisionConfig(
                **config_json.read_fields(VisionConfig, vision, f"{where}, vision_config")
            )
        values |= config_json.read_token_ids(root, text, where)
        try:
            return cls(rope_scaling=scaling, vision=vision, **values)
        except CheckpointError as error:
            raise CheckpointError(error.what, where=where, next=error.next) from None

    @classmethod
    def from_dir(cls, path: Path) -> ModelConfig:
        """The config of a checkpoint directory: config.json and, for the ids of bos, eos and pad,
        generation_config.json where there is one.

        Raises:
            CheckpointError: no config.json, a file that is not JSON, or see `from_json`.
        """
        root = config_json.load(Path(path) / "config.json")
        generation = Path(path) / "generation_config.json"
        if generation.exists():
            ids = config_json.load(generation)
            root |= {key: ids[key] for key in config_json.TOKEN_IDS if ids.get(key) is not None}
        return cls.from_json(root, where=str(Path(path) / "config.json"))

    @classmethod
    def release(cls) -> ModelConfig:
        """The published DeepSeek-V4.1-Flash ('v4.1-flash'): spec §1.1."""
        from deepinfer.graph.release import RELEASE

        return cls.from_json(RELEASE, where="v4.1-flash")

    def to_json(self) -> dict[str, Any]:
        """The official config.json layout; `from_json` of it gives an equal config."""
        return config_json.write(self)

    def layer(self, index: int) -> LayerSpec:
        """The role of a layer; num_hidden_layers + i is DSpark stage i."""
        return _layer_specs(self)[index]

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The roles of all layers of the target, without the DSpark stages."""
        return _layer_specs(self)[: self.num_hidden_layers]

    @property
    def stages(self) -> tuple[LayerSpec, ...]:
        """The roles of the DSpark stages, layer numbers num_hidden_layers onwards."""
        return _layer_specs(self)[self.num_hidden_layers :]

    @property
    def n_stages(self) -> int:
        return self.num_nextn_predict_layers

    @property
    def replay_cut(self) -> int:
        """First decoder layer = the last KV source: from here on a replayed prefill runs on its
        last rows only (spec §11.6)."""
        return self.kv_source_layer_ids[-1]

    @property
    def can_replay(self) -> bool:
        """Whether a prefill may leave rows behind at the cut: the layers before it are all that
        reads n-grams, and the taps are all behind it (spec §4.1)."""
        taps = self.dspark_target_layer_ids if self.n_stages else ()
        return all(i < self.replay_cut for i in self.engram_layer_ids) and all(
            i >= self.replay_cut for i in taps)

    @property
    def replay_keep(self) -> int:
        """Rows kept by a bounded replay: window + 2 * (drafts + 1), 140 in the release (§4.1)."""
        drafts = self.dspark_block_size if self.n_stages else 0
        return self.sliding_window + 2 * (drafts + 1)

    @property
    def hc_mixes(self) -> int:
        """Outputs of a hyper-connection mix: pre, post and the mixing matrix."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def engram_columns(self) -> int:
        """Hash columns of an Engram layer = table rows read per token."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def engram_primes(self) -> tuple[tuple[int, ...], ...]:
        """Rows of every hash column, per Engram layer."""
        return column_primes(
            len(self.engram_layer_ids),
            table_size=self.engram_vocab_size,
            max_ngram=self.engram_max_ngram_size,
            heads=self.engram_n_heads,
        )


@functools.lru_cache(maxsize=16)
def _layer_specs(cfg: ModelConfig) -> tuple[LayerSpec, ...]:
    specs: list[LayerSpec] = []
    kv_source = index_source = None
    candidates_known = False
    taps = cfg.dspark_target_layer_ids if cfg.n_stages else ()
    for index, ratio in enumerate(cfg.compress_ratios):
        is_kv_source = index in cfg.kv_source_layer_ids
        is_index_source = index in cfg.index_source_layer_ids
        kv_source = index if is_kv_source else kv_source
        index_source = index if is_index_source else index_source
        role: CandidateRole = "none"
        if index == cfg.candidate_source_layer_id:
            role, candidates_known = "source", True
        elif is_index_source and candidates_known:
            role = "within"
        specs.append(
            LayerSpec(
                index=index,
                ratio=ratio,
                is_kv_source=is_kv_source,
                is_index_source=is_index_source,
                kv_source=kv_source if ratio else None,
                index_source=index_source if ratio else None,
                candidates=role,
                engram=_position(cfg.engram_layer_ids, index),
                tap=_position(taps, index),
                rope_base=cfg.compress_rope_theta if ratio else cfg.rope_theta,
                yarn=cfg.rope_scaling if ratio else None,
            )
        )
    return tuple(specs)


def _position(ids: tuple[int, ...], index: int) -> int | None:
    return ids.index(index) if index in ids else None
