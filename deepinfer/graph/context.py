"""What every part of the forward needs at hand: config, weights, step inputs and state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deepinfer.graph.config import LayerSpec, ModelConfig
from deepinfer.graph.limits import Limits
from deepinfer.graph.weights import WeightDecl, weight_table
from deepinfer.ir import Builder, Sym, TensorType, Value
from deepinfer.ir.types import BF16, DTYPES, E2M1, E4M3, F32, I32, U8, UE8M0, Dim, DType
from deepinfer.ops.gemm import gather_rows, linear, linear_fp8
from deepinfer.ops.hyper import hyper_gather
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.quant import quantize_fp8

BLOCK = 32  # activations are quantised per 32 along K (spec §2.0)


@dataclass(slots=True)
class Rows:
    """The inputs that say which rows a step has and whose they are.

    Args:
        rows: their dim.
        positions: i32[N] absolute position of each row.
        request: i32[N] the row's request, an index into ``spans`` and ``pages``.
        spans: i32[R,4] of each request: state slot, first row, end row, and the floor: the first
            position that window attention sees.
        is_image: name of the u8[N] input that marks the rows of an image.
    """

    rows: Sym
    positions: Value
    request: Value
    spans: Value
    is_image: str

    @staticmethod
    def declare(b: Builder, rows: Sym, requests: Dim, prefix: str = "", is_image: str = ""
                ) -> Rows:
        """The inputs ``<prefix>positions`` and so on."""
        return Rows(rows, b.input(f"{prefix}positions", TensorType((rows,), I32)),
                    b.input(f"{prefix}request", TensorType((rows,), I32)),
                    b.input(f"{prefix}spans", TensorType((requests, 4), I32)),
                    is_image or f"{prefix}is_image")


@dataclass(slots=True)
class Context:
    """The graph under construction and what its parts share.

    Args:
        b: the open builder. cfg: the model. limits: the largest sizes.
        all_rows: the rows of the step. rows_of: those that the layers at hand run on.
        kept: which of all rows they are, if a replayed prefill has left the others behind.
    """

    b: Builder
    cfg: ModelConfig
    limits: Limits
    all_rows: Rows
    rows_of: Rows
    kept: Value | None = None
    _table: Mapping[str, WeightDecl] = field(default_factory=dict)
    _quantized: dict[Value, tuple[Value, Value]] = field(default_factory=dict)

    @staticmethod
    def open(b: Builder, cfg: ModelConfig, limits: Limits, rows: Sym, requests: Sym) -> Context:
        table = {d.value: d for d in weight_table(cfg)}
        declared = Rows.declare(b, rows, requests)
        return Context(b, cfg, limits, declared, declared, _table=table)

    def w(self, name: str) -> Value:
        """The weight ``name`` as the checkpoint declares it."""
        decl = self._table[name]
        return self.b.weight(name, TensorType(decl.shape, DTYPES[decl.dtype]))

    def input(self, name: str, shape: tuple[Dim, ...], dtype: DType = I32) -> Value:
        return self.b.input(name, TensorType(shape, dtype))

    @property
    def drafts(self) -> int:
        """Earlier drafts of a block that a row of a verify step may have to count."""
        return max(1, self.limits.draft_width)

    @property
    def slots(self) -> Sym:
        return Sym("num_slots", self.limits.max_num_seqs)

    @property
    def is_image(self) -> Value:
        return self.input(self.rows_of.is_image, (self.rows_of.rows,), U8)

    def cut(self) -> None:
        """From here on layers run on the rows that ``kept_rows`` picks (spec §4.1)."""
        rows = Sym("num_kept", self.all_rows.rows.max)
        self.kept = self.input("kept_rows", (rows,))
        self.rows_of = Rows.declare(self.b, rows, self.all_rows.spans.type.shape[0], "kept_")

    def keep(self, x: Value) -> Value:
        """The kept rows of a value of all rows: channels, or streams of channels."""
        if self.kept is None:
            return x
        pick = hyper_gather if len(x.type.shape) == 3 else gather_rows
        kept: Value = pick(x, self.kept, name="kept")
        return kept

    @property
    def pages(self) -> Value:
        """i32[requests, pages]: the page table of each request of the step."""
        width = Sym("pages_per_seq", self.limits.pages_per_seq)
        return self.input("pages", (self.all_rows.spans.type.shape[0], width))

    def rope_table(self, layer: LayerSpec) -> Value:
        """f32[positions, rope dims] of cos, sin pairs: derived when weights are loaded."""
        name = "derived.rope_compressed" if layer.ratio else "derived.rope_window"
        shape = (self.limits.table_rows, self.cfg.qk_rope_head_dim)
        return self.b.weight(name, TensorType(shape, F32))

    def ring(self, prefix: str) -> tuple[Value, Value]:
        """The window KV of a layer: e4m3 codes and their scales per 32."""
        d, length = self.cfg.head_dim, self.limits.ring(self.cfg)
        return (self.b.state(f"{prefix}.ring", TensorType((self.slots, length, d), E4M3)),
                self.b.state(f"{prefix}.ring_sf",
                             TensorType((self.slots, length, d // BLOCK), UE8M0)))

    def cache(self, name: str, ratio: int, width: int, block: int, scale: DType
              ) -> tuple[Value, Value]:
        """A paged fp4 cache with one entry per ``ratio`` tokens."""
        pages = Sym("num_pages", self.limits.pages_per_seq * self.limits.max_num_seqs)
        entries = self.limits.page_size // ratio
        return (self.b.state(name, TensorType((pages, entries, width), E2M1)),
                self.b.state(f"{name}_sf", TensorType((pages, entries, width // block), scale)))

    def kv_cache(self, layer: int) -> tuple[Value, Value]:
        return self.cache(f"layers.{layer}.kv", self.cfg.layer(layer).ratio, self.cfg.head_dim, 16,
                          E4M3)

    def index_cache(self, layer: int) -> tuple[Value, Value]:
        return self.cache(f"layers.{layer}.index_keys", self.cfg.layer(layer).ratio,
                          self.cfg.index_head_dim, 32, UE8M0)

    def quantized(self, x: Value) -> tuple[Value, Value]:
        """``x`` as e4m3 per 32; several linears that read one row share one quantisation."""
        if x not in self._quantized:
            self._quantized[x] = quantize_fp8(x, block=BLOCK)
        return self._quantized[x]

    def linear_fp8(self, x: Value, name: str, *, out: str = "bf16") -> Value:
        """The quantised linear ``name`` of spec §2.0."""
        y: Value = linear_fp8(*self.quantized(x), self.w(f"{name}.weight"), self.w(f"{name}.scale"),
                              out=out, name=name.rsplit(".", 1)[-1])
        return y

    def linear(self, x: Value, name: str, *, out: str = "bf16") -> Value:
        """A linear with a bf16 weight; ``out="f32"`` keeps the fp32 sum."""
        assert x.type.dtype is BF16
        y: Value = linear(x, self.w(f"{name}.weight"), out=out, name=name.rsplit(".", 1)[-1])
        return y

    def norm(self, x: Value, name: str) -> Value:
        y: Value = rms_norm(x, self.w(name), eps=self.cfg.rms_norm_eps,
                            name=name.removesuffix(".weight").rsplit(".", 1)[-1])
        return y
