"""A byte-level tokenizer of any size, for random checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from deepinfer.errors import CheckpointError

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# Spelled as in the V4.1 prompt format (spec §7). They take the last ids, the draft's noise token
# the very last one.
_ROLES = ("<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>")
_MARKS = ("<think>", "</think>", "｜DSML｜")
_NOISE = "<｜noise｜>"
_TAIL = (*_ROLES, *_MARKS, _NOISE)
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
MIN_VOCAB = 3 + 256 + len(_TAIL)


def byte_level_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly `vocab_size` ids.

    Ids 0, 1, 2 are bos, eos, pad; then the 256 bytes; then merged letter groups, commonest letters
    first; then role and thinking marks; the last id is the DSpark noise token.

    Raises:
        CheckpointError: fewer ids than the bytes and the special tokens need.
    """
    if vocab_size < MIN_VOCAB:
        raise CheckpointError(
            f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least {MIN_VOCAB} ids",
            where="byte_level_tokenizer",
            next="raise vocab_size, or write the model without a tokenizer",
        )
    merges = list(itertools.islice(_letter_merges(), vocab_size - MIN_VOCAB))
    pieces = [BOS, EOS, PAD, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [left + right for left, right in merges]
    pieces += _TAIL
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # The pattern keeps every merge inside one word with its leading space.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = [BOS, EOS, PAD, *_ROLES, _NOISE]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in _MARKS])
    return tokenizer


def _letter_merges() -> Iterator[tuple[str, str]]:
    """Merges in the order of their ids; both sides of each are bytes or earlier merges."""
    space = "Ġ"
    yield from ((space, letter) for letter in _LETTERS)
    groups = list(_LETTERS)
    while True:
        # Letter groups one letter longer than before, the common letters first.
        pairs = list(itertools.product(enumerate(groups), enumerate(_LETTERS)))
        pairs.sort(key=lambda pair: (pair[0][0] + pair[1][0], pair[0][0]))
        longer = [(group, letter) for (_, group), (_, letter) in pairs]
        yield from longer
        yield from ((space + group, letter) for group, letter in longer)
        groups = [group + letter for group, letter in longer]
