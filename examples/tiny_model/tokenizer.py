"""token classes (stub to be extended)"""
import re
import unicodedata

import numpy as np
from tokenizers import Tokenizer


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
