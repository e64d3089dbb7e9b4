"""Lower a prim_func to CUDA text for sm_100a, with what is needed to launch it; needs no GPU.

TileLang (0.1.15) was observed to order parameters by name, to replace a buffer that only TMA reads
by its tensor map ``<buffer>_desc``, to drop operands that are not read, and to put the grid, the
dynamic shared memory and the tensor maps into attributes of the lowered module.
Source: shared notes on the sm100 toolchain.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from deepinfer.errors import ToolchainError
from deepinfer.targets.base import LoweredKernel
from deepinfer.targets.tile import load

ARCH = "sm_100a"
_KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\([^)]*\) (\w+)\(([^)]*)\) \{')
# Kernels guard their own accesses and place their own barriers: nothing is added between them.
_CONFIG = {"tl.disable_safe_memory_legalize": True, "tl.disable_thread_storage_sync": True}
_MAP_FIELDS = ("dims", "strides", "box", "element_strides")


def lower(func: Any, symbol: str) -> LoweredKernel:
    """Lower ``func`` with TileLang's CUDA target and call the kernel ``symbol``.

    ``launch`` of the result holds: ``grid`` (three expressions of the op's dims), ``threads``,
    ``dynamic_smem`` (bytes), and ``tensor_maps`` by parameter (operand, CUtensorMapDataType,
    dims and strides innermost first, box, swizzle: the arguments of cuTensorMapEncodeTiled).

    Raises:
        ToolchainError: TileLang refused the program or emitted a text we do not know.
    """
    tilelang = load()
    import tvm
    from tvm.target import Target as TvmTarget

    target = TvmTarget({"kind": "cuda", "arch": ARCH})
    try:
        with tvm.transform.PassContext(opt_level=3, config=_CONFIG), target:
            made = tilelang.lower(func, target=target)
    except Exception as error:  # TVM raises many types; all mean the same to the reader
        raise ToolchainError(f"TileLang could not lower it: {str(error).strip().splitlines()[-1]}",
                             where=f"kernel {symbol}", next="mend the kernel's program") from error
    text = made.kernel_source
    found = _KERNEL.findall(text)
    if len(found) != 1:
        raise ToolchainError(f"{len(found)} kernels were emitted, expected 1",
                             where=f"kernel {symbol}", next="give the program one T.Kernel")
    name, arguments = found[0]
    return LoweredKernel(symbol, re.sub(rf"\b{name}\b", symbol, text).strip() + "\n",
                         tuple(_parameter(a) for a in arguments.split(",")), _launch(made))


def _parameter(argument: str) -> tuple[str, str]:
    ctype, _, name = argument.replace("__restrict__", "").replace("__grid_constant__", "") \
        .strip().rpartition(" ")
    return name, " ".join(ctype.split())


def _launch(made: Any) -> dict[str, Any]:
    (function,) = (f for _, f in made.device_mod.functions.items())
    extent = {str(k): v for k, v in function.attrs["thread_extent"].items()}
    smem = function.attrs["dyn_shared_memory_buf"] \
        if "dyn_shared_memory_buf" in function.attrs else 0
    maps: dict[str, Any] = {}
    for _, host in made.host_mod.functions.items():
        if host.attrs is not None and "tma_descriptor_args" in host.attrs:
            for key, value in host.attrs["tma_descriptor_args"].items():
                maps[str(key)] = _tensor_map(list(value))
    return {"grid": [_size(extent.get(f"blockIdx.{axis}", 1)) for axis in "xyz"],
            "threads": int(extent["threadIdx.x"]), "dynamic_smem": int(smem),
            "tensor_maps": maps}


def _size(expression: Any) -> int | str:
    text = str(expression)
    return int(text) if text.isdigit() else text


def _tensor_map(arguments: list[Any]) -> dict[str, Any]:
    """From TileLang's (call, name, dtype, rank, buffer, 4 x rank numbers, 4 modes)."""
    dtype, rank, operand = int(arguments[2]), int(arguments[3]), str(arguments[4])
    numbers = [_size(a) for a in arguments[5:]]
    made: dict[str, Any] = {"operand": operand, "dtype": dtype, "rank": rank}
    for i, name in enumerate(_MAP_FIELDS):
        made[name] = numbers[i * rank:(i + 1) * rank]
    modes = zip(("interleave", "swizzle", "l2", "oob"), numbers[4 * rank:], strict=True)
    return made | {name: int(mode) for name, mode in modes}


_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__,
    ast.FloorDiv: int.__floordiv__, ast.Mod: int.__mod__,
}


def evaluate_size(expression: int | str, dims: Mapping[str, int]) -> int:
    """The value of a size in ``LoweredKernel.launch`` for these dims of the op.

    Raises:
        ToolchainError: the expression has a form or a name that is not known.
    """

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name) if name in dims:
                return dims[name]
            case ast.BinOp(left=a, op=operator, right=b) if type(operator) in _OPERATORS:
                return int(_OPERATORS[type(operator)](value(a), value(b)))
            case ast.Call(args=[_, inner]):  # T.Cast("int64", n), T.int64(n)
                return value(inner)
            case ast.Call(args=[inner]):
                return value(inner)
        raise ToolchainError(f"cannot evaluate the size '{expression}' with dims {sorted(dims)}",
                             where="launching a kernel", next="report it")

    return value(ast.parse(str(expression), mode="eval").body)
