"""A target whose "lowering" needs no TileLang."""

from __future__ import annotations

from typing import Any

from deepinfer.targets.base import Kernel, LoweredKernel, Schedule, Spec, Target, grid

lowered: list[str] = []


def lower(program: Any, symbol: str) -> LoweredKernel:
    lowered.append(symbol)
    return LoweredKernel(symbol, f"void {symbol}() {{ /* {program} */ }}\n", (("x", "float*"),),
                         {"grid": [1, 2]})


def build(spec: Spec) -> str:
    return spec.key()


def kernel(op: str, items: str = "N", space: tuple[Schedule, ...] = grid(tile=(16, 32))) -> Kernel:
    return Kernel(op, build, items, lambda spec: space, lambda spec: 128 if op == "scale" else 0)


def target(*ops: str) -> Target:
    return Target("fake", {}, (), {op: kernel(op) for op in ops}, lower,
                  lambda *a, **k: {}, lambda: {})
