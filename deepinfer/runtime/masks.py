"""Token masks: which ids may be chosen, one bit each.

A mask is i32[ceil(V / 32)]; bit t % 32 of word t // 32 says that token t is allowed, and the bits
past the vocabulary are 0. Masks are never written after they are made, so requests share them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from deepinfer.errors import RequestError

Array = np.ndarray[Any, Any]


def mask_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)


def pack_mask(allowed: Array) -> Array:
    """The mask of a bool[V]."""
    bits = np.zeros(mask_words(len(allowed)) * 32, np.bool_)
    bits[:len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


@lru_cache(maxsize=64)
def token_mask(vocab_size: int, allowed: tuple[int, ...] | None, blocked: tuple[int, ...]) -> Array:
    """The mask of the allowed ids (None: all) without the blocked ones. Equal masks are one array.

    Args:
        allowed, blocked: ids; those outside the vocabulary are ignored.
    """
    free = np.full(vocab_size, allowed is None)
    free[[i for i in allowed or () if i < vocab_size]] = True
    free[[i for i in blocked if i < vocab_size]] = False
    mask = pack_mask(free)
    mask.flags.writeable = False
    return mask


class TokenMasks:
    """The masks of one request that do not depend on what it generates.

    Args:
        vocab_size: ids there are. allowed: nothing else can be chosen; None: all.
        enders: ids that end the request; they are masked for its first ``min_tokens`` tokens.
    """

    def __init__(self, vocab_size: int, allowed: Sequence[int] | None, enders: Collection[int],
                 min_tokens: int) -> None:
        ids = None if allowed is None else tuple(allowed)
        self._later = None if ids is None else token_mask(vocab_size, ids, ())
        self._first, self._min_tokens = self._later, min_tokens
        if min_tokens and enders:
            self._first = token_mask(vocab_size, ids, tuple(sorted(enders)))
        self.any = self._first is not None or self._later is not None

    def at(self, made: int) -> Array | None:
        """The mask of the token after ``made`` generated ones; None: all are allowed."""
        return self._first if made < self._min_tokens else self._later

    def rows(self, made: int, count: int, grammar: Sequence[Array | None] = (), *, where: str
             ) -> list[Array | None]:
        """The masks of consecutive tokens, with those of a grammar; [] if none has one.

        Args:
            made: tokens generated before the first of them. count: how many.
            grammar: the grammar's masks; missing ones and None allow all.
            where: the request and step, for the error.

        Raises:
            RequestError: a mask allows no token.
        """
        masks = [self.at(made + k) for k in range(count)]
        for k, other in enumerate(grammar[:count]):
            mask = masks[k]
            masks[k] = mask if other is None else other if mask is None else mask & other
        if all(mask is None for mask in masks):
            return []
        for k, mask in enumerate(masks):
            if mask is not None and not np.count_nonzero(mask):
                raise RequestError(
                    f"output token {made + k} has no allowed id, expected at least 1 that "
                    "allowed_token_ids, structured and min_tokens (which bars end-of-text and stop "
                    "ids) leave together", where=where,
                    next="lower min_tokens or allow more ids")
        return masks
