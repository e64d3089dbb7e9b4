"""Turns generated CUDA text into C++ for the emulator: three textual changes and an entry point."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deepinfer.errors import ToolchainError

_SIZES = {"uint64_t": 8, "uint": 4, "int": 4, "float": 4, "bfloat16_t": 2, "uchar": 1, "uint4": 16}
_DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];")
_STATIC = re.compile(r"__shared__ __align__\((\d+)\) ([\w ]+?) (\w+)\[(\d+)\];")
_INCLUDE = re.compile(r"^\s*#include <.*>$", re.M)
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)'
                     r"\(([^)]*)\) \{")


@dataclass(frozen=True, slots=True)
class Source:
    """C++ of one kernel.

    Args:
        text: with ``extern "C" void emu_entry(void** arguments)`` at its end.
        statics: (bytes, alignment) of its static shared arrays, in order.
    """

    text: str
    statics: tuple[tuple[int, int], ...]


def adapt(cuda: str) -> Source:
    """Make the generated text compile against the emulator.

    Raises:
        ToolchainError: no kernel is found, or a shared array of an unknown type.
    """
    statics: list[tuple[int, int]] = []

    def static(m: re.Match[str]) -> str:
        align, ctype, name, count = int(m[1]), m[2], m[3], int(m[4])
        if ctype not in _SIZES:
            raise ToolchainError(f"a shared array of {ctype}", where="sm100 emulator",
                                 next=f"known are {', '.join(_SIZES)}")
        statics.append((_SIZES[ctype] * count, align))
        return (f"{ctype} (&{name})[{count}] = "
                f"*({ctype}(*)[{count}])emu::static_smem({len(statics) - 1});")

    text = _INCLUDE.sub("", cuda)
    text = _DYNAMIC.sub(r"\1* \2 = (\1*)emu::dynamic_smem();", text)
    text = _STATIC.sub(static, text)
    found = _KERNEL.search(text)
    if found is None:
        raise ToolchainError("no kernel in the text", where="sm100 emulator",
                             next="give the text of one lowered kernel")
    arguments = []
    for i, parameter in enumerate(p.strip() for p in found[2].split(",")):
        if "CUtensorMap" in parameter:
            arguments.append(f"*(CUtensorMap*)a[{i}]")
        elif "*" in parameter:
            ctype = parameter.replace("__restrict__", "").rsplit("*", 1)[0].strip()
            arguments.append(f"({ctype}*)a[{i}]")
        else:
            arguments.append(f"*({parameter.rsplit(' ', 1)[0]}*)a[{i}]")
    text += f'\nextern "C" void emu_entry(void** a) {{ {found[1]}({", ".join(arguments)}); }}\n'
    return Source('#include "tl.h"\n' + text, tuple(statics))
