"""Compiles the C micro headers, so that the numpy functions can be compared with their C twins."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

import deepinfer

MICRO = Path(deepinfer.__file__).parent / "targets" / "cpu" / "micro"
FLAGS = (
    "-std=c++17 -O3 -ffp-contract=off -fno-strict-aliasing -fno-trapping-math -fno-math-errno "
    "-Wall -Wextra -Werror -shared -fPIC"
).split()
# name: (what /proc/cpuinfo must list, compiler flags)
LEVELS = {
    "generic": ((), ()),
    "avx2": (("avx2", "fma", "f16c"), ("-mavx2", "-mfma", "-mf16c")),
    "avx512": (
        ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
        ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    ),
}


class Micro:
    """Micro functions of one header, each called in a loop over arrays."""

    def __init__(self, folder: Path, text: str, signatures: dict[str, str], level: str) -> None:
        features, isa_flags = LEVELS[level]
        present = Path("/proc/cpuinfo").read_text().split()
        source = folder / f"{level}.cc"
        source.write_text(text + "".join(_loop(*item) for item in signatures.items()))
        library = source.with_suffix(".so")
        command = ["g++", *FLAGS, *isa_flags, f"-I{MICRO}", str(source), "-o", str(library)]
        built = subprocess.run(command, capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        missing = sorted(set(features) - set(present))
        if missing:
            pytest.skip(f"{level}: compiled, but this CPU cannot run it: no {', '.join(missing)}")
        self._library = ctypes.CDLL(str(library))

    def call(self, name: str, out: type, *arrays: np.ndarray, flush: bool = False) -> np.ndarray:
        """name(arrays[0][i], ...) for every i; flush sets MXCSR's FTZ and DAZ around the loop."""
        arrays = tuple(np.ascontiguousarray(array) for array in arrays)
        result = np.empty(arrays[0].shape, out)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*arrays, result)]
        getattr(self._library, f"loop_{name}")(ctypes.c_long(result.size), flush, *pointers)
        return result


def _loop(name: str, signature: str) -> str:
    """C for a loop over one function; signature is e.g. "float,uint8_t->uint8_t"."""
    inputs, output = signature.split("->")
    types = inputs.split(",")
    parameters = "".join(f", const {t}* x{i}" for i, t in enumerate(types))
    arguments = ", ".join(f"x{i}[j]" for i in range(len(types)))
    return f"""
extern "C" void loop_{name}(long n, bool flush{parameters}, {output}* y) {{
  unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(flush ? 0x9FC0 : 0x1F80);
  for (long j = 0; j < n; ++j) y[j] = {name}({arguments});
  __builtin_ia32_ldmxcsr(before);
}}
"""


@pytest.fixture(scope="module", params=list(LEVELS))
def micro(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Micro:
    """The C text and the signatures that the test module names as SOURCE and SIGNATURES."""
    folder = tmp_path_factory.mktemp("micro")
    return Micro(folder, request.module.SOURCE, request.module.SIGNATURES, request.param)
