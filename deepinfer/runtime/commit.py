"""Commit: what chosen tokens do to a request.

A step gives a request a run of tokens: the drafts that were accepted and the one after them. They
are applied one by one, exactly as plain decode would, and what comes after the first stop is
dropped. So the width of a draft changes neither the ids nor the reason nor the usage.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.errors import DeepInferError, RequestError
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampler import Sampled


def commit(request: Request, tokens: Sequence[int], sampled: Sampled, row: int, *, step: int,
           now: float = 0.0) -> int:
    """Append a run of tokens up to the first that ends the request.

    For each token, in this order: logits that are not finite end it with an error; the token is
    appended, counted and given its logprobs; an end-of-text or stop id ends it; a token that its
    grammar refuses is an error; a stop text ends it; a grammar after which nothing can follow ends
    it; max_tokens and the context's end come last.

    Args:
        request: if it has ended, nothing is done. tokens: chosen at consecutive rows.
        sampled: the step's outputs. row: of the first token. step: its number, for errors.
        now: seconds of the engine's clock.

    Returns:
        How many tokens were appended; fewer than given only if the request has ended.
    """
    if sampled.finite and request.plain:
        return _commit_plain(request, tokens, now)
    before, counts = request.made, request.sampling.counts
    for at, token in enumerate(tokens, row):
        if request.finished or _not_finite(request, sampled, at, len(request.tokens) - 1, step):
            break
        request.tokens.append(token)
        if counts is not None:
            counts.add((token,))
        if request.params.logprobs is not None:
            request.logprobs.append(sampled.logprobs(at, request.params.logprobs))
        _see_whether_it_ends(request, token, step)
    if request.finished:
        request.drafts = []
    request.metrics.add_tokens(request.made - before, now)
    return request.made - before


def _commit_plain(request: Request, tokens: Sequence[int], now: float) -> int:
    """The same for a request of which nothing but ids and lengths can matter; in one go, because
    it happens between two calls of the device."""
    run = list(tokens[:request.max_len - len(request.tokens)])
    free = request.params.min_tokens - request.made  # tokens that no ender ends
    ends = [k for k, token in enumerate(run) if token in request.enders and k >= free]
    if ends:
        run = run[:ends[0] + 1]
    request.tokens += run
    if request.text is not None:
        request.text.extend(run[:-1] if ends else run)  # what ends it has no text
    if ends:
        request.end("stop", run[-1])
    elif len(request.tokens) >= request.max_len:
        request.end("length")
    if request.finished:
        request.drafts = []
    request.metrics.add_tokens(len(run), now)
    return len(run)


def commit_prompt(request: Request, sampled: Sampled, row: int, position: int, count: int, *,
                  step: int) -> None:
    """Note the logprobs of prompt tokens. Those known from before a preemption stay as they are.

    Args:
        request: with prompt_logprobs; if it has ended, nothing is done.
        sampled: the step's outputs; the tokens were forced.
        row: of the first of ``count`` rows. position: index of the prompt token chosen there.
        step: its number, for errors.
    """
    assert request.params.prompt_logprobs is not None
    for at in range(count):
        if request.finished or _not_finite(request, sampled, row + at, position + at - 1, step):
            return
        if position + at == len(request.prompt_logprobs):
            request.prompt_logprobs.append(
                sampled.logprobs(row + at, request.params.prompt_logprobs))


def fail(request: Request, error: DeepInferError) -> None:
    """End a request by an error; no other request notices."""
    request.drafts = []
    request.end("error", error=error)


def _not_finite(request: Request, sampled: Sampled, row: int, position: int, step: int) -> bool:
    bad = sampled.not_finite(row)
    if bad:
        fail(request, RequestError(
            f"the logits at position {position} are not finite",
            where=f"request {request.request_id}, step {step}",
            next="check the weights with `deepinfer score`"))
    return bad


def _see_whether_it_ends(request: Request, token: int, step: int) -> None:
    """Stop rules in the order of ``commit``; none counts within the first min_tokens tokens."""
    active = request.made > request.params.min_tokens
    if active and token in request.enders:
        request.end("stop", token)
    elif _refused(request, token, step):
        return
    elif request.text is not None and request.text.add(token, active=active):
        request.end("stop", request.text.matched)
    elif request.matcher is not None and request.matcher.finished:
        request.end("stop")
    elif len(request.tokens) >= request.max_len:
        request.end("length")


def _refused(request: Request, token: int, step: int) -> bool:
    """Advance the grammar; True, and the request has failed, if it does not allow the token."""
    if request.matcher is None:
        return False
    cause = ""
    try:
        if request.matcher.accept(token) is not False:
            return False
    except DeepInferError as error:
        cause = f": {error.what}"
    fail(request, RequestError(
        f"token {token} does not fit the grammar of structured{cause}",
        where=f"request {request.request_id}, step {step}",
        next="this is a fault of the engine or of the grammar: please report it"))
    return True
