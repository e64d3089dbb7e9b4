"""Counter-based noise for sampling: a pure function of (seed, position, purpose, token id).

There is no state to carry, roll back or order by batch: the noise of a token is the same whoever
asks, which is what lets a draft be checked against the token the target itself would pick.
`targets/cpu/micro/noise.h` is the same in C and gives the same bits. Not for cryptography.
Source: DESIGN §6.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer.numerics.functions import log, log1p

F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]

# The golden-ratio increment keeps neighbouring counters apart before they are mixed.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_BELOW_ONE = np.float32(1 - 2.0**-24)


def _mix(x: U64) -> U64:
    """Scramble 64 bits so that every input bit flips each output bit about half of the time.

    Source: Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014, with the
    constants of Stafford's variant 13.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream(seed: ArrayLike, position: ArrayLike, purpose: int) -> U64:
    """The key of one choice: everything but the token id.

    Args:
        seed: u64, the request's seed.
        position: i32, absolute index of the token that is being chosen.
        purpose: a number below 2^32 that keeps independent uses of a position apart.
    Returns: u64, broadcast over seed and position.
    """
    seeds, where = np.atleast_1d(np.asarray(seed, np.uint64)), np.asarray(position, np.int64)
    low = where.astype(np.uint64) & np.uint64(0xFFFFFFFF)
    counter = low | np.uint64(purpose << 32)
    return _mix(_mix(seeds + _STEP) ^ counter)


def uniform(key: ArrayLike, token: ArrayLike) -> F32:
    """One number in the open interval (0, 1) for each token.

    u = fp32((2r + 1) * 2^-41) with 40 random bits r, so small values keep 24 significant bits; the
    few that would round to 1 become 1 - 2^-24.

    Args:
        key: u64 of `stream`. token: i32 token ids, at least 0; the two are broadcast.
    Returns: f32.
    """
    keys, ids = np.asarray(key, np.uint64), np.atleast_1d(np.asarray(token, np.int64))
    bits = _mix(keys + (ids.astype(np.uint64) + np.uint64(1)) * _STEP)
    r: NDArray[Any] = ((bits >> np.uint64(24)) << np.uint64(1)) | np.uint64(1)
    u = r.astype(np.int64).astype(np.float32) * np.float32(2.0**-41)
    return np.where(u < 1, u, _BELOW_ONE)


def gumbel(key: ArrayLike, token: ArrayLike) -> F32:
    """Standard Gumbel noise for each token: -log(-log(1 - u)).

    1 - u instead of u, because only large noise decides an argmax and a small u is finer than one
    near 1: values up to 28.4 occur, and two tokens hardly ever tie.

    Args:
        key: u64 of `stream`. token: i32 token ids; the two are broadcast.
    Returns: f32.
    """
    return -log(-log1p(-uniform(key, token)))
