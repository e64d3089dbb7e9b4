"""The usual subject: a checkpoint with its compiled Program, on the cpu device."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.compiler import compile, content_key, read_config
from deepinfer.errors import RequestError
from deepinfer.graph.limits import Limits
from deepinfer.program import Program
from deepinfer.runtime.devices.cpu import CpuDevice
from deepinfer.runtime.devices.isa import host_levels
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.prepacked import open_weights
from deepinfer.runtime.state import StateSizes
from deepinfer.runtime.text import Text
from deepinfer.runtime.weight_store import WeightStore
from deepinfer.targets.base import load_target
from deepinfer.testing.invariance.subject import Made, Setting, Wrap, fill_state

EMBEDDING = "embed.weight"
SNAPSHOT_INTERVAL = 8  # pages
LONGEST = 16  # pages that a request of a check can have; state for more would be for nothing
LINE = re.compile(r"^  (?:(?P<left>%.*?) = )?(?P<op>\w+)\(.*?(?:   # (?P<loc>\S+))?$")
NAME = re.compile(r"%(\S+?): ")


class ModelSubject:
    """Args:
        model: a checkpoint directory. program: a Program for it or its directory; None: compile
            one, or take it from the cache.

    Raises:
        CheckpointError, ProgramError, ToolchainError: as ``LLM``.
    """

    def __init__(self, model: Path, program: Program | str | Path | None = None) -> None:
        self.model = Path(model)
        cfg = read_config(self.model)
        if program is None:
            program = compile(cfg)
        elif not isinstance(program, Program):
            program = Program.load(program)
        program.require(target="cpu", model=cfg.to_json())
        self.cfg, self._program = cfg, program
        self.limits = Limits(**program.manifest["limits"])
        self._by_level: dict[str, Program] = dict.fromkeys(program.manifest["isa"], program)
        self._weights = open_weights(program, self.model, WeightStore.default()).arrays
        self._text = Text.load(self.model, program.manifest["facts"]["bos"])

    @property
    def program(self) -> Program:
        return self._program

    @property
    def grammar(self) -> bool:
        return self._text is not None

    @property
    def levels(self) -> tuple[str, ...]:
        """Those of this machine up to the highest that the Program holds."""
        host = host_levels()
        highest = [level for level in host if level in self._program.manifest["isa"]][-1]
        return host[:host.index(highest) + 1]

    def encode(self, text: str) -> list[list[int]]:
        """Token ids of a text's paragraphs, of those that are not empty.

        Raises:
            RequestError: the model has no tokenizer, or the text holds nothing.
        """
        if self._text is None:
            raise RequestError("the model has no tokenizer.json, expected one for a text",
                               where=str(self.model), next="leave the text out")
        found = [list(self._text.encode(part)) for part in text.split("\n\n") if part.strip()]
        if not found:
            raise RequestError("the text is empty, expected some paragraphs", where="text",
                               next="give another text, or none")
        return found

    def at_level(self, level: str) -> Program:
        """The Program; if it lacks the level, the same graphs compiled for it."""
        if level not in self._by_level:
            self._by_level[level] = compile(self.cfg, limits=self.limits, isa=[level])
        return self._by_level[level]

    def engine(self, setting: Setting, wrap: Wrap) -> Engine:
        level = setting.isa or self.levels[-1]
        program = self.at_level(level)
        length = min(self.limits.max_model_len, LONGEST * self.limits.page_size)
        cached = setting.prefix_cache == "exact"
        sizes = StateSizes.plan(program, max_num_seqs=min(setting.seqs, self.limits.max_num_seqs),
                                max_model_len=length,
                                snapshot_interval=SNAPSHOT_INTERVAL if cached else None)
        if setting.pages is not None:
            sizes = replace(sizes, num_pages=setting.pages)
        weights = self._weights
        if setting.nan_token is not None:
            poisoned = weights[EMBEDDING].copy()
            poisoned[setting.nan_token] = np.nan
            weights = {**weights, EMBEDDING: poisoned}
        with forced(level):
            device = CpuDevice(program, weights, sizes.for_device(), num_threads=setting.threads)
        if setting.fill is not None:
            fill_state(device.state, setting.fill)
        rows = setting.rows or self.limits.max_num_batched_tokens
        if setting.chunk is not None:  # a Program for few rows has no room for larger ones
            width = 0 if setting.draft == "off" else self.limits.draft_width
            room = rows - (sizes.num_slots - 1) * (1 + width)
            setting = replace(setting, chunk=min(setting.chunk, room))
        return Engine(program, wrap(device, setting), sizes, text=self._text, model=self.model,
                      max_num_batched_tokens=rows, max_model_len=length,
                      snapshot_interval=SNAPSHOT_INTERVAL, **setting.of_engine)

    def made(self, phase: str) -> Sequence[Made]:
        text = (self._program.path / "graphs" / f"{phase}.txt").read_text(encoding="utf-8")
        return parse_nodes(text)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over all weights."""
        from deepinfer.checkpoint.reader import CheckpointReader

        with CheckpointReader(self.model) as reader:
            return reader.fingerprint()

    def describe(self) -> Mapping[str, Any]:
        manifest = self._program.manifest
        return {"model": self.model.resolve().name, "program": self._program.digest,
                "weights": self.fingerprint, "target": manifest["target"],
                "isa": list(manifest["isa"]), "limits": dict(manifest["limits"]),
                "compiled_with": dict(manifest["versions"])}

    def spec(self) -> Mapping[str, Any] | None:
        return {"module": __name__, "function": "reopen",
                "args": {"model": str(self.model.resolve()),
                         "program": str(self._program.path.resolve())}}

    def rebuild(self, directory: Path) -> tuple[str | None, str]:
        levels = tuple(self._program.manifest["isa"])
        key = content_key(self.cfg, self.limits, load_target("cpu"), levels)
        if key != self._program.manifest["key"]:
            return None, "the Program was compiled from other sources or by other tools"
        with environment("DEEPINFER_CACHE_DIR", str(directory / "cache")):
            return compile(self.cfg, limits=self.limits, isa=levels,
                           out=directory / "program").digest, ""


def reopen(model: str, program: str) -> ModelSubject:
    """A subject from its ``spec``."""
    return ModelSubject(Path(model), program)


def parse_nodes(text: str) -> list[Made]:
    """The nodes of a graph's text, in order."""
    found = (LINE.match(line) for line in text.splitlines())
    return [Made(m["op"], m["loc"] or "", tuple(NAME.findall(m["left"] or ""))) for m in found if m]


def forced(level: str) -> Any:
    """Force an ISA level for devices that are made meanwhile."""
    return environment("DEEPINFER_CPU_ISA", level)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """An environment variable with another value for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
