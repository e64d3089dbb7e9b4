"""Where each weight of a lowered graph comes from: the table a loader follows.

A weight is read from the checkpoint, laid out anew from one that is, or derived from the config and
the tokenizer. The table is plain data: it goes into the Program, which the runtime reads without
this package.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict

from deepinfer.errors import IRError
from deepinfer.graph.config import ModelConfig
from deepinfer.graph.weights import WeightDecl, weight_table
from deepinfer.ir.types import Value


class MapSizes(TypedDict):
    """Arguments of ``token_map_for``."""

    vocab_size: int
    classes: int
    pad: int


def map_sizes(cfg: ModelConfig) -> MapSizes:
    """What the Engram token map depends on besides the tokenizer."""
    return {"vocab_size": cfg.vocab_size, "classes": cfg.engram_compressed_vocab_size,
            "pad": cfg.engram_pad_token_id}


def _rope(cfg: ModelConfig, value: Value) -> dict[str, Any]:
    compressed = value.name == "derived.rope_compressed"
    yarn = cfg.rope_scaling if compressed else None
    return {
        "derive": "rope", "dims": cfg.qk_rope_head_dim, "rows": value.type.shape[0],
        "base": cfg.compress_rope_theta if compressed else cfg.rope_theta,
        "yarn": yarn and [yarn.factor, yarn.original_max_position_embeddings, yarn.beta_fast,
                          yarn.beta_slow],
    }


def _stored(decl: WeightDecl) -> dict[str, Any]:
    """Several tensors differ in one number; it becomes ``*`` in the pattern."""
    tensors = decl.tensors[0]
    if decl.stacked:
        tensors = tensors.replace(".experts.0.", ".experts.*.")
        assert decl.tensors[-1] == tensors.replace("*", str(len(decl.tensors) - 1)), decl.tensors
    return {"tensors": tensors, "count": len(decl.tensors), "dtype": decl.dtype,
            "shape": list(decl.tensor_shape)}


def weight_sources(cfg: ModelConfig, values: Iterable[Value]) -> dict[str, Any]:
    """The loader's table for these WEIGHT values.

    Returns:
        ``values``: by value name, {"of"} an entry of ``stored`` (laid out as the name says after
        "|"), or {"derive", ...}. ``stored``: everything a checkpoint must hold, used or not, as
        {"tensors", "count", "dtype", "shape", "unused"?, "optional"?}; ``count`` tensors are
        stacked where the pattern has a ``*``.
    """
    table = {d.value: d for d in weight_table(cfg)}
    found: dict[str, Any] = {}
    for value in values:
        base = value.name.partition("|")[0]  # what follows names a layout
        if base.startswith("derived.rope"):
            found[value.name] = _rope(cfg, value)
        elif base == "derived.token_map":
            found[value.name] = {"derive": "token_map", **map_sizes(cfg)}
        elif base not in table:
            raise IRError(f"weight '{value.name}' is no tensor of the checkpoint",
                          where="weight sources", next="declare it in graph/weights.py")
        else:
            found[value.name] = {"of": base}
    stored = {
        d.value: _stored(d) | ({"unused": d.reason} if not d.used else {})
        | ({"optional": True} if d.optional else {}) for d in table.values()
    }
    return {"values": found, "stored": stored}
