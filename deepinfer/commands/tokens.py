"""Token ids as the command line gives them."""

from __future__ import annotations

import json
from pathlib import Path

from deepinfer.errors import RequestError

_MAX_DIGITS = 20  # more are no token of any vocabulary, and int() refuses thousands

def parse_tokens(text: str) -> list[int]:
    """Token ids from ``1,2,3`` or from ``@file.json``, a JSON list of ints.

    Raises:
        RequestError: neither of the two, or no token at all.
    """
    where = "--tokens"
    found: object
    if text.startswith("@"):
        where = text[1:]
        try:
            found = json.loads(Path(text[1:]).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise RequestError(f"cannot read token ids: {error}", where=where,
                               next="give a file with a JSON list of ints") from None
    else:
        found = [int(w) if _is_int(w) else w for w in text.split(",")] if text.strip() else []
    if not isinstance(found, list):
        raise RequestError(f"found a JSON {type(found).__name__}, expected a list of ints",
                           where=where, next="write the ids as [1, 2, 3]")
    for i, token in enumerate(found):
        if type(token) is not int:  # True is an int to isinstance
            raise RequestError(f"token {i} is {token!r}, expected an int", where=where,
                               next="write ids as 1,2,3")
    if not found:
        raise RequestError("no tokens, expected at least one", where=where,
                           next="write ids as 1,2,3")
    return found


def _is_int(word: str) -> bool:
    word = word.strip()
    digits = word.removeprefix("-")
    return len(digits) < _MAX_DIGITS and digits.isascii() and digits.isdecimal()
