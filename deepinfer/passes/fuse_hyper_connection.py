"""Pass fuse_hyper_connection: what stands between two sublayers becomes one op, row by row.

``x = hyper_post(..); hyper_mix(x); u = rms_norm(hyper_collapse(x, pre)); fake_quantize_fp8(u)``
becomes ``hyper_post_enter``, and without the ``hyper_post`` (after the embedding or an Engram)
``hyper_enter``. Exact: streams, collapsed and normed rows are rounded to bf16 in between as before.
Other readers of the streams and of the normed row (taps, the router, a compressor) read outputs.

Left alone: streams that are collapsed but not mixed (the head, the replay cut), and the reverse.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.op import Op
from deepinfer.ir.rewrite import drop_dead, users, with_nodes
from deepinfer.ir.types import Value
from deepinfer.ops.fused_hyper import hyper_enter, hyper_post_enter
from deepinfer.ops.hyper import hyper_collapse, hyper_mix, hyper_post
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.quant import fake_quantize_fp8


@dataclass(frozen=True, slots=True)
class _Chain:
    """The nodes of one connection; ``post`` where the streams are made by one."""

    post: Node | None
    mix: Node
    collapse: Node
    norm: Node
    quantize: Node

    def nodes(self) -> tuple[Node, ...]:
        inner = (self.mix, self.collapse, self.norm, self.quantize)
        return inner if self.post is None else (self.post, *inner)

    def fused(self) -> Node:
        """The node that stands for all of them."""
        mix, norm = self.mix, self.norm
        operands = (self.collapse.inputs[1], *mix.inputs[1:], norm.inputs[1])
        outputs = (*mix.outputs, *norm.outputs, *self.quantize.outputs)
        op = hyper_enter if self.post is None else hyper_post_enter
        attrs = op.attrs({**mix.attrs, "norm_eps": norm.attrs.eps,
                          "block": self.quantize.attrs.block})
        if self.post is None:
            return Node(op, (mix.inputs[0], *operands), outputs, attrs, mix.loc)
        return Node(op, (*self.post.inputs, *operands), (*self.post.outputs, *outputs), attrs,
                    mix.loc)


def fuse_hyper_connection(graph: Graph) -> Graph:
    """Put one op where a sublayer begins, together with the end of the one before it."""
    graph = drop_dead(graph)
    readers = users(graph)
    maker = {v: n for n in graph.nodes for v in n.outputs}
    at = {n: i for i, n in enumerate(graph.nodes)}
    fused: dict[Node, Node] = {}
    gone: set[Node] = set()
    for collapse in graph.nodes:
        chain = _chain(collapse, maker, readers, graph)
        if chain is None:
            continue
        first = min(chain.nodes(), key=at.__getitem__)
        new = chain.fused()
        # The ops of the chain move up to its first one: whatever they read must be there.
        if all(at[maker[v]] < at[first] for v in new.inputs if v in maker):
            fused[first] = new
            gone |= set(chain.nodes()) - {first}
    return with_nodes(graph, [fused.get(n, n) for n in graph.nodes if n not in gone])


def _chain(collapse: Node, maker: dict[Value, Node], readers: dict[Value, list[Node]],
           graph: Graph) -> _Chain | None:
    """The connection that this collapse is part of, if it has all its parts."""

    def one(value: Value, op: Op) -> Node | None:
        """The only reader of the value that is such an op and reads it first."""
        found = [n for n in readers[value] if n.op is op and n.inputs[0] is value]
        return found[0] if len(found) == 1 else None

    if collapse.op is not hyper_collapse or collapse.outputs[0] in graph.outputs:
        return None
    streams, row = collapse.inputs[0], collapse.outputs[0]
    mix, norm = one(streams, hyper_mix), one(row, rms_norm)
    if mix is None or norm is None or len(readers[row]) != 1:
        return None
    quantize = one(norm.outputs[0], fake_quantize_fp8)
    if quantize is None:
        return None
    post = maker.get(streams)
    if post is not None and post.op is not hyper_post:
        post = None
    return _Chain(post, mix, collapse, norm, quantize)
