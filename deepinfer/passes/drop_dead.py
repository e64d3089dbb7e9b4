"""Pass drop_dead: nodes whose outputs nobody reads and that write no state."""

from __future__ import annotations

from deepinfer.ir import rewrite
from deepinfer.ir.graph import Graph


def drop_dead(graph: Graph) -> Graph:
    """The graph without dead nodes, and without the weights that only they read. Exact."""
    return rewrite.drop_dead(graph)
