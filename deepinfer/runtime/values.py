"""Values that callers give: what kind they are, and how to keep and show them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Hashable)


class Frozen(Mapping[K, V]):
    """A read-only, hashable mapping of hashable values; equal to a dict of the same items."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[K, V]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def is_list(value: Any) -> bool:
    """A sequence that is no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_real(value: Any) -> bool:
    """A number of Python or numpy, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_text(value: Any) -> bool:
    """A text of at least one character, without lone surrogates: no output can hold those."""
    if not isinstance(value, str) or value == "":
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_int(value: Any) -> bool:
    """An int of Python or numpy, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def brief(value: Any) -> str:
    """A value as an error message shows it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python writes no int of thousands of digits
        text = f"an {type(value).__name__} too long to show"
    return text if len(text) <= 60 else f"{text[:57]}..."


def plain(value: Any) -> Any:
    """A value as ``json`` takes it: dicts for mappings, lists for tuples."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, tuple | list) else value
