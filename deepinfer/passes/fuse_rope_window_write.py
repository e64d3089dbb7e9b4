"""Pass fuse_rope_window_write: rotation, quantisation and ring write of a key become one op.

``k = rope(x); q, sf = quantize_fp8(k); window_write(q, sf, ...)`` becomes ``q, sf =
rope_window_write(x, ...)`` where the rope stood, so the ring is written earlier. Exact, because it
is done only where no node in between touches the ring: an attention of the same step reads what the
write replaces, so there the three stay.
"""

from __future__ import annotations

from dataclasses import replace

from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.rewrite import users, with_nodes
from deepinfer.ir.types import Value
from deepinfer.ops.cache import window_write
from deepinfer.ops.fused import rope_window_write
from deepinfer.ops.quant import quantize_fp8
from deepinfer.ops.rope import rope


def fuse_rope_window_write(graph: Graph) -> Graph:
    """Fuse each rotated, quantised key into its ring write where the ring is idle in between."""
    maker: dict[Value, Node] = {v: n for n in graph.nodes for v in n.outputs}
    at = {node: i for i, node in enumerate(graph.nodes)}
    readers = users(graph)
    fused: dict[Node, Node] = {}
    gone: set[Node] = set()
    for write in graph.nodes:
        chain = _chain(write, maker)
        if chain is None:
            continue
        turn, quantize = chain
        alone = readers[turn.outputs[0]] == [quantize] and turn.outputs[0] not in graph.outputs
        between = graph.nodes[at[turn] + 1:at[write]]
        if not alone or any(v in write.writes() for n in between for v in n.inputs):
            continue
        x, positions, table = turn.inputs
        operands = (x, positions, table, *write.inputs[3:])
        fused[turn] = replace(quantize, op=rope_window_write, inputs=operands,
                              attrs=rope_window_write.attrs({"block": quantize.attrs.block}))
        gone |= {quantize, write}
    return with_nodes(graph, [fused.get(n, n) for n in graph.nodes if n not in gone])


def _chain(write: Node, maker: dict[Value, Node]) -> tuple[Node, Node] | None:
    """The rope and the quantisation that feed this ring write, if they fit the fused op."""
    if write.op is not window_write:
        return None
    quantize = maker.get(write.inputs[0])
    if quantize is None or quantize.op is not quantize_fp8 \
            or write.inputs[1] is not quantize.outputs[1]:
        return None
    turn = maker.get(quantize.inputs[0])
    if turn is None or turn.op is not rope or turn.attrs.heads != 1 or turn.attrs.inverse \
            or turn.inputs[1] is not write.inputs[2]:
        return None
    return turn, quantize
