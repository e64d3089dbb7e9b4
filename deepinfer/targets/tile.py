"""The only bridge to TileLang: lower a prim_func to text, and read the emitted signature.

TileLang's C backend was observed (0.1.15) to order parameters by name, to print float literals
with seven digits (see ``deepinfer.targets.cpu.dialect.const``), and to guard every access unless
told not to. Source: shared notes on the CPU toolchain; tilelang 0.1.15.
"""

from __future__ import annotations

import re
from typing import Any

from deepinfer.errors import ToolchainError
from deepinfer.targets.base import LoweredKernel

_DECL = re.compile(r"int32_t (\w+)\(([^)]*)\) \{")


def load() -> Any:
    """Import TileLang, or say what to install."""
    try:
        import tilelang
    except ImportError as error:
        raise ToolchainError(f"tilelang cannot be imported: {error}", where="lowering kernels",
                             next="install the compile extra: pip install "
                                  "'deepinfer-compiler[compile]'") from error
    return tilelang


def lower_c(func: Any, symbol: str) -> LoweredKernel:
    """Lower ``func`` with TileLang's C target and call the result ``symbol``.

    Raises:
        ToolchainError: TileLang refused the program or emitted a text we do not know.
    """
    tilelang = load()
    import tvm
    from tvm.target import Target as TvmTarget

    try:
        with tvm.transform.PassContext(
            opt_level=3, config={"tl.disable_safe_memory_legalize": True}
        ), TvmTarget("c"):
            text = tilelang.lower(func, target=TvmTarget("c")).kernel_source
    except Exception as error:  # TVM raises many types; all mean the same to the reader
        raise ToolchainError(f"TileLang could not lower it: {error}", where=f"kernel {symbol}",
                             next="mend the kernel's program") from error
    return read_emitted(text, symbol)


def read_emitted(text: str, symbol: str) -> LoweredKernel:
    """Rename the emitted function, drop TileLang's header, and parse the parameters."""
    found = _DECL.findall(text)
    if len(found) != 1:
        raise ToolchainError(f"{len(found)} functions were emitted, expected 1",
                             where=f"kernel {symbol}", next="give the program one T.Kernel")
    name, arguments = found[0]
    params = []
    for argument in arguments.split(","):
        ctype, _, variable = argument.strip().rpartition(" ")
        params.append((variable, ctype.replace(" ", "")))
    body = "\n".join(line for line in text.splitlines()
                     if not line.startswith(("#include", "// tilelang target")))
    return LoweredKernel(symbol, re.sub(rf"\b{name}\b", symbol, body).strip() + "\n",
                         tuple(params))
