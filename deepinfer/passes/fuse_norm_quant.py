"""Pass fuse_norm_quant: a norm whose only reader is an fp8 quantisation becomes one op.

``fake_quantize_fp8(rms_norm(x, w))`` becomes ``norm_fake_quant(x, w)``, and with ``quantize_fp8``
``norm_quant(x, w)``. Exact: both round the normed row to bf16 in between. Dead readers do not
count: ``widen_activations`` leaves a quantiser behind whose codes nobody reads.
"""

from __future__ import annotations

from dataclasses import replace

from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.op import Op
from deepinfer.ir.rewrite import drop_dead, users, with_nodes
from deepinfer.ir.types import Value
from deepinfer.ops.norm import norm_fake_quant, norm_quant, rms_norm
from deepinfer.ops.quant import fake_quantize_fp8, quantize_fp8

_FUSED: dict[Op, Op] = {fake_quantize_fp8: norm_fake_quant, quantize_fp8: norm_quant}


def fuse_norm_quant(graph: Graph) -> Graph:
    """Fuse each rms_norm into the fp8 quantisation that alone reads it."""
    graph = drop_dead(graph)
    readers = users(graph)
    norms: dict[Value, Node] = {
        n.outputs[0]: n for n in graph.nodes
        if n.op is rms_norm and n.outputs[0] not in graph.outputs
        and [r.op in _FUSED for r in readers[n.outputs[0]]] == [True]}
    nodes = []
    for node in graph.nodes:
        if node.outputs and node.outputs[0] in norms:
            continue
        if node.op in _FUSED and node.inputs[0] in norms:
            norm, op = norms[node.inputs[0]], _FUSED[node.op]
            node = replace(node, op=op, inputs=norm.inputs,
                           attrs=op.attrs({**norm.attrs, **node.attrs}))
        nodes.append(node)
    return with_nodes(graph, nodes)
