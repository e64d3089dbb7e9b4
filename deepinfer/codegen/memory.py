"""Plan the arena: temps whose lives do not overlap may share bytes."""

from __future__ import annotations

from deepinfer.ir.graph import Graph
from deepinfer.ir.types import Value

ALIGN = 64  # a cache line; also what the widest vector loads want


def plan_arena(graph: Graph) -> tuple[dict[Value, int], int]:
    """Offsets of all temps at their largest sizes, and the arena's size in bytes.

    Greedy by size: the largest value first, each at the lowest offset that is free for the whole of
    its life. A value lives from its node to its last reader; outputs live to the end.
    """
    birth: dict[Value, int] = {}
    death: dict[Value, int] = {}
    for index, node in enumerate(graph.nodes):
        for value in node.outputs:
            birth[value] = death[value] = index
        for value in node.inputs:
            if value in birth:
                death[value] = index
    for value in graph.outputs:
        if value in birth:
            death[value] = len(graph.nodes)
    size = {v: -(-v.type.nbytes() // ALIGN) * ALIGN for v in birth}
    offsets: dict[Value, int] = {}
    total = 0
    for value in sorted(birth, key=lambda v: (-size[v], birth[v], v.name)):
        busy = sorted((offsets[o], offsets[o] + size[o]) for o in offsets
                      if birth[o] <= death[value] and birth[value] <= death[o])
        at = 0
        for begin, end in busy:
            if at + size[value] <= begin:
                break
            at = max(at, end)
        offsets[value] = at
        total = max(total, at + size[value])
    return offsets, total
