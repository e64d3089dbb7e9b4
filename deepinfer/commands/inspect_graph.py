"""`deepinfer inspect graph`: a phase's graph as text, source or lowered, whole or one layer."""

from __future__ import annotations

import argparse

from deepinfer.codegen.emit import lower_graph
from deepinfer.commands.layer_view import layer_text
from deepinfer.commands.output import emit, say
from deepinfer.compiler import read_config
from deepinfer.errors import RequestError
from deepinfer.graph.config import ModelConfig
from deepinfer.graph.draft import draft
from deepinfer.graph.limits import Limits
from deepinfer.graph.v41_flash import forward
from deepinfer.ir.graph import Graph
from deepinfer.ir.text import graph_text
from deepinfer.targets.base import load_target


def run(args: argparse.Namespace) -> int:
    cfg = read_config(args.config or args.model)
    phase, layer = which(cfg, args.phase, args.layer)
    graph = build(cfg, phase)

    def show(stage: str, at: Graph) -> None:
        if layer is not None:
            emit(layer_text(cfg, at, cfg.layer(layer), stage))
        else:
            emit(f"# {stage}\n{graph_text(at)}")

    if not args.print_after and not args.lowered:
        show("source graph", graph)
        if layer is None:
            say(f"{len(graph.nodes)} nodes; --layer N shows one layer")
        return 0
    target = load_target(args.target)
    wanted = passes_to_print(args.print_after, [p.name for p in target.passes])
    lowered = lower_graph(graph, target, lambda name, at: (
        show(f"after pass {name}", at) if name in wanted else None))
    if args.lowered:
        show(f"lowered for {target.name}", lowered)
    return 0


def build(cfg: ModelConfig, phase: str) -> Graph:
    """The source graph of one phase at the model's own limits, verified."""
    if phase in ("verify", "draft") and not cfg.n_stages:
        raise RequestError(f"the model has no DSpark stages, so no phase '{phase}'",
                           where="--phase", next="choose prefill or decode")
    limits = Limits.for_model(cfg)
    return draft(cfg, limits) if phase == "draft" else forward(cfg, limits, phase)


def which(cfg: ModelConfig, phase: str | None, layer: int | None) -> tuple[str, int | None]:
    """The phase and the layer meant: a DSpark stage is only in the draft, a layer never.

    In phase "draft", stage i is called i or num_hidden_layers + i.
    """
    layers = cfg.num_hidden_layers
    if layer is None:
        return phase or "decode", None
    if phase is None:
        phase = "draft" if layers <= layer < layers + cfg.n_stages else "decode"
    first, last = (layers, layers + cfg.n_stages - 1) if phase == "draft" else (0, layers - 1)
    if phase == "draft" and 0 <= layer < cfg.n_stages:
        layer += layers
    if not first <= layer <= last:
        raise RequestError(f"phase '{phase}' has no layer {layer}, it has {first}..{last}",
                           where="--layer", next="choose one of them, or another --phase")
    return phase, layer


def passes_to_print(given: list[str], known: list[str]) -> set[str]:
    """The passes to print after; "all" stands for each."""
    for name in given:
        if name not in known and name != "all":
            raise RequestError(f"no pass '{name}', the target has {', '.join(known)}",
                               where="--print-after", next="choose one of them, or 'all'")
    return set(known) if "all" in given else set(given)
