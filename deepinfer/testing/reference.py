"""A device that runs graphs over their numpy references: what a compiled Program must equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.graph.config import ModelConfig
from deepinfer.graph.derived import weight_sources
from deepinfer.ir.eval import evaluate
from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.types import Kind, Sym
from deepinfer.runtime.devices.state import StateAccess
from deepinfer.runtime.weights import load_weights

Array = np.ndarray[Any, Any]


class EvaluatorDevice(StateAccess):
    """Runs phases of source or lowered graphs; stands in for a device in tests.

    Args:
        graphs: by phase. model: a checkpoint directory. cfg: its config.
        sizes: "num_slots", "num_pages", "pages_per_seq".
        poison: start state as NaN patterns instead of zeros.
    """

    def __init__(self, graphs: Mapping[str, Graph], cfg: ModelConfig, model: Path,
                 sizes: Mapping[str, int], *, poison: bool = True) -> None:
        self.graphs, self.sizes = dict(graphs), dict(sizes)
        self.calls = 0
        wanted = {v.name: v for g in graphs.values() for v in g.of_kind(Kind.WEIGHT)}
        self._arrays: dict[str, Array] = load_weights(weight_sources(cfg, wanted.values()), model)
        self.state: dict[str, Array] = {}
        paged: list[str] = []
        for graph in graphs.values():
            for v in graph.of_kind(Kind.STATE):
                if v.name not in self.state:
                    array = np.zeros(v.type.storage(self.sizes), v.type.dtype.numpy)
                    if poison:
                        array.view(np.uint8)[...] = 0xFF
                    self.state[v.name] = array
                    first = v.type.shape[0]
                    if isinstance(first, Sym) and first.name == "num_pages":
                        paged.append(v.name)
        self.paged = tuple(paged)

    def run(self, phase_name: str, inputs: Mapping[str, Array], *,
            trace: Iterable[str] = ()) -> dict[str, Array]:
        """As CpuDevice.run: outputs and traced values by name."""
        wanted, traced = set(trace), {}

        def watch(node: Node, arrays: tuple[Array, ...]) -> None:
            for value, array in zip(node.outputs, arrays, strict=True):
                if value.name in wanted:
                    traced[value.name] = array.copy()

        self.calls += 1
        outputs = evaluate(self.graphs[phase_name], {**self._arrays, **self.state, **inputs},
                           watch=watch)
        return outputs | traced

    def close(self) -> None:
        """Nothing to release."""
