"""Text: encoding prompts, decoding outputs as they grow, and stop texts."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers

from deepinfer.checkpoint.token_map import read_tokenizer


def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 and on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
    assert table.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return table


class Text:
    """The tokenizer of a checkpoint.

    Args:
        tokenizer: of its tokenizer.json. bos: the begin-of-text id, or None.
    """

    def __init__(self, tokenizer: Tokenizer, bos: int | None) -> None:
        # A tokenizer.json may hold settings of its training: a prompt is neither cut nor padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer, self.bos = tokenizer, bos
        added = tokenizer.get_added_tokens_decoder()
        self._special = {i for i, token in added.items() if token.special}
        self._bytes: dict[int, bytes] = {}  # of the tokens seen so far
        self.byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._byte_of = _byte_of()

    @staticmethod
    def load(model: Path, bos: int | None) -> Text | None:
        """The tokenizer of a checkpoint directory, or None if it has no tokenizer.json.

        Raises:
            CheckpointError: the file is not a tokenizer.
        """
        file = Path(model) / "tokenizer.json"
        return Text(read_tokenizer(file), bos) if file.exists() else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; the begin-of-text id is put in front unless it is spelled out."""
        ids = list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        return ids if self.bos is None or ids[:1] == [self.bos] else [self.bos, *ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens have none."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def special_id(self, spelling: str) -> int | None:
        """The id of the special token that is spelled so."""
        token = self.tokenizer.token_to_id(spelling)
        return int(token) if token in self._special else None

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to the text's bytes; only for a byte-level tokenizer."""
        if token not in self._bytes:
            self._bytes[token] = self._spell(token)
        return self._bytes[token]

    def _spell(self, token: int) -> bytes:
        if token in self._special:
            return b""
        spelled = self.tokenizer.id_to_token(token) or ""
        if all(c in self._byte_of for c in spelled):
            return bytes(self._byte_of[c] for c in spelled)
        return spelled.encode()  # an added token is spelled as it reads


class Detokenizer:
    """The text of an output, token by token, in whole characters.

    Args:
        text: the tokenizer.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids: list[int] = []  # only for tokenizers that are not byte-level
        self._given = 0

    def add(self, token: int) -> str:
        """The characters that this token completes."""
        if self._text.byte_level:
            return self._utf8.decode(self._text.token_bytes(token))
        self._ids.append(token)
        whole = self._text.decode(self._ids).rstrip("\ufffd")
        return self._take(whole)

    def finish(self) -> str:
        """What is left: an incomplete character reads as U+FFFD."""
        if self._text.byte_level:
            return self._utf8.decode(b"", final=True)
        return self._take(self._text.decode(self._ids))

    def _take(self, whole: str) -> str:
        new, self._given = whole[self._given:], max(self._given, len(whole))
        return new


class StopTexts:
    """Watches a growing text for stop texts; holds back what may become one.

    Args:
        stops: the texts; none of them empty.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self.text = ""
        self.matched: str | None = None

    def add(self, piece: str, *, active: bool = True) -> bool:
        """Append a piece; True if a stop text ended the text, which is then cut before it.

        Which one counts depends on the text alone, not on how it came in pieces: the one complete
        first, and of those that end together the longest.

        Args:
            active: False appends without looking; what is complete by now will not match later.
        """
        seen = len(self.text)
        self.text += piece
        if not active or not piece:
            return False
        found = [(at + len(stop), at, stop) for stop in self._stops
                 if (at := self.text.find(stop, max(0, seen - len(stop) + 1))) >= 0]
        if not found:
            return False
        _, at, self.matched = min(found)
        self.text = self.text[:at]
        return True

    @property
    def safe(self) -> str:
        """The text without an end that is the beginning of a stop text."""
        if self.matched is not None:
            return self.text
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-length:]) for s in self._stops if len(s) > length):
                return self.text[:-length]
        return self.text


class OutputText:
    """The text of one output as it grows: whole characters, stop texts, echo.

    Stop texts are looked for in the output alone, never in the prompt or across its end. Special
    tokens have no text; a stop that spells one ends the output at that token instead.

    Args:
        text: the tokenizer. stops: the stop texts. prompt: ids whose text comes first (echo).
    """

    def __init__(self, text: Text, stops: Sequence[str], prompt: Sequence[int] = ()) -> None:
        self._special = {token: stop for stop in stops
                         if (token := text.special_id(stop)) is not None}
        self._detokenizer = Detokenizer(text)
        self._stops = StopTexts(tuple(stops))
        self._prompt = text.decode(prompt) if prompt else ""
        self._special_stop: str | None = None
        self._watches = bool(stops)
        self._later: list[int] = []  # without stops nobody needs the text before it is shown

    @property
    def matched(self) -> str | None:
        """The stop text that ended it."""
        return self._special_stop or self._stops.matched

    def add(self, token: int, *, active: bool = True) -> bool:
        """Append a token; True if a stop text ended the output.

        Args:
            active: False appends without looking for stops.
        """
        if not self._watches:
            self._later.append(token)
            return False
        found = self._stops.add(self._detokenizer.add(token), active=active)
        if active and token in self._special:
            self._special_stop = self._special[token]
        return found or self._special_stop is not None

    @property
    def watches(self) -> bool:
        """Whether there are stop texts to look for."""
        return self._watches

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of an output without stop texts."""
        self._later += tokens

    def shown(self, finished: bool) -> str:
        """The text so far.

        Args:
            finished: no token follows, so nothing is withheld: neither what may become a stop text
                nor an incomplete character, which reads as U+FFFD.
        """
        later, self._later = self._later, []
        if later:
            self._stops.add("".join(map(self._detokenizer.add, later)), active=False)
        if not finished:
            return self._prompt + self._stops.safe
        if self._stops.matched is None:
            self._stops.add(self._detokenizer.finish(), active=False)
        return self._prompt + self._stops.text
