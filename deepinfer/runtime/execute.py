"""Execute: one step's calls of the device, from rows to chosen tokens and from tokens to drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from deepinfer.program import Program
from deepinfer.runtime.batch import Rows, build_inputs
from deepinfer.runtime.draft_batch import Anchors, Context, build_draft_inputs
from deepinfer.runtime.rejection import draft_seed
from deepinfer.runtime.sampler import Sampled
from deepinfer.runtime.timeline import Timeline

Array = np.ndarray[Any, Any]
_SAMPLED = ("token", "logprob", "top_ids", "top_logprobs")
Masks = Mapping[tuple[str, int], Array]


class Device(Protocol):
    """What the engine needs of a device. It holds weights and state."""

    def run(self, phase_name: str, inputs: Mapping[str, Array], *, trace: Iterable[str] = ()
            ) -> dict[str, Array]:
        """The phase's outputs and the traced values, by name.

        A device may also have ``prepare``, with the same arguments: a ``run`` with them is likely
        to come soon.
        """

    def read_slot(self, slot: int, names: Iterable[str]) -> dict[str, Array]:
        """Copies of one slot's rows of the named state."""

    def write_slot(self, slot: int, arrays: Mapping[str, Array]) -> None:
        """Replace them."""

    def read_pages(self, page_ids: Sequence[int]) -> dict[str, Array]:
        """Copies of these pages of every paged cache."""

    def write_pages(self, page_ids: Sequence[int], arrays: Mapping[str, Array]) -> None:
        """Replace them."""


@dataclass(slots=True)  # not frozen: that takes longer to make, and the device waits
class TargetStep:
    """What the target made of a batch.

    Args:
        phase: that ran. inputs, outputs: its arrays by name, with the traced ones.
        sampled: chosen tokens by sampled row. hidden: bf16[kept rows, taps*d], or None.
    """

    phase: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    sampled: Sampled
    hidden: Array | None


@dataclass(frozen=True, slots=True)
class Drafts:
    """What the draft proposed, by drafting request.

    Args:
        tokens: i32[D, block]. confidences: f32[D, block].
        logits: f32[D, block, V] after penalties and masks, if asked for.
    """

    tokens: Array
    confidences: Array
    logits: Array | None = None


class Executor:
    """Args:
        program: whose phases to run. device: where. pages_per_seq: width of its page tables.
        calibration: temperatures of the draft's confidences.
    """

    def __init__(self, program: Program, device: Device, pages_per_seq: int,
                 calibration: Sequence[float]) -> None:
        self.program, self.device, self.pages_per_seq = program, device, pages_per_seq
        self.facts: Mapping[str, Any] = program.manifest["facts"]
        self.calibration = np.array(calibration, np.float32)
        self.timeline: Timeline | None = None

    def phase_for(self, batch: Sequence[Rows]) -> str:
        """"decode" when every request has the one row it samples, "verify" when each has an anchor
        and drafts, else "prefill", which runs any rows. No bit depends on which."""
        if all(len(rows) == 1 and rows.sample != "none" for rows in batch):
            return "decode"
        whole = all(rows.request.decoding and rows.sample == "all" for rows in batch)
        return "verify" if whole and "verify" in self.program.phases else "prefill"

    def target(self, batch: Sequence[Rows], masks: Masks | None = None, trace: Iterable[str] = (),
               phase: str | None = None, inputs: Mapping[str, Array] | None = None
               ) -> Callable[[], TargetStep]:
        """Make the inputs of the target on a batch; what is returned runs it.

        Args:
            phase: None lets the batch decide. inputs: of the phase, if made already.
        """
        name = phase or self.phase_for(batch)
        if inputs is None:
            with Timeline.host(self.timeline):
                inputs = build_inputs(self.program.phases[name], batch, self.facts, masks=masks,
                                      pages_per_seq=self.pages_per_seq)
        given, roles = inputs, self.facts["outputs"][name]

        def run() -> TargetStep:
            with Timeline.device(self.timeline):
                outputs = self.device.run(name, given, trace=trace)
            token, chosen, top_ids, top = (outputs[roles[r]] for r in _SAMPLED)
            sampled = Sampled(token, chosen, top_ids, top, all(map(math.isfinite, chosen.tolist())))
            return TargetStep(name, given, outputs, sampled,
                              outputs[roles["hidden"]] if "hidden" in roles else None)

        return run

    def draft(self, step: TargetStep, context: Context, anchors: Anchors,
              masks: Mapping[int, Array] | None = None, *, own_noise: bool = False
              ) -> Callable[[], Drafts]:
        """Make the inputs of the draft; what is returned seeds its rings with the committed rows
        and proposes a block after each anchor.

        Args:
            own_noise: sample with seeds of the draft's own and return its logits, as rejection
                sampling needs them; else with the target's noise.
        """
        assert step.hidden is not None
        with Timeline.host(self.timeline):
            inputs = build_draft_inputs(
                self.program.phases["draft"], context, step.hidden, anchors, self.facts,
                calibration=self.calibration, masks=masks)
        roles = self.facts["outputs"]["draft"]
        trace: list[str] = []
        if own_noise:
            inputs["seed"] = np.array([draft_seed(r.params.seed, len(r.tokens))
                                       for r in anchors.requests], np.uint64)
            trace = [f"draft.{k}.adjusted" for k in range(int(self.facts["block"]))]

        def run() -> Drafts:
            with Timeline.device(self.timeline):
                outputs = self.device.run("draft", inputs, trace=trace)
            tokens, confidences, *logits = (
                np.stack([outputs[name] for name in names], axis=1)
                for names in (roles["tokens"], roles["confidences"], trace) if names)
            return Drafts(tokens, confidences, logits[0] if logits else None)

        return run
