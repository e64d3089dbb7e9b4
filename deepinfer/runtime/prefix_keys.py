"""Keys of cached pages: a chain of hashes, each over typed parts with their lengths."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

FORMAT = b"deepinfer prefix 1"


def hash_parts(*parts: bytes) -> bytes:
    """sha256 over parts, each after its length: no two lists of parts give the same input."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def root_key(identity: str, mode: str, facts: Mapping[str, Any], rings: Sequence[str]) -> bytes:
    """The parent of every first page: what all contents depend on, besides tokens and salt.

    Args:
        identity: of weights, Program and replay. mode: of the prefix cache. facts: the layout.
        rings: names of the state values in a snapshot.
    """
    layout = {name: facts[name] for name in ("page_size", "window", "draft_width", "state")}
    return hash_parts(FORMAT, b"root", identity.encode(), mode.encode(),
                      json.dumps(layout, sort_keys=True).encode(), json.dumps(list(rings)).encode())


def page_keys(parent: bytes, tokens: Sequence[int], count: int, page_size: int, salt: str | None
              ) -> Iterator[bytes]:
    """The keys of the first ``count`` full pages of ``tokens``, as far as there are tokens.

    key = sha256(parent key, "page", tokens as i32, "no salt" or "salt", salt)
    """
    typed = (b"no salt", b"") if salt is None else (b"salt", salt.encode())
    for first in range(0, min(count * page_size, len(tokens) - page_size + 1), page_size):
        page = np.asarray(tokens[first:first + page_size], "<i4").tobytes()
        parent = hash_parts(parent, b"page", page, *typed)
        yield parent
