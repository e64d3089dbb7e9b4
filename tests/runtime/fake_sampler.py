"""What a fake device chooses: the sampler's transforms on made-up logits of a history.

The same choice, made from a request's prompt and params alone, is what the engine must arrive at
whatever it did meanwhile. Only the transforms are shared: counts, masks and stops are its own.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.runtime.request import SamplingParams

Array = np.ndarray[Any, Any]
History = tuple[int, ...]
Choose = Callable[[History], int]
VOCAB, EOS = 512, 1
BYTES = range(3, 259)  # ids of a byte each: what is chosen unless a bias or mask says otherwise
_IDS = np.arange(VOCAB, dtype=np.uint32)


def by_hash(history: History) -> int:
    """A token 3..258 (a byte) that depends on every earlier one."""
    return 3 + zlib.crc32(np.array(history, np.int32).tobytes()) % 256


def logits_of(history: History, noise: tuple[float, ...] = ()) -> Array:
    """f32[512] below 4 that depend on every token and on the noise; bytes are above all others."""
    seed = zlib.crc32(np.array(history, np.int32).tobytes(), zlib.crc32(repr(noise).encode()))
    mixed = (_IDS ^ np.uint32(seed)) * np.uint32(0x9E3779B1)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x85EBCA77)
    mixed ^= mixed >> np.uint32(13)
    made = mixed.astype(np.float32) * np.float32(3 / 2**32)
    made[:BYTES.start] -= 4
    made[BYTES.stop:] -= 4
    return made


@dataclass(frozen=True)
class Setting:
    """What one sampled row is told besides its history.

    Args:
        noise: seed, temperature and filters, or () for the likeliest token.
        penalties: repetition, frequency, presence. counts: of output tokens. seen: ids in prompt
            or output. bias: by id. allowed: bool[512] or None.
    """

    noise: tuple[float, ...] = ()
    penalties: tuple[float, float, float] = (1, 0, 0)
    counts: Mapping[int, int] = field(default_factory=dict)
    seen: Collection[int] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Array | None = None

    @property
    def plain(self) -> bool:
        return (not self.noise and self.penalties == (1, 0, 0) and not self.bias
                and self.allowed is None)

    def logits(self, history: History, choose: Choose) -> Array:
        """After penalties, bias and mask."""
        x = logits_of(history, self.noise)
        if not self.noise:
            x[choose(history)] = 4
        repetition, frequency, presence = self.penalties
        seen, counted = list(self.seen), list(self.counts)
        x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
        x[counted] -= [frequency * n + presence * (n > 0) for n in self.counts.values()]
        x[list(self.bias)] += list(self.bias.values())
        return x if self.allowed is None else np.where(self.allowed, x, np.float32(-np.inf))

    def choose(self, history: History, choose: Choose) -> int:
        return choose(history) if self.plain else int(self.logits(history, choose).argmax())


def setting_of(inputs: Mapping[str, Array], q: int, recent: Sequence[int], mask_row: int
               ) -> Setting:
    """What the inputs of a phase say about row (or drafting request) ``q``.

    Args:
        recent: drafts before it. mask_row: its row of the masks, or -1.
    """
    noise: tuple[float, ...] = ()
    if inputs["temperature"][q] > 0:
        noise = (int(inputs["seed"][q]), *(round(float(inputs[n][q]), 6) for n in (
            "temperature", "top_k", "top_p", "min_p")))
    part = slice(*inputs["adjust_spans"][q].tolist())
    ids = inputs["adjust_ids"][part].tolist()
    assert ids == sorted(set(ids))
    counts = Counter(dict(zip(ids, inputs["adjust_counts"][part].tolist(), strict=True)))
    counts.update(recent)
    seen = {i for i, s in zip(ids, inputs["adjust_seen"][part], strict=True) if s} | set(recent)
    bias = dict(zip(ids, inputs["adjust_bias"][part].tolist(), strict=True))
    allowed = None
    if mask_row >= 0:
        bits = np.unpackbits(inputs["masks"][mask_row].view(np.uint8), bitorder="little")
        allowed = bits[:VOCAB].astype(bool)
        assert allowed.any()
    penalties = tuple(round(float(inputs[n][q]), 6) for n in (
        "repetition", "frequency", "presence"))
    return Setting(noise, penalties, counts, seen, {i: b for i, b in bias.items() if b}, allowed)


def solo_tokens(prompt: Sequence[int], params: SamplingParams, choose: Choose = by_hash,
                grammar: Callable[[int], Array] | None = None) -> list[int]:
    """The output of a request, made from its prompt and params alone, up to stop ids and length.

    Args:
        grammar: bool[512] allowed after so many output tokens.
    """
    p = params
    enders = set(p.stop_token_ids) | (set() if p.ignore_eos else {EOS})
    filters = (p.temperature, float(max(0, p.top_k)), p.top_p, p.min_p)
    noise = (p.seed, *filters) if p.temperature else ()
    output: list[int] = []
    while len(output) < p.max_tokens and not (output and output[-1] in enders):
        allowed = np.full(VOCAB, p.allowed_token_ids is None)
        allowed[list(p.allowed_token_ids or ())] = True
        if len(output) < p.min_tokens:
            allowed[sorted(enders)] = False
        if grammar is not None:
            allowed &= grammar(len(output))
        setting = Setting(
            noise, (p.repetition_penalty, p.frequency_penalty, p.presence_penalty),
            Counter(output), {*prompt, *output}, p.logit_bias, None if allowed.all() else allowed)
        output.append(setting.choose((*prompt, *output), choose))
    return output
