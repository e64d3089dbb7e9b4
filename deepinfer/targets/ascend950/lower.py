"""Lower a prim_func to AscendC text for dav-3510 (Ascend 950); needs neither CANN nor an NPU.

TileLang (0.1.15) was observed to order parameters by name, not as the prim_func has them, and to
write the kind of cores into the kernel's declaration: ``__cube__``, ``__vector__`` or
``__mix__(1, 2)``. Its auto-scheduler is off: the kernels place every event themselves.
Source: shared notes on the ascend950 toolchain.
"""

from __future__ import annotations

import re
from typing import Any

from deepinfer.errors import ToolchainError
from deepinfer.targets.base import LoweredKernel
from deepinfer.targets.tile import load

ARCH = "dav-3510"
_KERNEL = re.compile(r'extern "C" __global__ (__cube__|__vector__|__mix__\(1, 2\)) void (\w+)'
                     r"\(([^)]*)\) \{")
_CORES = {"__cube__": "cube", "__vector__": "vector", "__mix__(1, 2)": "mixed"}
_SPACES = {"shared.dyn": "ub", "shared.l1.dyn": "l1", "shared.l1": "l1", "shared.l0c": "l0c",
           "shared.l0c.dyn": "l0c"}
# Buffers keep their own addresses, kernels guard their own accesses and place their own barriers:
# nothing is inferred or added (TileLang puts thread barriers into branches that not all take).
_CONFIG = {"tl.enable_auto_schedule": False, "tl.disable_shared_memory_reuse": True,
           "tl.disable_safe_memory_legalize": True, "tl.disable_thread_storage_sync": True}


def lower(func: Any, symbol: str) -> LoweredKernel:
    """Lower ``func`` with TileLang's Ascend target and call the kernel ``symbol``.

    ``launch`` of the result holds ``grid`` (groups of cores), ``cores`` ("cube", "vector" or
    "mixed": one cube core with two vector cores) and ``memory`` (bytes of UB, L1 and L0C in use).

    Raises:
        ToolchainError: TileLang refused the program or emitted a text we do not know.
    """
    tilelang = load()
    import tvm
    from tvm.target import Target as TvmTarget

    target = TvmTarget({"kind": "ascend", "arch": ARCH})
    try:
        with tvm.transform.PassContext(opt_level=3, config=_CONFIG), target:
            made = tilelang.lower(func, target=target, enable_host_codegen=False,
                                  enable_device_compile=False)
    except Exception as error:  # TVM raises many types; all mean the same to the reader
        raise ToolchainError(f"TileLang could not lower it: {str(error).strip().splitlines()[-1]}",
                             where=f"kernel {symbol}", next="mend the kernel's program") from error
    text = made.kernel_source
    found = _KERNEL.findall(text)
    if len(found) != 1:
        raise ToolchainError(f"{len(found)} kernels were emitted, expected 1",
                             where=f"kernel {symbol}", next="give the program one T.Kernel")
    cores, name, arguments = found[0]
    (function,) = (f for _, f in made.device_mod.functions.items())
    extent = {str(k): v for k, v in function.attrs["thread_extent"].items()}
    launch = {"grid": int(extent["blockIdx.x"]), "cores": _CORES[cores],
              "memory": _memory(function)}
    return LoweredKernel(symbol, re.sub(rf"\b{name}\b", symbol, text).strip() + "\n",
                         tuple(_parameter(a) for a in arguments.split(",")), launch)


def _memory(function: Any) -> dict[str, int]:
    """Bytes that the lowered function allocates in each on-chip memory."""
    from tvm import DataType, tirx

    used = dict.fromkeys(_SPACES.values(), 0)

    def visit(node: Any) -> None:
        if isinstance(node, tirx.AllocBuffer) and node.buffer.scope() in _SPACES:
            dtype, size = DataType(node.buffer.dtype), 1
            for extent in node.buffer.shape:
                size *= int(extent)
            used[_SPACES[node.buffer.scope()]] += size * dtype.bits * dtype.lanes // 8

    tirx.stmt_functor.post_order_visit(function.body, visit)
    return used


def _parameter(argument: str) -> tuple[str, str]:
    ctype, _, name = argument.replace("__gm__", "").strip().rpartition(" ")
    return name, " ".join(ctype.split())


def grid_size(lowered: LoweredKernel) -> int:
    """Groups of cores of a launch; a kernel divides its rows or tiles among them itself."""
    return int(lowered.launch["grid"])
