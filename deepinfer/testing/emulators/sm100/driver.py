"""Runs a lowered sm100 kernel on numpy arrays in the emulator, under chosen schedules."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.errors import ToolchainError
from deepinfer.ir.op import Op
from deepinfer.ir.types import TensorType
from deepinfer.targets.base import LoweredKernel
from deepinfer.targets.sm100.lower import evaluate_size
from deepinfer.testing.emulators.objects import build
from deepinfer.testing.emulators.sm100.source import adapt

Array = np.ndarray[Any, Any]
HERE = Path(__file__).parent
RUNTIME = sorted((HERE / "runtime").glob("*.cpp"))
HEADERS = sorted((*(HERE / "runtime").glob("*.h"), *(HERE / "device").glob("*.h"),
                  HERE.parent / "formats.h"))
# No unique symbols: they would be shared between the emulators of one process.
_CXX = ("-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique", "-w")
# -fsanitize=thread makes the compiler report every access; its library is never linked.
_KERNEL_CXX = (*_CXX, "-O1", "-fpermissive", "-fsanitize=thread", "-fno-tree-vectorize")

# When asynchronous operations run: at once; as late as possible; in random order (with warps
# shuffled); late with threads reversed; copies at once but MMAs late.
SCHEDULES = ("eager", "lazy", "random", "reversed", "late_mma")


@dataclass(frozen=True, slots=True)
class Report:
    """What one run saw.

    Args:
        counts: violations by kind ("race", "deadlock", "uninitialised", ...); empty is clean.
        texts: the first few of each kind. operations: how often each instruction ran
            ("tcgen05.mma" once an MMA; what every thread runs counts once a thread).
        notes: what is legal but odd.
        unwritten: output bytes that nothing wrote.
    """

    counts: Mapping[str, int]
    texts: str
    operations: Mapping[str, int]
    notes: str
    unwritten: int

    def clean(self) -> bool:
        return not self.counts and not self.unwritten


@cache
def _runtime_path() -> Path:
    sources: dict[str, str | Path] = {p.stem: p for p in RUNTIME}
    return build("sm100-runtime", sources, (*_CXX, "-O2"), HEADERS)


@cache
def _runtime() -> ctypes.CDLL:
    """Loaded for itself alone: kernels are linked to it, and the emulators of two targets define
    the same names."""
    library = ctypes.CDLL(str(_runtime_path()))
    library.emu_tensor.restype = ctypes.c_void_p
    library.emu_tensor.argtypes = [ctypes.c_size_t, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    library.emu_undefined.restype = ctypes.c_long
    return library


class _TensorMap(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int), ("rank", ctypes.c_int), ("base", ctypes.c_void_p),
                ("dim", ctypes.c_int64 * 5), ("stride", ctypes.c_int64 * 5),
                ("box", ctypes.c_int * 5), ("element_stride", ctypes.c_int * 5),
                ("interleave", ctypes.c_int), ("swizzle", ctypes.c_int), ("l2", ctypes.c_int),
                ("oob", ctypes.c_int)]


class Emulation:
    """A lowered kernel, compiled for the emulator.

    Args:
        lowered: of ``targets.sm100.lower``. op: whose operands the parameters are.

    Raises:
        ToolchainError: the text uses a name that the emulator does not know.
    """

    def __init__(self, lowered: LoweredKernel, op: Op) -> None:
        self.lowered, self.op = lowered, op
        self._source = adapt(lowered.text)
        flags = (*_KERNEL_CXX, f"-I{HERE / 'device'}")
        runtime = _runtime()
        self._library = ctypes.CDLL(str(build("sm100-kernel", {"kernel": self._source.text}, flags,
                                              (*HEADERS, *RUNTIME), (str(_runtime_path()),))))
        self._runtime = runtime

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
        written = {signature.inputs[i].name for i in self.op.written()}
        bases: dict[str, int] = {}
        arrays = dict(zip((o.name for o in (*signature.inputs, *signature.outputs)),
                          (*inputs, *made), strict=True))
        for name, array in arrays.items():
            defined = not any(o.name == name for o in signature.outputs)
            bases[name] = runtime.emu_tensor(array.nbytes, name.encode(),
                                             int(not defined), int(defined))
            if defined:
                assert array.flags.c_contiguous
                ctypes.memmove(bases[name], array.ctypes.data, array.nbytes)
        arguments, keep = self._arguments(bases, dims)
        launch = self.lowered.launch
        grid = (ctypes.c_int * 3)(*(evaluate_size(g, dims) for g in launch["grid"]))
        statics = [x for pair in self._source.statics for x in pair]
        runtime.emu_run(
            ctypes.cast(self._library.emu_entry, ctypes.c_void_p), arguments, grid,
            launch["threads"], ctypes.c_size_t(launch["dynamic_smem"]),
            (ctypes.c_size_t * max(1, len(statics)))(*statics), len(self._source.statics),
            SCHEDULES.index(schedule), ctypes.c_uint64(seed))
        unwritten = 0
        for index, (name, array) in enumerate(arrays.items()):
            if name in written or any(array is m for m in made):
                ctypes.memmove(array.ctypes.data, bases[name], array.nbytes)
                unwritten += runtime.emu_undefined(index)
        del keep
        return tuple(made), self._report(unwritten)

    def _arguments(self, bases: Mapping[str, int], dims: Mapping[str, int]
                   ) -> tuple[Any, list[Any]]:
        arguments = (ctypes.c_void_p * len(self.lowered.params))()
        keep: list[Any] = []
        for i, (name, ctype) in enumerate(self.lowered.params):
            if "CUtensorMap" in ctype:
                keep.append(self._tensor_map(self.lowered.launch["tensor_maps"][name], bases, dims))
                arguments[i] = ctypes.addressof(keep[-1])
            elif ctype.endswith("*"):
                arguments[i] = bases[name]
            elif name in dims:
                keep.append(ctypes.c_int(dims[name]))
                arguments[i] = ctypes.addressof(keep[-1])
            else:
                raise ToolchainError(f"parameter '{ctype} {name}' is no operand or dim of "
                                     f"{self.op.name}", where="sm100 emulator",
                                     next="name buffers and dims as the op's signature does")
        return arguments, keep

    @staticmethod
    def _tensor_map(m: Mapping[str, Any], bases: Mapping[str, int], dims: Mapping[str, int]
                    ) -> _TensorMap:
        made = _TensorMap(dtype=m["dtype"], rank=m["rank"], base=bases[m["operand"]],
                          interleave=m["interleave"], swizzle=m["swizzle"], l2=m["l2"],
                          oob=m["oob"])
        for i in range(m["rank"]):
            made.dim[i] = evaluate_size(m["dims"][i], dims)
            made.stride[i] = evaluate_size(m["strides"][i], dims)
            made.box[i] = evaluate_size(m["box"][i], dims)
            made.element_stride[i] = evaluate_size(m["element_strides"][i], dims)
        return made

    def _report(self, unwritten: int) -> Report:
        buffer = ctypes.create_string_buffer(1 << 16)
        self._runtime.emu_report(buffer, len(buffer))
        counts, texts, operations, notes = buffer.value.decode().split("\f")
        return Report(_counts(counts), texts, _counts(operations), notes, unwritten)


def _counts(lines: str) -> dict[str, int]:
    """Lines "name = count"."""
    pairs = (line.rsplit(" = ", 1) for line in lines.splitlines())
    return {name: int(count) for name, count in pairs}

