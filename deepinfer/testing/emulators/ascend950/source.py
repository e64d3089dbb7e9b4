"""Turns generated AscendC text into C++ for the emulator: addresses, includes, an entry point."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deepinfer.errors import ToolchainError
from deepinfer.targets.tile import load

_INCLUDE = re.compile(r"^\s*#(?:include .*|pragma once)$", re.M)
_ADDRESS = re.compile(r"\(__(ubuf|cbuf|ca|cb|cc)__\s+([\w:]+)\s*\*\)\s*(\d+)\b")
_MEMORY = {"ubuf": "ub", "cbuf": "l1", "ca": "l0a", "cb": "l0b", "cc": "l0c"}
_KERNEL = re.compile(r'extern "C" __global__ (__cube__|__vector__|__mix__\(1, 2\)) void (\w+)'
                     r"\(([^)]*)\) \{")
_CORES = {"__cube__": 1, "__vector__": 2, "__mix__(1, 2)": 3}
# TileLang's own templates that the text includes and that need no vendor header.
_TEMPLATES = ("gemm.h",)


@dataclass(frozen=True, slots=True)
class Source:
    """C++ of one kernel.

    Args:
        text: with ``extern "C" void emu_entry(void** arguments)`` at its end.
        cores: 1 the cube core, 2 one vector core, 3 a cube core and two vector cores.
    """

    text: str
    cores: int


def _place(text: str) -> str:
    """On-chip addresses become addresses in the emulator's memories."""
    return _ADDRESS.sub(lambda m: f"({m[2]}*)(emu::{_MEMORY[m[1]]}() + {m[3]})",
                        _INCLUDE.sub("", text))


@cache
def _templates() -> str:
    folder = Path(load().__file__).parent / "src" / "tl_templates" / "ascend"
    return "\n".join(_place((folder / name).read_text()) for name in _TEMPLATES)


def adapt(asc: str) -> Source:
    """Make the generated text compile against the emulator.

    Raises:
        ToolchainError: no kernel is found in the text.
    """
    found = _KERNEL.search(asc)
    if found is None:
        raise ToolchainError("no kernel in the text", where="ascend950 emulator",
                             next="give the text of one lowered kernel")
    arguments = []
    for i, parameter in enumerate(p.replace("__gm__", "").strip() for p in found[3].split(",")):
        ctype, star, _ = parameter.rpartition("*")
        arguments.append(f"({ctype}*)a[{i}]" if star
                         else f"*({parameter.rsplit(' ', 1)[0]}*)a[{i}]")
    entry = f'\nextern "C" void emu_entry(void** a) {{ {found[2]}({", ".join(arguments)}); }}\n'
    return Source('#include "asc.h"\n' + _templates() + _place(asc) + entry, _CORES[found[1]])
