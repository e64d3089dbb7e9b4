"""Engram n-gram hashing: the prime table sizes, the hash multipliers and the rows a token reads.

Pure integer arithmetic, the same on every machine. Source: spec §2.10 (REF engram.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

INT64_MAX = 2**63 - 1
# These bases make the Miller-Rabin test exact below 3.3e24, far above any table size.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def is_prime(n: int) -> bool:
    """True if `n` is a prime number; exact for every n < 3.3e24."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in _WITNESSES:
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def column_primes(
    num_layers: int, *, table_size: int, max_ngram: int, heads: int
) -> tuple[tuple[int, ...], ...]:
    """The number of rows of every hash column, one tuple per Engram layer.

    The columns of a layer are ordered by n-gram size 2..max_ngram, then by head. Each n-gram size
    starts its search at `table_size` and takes the next primes that no earlier column has taken,
    over all layers, so no two columns share a modulus.

    Args:
        num_layers: number of Engram layers, in config order.
        table_size: `engram_vocab_size`; the first candidate is this number itself.
        max_ngram: longest n-gram.
        heads: hash columns per n-gram size.

    Source: spec §2.10 "Primes".
    """
    seen: set[int] = set()
    layers: list[tuple[int, ...]] = []
    for _ in range(num_layers):
        columns: list[int] = []
        for _size in range(2, max_ngram + 1):
            candidate = table_size - 1
            for _head in range(heads):
                candidate += 1
                while candidate in seen or not is_prime(candidate):
                    candidate += 1
                seen.add(candidate)
                columns.append(candidate)
        layers.append(tuple(columns))
    return tuple(layers)


def hash_multipliers(layer_id: int, *, compressed_vocab: int, max_ngram: int) -> tuple[int, ...]:
    """The odd factor of every lookback position, drawn by PCG64 from the layer's number.

    `2 * integers(0, bound) + 1` with bound = (2^63 - 1) // compressed_vocab // 2, so a product
    with a compressed id always fits int64 and is never negative.

    Source: spec §2.10 "Multipliers".
    """
    bound = max(1, INT64_MAX // compressed_vocab // 2)
    draws = np.random.default_rng(10007 * layer_id).integers(
        0, bound, size=max_ngram, dtype=np.int64
    )
    return tuple(2 * int(draw) + 1 for draw in draws)


@dataclass(frozen=True, slots=True)
class EngramHash:
    """The constants of one Engram layer's hash.

    Attributes:
        multipliers: one odd int64 factor per lookback position, newest first.
        primes: rows of each column; columns ordered by n-gram size, then head.
        pad: compressed id that stands for a blocked position.
    """

    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    pad: int

    @property
    def heads(self) -> int:
        return len(self.primes) // (len(self.multipliers) - 1)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First table row of each column."""
        return tuple(accumulate(self.primes, initial=0))[:-1]


def engram_hash(
    ids: npt.NDArray[np.integer], blocked: npt.NDArray[np.bool_], constants: EngramHash
) -> npt.NDArray[np.int64]:
    """The table rows that each token reads.

    rho_0 = t_0*m_0; rho_i = rho_{i-1} XOR t_i*m_i; row of (n-gram size i+1, head h) =
    rho_i mod prime[i-1][h] + offset[i-1][h].

    Args:
        ids: [N, max_ngram] token classes, newest first.
        blocked: same shape; a blocked position and everything older counts as the pad class.
        constants: the layer's hash.

    Returns:
        i64[N, columns] row numbers of the layer's table.

    Source: spec §2.10 "Hash".
    """
    cut = np.logical_or.accumulate(blocked, axis=1)
    terms = np.where(cut, constants.pad, ids.astype(np.int64))
    terms = terms * np.array(constants.multipliers, np.int64)
    rho = np.bitwise_xor.accumulate(terms, axis=1)
    # Columns of n-gram size i+1 all reduce rho_i; rho_0 alone (a unigram) has no column.
    per_column = np.repeat(rho[:, 1:], constants.heads, axis=1)
    primes = np.array(constants.primes, np.int64)
    return np.asarray(per_column % primes + np.array(constants.offsets, np.int64))
