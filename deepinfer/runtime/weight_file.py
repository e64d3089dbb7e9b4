"""Weights in a file that processes map: an entry whose arrays begin at multiples of 4096 bytes.

The header's checksum and the file's size are verified whenever it is opened. The checksum of the
data is made while they are written, and verified on request only (``deepinfer cache gc --verify``):
the file is there so that nobody needs to read everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np

from deepinfer.errors import ProgramError
from deepinfer.runtime.entries import (
    Array,
    EntryError,
    Header,
    Layout,
    check_identity,
    head,
    read_header,
)

KIND = CACHE_CLASS = "weights"
PAGE = 4096  # part of the format, whatever the machine's pages are


@dataclass(frozen=True, slots=True)
class Pack:
    """Which weights a file holds.

    Args:
        key: of all that their bytes depend on. identity: the checkpoint's fingerprint, or "".
        layout: element types and shapes, by name, in the file's order.
    """

    key: bytes
    identity: str
    layout: Layout

    @property
    def nbytes(self) -> int:
        """Bytes of the file after its header."""
        return self._offsets()[1]

    def _offsets(self) -> tuple[dict[str, int], int]:
        """(where each array begins, where the last one ends), counted from the header's end."""
        begins, at = {}, 0
        for name, (dtype, shape) in self.layout.items():
            begins[name] = at
            at += -(-dtype.itemsize * math.prod(shape) // PAGE) * PAGE
        return begins, at

    def write(self, file: BinaryIO, arrays: Iterable[tuple[str, Array]]) -> None:
        """Write a whole file, one array after the other; the true header last.

        Args:
            arrays: name and array, in the layout's order.

        Raises:
            ProgramError: an array is not as the layout says.
        """
        listed = tuple((n, d.name, tuple(s)) for n, (d, s) in self.layout.items())
        header = Header(KIND, self.key.hex(), self.identity, CACHE_CLASS, listed, self.nbytes,
                        "0" * 64)  # as long as the sha256 that comes last
        file.write(head(header, PAGE))
        digest = hashlib.sha256()
        for (name, array), (expected, (dtype, shape)) in zip(
                arrays, self.layout.items(), strict=True):
            if (name, array.dtype, array.shape) != (expected, dtype, tuple(shape)):
                raise ProgramError(
                    f"weight '{name}' is {array.dtype}{list(array.shape)}, expected "
                    f"'{expected}', {dtype}{list(shape)}", where="packing weights",
                    next="compile the Program again")
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for piece in (data.data, bytes(-data.size % PAGE)):
                digest.update(piece)
                file.write(piece)
        file.flush()
        os.pwrite(file.fileno(), head(replace(header, sha256=digest.hexdigest()), PAGE), 0)

    def map(self, file: BinaryIO) -> dict[str, Array]:
        """Read-only views of a file; processes that map it share its pages.

        Raises:
            EntryError: it is another file, or damaged in its header or its size. OSError: it
                cannot be mapped.
        """
        header = read_header(file)
        check_identity(header, KIND, self.key, self.identity, self.layout)
        begins, nbytes = self._offsets()
        begin, size = file.tell(), os.fstat(file.fileno()).st_size
        if not size - begin == header.nbytes == nbytes or begin % PAGE:
            raise EntryError("damaged", f"it has {size - begin} bytes of data, its header says "
                                        f"{header.nbytes}, expected {nbytes}")
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # shared
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # most file systems have none for files
                mapping.madvise(mmap.MADV_HUGEPAGE)
        return {n: np.ndarray(s, d, buffer=mapping, offset=begin + begins[n])
                for n, (d, s) in self.layout.items()}
