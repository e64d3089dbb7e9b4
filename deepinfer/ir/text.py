"""The text form of a graph: stable, one node a line; what ``--print-after`` shows."""

from __future__ import annotations

import hashlib

from deepinfer.ir.graph import Graph, Node


def node_text(node: Node) -> str:
    """``%q: e4m3[n,5120], %sf: ue8m0[n,160] = norm_quant(%x, @w) eps=1e-20   # layers.20.attn``."""
    left = ", ".join(f"{v}: {v.type}" for v in node.outputs)
    args = ", ".join(map(str, node.inputs))
    call = f"{node.op.name}({args})" + (f" {node.attrs}" if len(node.attrs) else "")
    return (f"{left} = " if left else "") + call + (f"   # {node.loc}" if node.loc else "")


def graph_text(graph: Graph, *, only: str | None = None) -> str:
    """The whole graph, or only the nodes whose location starts with ``only``."""
    nodes = [n for n in graph.nodes if only is None or n.loc == only
             or n.loc.startswith(only + ".")]
    used = {id(v) for n in nodes for v in n.inputs}
    lines = [f"graph {graph.name}"]
    lines += [f"  {v.kind.value} {v}: {v.type}" for v in graph.inputs
              if only is None or id(v) in used]
    lines += [f"  {node_text(n)}" for n in nodes]
    if only is None:
        lines.append("  return " + ", ".join(map(str, graph.outputs)))
    return "\n".join(lines) + "\n"


def graph_digest(graph: Graph) -> str:
    """sha256 of the text and of the order of every op used."""
    orders = {n.op.name: n.op.order.digest() for n in graph.nodes}
    text = graph_text(graph) + "".join(f"{k}:{v}\n" for k, v in sorted(orders.items()))
    return hashlib.sha256(text.encode()).hexdigest()
