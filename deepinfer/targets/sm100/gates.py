"""Static gates of sm100 kernels: what no tool checks for us, on the text, the cubin and its SASS.

A gate that needs an absent tool says "not checked", never "passed".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer.errors import TargetError
from deepinfer.targets.base import LoweredKernel
from deepinfer.targets.sm100.facts import FACTS
from deepinfer.targets.sm100.toolchain import Cubin, disassemble

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"
# T.gemm into a fragment is mma.sync on sm_100a, silently: a hundredth of tcgen05's rate.
_WARP_MMA_TEXT = re.compile(r"\b(?:tl::)?(mma_sync\w*|ptx_ldmatrix\w*|wgmma_\w+|gemm_[rs]s)\b")
_WARP_MMA_SASS = re.compile(r"\b([HQI]?MMA|HGMMA|QGMMA)\.")
_TENSOR_TEXT = re.compile(r"tl::tcgen05mma_\w+")
_TENSOR_SASS = re.compile(r"\b(UTC[HQO]MMA)\b")
_ALLOCATE = re.compile(r"tl::tmem_allocate\(\(&\((\w+)\[0\]\)\), (\d+)\)")
_DEALLOCATE = re.compile(r"tl::tmem_deallocate\(\(&\((\w+)\[0\]\)\), (\d+)\)")
_STATIC = re.compile(r"__shared__ __align__\(\d+\) ([\w ]+?) \w+\[(\d+)\];")
_STATIC_BYTES = {"uint64_t": 8, "uint": 4, "int": 4, "float": 4}


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate's outcome: ``status`` is "passed", "failed" or "not checked"."""

    name: str
    status: str
    detail: str


def _gate(name: str, ok: bool, detail: str) -> Gate:
    return Gate(name, PASSED if ok else FAILED, detail)


def check_text(lowered: LoweredKernel) -> tuple[Gate, ...]:
    """Gates on the generated text: shared memory, tensor memory, and no warp-level mma."""
    text = lowered.text
    static = sum(_STATIC_BYTES.get(t, 16) * int(n) for t, n in _STATIC.findall(text))
    smem, limit = static + int(lowered.launch["dynamic_smem"]), int(FACTS["smem_per_block"].value)
    allocated, freed = _ALLOCATE.findall(text), _DEALLOCATE.findall(text)
    columns = [int(n) for _, n in allocated]
    low, high = int(FACTS["tmem_alloc_min"].value), int(FACTS["tmem_columns"].value)
    legal = all(low <= n <= high and n & (n - 1) == 0 for n in columns)
    warp_mma = sorted(set(_WARP_MMA_TEXT.findall(text)))
    return (
        _gate("shared memory", smem <= limit, f"{smem} bytes, at most {limit}"),
        _gate("tensor memory", legal and sum(columns) <= high,
              f"{sum(columns)} columns as {columns}, powers of two, at most {high}"),
        _gate("tensor memory is freed", sorted(allocated) == sorted(freed),
              f"allocated {allocated}, freed {freed}"),
        _gate("no warp-level mma", not warp_mma, ", ".join(warp_mma) or "none in the text"),
    )


def check_cubin(lowered: LoweredKernel, cubin: Cubin | None, why_not: str = "no nvcc"
                ) -> tuple[Gate, ...]:
    """Gates on the compiled kernel; all "not checked" without one, for the reason given."""
    if cubin is None:
        return tuple(Gate(name, NOT_CHECKED, why_not)
                     for name in ("registers", "no spills", "tcgen05 in SASS"))
    return (*check_resources(cubin), check_sass(lowered, disassemble(cubin)))


def check_resources(cubin: Cubin) -> tuple[Gate, Gate]:
    """Gates on what ptxas reported."""
    limit = int(FACTS["registers_per_thread"].value)
    return (_gate("registers", cubin.registers <= limit, f"{cubin.registers}, at most {limit}"),
            _gate("no spills", cubin.spilled == 0, f"{cubin.spilled} bytes"))


def check_sass(lowered: LoweredKernel, sass: str | None) -> Gate:
    """What the text issues to the tensor cores must be UTC*MMA in SASS, and nothing HMMA."""
    name = "tcgen05 in SASS"
    if sass is None:
        return Gate(name, NOT_CHECKED, "no cuobjdump or no nvdisasm")
    found = _TENSOR_SASS.findall(sass)
    warp = _WARP_MMA_SASS.findall(sass)
    wanted = _TENSOR_TEXT.search(lowered.text) is not None
    counts = ", ".join(f"{op} x{found.count(op)}" for op in sorted(set(found))) or "no tcgen05 mma"
    detail = counts + (f", warp-level: {sorted(set(warp))}" if warp else "")
    return _gate(name, bool(found) == wanted and not warp, detail)


def require(gates: Iterable[Gate], symbol: str) -> None:
    """Refuse a kernel with a failed gate.

    Raises:
        TargetError: names each failed gate with its numbers.
    """
    failed = [g for g in gates if g.status == FAILED]
    if failed:
        raise TargetError("; ".join(f"{g.name}: {g.detail}" for g in failed),
                          where=f"kernel {symbol} on sm100",
                          next="change the kernel or its schedule")
