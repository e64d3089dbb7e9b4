"""Pass fuse_fake_quant: what makes rows only for an fp8 fake quantiser writes them quantised.

``fake_quantize_fp8(silu_mul(...))`` becomes ``silu_mul_fake_quant(...)``, and so for
``grouped_gate_up`` and for ``packed_linear_fp8`` with bf16 outputs. Exact: the rows are rounded to
bf16 in between, and a block is quantised by itself. A node is left alone where its weight tiles of
16 outputs, or its groups, do not fill whole blocks of 32: a kernel makes whole tiles of one group.
Dead readers do not count. Run it after ``prepack_weights``, which makes the packed linears.
"""

from __future__ import annotations

from dataclasses import replace

from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.op import Op
from deepinfer.ir.rewrite import drop_dead, users, with_nodes
from deepinfer.ir.types import Value
from deepinfer.ops.fused import (
    grouped_gate_up_fake_quant,
    packed_linear_fp8_fake_quant,
    silu_mul_fake_quant,
)
from deepinfer.ops.gemm import silu_mul
from deepinfer.ops.moe import grouped_gate_up
from deepinfer.ops.packed import packed_linear_fp8
from deepinfer.ops.quant import fake_quantize_fp8

_FUSED: dict[Op, Op] = {silu_mul: silu_mul_fake_quant,
                        grouped_gate_up: grouped_gate_up_fake_quant,
                        packed_linear_fp8: packed_linear_fp8_fake_quant}
BLOCK = 32  # of two weight tiles


def fuse_fake_quant(graph: Graph) -> Graph:
    """Fuse each fp8 fake quantiser into the node that makes rows for it alone."""
    graph = drop_dead(graph)
    readers = users(graph)
    makers: dict[Value, Node] = {
        n.outputs[0]: n for n in graph.nodes
        if n.op in _FUSED and n.outputs[0] not in graph.outputs
        and [_fits(n, r) for r in readers[n.outputs[0]]] == [True]}
    nodes = []
    for node in graph.nodes:
        if node.outputs and node.outputs[0] in makers:
            continue
        if node.op is fake_quantize_fp8 and node.inputs[0] in makers:
            maker = makers[node.inputs[0]]
            op = _FUSED[maker.op]
            attrs = {k: v for k, v in maker.attrs.items() if k != "out"}
            node = replace(node, op=op, inputs=maker.inputs,
                           attrs=op.attrs({**attrs, "block": node.attrs.block}))
        nodes.append(node)
    return with_nodes(graph, nodes)


def _fits(maker: Node, reader: Node) -> bool:
    """Whether the reader quantises what the maker's whole tiles can hold."""
    if reader.op is not fake_quantize_fp8 or reader.attrs.block != BLOCK:
        return False
    if maker.op is packed_linear_fp8:
        return bool(maker.attrs.out == "bf16" and maker.attrs.m % maker.attrs.groups == 0
                    and maker.attrs.m // maker.attrs.groups % BLOCK == 0)
    return maker.op is silu_mul or bool(maker.attrs.m % BLOCK == 0)
