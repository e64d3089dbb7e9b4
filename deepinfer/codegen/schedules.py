"""The schedules that ship with a target: ``targets/<name>/schedules.json``, written by
``deepinfer-tune apply`` and meant to be read in a review.

A kernel gets a tuned schedule only where the whole of what it is built for stands in the file
(op, signature, order, dims, dtypes, attributes) and, where the entry names one, the phase. There is
no nearest shape: anything else runs the default, the first of the kernel's space. No entry can
change a bit of a result (DESIGN I2), only its speed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepinfer.errors import TargetError
from deepinfer.targets.base import Kernel, Schedule, Spec

FORMAT = 1
TARGETS = Path(__file__).parents[1] / "targets"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the file.

    Args:
        kernel: ``kernel_key`` of what it is for. phase: "" for every phase that has no own entry.
        schedule: what to build it with. evidence: where that was measured and what it gained.
    """

    kernel: str
    phase: str
    schedule: Schedule
    evidence: Mapping[str, Any]


def kernel_key(spec: Spec) -> str:
    """What a kernel is built for, without its schedule; symbolic dims are alike."""
    return replace(spec, schedule=Schedule()).key().removesuffix(f"@{Schedule()}").rstrip()


def path_of(target: str) -> Path:
    """The schedules file of a target."""
    return TARGETS / target / "schedules.json"


def read_entries(path: Path) -> Mapping[tuple[str, str], Entry]:
    """The entries of a schedules file by kernel and phase; none where there is no file.

    Raises:
        TargetError: it cannot be read, is of another format, or names a kernel twice.
    """
    try:
        return parse(path.read_bytes(), str(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TargetError(f"the schedules cannot be read: {error.strerror}", where=str(path),
                          next="mend its permissions") from None


@lru_cache(maxsize=8)
def parse(data: bytes, where: str) -> Mapping[tuple[str, str], Entry]:
    """The entries that the bytes of a schedules file hold.

    Raises:
        TargetError: as ``read_entries``.
    """
    made: dict[tuple[str, str], Entry] = {}
    try:
        held = json.loads(data)
        if held["format"] != FORMAT:
            raise TargetError(f"format is {held['format']!r}, expected {FORMAT}", where=where,
                              next="write it again with `deepinfer-tune apply`")
        for e in held["schedules"]:
            entry = Entry(e["kernel"], e["phase"], _schedule(e["schedule"]),
                          {k: v for k, v in e.items() if k not in ("kernel", "phase", "schedule")})
            if (entry.kernel, entry.phase) in made:
                raise TargetError(f"{entry.kernel} has two schedules for phase '{entry.phase}'",
                                  where=where, next="keep one of them")
            made[entry.kernel, entry.phase] = entry
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetError(f"it is no schedules file: {type(error).__name__}: {error}", where=where,
                          next="write it again with `deepinfer-tune apply`") from None
    return MappingProxyType(made)


def _schedule(items: Mapping[str, int]) -> Schedule:
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in items.values()):
        raise ValueError(f"a schedule holds ints, found {items}")
    return Schedule(tuple(sorted(items.items())))


def choose(kernel: Kernel, spec: Spec, target: str, phase: str) -> Schedule:
    """The shipped schedule of exactly this kernel in this phase, or the default.

    Raises:
        TargetError: the file names a schedule that the kernel's space does not have.
    """
    space = kernel.space(spec)
    path = path_of(target)
    entries = read_entries(path)
    if not entries or len(space) == 1:
        return space[0]
    key = kernel_key(spec)
    entry = entries.get((key, phase)) or entries.get((key, ""))
    if entry is None:
        return space[0]
    if entry.schedule not in space:
        raise TargetError(f"schedule {entry.schedule} is not in the kernel's space, which has "
                          f"{'; '.join(map(str, space))}", where=f"{path}, {key}",
                          next="remove the entry, or tune again: `deepinfer-tune tune`, `apply`")
    return entry.schedule
