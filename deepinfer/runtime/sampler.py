"""Sampling from the runtime's side: fill the inputs of the compiled sampler, read its outputs.

The choice itself (temperature, filters, noise, argmax, logprobs) is compiled into the Program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.program import Phase
from deepinfer.runtime.request import SamplingParams, TokenLogprobs

Array = np.ndarray[Any, Any]
_I32_MAX = 2**31 - 1


def sampling_inputs(rows: Sequence[tuple[SamplingParams, int]]) -> dict[str, Array]:
    """The sampler's inputs.

    Args:
        rows: of each sampled row, its request's params and the absolute index of the token that is
            chosen there. Noise is keyed by (seed, index), so it depends on nothing else.

    Returns:
        temperature f32, top_k i32 (0 is off), top_p f32, min_p f32, seed u64, sample_position i32.
    """
    params = [p for p, _ in rows]
    return {
        "temperature": np.array([p.temperature for p in params], np.float32),
        "top_k": np.array([min(max(p.top_k, 0), _I32_MAX) for p in params], np.int32),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "seed": np.array([p.seed for p in params], np.uint64),
        "sample_position": np.array([position for _, position in rows], np.int32),
    }


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampler's outputs of one step, by sampled row.

    Args:
        tokens: i32[Q]. chosen: f32[Q], their logprobs. top_ids, top: [Q,k], the best ones'.
    """

    tokens: Array
    chosen: Array
    top_ids: Array
    top: Array

    @staticmethod
    def of(phase: Phase, outputs: Mapping[str, Array]) -> Sampled:
        """From what a device returned; a forward phase's outputs begin with these four."""
        return Sampled(*(outputs[name] for name in phase.outputs[:4]))

    def not_finite(self, row: int) -> bool:
        """Whether the row's logits were not all finite: one NaN makes the log-sum NaN."""
        return not bool(np.isfinite(self.chosen[row]))

    def logprobs(self, row: int, count: int) -> TokenLogprobs:
        """The row's logprobs with the best ``count`` alternatives."""
        best = zip(self.top_ids[row, :count].tolist(), self.top[row, :count].tolist(), strict=True)
        return TokenLogprobs(float(self.chosen[row]), list(best))
