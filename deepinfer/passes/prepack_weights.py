"""Pass prepack_weights: weights in the tiles that the cpu micro-kernels read.

``linear`` and the widened and grouped linears become ``packed_linear_*`` on new WEIGHT values that
the loader makes with ``deepinfer.checkpoint.layouts``. Exact: packing moves codes, and its padding
is cut off. A linear whose weight is no WEIGHT stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from deepinfer.errors import PassError
from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.op import AttrValue, Op
from deepinfer.ir.rewrite import rewrite
from deepinfer.ir.types import Dim, Kind, TensorType, Value
from deepinfer.ops.gemm import grouped_linear_fp8, linear, wide_linear_fp4, wide_linear_fp8
from deepinfer.ops.packed import (
    TILE,
    packed_linear_bf16,
    packed_linear_fp4,
    packed_linear_fp8,
)

# The last dims of a packed value from those of its source, as checkpoint.layouts makes them.
_SHAPES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "tile16_bf16": lambda m, k: (-(-m // 16), -(-k // 32) * 16, 32),
    "tile16_e4m3": lambda m, k: (-(-m // 32) * 2, k // 2, 32),
    "tile16_e4m3_sf": lambda m, f: (m * 2, f),
    "tile16_e2m1": lambda m, k: (-(-m // 16), k // 2, 32),
    "tile16_e2m1_sf": lambda m, f: (-(-m // 16), f, 16),
}


@cache
def packed(value: Value, layout: str) -> Value:
    """The WEIGHT value "<name>|<layout>" that the loader makes from ``value``.

    Memoised: asked twice for one value, in one pass or two, it is the same object.

    Args:
        value: a WEIGHT [..., M, K] (or [..., rows, K/32] for scales), with any leading dims.
        layout: a key of ``deepinfer.checkpoint.layouts.LAYOUTS``.
    Raises: PassError if value is not a weight of fixed shape, or K does not fit the layout.
    """
    *lead, m, k = value.type.shape
    if value.kind is not Kind.WEIGHT or not isinstance(m, int) or not isinstance(k, int):
        raise PassError(f"{value}: {value.type} is {value.kind.value}, expected a weight of fixed "
                        f"shape", where=f"packing as {layout}", next="pack only weights")
    if layout in ("tile16_e4m3", "tile16_e2m1") and k % 32:
        raise PassError(f"{value} has K = {k}, expected a multiple of 32",
                        where=f"packing as {layout}", next="check the shapes in config.json")
    shape: tuple[Dim, ...] = (*lead, *_SHAPES[layout](m, k))
    return Value(f"{value.name}|{layout}", TensorType(shape, value.type.dtype), Kind.WEIGHT)


_RULES: dict[Op, tuple[Op, tuple[str, ...]]] = {
    linear: (packed_linear_bf16, ("tile16_bf16",)),
    wide_linear_fp8: (packed_linear_fp8, ("tile16_e4m3", "tile16_e4m3_sf")),
    wide_linear_fp4: (packed_linear_fp4, ("tile16_e2m1", "tile16_e2m1_sf")),
    grouped_linear_fp8: (packed_linear_fp8, ("tile16_e4m3", "tile16_e4m3_sf")),
}


def prepack_weights(graph: Graph) -> Graph:
    """Replace every linear on a weight by its packed form.

    Raises: PassError if a group of ``grouped_linear_fp8`` does not fill whole tiles.
    """
    return rewrite(graph, _pack)


def _pack(node: Node) -> tuple[Sequence[Node], Sequence[Value]] | None:
    if node.op not in _RULES or any(v.kind is not Kind.WEIGHT for v in node.inputs[1:]):
        return None
    op, layouts = _RULES[node.op]
    m = node.inputs[1].type.shape[0]
    assert isinstance(m, int)
    given: dict[str, AttrValue] = {**node.attrs, "m": m}
    groups = int(node.attrs.get("groups") or 1)  # type: ignore[arg-type]
    if groups > 1 and m % (groups * TILE):
        raise PassError(f"{m} outputs in {groups} groups, expected a multiple of {TILE} in each",
                        where=f"pass prepack_weights, node {node.op.name} at {node.loc}",
                        next="choose o_lora_rank as a multiple of 16")
    weights = [packed(v, layout) for v, layout in zip(node.inputs[1:], layouts, strict=True)]
    made = Node(op, (node.inputs[0], *weights), node.outputs, op.attrs(given), node.loc)
    return (made,), node.outputs
