"""Specs of every sm100 kernel at the shapes of V4.1-Flash."""

from __future__ import annotations

from typing import Any

from deepinfer.ir.op import OPS
from deepinfer.ir.types import BF16, E2M1, E4M3, F32, I32, UE8M0, Dim, DType, Sym, TensorType
from deepinfer.ops import attention, fused, gemm, indexer, norm  # noqa: F401  declares the ops
from deepinfer.targets.base import Kernel, Schedule, Spec
from deepinfer.targets.sm100.target import TARGET

N, R, S = Sym("num_tokens", 8192), Sym("num_requests", 256), Sym("num_slots", 256)
T, L = Sym("num_pages", 4096), Sym("pages_per_request", 512, 64)
D, W = 512, 192


def types(*given: tuple[DType, Any]) -> list[TensorType]:
    return [TensorType(shape if isinstance(shape, tuple) else (shape,), t) for t, shape in given]


ATTENTION = types(
    (BF16, (N, 64 * D)), (E4M3, (N, D)), (UE8M0, (N, 16)), (E4M3, (S, W, D)), (UE8M0, (S, W, 16)),
    (F32, 64), (I32, N), (I32, N), (I32, (R, 4)), (I32, (N, 512)), (I32, (R, 128)),
    (E2M1, (T, 64, D)), (E4M3, (T, 64, D // 16)))
OPERANDS: dict[str, tuple[list[TensorType], dict[str, Any]]] = {
    "norm_quant": (types((BF16, (N, 5120)), (BF16, 5120)), {"eps": 1e-20, "block": 32}),
    "linear_fp8": (types((E4M3, (N, 5120)), (UE8M0, (N, 160)), (E4M3, (1280, 5120)),
                         (UE8M0, (40, 160))), {}),
    "linear_fp4": (types((E4M3, (N, 5120)), (UE8M0, (N, 160)), (E2M1, (2304, 5120)),
                         (UE8M0, (2304, 160))), {}),
    "topk": (types((F32, (N, L)), (I32, N)), {"k": 512, "ratio": 2}),
    "rope_window_write": (types((BF16, (N, D)), (I32, N), (F32, (65536, 64)), (I32, N),
                                (I32, (R, 4)), (E4M3, (S, W, D)), (UE8M0, (S, W, 16))), {}),
    "sparse_attention": (ATTENTION, {"window": 128, "scale": float(D) ** -0.5}),
}


def spec_of(name: str, schedule: Schedule | None = None) -> tuple[Kernel, Spec]:
    """The kernel and its spec at these shapes, at its default schedule if none is given."""
    op, kernel = OPS[name], TARGET.kernels[name]
    given, attrs = OPERANDS[name]
    full = op.attrs(attrs)
    unifier = op.unifier(full)
    unifier.unify(tuple(given))
    dims: dict[str, Dim] = dict(unifier.dims)
    plain = Spec(op, dims, dict(unifier.dtypes), full)
    return kernel, Spec(op, dims, dict(unifier.dtypes), full, schedule or kernel.space(plain)[0])
