"""Subjects for the tests of the harness: the real engine on a device of hashes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.checkpoint import write_checkpoint
from deepinfer.compiler import build_graphs, facts
from deepinfer.graph.limits import Limits
from deepinfer.graph.make_model import tiny_config
from deepinfer.ir import Graph
from deepinfer.ir.types import Sym
from deepinfer.program import Phase, Program, ValueInfo
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.state import StateSizes
from deepinfer.settings import usable_cpus
from deepinfer.testing.invariance.subject import Made, Setting, Wrap, fill_state
from tests.determinism.hash_device import HashDevice

PAGE = 8


class HashSubject:
    """Args: levels: to pretend to. digest: of the Program; rebuilt: of it built again.
    page, length: tokens of a page and of a request at most.
    """

    def __init__(self, *, levels: Sequence[str] = ("generic", "avx2"), digest: str = "d0",
                 rebuilt: str | None = "d0", page: int = PAGE, length: int = 128) -> None:
        self._args = {"levels": list(levels), "digest": digest, "rebuilt": rebuilt,
                      "page": page, "length": length}
        self._length = length
        self._levels, self._rebuilt = tuple(levels), rebuilt
        self._checkpoint: tempfile.TemporaryDirectory[str] | None = None
        cfg = tiny_config()
        limits = Limits.for_model(cfg, page_size=page, max_model_len=length)
        self.graphs = build_graphs(cfg, limits)
        manifest = {"facts": facts(cfg, limits, self.graphs), "model": cfg.to_json(),
                    "target": "hash", "digest": digest, "limits": {}}
        self._program = Program(Path("hash"), manifest,
                                {n: _phase(g) for n, g in self.graphs.items()})

    @property
    def program(self) -> Program:
        return self._program

    @property
    def grammar(self) -> bool:
        return False

    @property
    def levels(self) -> tuple[str, ...]:
        return self._levels

    def engine(self, setting: Setting, wrap: Wrap) -> Engine:
        program = self._program
        sizes = StateSizes.plan(program, max_num_seqs=setting.seqs,
                                max_model_len=self._length,
                                snapshot_interval=8 if setting.prefix_cache == "exact" else None)
        if setting.pages is not None:
            sizes = replace(sizes, num_pages=setting.pages)
        device = HashDevice(self.graphs, program.manifest["facts"], sizes.for_device(),
                            nan_token=setting.nan_token, threads=setting.threads or usable_cpus(),
                            isa=setting.isa or self._levels[-1])
        if setting.fill is not None:
            fill_state(device.state, setting.fill)
        return Engine(program, wrap(device, setting), sizes, model=self._model(setting),
                      max_num_batched_tokens=setting.rows or 256, **setting.of_engine)

    def _model(self, setting: Setting) -> Path | None:
        """A checkpoint of one tensor: what is kept on disk is kept under its fingerprint."""
        if setting.cache_dir is None:
            return None
        if self._checkpoint is None:
            self._checkpoint = tempfile.TemporaryDirectory()
            write_checkpoint(Path(self._checkpoint.name), {"w": np.zeros(1, np.float32)})
        return Path(self._checkpoint.name)

    def made(self, phase: str) -> Sequence[Made]:
        return [Made(n.op.name, n.loc, tuple(v.name for v in n.outputs))
                for n in self.graphs[phase].nodes]

    def describe(self) -> Mapping[str, Any]:
        return {"program": self._args["digest"]}

    def spec(self) -> Mapping[str, Any] | None:
        return {"module": __name__, "function": "HashSubject", "args": self._args}

    def rebuild(self, directory: Path) -> tuple[str | None, str]:
        return self._rebuilt, "it is not there"


def _phase(graph: Graph) -> Phase:
    values = tuple(ValueInfo(v.name, v.kind.value, v.type.dtype.name, tuple(
        (d.name, d.times) if isinstance(d, Sym) else d for d in v.type.shape), 0)
        for v in graph.values())
    sizes = dict.fromkeys(d.name for v in graph.values() for d in v.type.shape
                          if isinstance(d, Sym))
    return Phase(graph.name, values, tuple((s, 0) for s in sizes),
                 tuple(v.name for v in graph.outputs), 0, 0, ())
