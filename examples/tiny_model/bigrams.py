"""The Markov head of the draft, set at the start of its training to what follows what in the text.

A token's row of the Markov state is trained only where the token occurs, and in the minutes that
the draft has most occur a few times. Counting is faster.
"""

import numpy as np
import torch
from model import Draft

SMOOTHING = 0.5  # added to the counts that the corpus would give if tokens were independent


@torch.no_grad()
def set_bigrams(draft: Draft, documents: list[np.ndarray]) -> None:
    """State and head: the best approximation of their rank of the pointwise mutual information
    log p(b | a) / p(b), where each token a counts by how often it occurs."""
    vocabulary, rank = draft.markov_embed.weight.shape
    pairs = np.zeros(vocabulary * vocabulary, np.float32)
    for ids in documents:
        pairs += np.bincount(ids[:-1].astype(np.int64) * vocabulary + ids[1:],
                             minlength=pairs.size)
    counts = torch.from_numpy(pairs).view(vocabulary, vocabulary)
    before, after = counts.sum(1, keepdim=True), counts.sum(0) / counts.sum()
    expected = before * after
    information = ((counts + SMOOTHING * expected + 1e-3)
                   / ((1 + SMOOTHING) * expected + 1e-3)).log()
    weight = (before + 1).sqrt()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(information * weight, q=2 * rank, niter=4)
    root = s[:rank].sqrt()
    spread = (u[:, :rank] * root / weight).square().mean().sqrt()
    # States of unit size, as embeddings begin.
    draft.markov_embed.weight.copy_(u[:, :rank] * root / weight / spread)
    draft.markov_head.weight.copy_(v[:, :rank] * root * spread)
