"""The cpu target: its passes in order, its kernels, and how a Program's files are built."""

from __future__ import annotations

from deepinfer.passes.drop_dead import drop_dead
from deepinfer.passes.fuse_fake_quant import fuse_fake_quant
from deepinfer.passes.fuse_hyper_connection import fuse_hyper_connection
from deepinfer.passes.fuse_norm_quant import fuse_norm_quant
from deepinfer.passes.group_experts import group_experts
from deepinfer.passes.prepack_weights import prepack_weights
from deepinfer.passes.stream_index import stream_index
from deepinfer.passes.widen_activations import widen_activations
from deepinfer.targets.base import Fact, KernelTable, Pass, Target
from deepinfer.targets.cpu.build import build, versions
from deepinfer.targets.tile import lower_c

PASSES = (
    Pass("stream_index", stream_index, True,
         "first, while scores, candidates and top-k still stand side by side"),
    Pass("widen_activations", widen_activations, True,
         "the micro-kernels read bf16 rows; codes times powers of two are exact in bf16"),
    Pass("group_experts", group_experts, True,
         "after widening, whose rows the experts share with the shared expert"),
    Pass("fuse_hyper_connection", fuse_hyper_connection, True,
         "after the fake quantisers were made, and before fuse_norm_quant takes their norms"),
    Pass("fuse_norm_quant", fuse_norm_quant, True, "after widening made the fake quantisers"),
    Pass("prepack_weights", prepack_weights, True,
         "after what rewrites plain linears: from here on weights are in the micro-kernels' tiles"),
    Pass("fuse_fake_quant", fuse_fake_quant, True, "after packing made the linears it fuses"),
    Pass("drop_dead", drop_dead, True, "quantisers whose codes nobody reads any more"),
)

# One line a kernel; file, kernel and op share the name.
KERNELS = (
    "adjust_logits", "compress_pairs", "concat", "confidence", "draft_attention", "draft_logits",
    "embed", "engram_gate", "engram_gather", "engram_hash", "expert_reduce", "fake_quantize_fp4",
    "fake_quantize_fp8", "force_token", "gather_rows", "group_rows", "grouped_down",
    "grouped_gate_up", "grouped_gate_up_fake_quant", "hyper_collapse", "hyper_enter",
    "hyper_expand", "hyper_gather", "hyper_mean", "hyper_mix", "hyper_post", "hyper_post_enter",
    "hyper_start", "index_topk", "index_topk_candidates", "index_topk_within", "kv_write",
    "logprobs", "norm_fake_quant", "norm_quant", "packed_linear_bf16", "packed_linear_fp4",
    "packed_linear_fp8", "packed_linear_fp8_fake_quant", "pending_write", "quantize_fp4",
    "quantize_fp4_e4m3", "quantize_fp8", "recent_push", "recent_start", "rms_norm", "rope", "route",
    "sample", "silu_mul", "silu_mul_fake_quant", "sparse_attention", "take_step", "topk",
    "window_attention", "window_write",
)


TARGET = Target(
    name="cpu",
    facts={"vector_lanes": Fact(16, "fp32 lanes of a row sum", "DESIGN §5"),
           "gemm_block": Fact(32, "K of one step of the contract order", "DESIGN §5")},
    passes=PASSES,
    kernels=KernelTable("deepinfer.targets.cpu.kernels", KERNELS),
    lower=lower_c,
    build=build,
    versions=versions,
)
