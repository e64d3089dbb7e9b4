"""Pass stream_index: index scores and their selections become one op, a row of scores at a time.

``topk(index_scores(..))`` becomes ``index_topk``; with ``candidate_blocks`` of the same scores,
``index_topk_candidates``; through ``candidate_mask``, ``index_topk_within``. So no value is tokens
x context. Exact: the same dots, sums and tie rules; only what the mask drops is not computed, and
the fp4 queries are read as the bf16 numbers they stand for.

Scores that anything else reads, or whose selection disagrees about rows or ratio, stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.op import Op
from deepinfer.ir.rewrite import make_node, replace_inputs, users, with_nodes
from deepinfer.ir.types import Value
from deepinfer.ops.indexer import (
    candidate_blocks,
    candidate_mask,
    index_scores,
    index_topk,
    index_topk_candidates,
    index_topk_within,
    topk,
)
from deepinfer.ops.quant import quantize_fp4
from deepinfer.passes.widen_activations import widened

_POSITIONS = 3  # operand of index_scores


@dataclass(frozen=True, slots=True)
class _Selection:
    """One use of index scores: the streamed op that stands for ``replaced``."""

    op: Op
    extra: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attrs: dict[str, Any]
    replaced: tuple[Node, ...]


def stream_index(graph: Graph) -> Graph:
    """Put the streamed op where the scores stood; see the module's text."""
    readers = users(graph)
    quantizers = {n.outputs[0]: n for n in graph.nodes if n.op is quantize_fp4}
    dropped: set[Node] = set()
    wide: dict[Node, Value] = {}
    made: dict[Value, Value] = {}
    defined: set[Value] = set(graph.inputs)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node in dropped:
            continue
        found = _selection(node, readers, graph) if node.op is index_scores else None
        quantizer = quantizers.get(node.inputs[0]) if found else None
        if found and quantizer and all(made.get(v, v) in defined for v in found.extra):
            if quantizer not in wide:
                nodes.append(widened(quantizer))
                wide[quantizer] = nodes[-1].outputs[0]
            operands = (wide[quantizer], *node.inputs[2:], *(made.get(v, v) for v in found.extra))
            new = make_node(found.op, operands, [v.name for v in found.outputs], node.loc,
                            **node.attrs, **found.attrs)
            made.update(zip(found.outputs, new.outputs, strict=True))
            dropped.update(found.replaced)
        else:
            new = replace_inputs(node, made)
        nodes.append(new)
        defined.update(new.outputs)
    return with_nodes(graph, nodes, [made.get(v, v) for v in graph.outputs])


def _selection(scores: Node, readers: dict[Value, list[Node]], graph: Graph) -> _Selection | None:
    """How the scores are used, if it is one of the three ways that have a streamed op."""
    uses = readers[scores.outputs[0]]
    mask = uses[0] if [n.op for n in uses] == [candidate_mask] else None
    if mask is not None:
        uses = readers[mask.outputs[0]]
    picks = [n for n in uses if n.op is topk]
    sources = [n for n in uses if n.op is candidate_blocks and mask is None]
    inner = {scores.outputs[0]} | ({mask.outputs[0]} if mask else set())
    if (len(picks) != 1 or len(sources) > 1 or len(uses) != len(picks) + len(sources)
            or inner & set(graph.outputs)
            or any(n.inputs[1] is not scores.inputs[_POSITIONS]
                   or n.attrs.ratio != scores.attrs.ratio for n in uses)):
        return None
    idx, k = picks[0].outputs[0], picks[0].attrs.k
    if mask is not None:
        return _Selection(index_topk_within, (mask.inputs[1],), (idx,),
                          {"k": k, "block": mask.attrs.block}, (mask, *picks))
    if sources:
        blocks = sources[0]
        return _Selection(index_topk_candidates, (), (idx, blocks.outputs[0]),
                          {"k": k, "block": blocks.attrs.block, "count": blocks.attrs.count},
                          (blocks, *picks))
    return _Selection(index_topk, (), (idx,), {"k": k}, tuple(picks))
