"""Pass group_experts: routed experts as grouped GEMMs over the rows of each expert.

``expert_gate_up`` and ``expert_down`` become ``grouped_gate_up`` and ``grouped_down`` on rows
sorted by ``group_rows``, on activations widened to bf16 and on packed weights. Exact: a row's sums
do not depend on its group, widening and packing move values only. Run it after
``widen_activations``, whose widened rows it shares, and before ``drop_dead``, which takes away the
codes that nobody reads any more.
"""

from __future__ import annotations

from deepinfer.errors import PassError
from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.rewrite import make_node, with_nodes
from deepinfer.ir.types import Value
from deepinfer.ops.moe import expert_down, expert_gate_up, group_rows, grouped_down, grouped_gate_up
from deepinfer.ops.quant import fake_quantize_fp8, quantize_fp8
from deepinfer.passes.prepack_weights import packed
from deepinfer.passes.widen_activations import widened


def group_experts(graph: Graph) -> Graph:
    """Group the routed experts of every layer; the two halves share one grouping.

    Raises: PassError if an expert reads codes that ``quantize_fp8`` did not make.
    """
    codes: dict[Value, Node] = {}
    wide: dict[tuple[Value, int], Value] = {}
    groups: dict[Value, tuple[Value, ...]] = {}
    nodes: list[Node] = []

    def widen(node: Node) -> Value:
        """The widened rows of an expert's codes, from a node that is there or a new one."""
        source = codes.get(node.inputs[0])
        if source is None:
            raise PassError(f"{node.inputs[0]} is no output of quantize_fp8, expected its codes",
                            where=f"pass group_experts, node {node.op.name} at {node.loc}",
                            next="quantise the experts' activations with quantize_fp8")
        key = (source.inputs[0], source.attrs.block)
        if key not in wide:
            nodes.append(widened(source))
            wide[key] = nodes[-1].outputs[0]
        return wide[key]

    def group(node: Node, idx: Value, experts: int) -> tuple[Value, ...]:
        if idx not in groups:
            names = tuple(f"{idx.name}.{part}" for part in ("order", "offsets"))
            nodes.append(make_node(group_rows, (idx,), names, node.loc, experts=experts))
            groups[idx] = nodes[-1].outputs
        return groups[idx]

    for node in graph.nodes:
        if node.op is expert_gate_up:
            _, _, w1, s1, w3, s3, idx, weight = node.inputs
            operands = (widen(node), *_tiles(w1, s1), *_tiles(w3, s3),
                        *group(node, idx, _size(w1, 0)), weight)
            attrs = grouped_gate_up.attrs({"m": _size(w1, 1), "limit": node.attrs.limit})
            node = Node(grouped_gate_up, operands, node.outputs, attrs, node.loc)
        elif node.op is expert_down:
            _, _, w2, s2, idx = node.inputs
            operands = (widen(node), *_tiles(w2, s2), *group(node, idx, _size(w2, 0)))
            attrs = grouped_down.attrs({"m": _size(w2, 1)})
            node = Node(grouped_down, operands, node.outputs, attrs, node.loc)
        elif node.op is quantize_fp8:
            codes[node.outputs[0]] = node
        elif node.op is fake_quantize_fp8:
            wide[node.inputs[0], node.attrs.block] = node.outputs[0]
        nodes.append(node)
    return with_nodes(graph, nodes)


def _tiles(w: Value, sf: Value) -> tuple[Value, Value]:
    return packed(w, "tile16_e2m1"), packed(sf, "tile16_e2m1_sf")


def _size(w: Value, axis: int) -> int:
    size = w.type.shape[axis]
    assert isinstance(size, int)
    return size
