"""Runs one cpu kernel alone, at any ISA level of this machine, against its op's reference."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from deepinfer.ir.op import Op, type_of
from deepinfer.ir.types import Dim, Sym, TensorType
from deepinfer.runtime.devices.isa import host_levels
from deepinfer.settings import cache_dir
from deepinfer.targets.base import Extent, Kernel, Schedule, Spec
from deepinfer.targets.cpu.toolchain import compile_library, thunk_text
from deepinfer.targets.tile import lower_c

Array = np.ndarray[Any, Any]
_CACHE = cache_dir() / "kernels-alone"


@cache
def _library(text: str, isa: str) -> ctypes.CDLL:
    _CACHE.mkdir(parents=True, exist_ok=True)
    out = _CACHE / f"{hashlib.sha256((isa + text).encode()).hexdigest()}.so"
    compile_library({"kernel": text}, isa, out, _CACHE)
    return ctypes.CDLL(str(out))


_TEXTS: dict[str, str] = {}


def _text(kernel: Kernel, spec: Spec) -> str:
    """The kernel's source with its thunk made visible; lowered once per spec."""
    if spec.key() not in _TEXTS:
        text = thunk_text(lower_c(kernel.program(spec), "kernel"), spec)
        _TEXTS[spec.key()] = text.replace(
            'extern "C" void', 'extern "C" __attribute__((visibility("default"))) void')
    return _TEXTS[spec.key()]


def run_kernel(op: Op, kernel: Kernel, arrays: tuple[Array, ...], attrs: dict[str, Any], *,
               symbolic: str = "N", isa: str = "avx2", ranges: int = 1,
               schedule: Schedule | None = None) -> tuple[Array, ...]:
    """Run ``kernel`` on ``arrays`` (STATE operands are written in place); returns its outputs.

    Args:
        symbolic: comma-separated dims of the signature that are known only at run time.
        ranges: into how many ranges the items are cut (run one after the other, last first).
        Outputs are filled with 0xFF bytes first, so that an unwritten element shows.
    """
    full = op.attrs(attrs)
    names = set(filter(None, symbolic.split(",")))
    concrete = [type_of(a, o.dtype) for a, o in zip(arrays, op.signature.inputs, strict=True)]
    out_types = op.infer(tuple(concrete), full)
    sizes: dict[str, int] = {}
    types = []
    fixed = {k: v for k, v in full.items() if isinstance(v, int)}
    for t, operand in zip(concrete, op.signature.inputs, strict=True):
        fixed |= {n: d for n, d in zip(operand.dims, t.shape, strict=True) if isinstance(d, int)}
    for t, operand in zip(concrete, op.signature.inputs, strict=True):
        shape: list[Dim] = []
        for text, size in zip(operand.dims, t.shape, strict=True):
            assert isinstance(size, int)
            base, _, rest = text.partition("*")
            if base in names and text == base:
                sizes[base] = size
                shape.append(Sym(base, 1 << 20))
            elif base in names:
                shape.append(Sym(base, 1 << 20, int(rest) if rest.isdigit() else fixed[rest]))
            else:
                shape.append(size)
        types.append(TensorType(tuple(shape), t.dtype))
    unifier = op.unifier(full)
    unifier.unify(tuple(types))
    spec = Spec(op, dict(unifier.dims), dict(unifier.dtypes), full)
    spec = replace(spec, schedule=schedule or kernel.space(spec)[0])
    thunk = _library(_text(kernel, spec), isa).kernel_thunk
    outputs = []
    for t in out_types:
        empty = np.empty(t.storage({}), t.dtype.numpy)
        empty.view(np.uint8)[...] = 0xFF
        outputs.append(empty)
    for a in arrays:
        assert a.flags.c_contiguous, "kernels read dense row-major arrays"
    args = (ctypes.c_void_p * (len(arrays) + len(outputs)))(
        *[a.ctypes.data for a in (*arrays, *outputs)])
    dim_values = []
    for name in spec.dynamic():
        sym = spec.dims[name]
        assert isinstance(sym, Sym)
        dim_values.append(sizes[sym.name] * sym.times)
    dim_array = (ctypes.c_int32 * max(1, len(dim_values)))(*dim_values)
    extent = Extent.parse(kernel.items, spec)
    count = -(-(sizes[extent.sym] if extent.sym else 1) * extent.mul // extent.div)
    scratch = (ctypes.c_uint8 * max(64, kernel.scratch(spec)))(*b"\xff" * 64)
    edges = [count * i // ranges for i in range(ranges + 1)]
    for lo, hi in reversed(list(zip(edges, edges[1:], strict=False))):
        thunk(args, dim_array, scratch, ctypes.c_int32(lo), ctypes.c_int32(hi))
    return tuple(outputs)


def bits(array: Array) -> Array:
    """The array's bytes as unsigned integers, for bitwise comparison."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def assert_same_bits(got: Array, expected: Array, what: str = "") -> None:
    """Fail with the first differing element and both bit patterns."""
    assert got.shape == expected.shape and got.dtype == expected.dtype, (
        f"{what}: {got.dtype}{got.shape}, expected {expected.dtype}{expected.shape}")
    a, b = bits(got), bits(expected)
    if not np.array_equal(a, b):
        where = tuple(np.argwhere(a != b)[0])
        raise AssertionError(f"{what}: {int((a != b).sum())} of {a.size} differ, first at "
                             f"{where}: {got[where]} ({a[where]:#x}), expected "
                             f"{expected[where]} ({b[where]:#x})")


def check(op: Op, kernel: Kernel, arrays: tuple[Array, ...], *, symbolic: str = "N",
          **attrs: Any) -> None:
    """Every ISA level of the machine, every schedule and several cuts give the reference's bits,
    outputs and written STATE alike."""
    def copy() -> tuple[Array, ...]:
        return tuple(a.copy() for a in arrays)

    expected_arrays = copy()
    expected = op.run(expected_arrays, op.attrs(attrs))
    concrete = [type_of(a, o.dtype) for a, o in zip(arrays, op.signature.inputs, strict=True)]
    unifier = op.unifier(op.attrs(attrs))
    unifier.unify(tuple(concrete))
    space = kernel.space(Spec(op, dict(unifier.dims), dict(unifier.dtypes), op.attrs(attrs)))
    for isa in host_levels():
        for schedule in space:
            for ranges in (1, 3):
                given = copy()
                got = run_kernel(op, kernel, given, attrs, symbolic=symbolic, isa=isa,
                                 ranges=ranges, schedule=schedule)
                what = f"{op.name} {isa} {schedule} cut in {ranges}"
                for g, e, o in zip(got, expected, op.signature.outputs, strict=True):
                    assert_same_bits(g, e, f"{what}, output {o.name}")
                for i in op.written():
                    assert_same_bits(given[i], expected_arrays[i],
                                     f"{what}, state {op.signature.inputs[i].name}")
