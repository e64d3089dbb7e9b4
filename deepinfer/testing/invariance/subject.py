"""What a check is about: something that makes engines with one setting changed at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from deepinfer.program import Program
from deepinfer.runtime.engine import Engine

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How an engine is set up. The defaults are the reference: nothing shared, nothing guessed.

    Args:
        chunk: rows of a prefill chunk; None: the engine's own. rows: rows of a step at most.
        seqs: requests that run at once. pages: of the pool; None: enough for all of them.
        prefix_cache, cache_dir, replay, keep_tokens, draft, draft_width, overlap: as ``Engine``'s.
        threads: of the device; None: all cores. isa: level to force; None: the highest.
        fill: a byte that all state is filled with before use.
        nan_token: a token id whose embedding is NaN, so that its requests' rows are.
    """

    chunk: int | None = None
    rows: int | None = None
    seqs: int = 8
    pages: int | None = None
    prefix_cache: str = "off"
    cache_dir: Path | None = None
    replay: str = "off"
    keep_tokens: int | None = None
    draft: str = "off"
    draft_width: int | None = None
    overlap: bool = False
    threads: int | None = None
    isa: str | None = None
    fill: int | None = None
    nan_token: int | None = None

    @property
    def of_engine(self) -> dict[str, Any]:
        """The arguments of ``Engine`` that it decides."""
        return {"prefill_chunk": self.chunk, "prefix_cache": self.prefix_cache,
                "cache_dir": self.cache_dir, "replay": self.replay,
                "keep_tokens": self.keep_tokens, "draft": self.draft,
                "draft_width": self.draft_width, "overlap": self.overlap}


REFERENCE = Setting()
Wrap: TypeAlias = Callable[[Any, Setting], Any]  # puts something around a device


@dataclass(frozen=True, slots=True)
class Made:
    """Where values of a phase come from.

    Args:
        op: the op that makes them. loc: its place in the model ("layers.3.attn").
        values: their names.
    """

    op: str
    loc: str
    values: tuple[str, ...]

    @property
    def layer(self) -> int | None:
        parts = self.loc.split(".")
        return int(parts[1]) if parts[0] == "layers" and len(parts) > 1 else None


class Subject(Protocol):
    """Makes engines of one Program and one set of weights."""

    @property
    def program(self) -> Program:
        """The Program under test."""

    @property
    def grammar(self) -> bool:
        """Whether requests may have structured output."""

    @property
    def levels(self) -> tuple[str, ...]:
        """ISA levels this machine runs, the reference's last."""

    def engine(self, setting: Setting, wrap: Wrap) -> Engine:
        """A new engine on a new device, which ``wrap`` has been put around."""

    def made(self, phase: str) -> Sequence[Made]:
        """The nodes of a phase in execution order; empty if they are not known."""

    def describe(self) -> Mapping[str, Any]:
        """What results depend on, for the certificate: digests and versions."""

    def spec(self) -> Mapping[str, Any] | None:
        """JSON that makes an equal subject in another process, as "module", "function" and "args";
        None if there is no way to."""

    def rebuild(self, directory: Path) -> tuple[str | None, str]:
        """Compile the Program anew, with nothing cached, under ``directory``; its digest.

        Returns:
            The digest and "", or None and the reason why it cannot be compared.
        """


def fill_state(state: Mapping[str, Array], byte: int) -> None:
    """Write one byte all over a device's state."""
    for array in state.values():
        array.view(np.uint8)[...] = byte


class Watch:
    """A device that notes in which phases it was run, and changes nothing."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.phases: dict[str, int] = {}

    def run(self, phase_name: str, inputs: Mapping[str, Array], *, trace: Sequence[str] = ()
            ) -> dict[str, Array]:
        self.phases[phase_name] = self.phases.get(phase_name, 0) + 1
        out: dict[str, Array] = self.inner.run(phase_name, inputs, trace=trace)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

