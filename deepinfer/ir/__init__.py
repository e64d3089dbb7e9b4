"""The intermediate representation: types, ops, graphs, verifier, text, rewriting, evaluator."""

from deepinfer.ir.graph import Builder, Graph, Node
from deepinfer.ir.op import ELEMENTWISE, OPS, Attrs, Op, Order, op
from deepinfer.ir.types import Kind, Sym, TensorType, Value

__all__ = ["ELEMENTWISE", "OPS", "Attrs", "Builder", "Graph", "Kind", "Node", "Op", "Order", "Sym",
           "TensorType", "Value", "op"]
