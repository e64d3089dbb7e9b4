"""An interpolated Kneser-Ney 5-gram model over tokens: what a trained model must beat."""

import numpy as np

BITS = 12  # of a token id; five ids fit an int64
DISCOUNT = 0.75


def windows(ids: np.ndarray, order: int) -> np.ndarray:
    """Every run of `order` ids as one int64, the oldest in the highest bits."""
    key = np.zeros(len(ids) - order + 1, np.int64)
    for i in range(order):
        key = (key << BITS) | ids[i : len(ids) - order + 1 + i]
    return key


class KneserNey:
    def __init__(self, documents: list[np.ndarray], vocab_size: int, order: int = 5) -> None:
        assert vocab_size <= 1 << BITS and order * BITS <= 63
        self.vocab_size, self.order = vocab_size, order
        longest = np.concatenate([windows(d.astype(np.int64), order)
                                  for d in documents if len(d) >= order])
        self.tables = []
        grams, counts = np.unique(longest, return_counts=True)
        for n in range(order, 0, -1):
            contexts, where = np.unique(grams >> BITS, return_inverse=True)
            totals = np.bincount(where, counts)
            kinds = np.bincount(where)
            self.tables.append((n, grams, counts, contexts, totals, kinds))
            # Shorter grams count in how many longer ones they end, not how often they occur.
            grams, counts = np.unique(grams & ((1 << BITS * (n - 1)) - 1), return_counts=True)

    def probabilities(self, ids: np.ndarray) -> np.ndarray:
        """P of every id but the first `order` - 1, given the ids before it."""
        keys = windows(ids.astype(np.int64), self.order)
        p = np.full(len(keys), 1 / self.vocab_size)
        for n, grams, counts, contexts, totals, kinds in reversed(self.tables):
            key = keys & ((1 << BITS * n) - 1)
            found, c = _look_up(grams, counts, key)
            known, total = _look_up(contexts, totals, key >> BITS)
            _, kind = _look_up(contexts, kinds, key >> BITS)
            total = np.where(known, total, 1)
            own = np.where(found, np.maximum(c - DISCOUNT, 0), 0) / total
            p = np.where(known, own + DISCOUNT * kind / total * p, p)
        return p


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray
             ) -> tuple[np.ndarray, np.ndarray]:
    at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    found = keys[at] == wanted
    return found, np.where(found, values[at], 0)
