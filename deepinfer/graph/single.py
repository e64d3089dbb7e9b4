"""Graphs of one op at a model's shapes, for ops that no lowered graph has as they are."""

from __future__ import annotations

from deepinfer.graph.config import ModelConfig
from deepinfer.graph.limits import Limits
from deepinfer.ir import Builder, Graph, Sym, TensorType
from deepinfer.ir.types import E2M1, E4M3, UE8M0
from deepinfer.ops.gemm import linear_fp4


def single_op_graphs(cfg: ModelConfig, limits: Limits) -> tuple[Graph, ...]:
    """``linear_fp4`` on one routed expert's matrices. The whole graphs hold experts stacked."""
    rows = Sym("num_tokens", limits.max_num_batched_tokens)
    graphs = []
    for name, m, k in (("w1", cfg.moe_intermediate_size, cfg.hidden_size),
                       ("w2", cfg.hidden_size, cfg.moe_intermediate_size)):
        with Builder(f"expert_{name}") as b:
            y = linear_fp4(b.input("q", TensorType((rows, k), E4M3)),
                           b.input("sf", TensorType((rows, k // 32), UE8M0)),
                           b.weight("w", TensorType((m, k), E2M1)),
                           b.weight("ws", TensorType((m, k // 32), UE8M0)), name=name)
            graphs.append(b.graph([y]))
    return tuple(graphs)
