"""Random checkpoints in the official layout: two ready sizes, and any ModelConfig.

Every tensor comes from its own counter-based stream, keyed by (seed, tensor name): its bits depend
neither on the other tensors nor on the machine. Source: spec §8, §11.6, §11.10.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deepinfer.checkpoint import write_checkpoint
from deepinfer.checkpoint.token_map import compression_map, token_map_for
from deepinfer.errors import CheckpointError
from deepinfer.graph.byte_tokenizer import byte_level_tokenizer
from deepinfer.graph.config import ModelConfig, Yarn
from deepinfer.graph.config_json import TOKEN_IDS
from deepinfer.graph.derived import map_sizes
from deepinfer.graph.random_weights import random_tensor
from deepinfer.graph.weights import checkpoint_tensors
from deepinfer.numerics.engram import column_primes

_SHARD_BYTES = 128 * 2**20  # also bounds the memory of writing


def make_model(kind: str, out: Path, seed: int) -> None:
    """Write a random checkpoint with a byte-level tokenizer.

    Args:
        kind: "tiny" (4 MB, every mechanism alive) or "mini" (0.5 GB, realistic shapes).
        out: directory, made if need be.
        seed: 0 .. 2^64 - 1; equal seeds give equal bytes.

    Raises:
        CheckpointError: an unknown kind, a bad seed, or a directory that cannot be written.
    """
    if kind not in MODELS:
        raise CheckpointError(
            f"model kind is {kind!r}; expected {' or '.join(MODELS)}",
            where="make_model",
            next="for other sizes use deepinfer.graph.make_model.write_random_model",
        )
    cfg = MODELS[kind]()
    write_random_model(cfg, out, seed, tokenizer=byte_level_tokenizer(cfg.vocab_size))


def write_random_model(
    cfg: ModelConfig, out: Path, seed: int, *, tokenizer: Tokenizer | None = None
) -> None:
    """Write a random checkpoint of any config: config.json, generation_config.json, weights.

    Args:
        cfg: the architecture.
        out: directory, made if need be; weights already there are only replaced if one file
            replaces one file.
        seed: 0 .. 2^64 - 1; equal seeds give equal bytes.
        tokenizer: written as tokenizer.json. None: no tokenizer.json; with Engram layers `cfg`
            must then declare `engram_compressed_vocab_size` equal to `vocab_size`.

    Raises:
        CheckpointError: a tokenizer that does not fit `cfg`, or see `make_model`.
    """
    if not 0 <= seed < 2**64:
        raise CheckpointError(
            f"seed is {seed}; expected 0 .. 2^64 - 1", where="write_random_model", next="change it"
        )
    out = Path(out)
    files = {
        "config.json": _json_text(cfg.to_json()),
        "generation_config.json": _json_text(_generation_config(cfg)),
    }
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer.to_str(pretty=True)
    if cfg.engram_layer_ids:
        _check_classes(cfg, out, files.get("tokenizer.json"))
    # The weights first: where they are refused, the files of the model already there stay.
    write_checkpoint(
        out,
        (
            (name, random_tensor(name, tag, shape, seed))
            for name, tag, shape in checkpoint_tensors(cfg)
        ),
        max_shard_bytes=_SHARD_BYTES,
    )
    try:
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"the model cannot be written: {error.strerror or error}",
            where=str(out),
            next="give another directory",
        ) from error


def _check_classes(cfg: ModelConfig, out: Path, tokenizer: str | None) -> None:
    """Refuse a tokenizer whose classes are not those of `cfg`; None: the one that is in `out`."""
    with tempfile.TemporaryDirectory() as scratch:
        if tokenizer is not None:
            (Path(scratch) / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        token_map_for(out if tokenizer is None else Path(scratch), **map_sizes(cfg))


def tiny_config(**changes: Any) -> ModelConfig:
    """The smallest model in which every mechanism is alive: spec §8 with the 12 layers of §11.6.

    Args:
        changes: fields to replace.
    """
    cfg = ModelConfig(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=12,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=64,
        o_lora_rank=32,
        o_groups=2,
        swiglu_limit=10.0,
        rms_norm_eps=1e-20,
        max_position_embeddings=256,
        rope_theta=10000.0,
        compress_rope_theta=1000.0,
        rope_scaling=Yarn(4.0, 32.0, 1.0, 64),
        sliding_window=8,
        compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0),
        kv_source_layer_ids=(2, 4, 6),
        index_source_layer_ids=(2, 4, 6, 8, 10),
        index_n_heads=4,
        index_head_dim=32,
        index_topk=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        routed_scaling_factor=1.5,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        candidate_source_layer_id=6,
        candidate_topk_blocks=4,
        candidate_block_size=4,
        engram_layer_ids=(1, 4),
        engram_num_embeddings=_table_rows(2, 101, 4, 2),
        engram_max_ngram_size=4,
        engram_n_heads=2,
        engram_head_dim=32,
        engram_vocab_size=101,
        engram_pad_token_id=2,
        engram_compressed_vocab_size=_classes(512),
        num_nextn_predict_layers=3,
        dspark_block_size=5,
        dspark_noise_token_id=511,
        dspark_target_layer_ids=(9, 10, 11),
        dspark_markov_rank=32,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
        bos_token_id=0,
        eos_token_ids=(1,),
        pad_token_id=2,
    )
    return dataclasses.replace(cfg, **changes)


def mini_config(**changes: Any) -> ModelConfig:
    """A model with realistic shapes that a laptop can run: tiny's layer roles, wider.

    Args:
        changes: fields to replace.
    """
    cfg = tiny_config(
        vocab_size=16384,
        hidden_size=1024,
        num_attention_heads=16,
        head_dim=128,
        qk_rope_head_dim=32,
        q_lora_rank=384,
        o_lora_rank=256,
        o_groups=4,
        max_position_embeddings=16384,
        compress_rope_theta=40000.0,
        rope_scaling=Yarn(4.0, 32.0, 1.0, 4096),
        sliding_window=128,
        index_n_heads=8,
        index_head_dim=64,
        index_topk=128,
        n_routed_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=256,
        candidate_topk_blocks=32,
        candidate_block_size=8,
        engram_num_embeddings=_table_rows(2, 4000, 4, 4),
        engram_n_heads=4,
        engram_head_dim=64,
        engram_vocab_size=4000,
        engram_compressed_vocab_size=_classes(16384),
        dspark_noise_token_id=16383,
        dspark_markov_rank=64,
        dspark_n_routed_experts=16,
        dspark_num_experts_per_tok=2,
    )
    return dataclasses.replace(cfg, **changes)


MODELS: dict[str, Callable[[], ModelConfig]] = {"tiny": tiny_config, "mini": mini_config}


def _table_rows(layers: int, table_size: int, max_ngram: int, heads: int) -> tuple[int, ...]:
    primes = column_primes(layers, table_size=table_size, max_ngram=max_ngram, heads=heads)
    return tuple(sum(columns) for columns in primes)


def _classes(vocab_size: int) -> int:
    return int(compression_map(byte_level_tokenizer(vocab_size)).max()) + 1


def _generation_config(cfg: ModelConfig) -> dict[str, Any]:
    root = cfg.to_json()
    ids = {key: root[key] for key in TOKEN_IDS if key in root}
    return {**ids, "do_sample": True, "temperature": 1.0, "top_p": 1.0}


def _json_text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
