"""Prompts and params as callers give them: one or several, texts or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from deepinfer.errors import RequestError
from deepinfer.runtime.params import SamplingParams
from deepinfer.runtime.text import Text

Prompt: TypeAlias = str | Sequence[int]
Params: TypeAlias = SamplingParams | Mapping[str, Any]


def is_prompt(prompts: Any) -> bool:
    """One prompt rather than a list of them: a text, or ids."""
    if isinstance(prompts, np.ndarray):
        return prompts.ndim < 2  # a number is a prompt too, and refused as one
    if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
        return True
    return not isinstance(prompts[0], str | Sequence | np.ndarray)


def params_for_each(params: Params | Sequence[Params] | None, count: int) -> list[Params]:
    """One params for each of ``count`` prompts.

    Raises:
        RequestError: a list of another length.
    """
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, Mapping | str) or not isinstance(params, Sequence):
        return [params] * count  # what is no params at all is refused request by request
    if len(params) != count:
        raise RequestError(f"there are {len(params)} params for {count} prompts, expected one for "
                           "all or one for each", where="generate", next="pass as many")
    return list(params)


def encode_prompt(text: Text | None, prompt: Prompt) -> Sequence[int]:
    """Token ids of a prompt. A text gets the begin-of-text id unless it is spelled out in it.

    Args:
        text: the model's tokenizer, if it has one. prompt: a text, or ids, returned as they are.

    Raises:
        RequestError: an empty text, one that is not Unicode, or a text for a model without
            tokenizer.json.
    """
    if not isinstance(prompt, str):
        return prompt
    if not prompt:
        raise RequestError("the prompt is empty, expected at least 1 character", where="prompt",
                           next="pass a text or token ids")
    if text is None:
        raise RequestError("the prompt is a text, expected token ids: the model has no "
                           "tokenizer.json", where="prompt", next="pass token ids")
    try:
        return text.encode(prompt)
    except (UnicodeEncodeError, TypeError) as error:  # a lone surrogate
        raise RequestError(f"the prompt is not Unicode text: {error}", where="prompt",
                           next="decode the bytes with errors='replace' first") from None
