"""The closed table of checkpoint tensors: every name belongs to exactly one declaration.

A declaration is one logical value of the graph. The routed experts of a layer are one value per
matrix, stacked over the experts. Source: spec §6.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deepinfer.graph.config import LayerSpec, ModelConfig, VisionConfig
from deepinfer.graph.config_rules import BLOCK

WeightDType = Literal["bf16", "f32", "e4m3", "ue8m0", "e2m1"]

# The dtype tag in a safetensors header; two e2m1 codes share one I8.
SAFETENSORS_TAG: dict[WeightDType, str] = {
    "bf16": "BF16",
    "f32": "F32",
    "e4m3": "F8_E4M3",
    "ue8m0": "F8_E8M0",
    "e2m1": "I8",
}
NO_IMAGES = "image input is not supported"
NO_IMAGES_IN_DRAFTS = "DSpark blocks never hold image tokens"


@dataclass(frozen=True, slots=True)
class WeightDecl:
    """One logical weight and the checkpoint tensors that hold it.

    Attributes:
        value: name of the graph's WEIGHT value.
        tensors: checkpoint names: one, or those of all experts.
        dtype: element type; "e2m1" is stored packed, two elements along K per byte.
        shape: logical shape of the value, in elements.
        stacked: True if the tensors stand along a new first axis, in their order, even one alone.
        used: False if no graph reads it; the loader must know the name but skip the bytes.
        reason: why it is not used.
        optional: True if a checkpoint may lack it.
    """

    value: str
    tensors: tuple[str, ...]
    dtype: WeightDType
    shape: tuple[int, ...]
    stacked: bool = False
    used: bool = True
    reason: str = ""
    optional: bool = False

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each tensor as stored."""
        shape = self.shape[1:] if self.stacked else self.shape
        return (*shape[:-1], shape[-1] // 2) if self.dtype == "e2m1" else shape


def weight_table(cfg: ModelConfig) -> tuple[WeightDecl, ...]:
    """All weights of a checkpoint of this config: target, DSpark stages, image tower.

    Example: `layers.3.ffn.experts.w1.weight` has tensors `layers.3.ffn.experts.0.w1.weight` ..,
    dtype e2m1 and shape [experts, moe_intermediate_size, hidden_size].
    """
    table: list[WeightDecl] = [*_top(cfg)]
    for spec in cfg.layers:
        table += _layer(cfg, f"layers.{spec.index}", spec)
    for stage, spec in enumerate(cfg.stages):
        table += _stage(cfg, f"mtp.{stage}", stage, spec)
    if cfg.vision is not None:
        table += _vision(cfg, cfg.vision)
    return tuple(table)


def checkpoint_tensors(cfg: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, safetensors dtype tag, stored shape) of every tensor of a complete checkpoint."""
    for decl in weight_table(cfg):
        for name in decl.tensors:
            yield name, SAFETENSORS_TAG[decl.dtype], decl.tensor_shape


def _one(
    name: str, dtype: WeightDType, *shape: int, unused: str = "", optional: bool = False
) -> WeightDecl:
    return WeightDecl(name, (name,), dtype, shape, used=not unused, reason=unused,
                      optional=optional)


def _fp8(name: str, rows: int, columns: int) -> Iterator[WeightDecl]:
    """An fp8 matrix and its scales, one per 32x32 tile."""
    yield _one(f"{name}.weight", "e4m3", rows, columns)
    yield _one(f"{name}.scale", "ue8m0", -(-rows // BLOCK), -(-columns // BLOCK))


def _experts(prefix: str, matrix: str, count: int, rows: int, columns: int) -> Iterator[WeightDecl]:
    """One MXFP4 matrix of all routed experts and its scales, one per 32 elements along K."""
    sizes: tuple[tuple[str, WeightDType, int], ...] = (
        ("weight", "e2m1", columns),
        ("scale", "ue8m0", columns // BLOCK),
    )
    for kind, dtype, width in sizes:
        names = tuple(f"{prefix}.{expert}.{matrix}.{kind}" for expert in range(count))
        yield WeightDecl(f"{prefix}.{matrix}.{kind}", names, dtype, (count, rows, width), True)


def _top(cfg: ModelConfig) -> Iterator[WeightDecl]:
    hidden = cfg.hidden_size
    yield _one("embed.weight", "bf16", cfg.vocab_size, hidden)
    yield _one("head.weight", "bf16", cfg.vocab_size, hidden)
    yield _one("norm.weight", "bf16", hidden)
    for name in ("image_start", "image_end", "image_newline"):
        yield _one(name, "bf16", hidden, unused=NO_IMAGES, optional=cfg.vision is None)


def _layer(cfg: ModelConfig, at: str, spec: LayerSpec) -> Iterator[WeightDecl]:
    yield from _block(cfg, at, cfg.n_routed_experts)
    hidden, head_dim = cfg.hidden_size, cfg.head_dim
    if spec.is_kv_source:
        yield _one(f"{at}.attn.compressor.wkv.weight", "bf16", head_dim, hidden)
        if spec.ratio > 1:
            yield _one(f"{at}.attn.compressor.wgate.weight", "bf16", head_dim, hidden)
        yield _one(f"{at}.attn.compressor.norm.weight", "bf16", head_dim)
        yield _one(f"{at}.attn.indexer.wk.weight", "bf16", cfg.index_head_dim, head_dim)
        yield _one(f"{at}.attn.indexer.k_norm.weight", "bf16", cfg.index_head_dim)
    if spec.is_index_source:
        rows = cfg.index_n_heads * cfg.index_head_dim
        yield from _fp8(f"{at}.attn.indexer.wq_b", rows, cfg.q_lora_rank)
        yield _one(f"{at}.attn.indexer.weights_proj.weight", "bf16", cfg.index_n_heads, hidden)
    if spec.engram is not None:
        width, streams = cfg.engram_head_dim, cfg.hc_mult
        rows = cfg.engram_num_embeddings[spec.engram]
        yield _one(f"{at}.engram.embed.weight", "e4m3", rows, width)
        yield _one(f"{at}.engram.embed.scale", "ue8m0", rows, width // BLOCK)
        yield from _fp8(f"{at}.engram.wkv", (streams + 1) * hidden, cfg.engram_columns * width)
        yield _one(f"{at}.engram.q_weight", "bf16", streams, hidden)
        yield _one(f"{at}.engram.k_weight", "bf16", streams, hidden)


def _block(
    cfg: ModelConfig, at: str, experts: int, *, bias_vl_unused: str = ""
) -> Iterator[WeightDecl]:
    """What every layer and every DSpark stage has."""
    hidden, head_dim, heads = cfg.hidden_size, cfg.head_dim, cfg.num_attention_heads
    for part in ("attn", "ffn"):
        yield _one(f"{at}.{part}_norm.weight", "bf16", hidden)
        yield _one(f"{at}.hc_{part}_fn", "f32", cfg.hc_mixes, cfg.hc_mult * hidden)
        yield _one(f"{at}.hc_{part}_base", "f32", cfg.hc_mixes)
        yield _one(f"{at}.hc_{part}_scale", "f32", 3)
    yield _one(f"{at}.attn.attn_sink", "f32", heads)
    yield from _fp8(f"{at}.attn.wq_a", cfg.q_lora_rank, hidden)
    yield _one(f"{at}.attn.q_norm.weight", "bf16", cfg.q_lora_rank)
    yield from _fp8(f"{at}.attn.wq_b", heads * head_dim, cfg.q_lora_rank)
    yield from _fp8(f"{at}.attn.wkv", head_dim, hidden)
    yield _one(f"{at}.attn.kv_norm.weight", "bf16", head_dim)
    grouped = cfg.o_groups * cfg.o_lora_rank
    yield from _fp8(f"{at}.attn.wo_a", grouped, heads * head_dim // cfg.o_groups)
    yield from _fp8(f"{at}.attn.wo_b", hidden, grouped)
    yield _one(f"{at}.ffn.gate.weight", "bf16", experts, hidden)
    yield _one(f"{at}.ffn.gate.bias", "f32", experts)
    yield _one(f"{at}.ffn.gate.bias_vl", "f32", experts, unused=bias_vl_unused)
    inner = cfg.moe_intermediate_size
    for matrix, rows, columns in (
        ("w1", inner, hidden),
        ("w2", hidden, inner),
        ("w3", inner, hidden),
    ):
        yield from _experts(f"{at}.ffn.experts", matrix, experts, rows, columns)
        yield from _fp8(f"{at}.ffn.shared_experts.{matrix}", rows, columns)


def _stage(cfg: ModelConfig, at: str, stage: int, spec: LayerSpec) -> Iterator[WeightDecl]:
    assert spec.ratio == 0 and spec.engram is None  # config_rules
    yield from _block(cfg, at, cfg.dspark_n_routed_experts, bias_vl_unused=NO_IMAGES_IN_DRAFTS)
    hidden, rank = cfg.hidden_size, cfg.dspark_markov_rank
    if stage == 0:
        yield from _fp8(f"{at}.main_proj", hidden, len(cfg.dspark_target_layer_ids) * hidden)
        yield _one(f"{at}.main_norm.weight", "bf16", hidden)
    if stage == cfg.n_stages - 1:
        yield _one(f"{at}.norm.weight", "bf16", hidden)
        yield _one(f"{at}.markov_head.embed.weight", "bf16", cfg.vocab_size, rank)
        yield _one(f"{at}.markov_head.head.weight", "bf16", cfg.vocab_size, rank)
        yield _one(f"{at}.confidence_head.proj.weight", "bf16", 1, hidden + rank)


def _vision(cfg: ModelConfig, vision: VisionConfig) -> Iterator[WeightDecl]:
    width, inner = vision.hidden_size, vision.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (width, 3 * vision.patch_size**2),
        "vision.patch_embed.proj.bias": (width,),
        "vision.norm.weight": (width,),
    }
    for i in range(vision.num_hidden_layers):
        at = f"vision.blocks.{i}"
        shapes |= {
            f"{at}.norm1.weight": (width,),
            f"{at}.norm2.weight": (width,),
            f"{at}.attn.wqkv.weight": (3 * width, width),
            f"{at}.attn.wqkv.bias": (3 * width,),
            f"{at}.attn.wo.weight": (width, width),
            f"{at}.attn.wo.bias": (width,),
            f"{at}.mlp.w1.weight": (2 * inner, width),
            f"{at}.mlp.w2.weight": (width, inner),
        }
    hidden = cfg.hidden_size
    shapes |= {
        "aligner.w1.weight": (hidden, vision.downsample_ratio**2 * width),
        "aligner.w1.bias": (hidden,),
        "aligner.w2.weight": (hidden, hidden),
        "aligner.w2.bias": (hidden,),
    }
    for name, shape in shapes.items():
        yield _one(name, "bf16", *shape, unused=NO_IMAGES)
