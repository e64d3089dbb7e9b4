"""The ISA levels of this machine's CPU."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

from deepinfer.errors import TargetError
from deepinfer.settings import forced_isa

NEEDS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "amx": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "amx_tile",
            "amx_bf16"},
}


@cache
def host_levels() -> tuple[str, ...]:
    """Levels this machine can run, lowest first; "generic" is plain C and runs everywhere."""
    flags: set[str] = set()
    if platform.machine() in ("x86_64", "AMD64"):
        try:
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("flags"):
                    flags = set(line.split(":", 1)[1].split())
                    break
        except OSError:  # no /proc: the plain C level is always right
            flags = set()
    return ("generic", *(level for level, needs in NEEDS.items() if needs <= flags))


def choose_level(built: tuple[str, ...]) -> str:
    """The highest level that a Program holds and this machine runs, or the forced one.

    Raises:
        TargetError: none fits.
    """
    forced, host = forced_isa(), host_levels()
    if forced is not None:
        if forced not in host:
            raise TargetError(f"DEEPINFER_CPU_ISA is '{forced}', this machine runs "
                              f"{', '.join(host)}", where="cpu device", next="unset it")
        if forced not in built:
            raise TargetError(f"the Program has no level '{forced}', it has {', '.join(built)}",
                              where="cpu device", next=f"compile it with --isa {forced}")
        return forced
    fitting = [level for level in host if level in built]
    if not fitting:
        raise TargetError(f"the Program has levels {', '.join(built)}, this machine runs "
                          f"{', '.join(host)}", where="cpu device",
                          next="compile it with --isa generic")
    return fitting[-1]
