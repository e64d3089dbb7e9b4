"""The tokenizer of the small model, and the Engram classes of any tokenizer."""

import re
import unicodedata
from collections.abc import Iterable

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
ROLES = ("<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>")
MARKS = ("<think>", "</think>", "｜DSML｜")
NOISE = "<｜noise｜>"  # the input of draft rows whose token is not known yet
# No token spans the end of a line: a prompt may stop before it or behind it, and both were seen in
# training. Of an indentation the last space belongs to the word.
PIECES = r" ?\p{L}+| ?[^\s\p{L}\p{N}]+|[\r\n]+|[^\S\r\n]+(?!\S)|[^\S\r\n]+"
SPECIAL = (BOS, EOS, PAD, *ROLES, *MARKS, NOISE)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; ids 0, 1, 2 are bos, eos, pad, then the other special tokens, then bytes.

    Digits stay single, so that arithmetic sees one token per digit.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Split(Regex(PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(texts, trainer)
    # Thinking and tool marks are text that a client must see: added, but not "special".
    tokenizer.add_special_tokens([AddedToken(t, special=True)
                                  for t in SPECIAL if t not in MARKS])
    tokenizer.add_tokens([AddedToken(t, special=False) for t in MARKS])
    return tokenizer


def normalise(text: str) -> str:
    """What two token texts must share to be one Engram class. Source: spec §2.10, §11.9."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if unicodedata.category(c) not in ("Mn", "Mc", "Me"))
    text = "".join(c.lower() for c in text)
    text = re.sub(r"[ \t\r\n]+", " ", text)
    return text if text == " " else text.strip()


def token_classes(tokenizer: Tokenizer, vocab_size: int, pad: int) -> np.ndarray:
    """The Engram class of every id, numbered in first-seen order; int32 [vocab_size]."""
    classes: dict[str, int] = {}
    result = []
    for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        key = tokenizer.id_to_token(token_id) if "\ufffd" in text else normalise(text) or text
        result.append(classes.setdefault(key, len(classes)))
    result += [result[pad]] * (vocab_size - len(result))
    return np.array(result[:vocab_size], np.int32)
