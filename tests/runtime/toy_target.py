"""A target model in a few lines: logits are a function of the history, the rest is the real thing.

Sampler inputs come from the runtime, the choice from the ops' references, and the tokens go through
``commit``. So requests run here as they do in an engine, with any drafts, in milliseconds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from deepinfer.graph.byte_tokenizer import byte_level_tokenizer
from deepinfer.ops.adjust import adjust_logits, force_token
from deepinfer.ops.sample import logprobs, sample
from deepinfer.runtime.commit import commit, commit_prompt
from deepinfer.runtime.draft import accept
from deepinfer.runtime.request import Request, SamplingParams
from deepinfer.runtime.sampler import Sampled, SampleRow, sampling_inputs
from deepinfer.runtime.text import Text

V = 512
EOS = frozenset({1})
TEXT = Text(byte_level_tokenizer(V), bos=0)
BYTES = {TEXT.token_bytes(i): i for i in range(3, 259)}
History = tuple[int, ...]
Logits = Callable[[History], np.ndarray[Any, Any]]


def ids_of(raw: str | bytes) -> list[int]:
    """One token for each byte."""
    return [BYTES[bytes([b])] for b in (raw.encode() if isinstance(raw, str) else raw)]


def by_hash(history: History) -> np.ndarray[Any, Any]:
    """Logits that depend on every earlier token; few of them matter, so that tokens repeat."""
    rng = np.random.default_rng(zlib.crc32(np.array(history, np.int32).tobytes()))
    logits = np.full(V, -20, np.float32)
    logits[:24] = rng.normal(0, 2, 24).astype(np.float32)
    return logits


def script(prompt: Sequence[int], tokens: Sequence[int]) -> Logits:
    """Logits that make greedy decoding give these tokens, then the first again."""
    def logits(history: History) -> np.ndarray[Any, Any]:
        at = len(history) - len(prompt)
        return np.where(np.arange(V) == tokens[at % len(tokens)], 5, 0).astype(np.float32)
    return logits


def make(prompt: Sequence[int], params: SamplingParams, max_model_len: int = 200) -> Request:
    return Request.make("r", list(prompt), params, vocab_size=V, eos=EOS, text=TEXT,
                        max_model_len=max_model_len)


def choose(rows: Sequence[SampleRow], logits: np.ndarray[Any, Any], width: int) -> Sampled:
    """What the compiled sampler does with a step's logits."""
    x = sampling_inputs(rows, V, width)
    adjusted = adjust_logits(
        logits, x["adjust_spans"], x["adjust_ids"], x["adjust_counts"], x["adjust_seen"],
        x["adjust_bias"], x["repetition"], x["frequency"], x["presence"], x["recent"],
        x["mask_row"], x["masks"])
    token = sample(adjusted, x["temperature"], x["top_k"], x["top_p"], x["min_p"], x["seed"],
                   x["sample_position"], purpose=0)
    token = force_token(token, x["forced"])
    return Sampled(token, *logprobs(logits, token, k=20))


def run(request: Request, logits: Logits = by_hash, drafts: Sequence[int] = (), width: int = 0,
        right: int = 0, preempt_at: int = -1) -> tuple[Request, list[int]]:
    """Decode a request to its end.

    Args:
        drafts: the tokens plain decode gives: the scripted drafter S(right) proposes the next
            ``right`` of them, then wrong ones. width: drafts of a step.
        preempt_at: after so many tokens it loses its state once.

    Returns:
        The request, and how many drafts each step accepted.
    """
    accepted, step = [], 0
    while not request.finished:
        step += 1
        known, made = len(request.tokens), request.made
        if made == preempt_at and not request.metrics.preemptions:
            request.restart()
        room = min(width, request.max_len - known - 1)
        good = list(drafts[made:made + right])
        proposed = (good + [(drafts[made + k] + 1) % V if made + k < len(drafts) else 7
                            for k in range(len(good), room)])[:room]
        rows = [SampleRow(request, known + k, tuple(proposed[:k])) for k in range(room + 1)]
        seen = [tuple(request.tokens + proposed[:k]) for k in range(room + 1)]
        sampled = choose(rows, np.stack([logits(h) for h in seen]), width)
        tokens = sampled.tokens.tolist()
        count = accept(proposed, tokens)
        accepted.append(count)
        commit(request, tokens[:count + 1], sampled, 0, step=step, now=float(step))
    return request, accepted


def prefill(request: Request, chunk: int, logits: Logits = by_hash) -> None:
    """Compute a prompt's logprobs in chunks."""
    for start in range(0, request.prompt_len - 1, chunk):
        rows = [SampleRow(request, p + 1, forced=request.tokens[p + 1])
                for p in range(start, min(start + chunk, request.prompt_len - 1))]
        seen = [tuple(request.tokens[:row.position]) for row in rows]
        sampled = choose(rows, np.stack([logits(h) for h in seen]), 0)
        commit_prompt(request, sampled, 0, start + 1, len(rows), step=1)
