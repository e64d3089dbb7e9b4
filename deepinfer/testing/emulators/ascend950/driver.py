"""Runs a lowered ascend950 kernel on numpy arrays in the emulator, under chosen schedules."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.errors import ToolchainError
from deepinfer.ir.op import Op
from deepinfer.ir.types import TensorType
from deepinfer.targets.ascend950.lower import grid_size
from deepinfer.targets.base import LoweredKernel
from deepinfer.testing.emulators.ascend950.source import adapt
from deepinfer.testing.emulators.objects import CACHE, build, compiler

Array = np.ndarray[Any, Any]
HERE = Path(__file__).parent
RUNTIME = sorted((HERE / "runtime").glob("*.cpp"))
HEADERS = sorted((*(HERE / "runtime").glob("*.h"), *(HERE / "device").glob("*.h"),
                  HERE.parent / "formats.h"))
# No unique symbols: they would be shared between the emulators of one process.
_CXX = ("-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique", "-w")
# -fsanitize=thread makes the compiler report every access; its library is never linked.
_KERNEL_CXX = (*_CXX, "-O0", "-fsanitize=thread", "-fno-exceptions", "-fno-rtti")

# Which of the scalar units and pipes that can go on does: pipes first; scalar units first, so that
# every operation runs as late as it may; any, at random; the last one, and threads backwards.
SCHEDULES = ("eager", "lazy", "random", "reversed")


@dataclass(frozen=True, slots=True)
class Report:
    """What one run saw.

    Args:
        counts: violations by kind ("race", "deadlock", "unmatched", ...); empty is clean.
        texts: the first few of each kind. operations: how often each instruction ran.
        unwritten: output bytes that nothing wrote.
    """

    counts: Mapping[str, int]
    texts: str
    operations: Mapping[str, int]
    unwritten: int

    def clean(self) -> bool:
        return not self.counts and not self.unwritten


@cache
def _runtime_path() -> Path:
    sources: dict[str, str | Path] = {p.stem: p for p in RUNTIME}
    return build("ascend950-runtime", sources, (*_CXX, "-O2"), HEADERS)


@cache
def _runtime() -> ctypes.CDLL:
    """Loaded for itself alone: kernels are linked to it, and the emulators of two targets define
    the same names."""
    library = ctypes.CDLL(str(_runtime_path()))
    library.emu_tensor.restype = ctypes.c_void_p
    library.emu_tensor.argtypes = [ctypes.c_size_t, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    library.emu_undefined.restype = ctypes.c_long
    return library


@cache
def _device_headers() -> Path:
    """A folder with asc.h, precompiled: most of a kernel's compile time is in it."""
    digest = hashlib.sha256("\0".join(_KERNEL_CXX).encode())
    for path in HEADERS:
        digest.update(path.read_bytes())
    folder = CACHE / f"ascend950-device-{digest.hexdigest()[:20]}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            (made / "asc.h").write_text(f'#include "{HERE / "device" / "asc.h"}"\n')
            subprocess.run([compiler(), *_KERNEL_CXX, "-x", "c++-header", str(made / "asc.h"),
                            "-o", str(made / "asc.h.gch")], check=True)
            try:
                os.replace(made, folder)
            except OSError:  # somebody else was faster
                if not folder.exists():
                    raise
    return folder


class Emulation:
    """A lowered kernel, compiled for the emulator.

    Args:
        lowered: of ``targets.ascend950.lower``. op: whose operands the parameters are.

    Raises:
        ToolchainError: the text uses a name that the emulator does not know.
    """

    def __init__(self, lowered: LoweredKernel, op: Op) -> None:
        self.lowered, self.op = lowered, op
        source = adapt(lowered.text)
        self._cores = source.cores
        self._runtime = _runtime()
        flags = (*_KERNEL_CXX, f"-I{_device_headers()}")
        self._library = ctypes.CDLL(str(build("ascend950-kernel", {"kernel": source.text}, flags,
                                              (*HEADERS, *RUNTIME), (str(_runtime_path()),))))

    def with_text(self, text: str) -> Emulation:
        """The same kernel with another text: for mutants."""
        return Emulation(replace(self.lowered, text=text), self.op)

    def run(self, inputs: tuple[Array, ...], outputs: tuple[TensorType, ...],
            dims: Mapping[str, int], schedule: str = "eager", seed: int = 1
            ) -> tuple[tuple[Array, ...], Report]:
        """Run once. Written STATE operands are updated in place.

        Args:
            inputs: arrays in the op's operand order. outputs: types, concrete. dims: of the spec.
            schedule: one of SCHEDULES. seed: of the random one.

        Returns:
            The outputs, and what the checker saw. Outputs start as 0xFF bytes.
        """
        runtime, signature = self._runtime, self.op.signature
        runtime.emu_forget_tensors()
        made = [np.empty(t.storage({}), t.dtype.numpy) for t in outputs]
        for array in made:
            array.view(np.uint8)[...] = 0xFF
        state = {signature.inputs[i].name for i in self.op.written()}
        results = {o.name for o in signature.outputs}
        arrays = dict(zip((o.name for o in (*signature.inputs, *signature.outputs)),
                          (*inputs, *made), strict=True))
        bases: dict[str, int] = {}
        for name, array in arrays.items():
            bases[name] = runtime.emu_tensor(array.nbytes, name.encode(),
                                             int(name in state or name in results),
                                             int(name not in results))
            if name not in results:
                assert array.flags.c_contiguous
                ctypes.memmove(bases[name], array.ctypes.data, array.nbytes)
        arguments, keep = self._arguments(bases, dims)
        runtime.emu_run(ctypes.cast(self._library.emu_entry, ctypes.c_void_p), arguments,
                        grid_size(self.lowered), self._cores, SCHEDULES.index(schedule),
                        ctypes.c_uint64(seed))
        unwritten = 0
        for index, (name, array) in enumerate(arrays.items()):
            if name in state or name in results:
                ctypes.memmove(array.ctypes.data, bases[name], array.nbytes)
                unwritten += runtime.emu_undefined(index)
        del keep
        return tuple(made), self._report(unwritten)

    def _arguments(self, bases: Mapping[str, int], dims: Mapping[str, int]
                   ) -> tuple[Any, list[Any]]:
        arguments = (ctypes.c_void_p * len(self.lowered.params))()
        keep: list[Any] = []
        for i, (name, ctype) in enumerate(self.lowered.params):
            if ctype.endswith("*"):
                arguments[i] = bases[name]
            elif name in dims:
                keep.append(ctypes.c_int(dims[name]))
                arguments[i] = ctypes.addressof(keep[-1])
            else:
                raise ToolchainError(f"parameter '{ctype} {name}' is no operand or dim of "
                                     f"{self.op.name}", where="ascend950 emulator",
                                     next="name buffers and dims as the op's signature does")
        return arguments, keep

    def _report(self, unwritten: int) -> Report:
        buffer = ctypes.create_string_buffer(1 << 16)
        self._runtime.emu_report(buffer, len(buffer))
        counts, texts, operations = buffer.value.decode().split("\f")
        return Report(_numbers(counts, " "), texts, _numbers(operations, " = "), unwritten)


def _numbers(text: str, separator: str) -> dict[str, int]:
    """Lines "name<separator>number" as a mapping."""
    return {name: int(number) for name, number in
            (line.rsplit(separator, 1) for line in text.splitlines())}
