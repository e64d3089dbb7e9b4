"""The file format of what is kept on disk: a page, a snapshot, or prepacked weights a file.

    magic            8 bytes
    header length    u32, little endian
    header           JSON: kind, key, identity, class, arrays (name, dtype, shape), nbytes, sha256
    header's sha256  32 bytes
    payload          the arrays, one after the other, C order

The header's hash covers the payload's, so every byte of a file is under a checksum. The payload of
weights has zero bytes between its arrays, see ``weight_file``.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
Layout = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]

KINDS = ("page", "snapshot", "weights", "fingerprint")
MAGIC = b"DIprefx1"
MAX_HEADER = 1 << 24
_LENGTH = struct.Struct("<I")
_HASH = 32  # bytes of a sha256


class EntryError(ValueError):
    """A file that is no good entry. ``fault`` is the kind of what is wrong with it."""

    def __init__(self, fault: str, what: str) -> None:
        self.fault = fault
        super().__init__(what)


@dataclass(frozen=True, slots=True)
class Header:
    """What an entry says of itself.

    Args:
        kind: one of KINDS. key: hex. identity: what the contents depend on besides.
        cache_class: how long it is kept. arrays: name, dtype, shape of each. nbytes, sha256: of
        the payload.
    """

    kind: str
    key: str
    identity: str
    cache_class: str
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]
    nbytes: int
    sha256: str


def encode(kind: str, key: bytes, identity: str, cache_class: str, arrays: Arrays) -> list[bytes]:
    """The bytes of an entry, in pieces."""
    payload = [np.ascontiguousarray(a).tobytes() for a in arrays.values()]
    digest = hashlib.sha256()
    for part in payload:
        digest.update(part)
    return [head(Header(
        kind, key.hex(), identity, cache_class,
        tuple((n, a.dtype.name, a.shape) for n, a in arrays.items()),
        sum(map(len, payload)), digest.hexdigest())), *payload]


def head(header: Header, align: int = 1) -> bytes:
    """The bytes before the payload, a multiple of ``align``: blanks after the JSON fill it up."""
    body = json.dumps({
        "kind": header.kind, "key": header.key, "identity": header.identity,
        "class": header.cache_class, "arrays": header.arrays, "nbytes": header.nbytes,
        "sha256": header.sha256}).encode()
    body += b" " * (-(len(MAGIC) + _LENGTH.size + len(body) + _HASH) % align)
    return MAGIC + _LENGTH.pack(len(body)) + body + hashlib.sha256(body).digest()


def read_header(file: BinaryIO) -> Header:
    """The header at the start of a file, its own checksum verified; stops before the payload.

    Raises:
        EntryError: it is another format or damaged.
    """
    start = file.read(len(MAGIC) + _LENGTH.size)
    if len(start) == len(MAGIC) + _LENGTH.size and not start.startswith(MAGIC):
        raise EntryError("another format", f"it begins with {start[:len(MAGIC)]!r}, expected "
                                           f"{MAGIC!r}")
    length = _LENGTH.unpack(start[-_LENGTH.size:])[0] if len(start) > len(MAGIC) else 0
    body = file.read(length) if length <= MAX_HEADER else b""
    if not body or hashlib.sha256(body).digest() != file.read(_HASH):
        raise EntryError("damaged", "its header does not have the expected sha256")
    try:
        h = json.loads(body)
        return Header(h["kind"], h["key"], h["identity"], h["class"], tuple(
            (str(n), str(d), tuple(map(int, s))) for n, d, s in h["arrays"]),
            int(h["nbytes"]), h["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise EntryError("another format", f"its header cannot be read: {error!r}") from None


def decode(file: BinaryIO, kind: str, key: bytes, identity: str, layout: Layout
           ) -> dict[str, Array]:
    """The arrays of an entry, after everything about it was verified.

    Args:
        kind, key, identity: what the entry must be. layout: element types and shapes it must have.

    Returns:
        Read-only arrays, in the layout's order.

    Raises:
        EntryError: anything is not as expected.
    """
    header = read_header(file)
    check_identity(header, kind, key, identity, layout)
    payload = file.read()
    sizes = [d.itemsize * int(np.prod(s, dtype=np.int64)) for d, s in layout.values()]
    if not len(payload) == header.nbytes == sum(sizes):
        raise EntryError("damaged", f"it has {len(payload)} bytes of data, its header says "
                                    f"{header.nbytes}, expected {sum(sizes)}")
    if hashlib.sha256(payload).hexdigest() != header.sha256:
        raise EntryError("damaged", "its data do not have the expected sha256")
    out, first = {}, 0
    for (name, (dtype, shape)), size in zip(layout.items(), sizes, strict=True):
        out[name] = np.frombuffer(payload, dtype, int(np.prod(shape, dtype=np.int64)),
                                  first).reshape(shape)
        first += size
    return out


def check_identity(header: Header, kind: str, key: bytes, identity: str, layout: Layout) -> None:
    """Raise EntryError unless a header is that of exactly this entry."""
    found = (header.kind, header.key, header.identity)
    if found != (kind, key.hex(), identity):
        raise EntryError("foreign", f"it is {_short(*found)}, expected "
                                    f"{_short(kind, key.hex(), identity)}")
    expected = {n: (d.name, tuple(s)) for n, (d, s) in layout.items()}
    arrays = {n: (d, s) for n, d, s in header.arrays}
    if arrays != expected or list(arrays) != list(expected):
        raise EntryError("foreign", f"its {len(arrays)} arrays have another layout than the "
                                    f"{len(expected)} expected ones")


def _short(kind: str, key: str, identity: str) -> str:
    return f"{kind} {key[:12]} of '{identity[:16]}'"
