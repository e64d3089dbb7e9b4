"""The sm100 target: its passes in order and its kernels.

Its kernels are *generated* (CUDA text for sm_100a), *compiled* (cubins, where nvcc is found) and
*emulated* (tests/emulated: against references, on a CPU model). None has run on a GPU.
"""

from __future__ import annotations

import importlib

from deepinfer.passes.drop_dead import drop_dead
from deepinfer.passes.fuse_norm_quant import fuse_norm_quant
from deepinfer.passes.fuse_rope_window_write import fuse_rope_window_write
from deepinfer.targets.base import Kernel, Pass, Target, by_op
from deepinfer.targets.sm100.build import build, versions
from deepinfer.targets.sm100.facts import FACTS
from deepinfer.targets.sm100.lower import lower

PASSES = (
    Pass("fuse_norm_quant", fuse_norm_quant, True, "first: it looks for single readers"),
    Pass("fuse_rope_window_write", fuse_rope_window_write, True,
         "keys whose ring is idle until the write"),
    Pass("drop_dead", drop_dead, True, "what the fusions left without a reader"),
)

# One line a kernel; file, kernel and op share the name.
KERNELS = (
    "linear_fp4",
    "linear_fp8",
    "norm_quant",
    "rope_window_write",
    "sparse_attention",
    "topk",
)


def _load(name: str) -> Kernel:
    module = importlib.import_module(f"deepinfer.targets.sm100.kernels.{name}")
    made = getattr(module, name)
    assert isinstance(made, Kernel)
    return made


TARGET = Target(
    name="sm100",
    facts=FACTS,
    passes=PASSES,
    kernels=by_op(tuple(_load(name) for name in KERNELS)),
    lower=lower,
    build=build,
    versions=versions,
)
