"""What the runtime needs to know of a model: sizes, the layout of its state, names of values.

The runtime imports no graph; all it knows is in the Program's manifest, this under "facts".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deepinfer.graph.config import ModelConfig
from deepinfer.graph.limits import Limits
from deepinfer.ir.graph import Graph
from deepinfer.ir.types import Kind, Sym, Value

_TARGET_OUTPUTS = ("token", "logprob", "top_ids", "top_logprobs", "hidden")


def facts(cfg: ModelConfig, limits: Limits, graphs: Mapping[str, Graph]) -> dict[str, Any]:
    """The facts of a model whose source graphs are ``graphs``, as JSON data.

    Returns:
        vocab_size, max_model_len, page_size, max_ngram, bos, eos; window, ring (slots of a window
        ring), draft_width, block (drafts of a block, 0 without DSpark stages), noise_token, cut
        (first layer that a replayed prefill leaves rows behind at), replay (whether it may),
        replay_keep (rows it keeps by default), num_layers, stages, recent (width of that input).
        state: of each STATE value name, kind ("ring", "pending" or "paged"), part ("encoder",
        "decoder" or "draft") and layer (of the draft part: the stage).
        outputs: by phase and role; a draft's tokens and confidences are lists.
        values: what may be traced by role: logits, adjusted (after penalties and masks), hidden.
    """
    block = cfg.dspark_block_size if cfg.n_stages else 0
    outputs = {name: _outputs(graph, block) for name, graph in graphs.items()}
    state = {v.name: v for g in graphs.values() for v in g.of_kind(Kind.STATE)}
    recent = next(v for v in graphs["prefill"].of_kind(Kind.INPUT) if v.name == "recent")
    return {
        "vocab_size": cfg.vocab_size, "max_model_len": limits.max_model_len,
        "page_size": limits.page_size,
        "max_ngram": cfg.engram_max_ngram_size if cfg.engram_layer_ids else 0,
        "bos": cfg.bos_token_id, "eos": list(cfg.eos_token_ids),
        "window": cfg.sliding_window, "ring": limits.ring(cfg),
        "draft_width": limits.draft_width, "block": block,
        "noise_token": cfg.dspark_noise_token_id, "cut": cfg.replay_cut,
        "replay": cfg.can_replay, "replay_keep": cfg.replay_keep,
        "num_layers": cfg.num_hidden_layers, "stages": cfg.n_stages,
        "recent": recent.type.shape[1],
        "state": [_state(v, cfg) for v in state.values()],
        "outputs": outputs,
        "values": {"logits": "head.logits", "adjusted": "head.adjusted",
                   "hidden": outputs["prefill"].get("hidden")},
    }


def _outputs(graph: Graph, block: int) -> dict[str, Any]:
    names = [v.name for v in graph.outputs]
    if graph.name == "draft":
        return {"tokens": names[:block], "confidences": names[block:]}
    return dict(zip(_TARGET_OUTPUTS, names, strict=False))


def _state(value: Value, cfg: ModelConfig) -> dict[str, Any]:
    """What a STATE value holds, from its shape and from the layer in its name."""
    found = re.match(r"(layers|mtp)\.(\d+)\.", value.name)
    assert found is not None
    layer, first = int(found[2]), value.type.shape[0]
    part = "draft" if found[1] == "mtp" else "encoder" if layer < cfg.replay_cut else "decoder"
    kind = ("paged" if isinstance(first, Sym) and first.name == "num_pages"
            else "pending" if value.name.endswith(".pending") else "ring")
    # The entries of the layer at the cut are made of all rows: they belong to what comes before.
    return {"name": value.name, "kind": kind, "part": "encoder" if kind != "ring" else part,
            "layer": layer}
