"""The requests that a check serves: prompts and parameters from a seed, the same on any machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.runtime.request import SamplingParams

MAX_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a check.

    Args:
        name: its id. prompt: token ids. params: how to sample.
    """

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams


def draw_ids(facts: Mapping[str, Any], count: int, seed: int) -> tuple[int, ...]:
    """Ordinary token ids: neither an end of text nor the id that marks a draft's noise."""
    special = {facts["bos"], *facts["eos"], facts.get("noise_token")}
    allowed = np.array([t for t in range(int(facts["vocab_size"])) if t not in special])
    return tuple(np.random.Generator(np.random.PCG64(seed)).choice(allowed, count).tolist())


def new_job(facts: Mapping[str, Any], name: str, length: int, seed: int,
            params: SamplingParams) -> Job:
    """A request with a random prompt of ``length`` tokens, or as many as fit beside its output."""
    longest = int(facts["max_model_len"]) - params.max_tokens - 1
    return Job(name, draw_ids(facts, max(1, min(length, longest)), seed), params)


def cut_prompt(texts: Sequence[Sequence[int]], first: int, length: int) -> tuple[int, ...]:
    """So many tokens of the text at ``first`` and, where it is shorter, of those after it, round
    and round; none if all are empty."""
    made: list[int] = []
    while len(made) < length and any(texts):
        made += texts[first % len(texts)]
        first += 1
    return tuple(made[:length])


def prompt_lengths(facts: Mapping[str, Any]) -> list[int]:
    """Lengths around what can go wrong: page ends (also reached while decoding), the window, odd
    and even ends, a single token."""
    page, window = int(facts["page_size"]), int(facts["window"])
    return [page + 3, 2 * page - 4, 5, window + page // 2 + 1, 2 * page + page // 2 + 1, 1]


def sampling_kinds(facts: Mapping[str, Any], seed: int, *, grammar: bool) -> list[dict[str, Any]]:
    """Parameters that between them use every rule of sampling and stopping.

    Args:
        seed: of the first; the others count up. grammar: whether the model has a tokenizer, which
            structured output needs; without one an allow-list takes its place.
    """
    some = sorted(set(draw_ids(facts, 12, seed + 77)))
    last: dict[str, Any] = {"structured": {"choice": ["yes, of course", "no, never"]}} if grammar \
        else {"allowed_token_ids": some}
    return [
        {"temperature": 1.0, "logprobs": 3, "ignore_eos": True},
        {"temperature": 0.0, "logprobs": 5, "ignore_eos": True},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5,
         "frequency_penalty": 0.25, "logprobs": 1, "ignore_eos": True},
        {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "logit_bias": {some[0]: 1.5, some[1]: -3},
         "logprobs": 2, "ignore_eos": True},
        {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": some, "logprobs": 0},
        {"temperature": 1.0, "logprobs": 2, **last},
    ]


def make_jobs(facts: Mapping[str, Any], *, count: int, seed: int, grammar: bool,
              max_tokens: int = MAX_TOKENS, texts: Sequence[Sequence[int]] = ()) -> list[Job]:
    """``count`` requests: lengths and kinds of parameters in turn, seeds all different.

    Args:
        facts: of the Program. seed: decides all of it. grammar: see ``sampling_kinds``.
        texts: token lists that prompts are cut from; without any they are random ids.
    """
    lengths, kinds = prompt_lengths(facts), sampling_kinds(facts, seed, grammar=grammar)
    longest = int(facts["max_model_len"]) - max_tokens - 1
    jobs = []
    for i in range(count):
        length = max(1, min(lengths[i % len(lengths)] + i // len(lengths), longest))
        prompt = draw_ids(facts, length, seed * 1000 + i)
        if texts:
            prompt = cut_prompt(texts, i, length) or prompt
        # Lengths repeat after six requests, kinds after six of those: the pairs differ for 36.
        kind = kinds[(i + i // len(kinds)) % len(kinds)]
        params = SamplingParams(max_tokens=max_tokens, seed=seed * 100 + i, **kind)
        jobs.append(Job(f"r{i}", prompt, params))
    return jobs
