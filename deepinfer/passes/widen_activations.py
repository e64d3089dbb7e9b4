"""Pass widen_activations: fp8 activations as bf16 rows that hold the quantised values.

``q, sf = quantize_fp8(x); linear_fp8(q, sf, w, ws)`` becomes
``x8 = fake_quantize_fp8(x); wide_linear_fp8(x8, w, ws)``, and so for ``linear_fp4``. Exact: e4m3
times a power of two is a bf16 number, and the GEMM reads bf16. The codes stay where other ops read
them.
"""

from __future__ import annotations

from dataclasses import replace

from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.rewrite import make_node, with_nodes
from deepinfer.ir.types import Value
from deepinfer.ops.gemm import linear_fp4, linear_fp8, wide_linear_fp4, wide_linear_fp8
from deepinfer.ops.quant import (
    fake_quantize_fp4,
    fake_quantize_fp8,
    quantize_fp4,
    quantize_fp8,
)

_WIDE_LINEAR = {linear_fp8: wide_linear_fp8, linear_fp4: wide_linear_fp4}
_FAKE = {quantize_fp8: fake_quantize_fp8, quantize_fp4: fake_quantize_fp4}


def widened(quantize: Node) -> Node:
    """The node that gives, as bf16, what ``quantize_fp8`` or ``quantize_fp4`` gives as codes.

    Its output is called "<name of the codes>.wide".
    """
    fake = _FAKE[quantize.op]
    return make_node(fake, quantize.inputs, (f"{quantize.outputs[0].name}.wide",), quantize.loc,
                     block=quantize.attrs.block)


def widen_activations(graph: Graph) -> Graph:
    """Let quantised linears read bf16 rows. Rows that are quantised twice are widened once."""
    codes: dict[Value, Node] = {n.outputs[0]: n for n in graph.nodes if n.op is quantize_fp8}
    wanted = {codes[n.inputs[0]] for n in graph.nodes
              if n.op in _WIDE_LINEAR and n.inputs[0] in codes}
    wide: dict[tuple[Value, int], Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes.append(node)
        if node in wanted and (node.inputs[0], node.attrs.block) not in wide:
            fake = widened(node)
            wide[node.inputs[0], node.attrs.block] = fake.outputs[0]
            nodes.append(fake)
        elif node.op in _WIDE_LINEAR and node.inputs[0] in codes:
            source = codes[node.inputs[0]]
            operands = (wide[source.inputs[0], source.attrs.block], *node.inputs[2:])
            nodes[-1] = replace(node, op=_WIDE_LINEAR[node.op], inputs=operands)
    return with_nodes(graph, nodes)
