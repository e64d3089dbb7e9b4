"""Which targets this version has."""

from __future__ import annotations

from importlib.util import find_spec

from deepinfer.errors import TargetError
from deepinfer.targets.base import TARGETS, Target, load_target


def has_target(name: str) -> bool:
    """True if this version has a target called ``name``; imports nothing of it."""
    return (find_spec(f"deepinfer.targets.{name}") is not None
            and find_spec(f"deepinfer.targets.{name}.target") is not None)


def open_target(name: str) -> Target:
    """The target called ``name``.

    Raises:
        TargetError: this version does not have it. ToolchainError: its kernels need a package that
            is not installed.
    """
    if not has_target(name):
        here = [t for t in TARGETS if has_target(t)]
        raise TargetError(f"target '{name}' is not in this version, it has "
                          f"{', '.join(here) or 'none'}", where="--target", next="use target cpu")
    return load_target(name)


def open_targets(name: str | None) -> list[Target]:
    """The target called ``name``, or all that this version has."""
    names = [name] if name else [t for t in TARGETS if has_target(t)]
    return [open_target(t) for t in names]


def absent_targets() -> list[str]:
    """Names of the targets that are planned but not in this version."""
    return [t for t in TARGETS if not has_target(t)]
