"""Inputs of every op, made from its signature; hints say only what a signature cannot.

One request has one row, so the rows of a step stand for themselves: ``alone`` cuts one of them out,
with its request, its slot and its pages, as a step of its own.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import deepinfer.ops
from deepinfer.ir import OPS
from deepinfer.ir.op import Op
from deepinfer.ir.signature import Operand
from deepinfer.ir.types import DTYPES

for _module in pkgutil.iter_modules(deepinfer.ops.__path__):
    importlib.import_module(f"deepinfer.ops.{_module.name}")
ALL = tuple(sorted(n for n, o in OPS.items() if o.reference.__module__.startswith("deepinfer.")))

Array = np.ndarray[Any, Any]

# Sizes of dims in general; Q of engram_gather and the like are in HINTS.
DIMS = {"C": 64, "K": 64, "D": 64, "I": 64, "H": 2, "F": 2, "V": 50, "L": 40, "B": 4, "P": 3,
        "E": 8, "W": 6, "A": 3, "M": 32, "Z": 5}
ATTRS: dict[str, Any] = {"eps": 1e-6, "block": 32, "heads": 2, "out": "bf16", "scale": 0.25,
                         "window": 5, "limit": 7.0, "ratio": 2, "k": 3, "count": 2, "copies": 3,
                         "m": 30, "purpose": 1, "groups": 1, "inverse": False, "step": 1}


@dataclass(frozen=True)
class Hint:
    """What one op needs beyond its signature.

    Args:
        rows: the dim that counts rows, and how many of it make one row.
        dims, attrs: sizes and attributes that differ from DIMS and ATTRS.
    """

    rows: str = "N"
    per_row: int = 1
    dims: dict[str, int] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)


EXPERTS = {"K": 2, "E": 4, "B": 2}
PAGED = {"E": 4, "P": 3, "K": 5, "I": 32, "B": 2, "L": 12}
HINTS = {
    "concat": Hint(dims={"A": 8, "B": 5}),
    "gather_rows": Hint(rows="Q"),
    "sample": Hint(rows="Q"),
    "logprobs": Hint(rows="Q"),
    "confidence": Hint(rows="R"),
    "draft_logits": Hint(rows="R", attrs={"block": 3}),
    "take_step": Hint(rows="Z", per_row=3, attrs={"block": 3}),
    "kv_write": Hint(rows="G", dims=PAGED | {"D": 64, "F": 2}),
    "compress_pairs": Hint(rows="G", dims={"Q": 3}),
    "pending_write": Hint(dims={"Q": 3}),
    "adjust_logits": Hint(rows="Q", dims={"E": 12, "M": 2}),
    "force_token": Hint(rows="Q"),
    "recent_start": Hint(rows="R", attrs={"width": 3}),
    "recent_push": Hint(rows="R"),
    "hyper_gather": Hint(rows="K", dims={"N": 9}),
    "expert_down": Hint(rows="M", dims=EXPERTS),
    "expert_gate_up": Hint(dims=EXPERTS),
    "expert_reduce": Hint(dims=EXPERTS),
    "grouped_gate_up": Hint(dims=EXPERTS),
    "grouped_gate_up_fake_quant": Hint(dims=EXPERTS, attrs={"m": 32}),
    "grouped_down": Hint(rows="Z", dims=EXPERTS),
    "route": Hint(dims={"E": 7}),
    "packed_linear_bf16": Hint(dims={"P": 32, "B": 2}),
    "packed_linear_fp8": Hint(dims={"B": 2}, attrs={"groups": 1}),
    "packed_linear_fp8_fake_quant": Hint(dims={"B": 2}, attrs={"m": 32, "groups": 1}),
    "packed_linear_fp4": Hint(dims={"B": 2}),
    "grouped_linear_fp8": Hint(dims={"K": 32, "C": 64, "M": 64}, attrs={"groups": 2}),
    "hyper_mix": Hint(dims={"M": 15}, attrs={"hc": 3, "iters": 4, "hc_eps": 1e-6}),
    "hyper_enter": Hint(dims={"M": 15}, attrs={"hc": 3, "iters": 4, "hc_eps": 1e-6,
                                               "norm_eps": 1e-6}),
    "hyper_post_enter": Hint(dims={"M": 15}, attrs={"hc": 3, "iters": 4, "hc_eps": 1e-6,
                                                    "norm_eps": 1e-6}),
    "engram_gate": Hint(dims={"Z": 192}),
    "engram_gather": Hint(dims={"Q": 3}),
    "engram_hash": Hint(dims={"A": 3}, attrs={
        "multipliers": (3, 0x7FFF_FFFF_FFFF_FFF1, 11), "primes": (11, 13, 17, 19), "heads": 2,
        "pad": 2, "columns": 4}),
    "rope": Hint(dims={"D": 16}),
    "rope_window_write": Hint(dims={"B": 16}),
    "index_scores": Hint(dims=PAGED),
    "index_topk": Hint(dims=PAGED),
    "index_topk_candidates": Hint(dims=PAGED, attrs={"block": 2}),
    "index_topk_within": Hint(dims=PAGED, attrs={"block": 2}),
    "candidate_blocks": Hint(dims=PAGED, attrs={"block": 2}),
    "candidate_mask": Hint(dims=PAGED, attrs={"block": 2}),
    "topk": Hint(dims=PAGED),
    "sparse_attention": Hint(dims=PAGED),
    "quantize_fp4_e4m3": Hint(attrs={"block": 16}),
}
# Not functions of a row: why.
NOT_BY_ROW = {"group_rows": "it sorts the rows of the whole step by expert"}
PLURAL = {"R", "S", "T", "G"}  # as many as rows; slots and pages are spare by SPARE
SPARE = 2


@dataclass(frozen=True)
class Step:
    """An op with the arrays of ``rows`` rows and its attributes."""

    op: Op
    hint: Hint
    rows: int
    arrays: tuple[Array, ...]
    attrs: dict[str, Any]

    def named(self) -> dict[str, Array]:
        return dict(zip((o.name for o in self.op.signature.inputs), self.arrays, strict=True))

    def run(self) -> tuple[Array, ...]:
        """Outputs of the op; written operands change in place."""
        return self.op.run(self.arrays, self.op.attrs(self.attrs))

    def led(self, operand: Operand) -> int:
        """How many entries of the operand's first dim make one row; 0 if it has none."""
        first = operand.dims[0] if operand.dims else ""
        if "request" in self.named() and first == "R":
            return 0  # requests are looked up by ``request``
        if self.op.name == "pending_write" and first == "R":
            return 0
        base, _, times = first.partition("*")
        if base != self.hint.rows:
            return 0
        size = DIMS | self.hint.dims | self.attrs | {"": 1}
        return self.hint.per_row * int(times if times.isdigit() else size[times])

    def with_arrays(self, **changed: Array) -> Step:
        return replace(self, arrays=tuple({**self.named(), **changed}.values()))

    def alone(self, picked: list[int]) -> Step:
        """The step of some rows only; written operands are shared with this one."""
        changed = {}
        for operand, array in zip(self.op.signature.inputs, self.arrays, strict=True):
            n = self.led(operand)
            if n:
                changed[operand.name] = np.concatenate(
                    [array[i * n:(i + 1) * n] for i in picked] or [array[:0]])
        named = self.named()
        if "spans" in named and self.hint.rows == "N":
            spans = np.zeros_like(named["spans"])
            for at, i in enumerate(picked):
                spans[i] = (named["spans"][i, 0], at, at + 1, named["spans"][i, 3])
            changed["spans"] = spans
        if "offsets" in named:
            order, offsets = named["order"], named["offsets"]
            expert = np.empty(len(order), np.int32)  # of each flat row
            for e in range(len(offsets) - 1):
                expert[order[offsets[e]:offsets[e + 1]]] = e
            n = len(order) // self.rows
            flat = np.concatenate([expert[i * n:(i + 1) * n] for i in picked]
                                  or [expert[:0]])
            changed["order"], changed["offsets"] = OPS["group_rows"](
                flat.reshape(-1, 1), experts=len(offsets) - 1)
        return replace(self.with_arrays(**changed), rows=len(picked))


def make(name: str, rows: int = 5, seed: int = 0) -> Step:
    """A step of ``rows`` rows of the op."""
    op, hint = OPS[name], HINTS.get(name, Hint())
    attrs = {k: {**ATTRS, **hint.attrs}[k] for k in sorted({*op.required, *op.defaults})}
    dims = {**DIMS, **hint.dims, hint.rows: rows * hint.per_row}
    for plural in PLURAL - {hint.rows}:
        dims[plural] = rows + (SPARE if plural == "S" else 0)
    dims["T"] = rows * dims["P"] + SPARE
    if hint.rows == "G":  # two source rows a group
        dims["N"] = 2 * rows
    elif hint.rows not in ("N", "M"):
        dims.setdefault("N", rows)
    rng = np.random.default_rng((seed, len(name), sum(map(ord, name))))
    shapes = {o.name: _shape(o, dims, attrs) for o in op.signature.inputs}
    kinds = {o.name: "f32" if len(o.dtype) == 1 else o.dtype for o in op.signature.inputs}
    if name == "kv_write":
        kinds["sf"] = kinds["cache_sf"] = "e4m3"
    arrays = {n: _array(n, kinds[n], shapes[n], rng, name, dims, attrs) for n in shapes}
    if "offsets" in arrays:
        k = len(arrays["order"]) // rows
        idx = rng.integers(0, dims["E"], (rows, k)).astype(np.int32)
        arrays["order"], arrays["offsets"] = OPS["group_rows"](idx, experts=dims["E"])
    return Step(op, hint, rows, tuple(arrays.values()), attrs)


def _shape(operand: Operand, dims: dict[str, int], attrs: dict[str, Any]) -> tuple[int, ...]:
    def word(text: str) -> int:
        return int(text) if text.isdigit() else dims[text] if text[0].isupper() else attrs[text]

    shape = []
    for text in operand.dims:
        for sign in "*/+":
            a, found, b = text.partition(sign)
            if found:
                left, right = word(a), word(b)
                shape.append(left * right if sign == "*" else -(-left // right) if sign == "/"
                             else left + right)
                break
        else:
            shape.append(word(text))
    return tuple(shape)


def _array(name: str, dtype: str, shape: tuple[int, ...], rng: np.random.Generator, op: str,
           dims: dict[str, int], attrs: dict[str, Any]) -> Array:
    made = _indices(name, shape, rng, op, dims, attrs)
    kind = DTYPES[dtype].numpy
    if made is not None:
        return np.ascontiguousarray(made.astype(kind))
    if dtype == "e2m1":
        return rng.integers(0, 256, (*shape[:-1], shape[-1] // 2)).astype(np.uint8)
    if dtype == "ue8m0":
        return rng.integers(124, 131, shape).astype(np.uint8).view(kind)
    values = rng.normal(size=shape).astype(np.float32)
    return (np.abs(values) + 0.25 if name.endswith("_sf") or name == "sf" else values).astype(kind)


def _indices(name: str, shape: tuple[int, ...], rng: np.random.Generator, op: str,
             dims: dict[str, int], attrs: dict[str, Any]) -> Array | None:
    """Operands whose numbers must mean something."""
    n = shape[0] if shape else 0
    tables = {"gather_rows": dims.get("N", 1), "hyper_gather": dims.get("N", 1),
              "engram_gather": dims["T"]}
    if op == "adjust_logits":
        begin = rng.integers(0, dims["E"] // 2, shape[0])
        return {"entries": lambda: np.stack([begin, rng.integers(begin, dims["E"])], axis=1),
                "ids": lambda: np.sort(rng.choice(dims["V"], n, replace=False)),
                "counts": lambda: rng.integers(0, 3, n), "seen": lambda: rng.integers(0, 2, n),
                "recent": lambda: rng.integers(-1, 9, shape),
                "mask_row": lambda: np.arange(n) % 3 - 1,
                "masks": lambda: rng.integers(-2**31, 2**31, shape)}.get(name, lambda: None)()
    if name == "spans":
        first = np.arange(n) * (2 if op == "compress_pairs" else 1)
        size = 2 if op == "compress_pairs" else 1
        floor = rng.choice([0, 9], n)
        return np.stack([rng.permutation(n), first, first + size, floor], axis=1).reshape(shape)
    if name in ("request", "group_request"):
        return np.arange(n)
    if name == "group_positions":
        return 2 * rng.integers(0, 11, n)
    if name in ("chosen", "forced", "anchor", "recent"):
        return rng.integers(-1, 3, shape)
    if name == "group_rows":  # the partner is in the step, or pending where the span is cut
        return 2 * np.arange(n) + (np.arange(n) % 2)
    if name == "pages":
        return rng.permutation(shape[0] * shape[1]).reshape(shape)
    if name == "positions":
        return rng.integers(0, 22, n)
    if name in ("tokens", "token"):
        return rng.integers(0, dims["V"], n)
    if name == "lookback":
        return rng.integers(-1, dims["V"] + 1, shape)
    if name == "token_map":
        return rng.integers(0, 40, n)
    if name == "rows":
        return rng.integers(0, tables[op], shape)
    if name == "image":
        return rng.integers(0, 2, n)
    if name == "blocks":
        return np.sort(rng.integers(-1, 6, shape), axis=1)
    if name == "idx":
        if op == "sparse_attention":
            return np.sort(rng.integers(-1, dims["P"] * dims["E"], shape), axis=1)
        return np.sort(rng.random((n, dims["E"])).argsort(axis=1)[:, :shape[1]], axis=1)
    if op == "sample":
        return {"temperature": rng.choice([0, 0.5, 1.5], n), "top_k": rng.choice([0, 3, 99], n),
                "top_p": rng.choice([0.3, 0.9, 1], n), "min_p": rng.choice([0, 0.05], n),
                "seed": rng.integers(0, 2**63, n), "position": np.arange(n)}.get(name)
    if name == "temperatures":
        return np.linspace(0.5, 1.5, n)
    return None
