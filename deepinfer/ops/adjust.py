"""What changes logits and choices around ``sample``: penalties, biases, masks, forced tokens.

Entries say what a row's tokens have been through: entry e is about token ids[e]. A row's entries
are a range of them, so rows of one request may share theirs; what the drafts before a row add on
top is in ``recent``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.ir import ELEMENTWISE, Order, op

Array = NDArray[Any]

ADJUST = Order("", "none", (), "repetition, frequency, presence, bias, mask: each rounded to fp32")
WORD = 32  # tokens per word of a mask


@op("logits:f32[Q,V], entries:i32[Q,2], ids:i32[E], counts:i32[E], seen:u8[E], bias:f32[E], "
    "repetition:f32[Q], frequency:f32[Q], presence:f32[Q], recent:i32[Q,B], mask_row:i32[Q], "
    "masks:i32[M,V/32] -> adjusted:f32[Q,V]", order=ADJUST)
def adjust_logits(logits: Array, entries: Array, ids: Array, counts: Array, seen: Array,
                  bias: Array, repetition: Array, frequency: Array, presence: Array,
                  recent: Array, mask_row: Array, masks: Array) -> Array:
    """Apply penalties and biases to the tokens a row has entries about, then its mask.

    With n = counts + occurrences in ``recent``, x = logit, in this order:
    seen or recent: x = x / repetition if x > 0 else x * repetition; n > 0: x = x - frequency * n,
    x = x - presence; bias: x = x + bias; not allowed: x = -inf.
    All other tokens keep their bits, and so do tokens whose penalties and bias are neutral.

    Args:
        logits: raw. entries: (begin, end) of each row's range. ids: tokens, ascending in a range.
        counts: times in the output. seen: 1 if in prompt or output. bias: added, 0 is none.
        repetition, frequency, presence: of each row; 1, 0 and 0 are neutral. recent: drafts of the
            same block before the row, counted as output; -1 is none.
        mask_row: row of ``masks``, -1: every token is allowed. masks: bit t % 32 of word t // 32
            says that token t is allowed.
    Order: every operation is rounded to fp32.
    Source: DESIGN §6.
    """
    out = logits.copy()
    for row, (begin, end) in enumerate(entries):
        about = slice(begin, end)
        drafted, times = np.unique(recent[row][recent[row] >= 0], return_counts=True)
        tokens = np.union1d(ids[about], drafted)
        n, known = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), bool)
        added = np.zeros(len(tokens), np.float32)
        at = np.searchsorted(tokens, ids[about])
        n[at], known[at], added[at] = counts[about], seen[about] != 0, bias[about]
        at = np.searchsorted(tokens, drafted)
        n[at] += times.astype(np.int32)
        known[at] = True
        x, r = out[row, tokens], repetition[row]
        x = np.where(known, np.where(x > 0, x / r, x * r), x)
        x = np.where(n > 0, x - frequency[row] * n.astype(np.float32) - presence[row], x)
        out[row, tokens] = np.where(added != 0, x + added, x)
        if mask_row[row] >= 0:
            words = masks[mask_row[row]].view(np.uint32)
            allowed = words[:, None] >> np.arange(WORD, dtype=np.uint32) & np.uint32(1)
            out[row, allowed.reshape(-1)[:out.shape[1]] == 0] = -np.inf
    return out


@op("chosen:i32[Q], forced:i32[Q] -> token:i32[Q]", order=ELEMENTWISE)
def force_token(chosen: Array, forced: Array) -> Array:
    """The token of a row that is not free to choose: token = forced if forced >= 0 else chosen.

    Args:
        chosen: what ``sample`` chose. forced: the token to take, -1: none.
    Source: DESIGN §6; teacher forcing and the logprobs of prompts.
    """
    return np.where(forced >= 0, forced, chosen)


@op("anchor:i32[R] -> recent:i32[R,width]", order=ELEMENTWISE)
def recent_start(anchor: Array, *, width: int) -> Array:
    """The drafts of a block that is just begun: none, all -1.

    Args:
        anchor: one entry per block; its value is not read. width: drafts to remember.
    Source: DESIGN §6.
    """
    return np.full((len(anchor), width), -1, np.int32)


@op("recent:i32[R,B], token:i32[R] -> grown:i32[R,B]", order=ELEMENTWISE)
def recent_push(recent: Array, token: Array) -> Array:
    """Put a draft in front of those before it; the oldest falls out.

    Args:
        recent: drafts of each block, newest first. token: the next one.
    Source: DESIGN §6.
    """
    return np.concatenate([token[:, None], recent[:, :-1]], axis=1)
