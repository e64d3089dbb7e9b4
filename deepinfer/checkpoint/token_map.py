"""The Engram token map: token ids that read alike share one class.

Source: spec §2.10 "Token compression map" and §11.9.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, normalizers

from deepinfer.errors import CheckpointError

# A text of one space must survive Strip; this private-use character stands in for it.
_SPACE_GUARD = "\ue000"


def engram_normalizer() -> normalizers.Normalizer:
    """The text normaliser of the token map.

    NFKC, NFD, drop marks (Mn, Mc and Me), lowercase per character, runs of blanks to one space,
    strip (a lone space stays). A test pins that `tokenizers` does exactly this.
    """
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SPACE_GUARD),
            normalizers.Strip(),
            normalizers.Replace(_SPACE_GUARD, " "),
        ]
    )


def compression_map(tokenizer: Tokenizer) -> npt.NDArray[np.int32]:
    """The class of every token id of a tokenizer.

    The key of an id is its normalised text, the text itself if that is empty, or the token's
    spelling if the id does not decode to whole characters. Classes are numbered in the order in
    which their first id appears.

    Returns:
        i32[len(tokenizer)], values 0 .. number of classes - 1.
    """
    normalize = engram_normalizer().normalize_str
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[i] for i in range(size)], skip_special_tokens=False)
    classes: dict[str | None, int] = {}
    mapping = np.empty(size, np.int32)
    for token_id, text in enumerate(texts):
        # U+FFFD: the token is part of a character, so its text says nothing.
        whole = "\ufffd" not in text
        key = (normalize(text) or text) if whole else tokenizer.id_to_token(token_id)
        mapping[token_id] = classes.setdefault(key, len(classes))
    return mapping


def token_map_for(
    path: Path, *, vocab_size: int, classes: int, pad: int
) -> npt.NDArray[np.int32]:
    """The Engram token map of a checkpoint directory.

    Ids that the tokenizer does not have but `vocab_size` counts get the class of the pad token
    (no text can produce them). As many classes as ids can only mean that every id is its own
    class, whatever the tokenizer.

    Args:
        path: the checkpoint directory.
        vocab_size: number of token ids.
        classes: `engram_compressed_vocab_size`.
        pad: `engram_pad_token_id`.

    Returns:
        i32[vocab_size], values below `classes`.

    Raises:
        CheckpointError: no tokenizer.json though one is needed, one that cannot be read, or one
            whose number of classes is not the declared one (all hash rows would be wrong).
    """
    if classes == vocab_size:
        return np.arange(vocab_size, dtype=np.int32)
    file = path / "tokenizer.json"
    if not file.exists():
        raise CheckpointError(
            f"there is no tokenizer.json; without it engram_compressed_vocab_size must equal "
            f"vocab_size {vocab_size}, but is {classes}",
            where=str(path),
            next="put the model's tokenizer.json next to config.json",
        )
    mapping = compression_map(read_tokenizer(file))
    count = int(mapping.max()) + 1
    if count != classes:
        raise CheckpointError(
            f"tokenizer.json yields {count} token classes, but engram_compressed_vocab_size is "
            f"{classes}",
            where=str(file),
            next="use the tokenizer.json that was published with this checkpoint",
        )
    if pad >= len(mapping):
        raise CheckpointError(
            f"engram_pad_token_id is {pad}, but the tokenizer has {len(mapping)} ids",
            where=str(file),
            next="use the tokenizer.json that was published with this checkpoint",
        )
    full = np.full(vocab_size, mapping[pad], np.int32)
    known = min(len(mapping), vocab_size)
    full[:known] = mapping[:known]
    return full


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json.

    Raises:
        CheckpointError: the file is not a tokenizer.
    """
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers package raises bare Exception
        raise CheckpointError(
            f"tokenizer.json cannot be read: {error}",
            where=str(file),
            next="copy the file again from the published checkpoint",
        ) from error
