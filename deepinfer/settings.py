"""Environment variables of DeepInfer: each is read here, and nowhere else."""

from __future__ import annotations

import difflib
import os
import warnings
from functools import cache
from pathlib import Path

from deepinfer.errors import TargetError

KNOWN = {
    "DEEPINFER_CACHE_DIR": "where compiled Programs and kernels are kept (~/.cache/deepinfer)",
    "DEEPINFER_CPU_ISA": "forces an ISA level of the cpu target: generic, avx2, avx512 or amx",
}
ISA_LEVELS = ("generic", "avx2", "avx512", "amx")


@cache
def warn_unknown() -> None:
    """Warn about DEEPINFER_* variables that nobody reads, naming the nearest known one. Every front
    door calls this first; only the first call of a process warns."""
    for name in sorted(os.environ):
        if name.startswith("DEEPINFER_") and name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            warnings.warn(f"environment variable {name} is not read by deepinfer-compiler{hint}",
                          stacklevel=3)  # the caller of the front door


def cache_dir() -> Path:
    """The directory of caches, an absolute path; made on first use by whoever writes.

    Raises:
        TargetError: no variable names one and the user has no home directory.
    """
    given = os.environ.get("DEEPINFER_CACHE_DIR")
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        home = Path(base).absolute() if base else Path.home() / ".cache"
    except RuntimeError as error:  # no HOME, and a user id without an entry in the passwd file
        raise TargetError(f"this user has no home directory for the cache: {error}",
                          where="environment", next="set DEEPINFER_CACHE_DIR") from None
    return home / "deepinfer"


def usable_cpus() -> int:
    """CPUs this process may run on, where the system can say; else all of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def forced_isa() -> str | None:
    """The ISA level forced by DEEPINFER_CPU_ISA.

    Raises:
        TargetError: the value is not a level.
    """
    given = os.environ.get("DEEPINFER_CPU_ISA")
    if given and given not in ISA_LEVELS:
        raise TargetError(f"DEEPINFER_CPU_ISA is '{given}', expected one of "
                          f"{', '.join(ISA_LEVELS)}", where="environment",
                          next="unset it or choose a level of this machine")
    return given or None
