"""The ascend950 target: its passes in order and its kernels.

Its kernels are *generated* (AscendC text for dav-3510) and *emulated* (tests/emulated: against
references, on a CPU model). They are compiled only where CANN's bisheng is found; none has run on
an NPU.
"""

from __future__ import annotations

from deepinfer.passes.drop_dead import drop_dead
from deepinfer.passes.fuse_norm_quant import fuse_norm_quant
from deepinfer.passes.fuse_rope_window_write import fuse_rope_window_write
from deepinfer.targets.ascend950.build import build, is_built, versions
from deepinfer.targets.ascend950.facts import FACTS
from deepinfer.targets.ascend950.lower import lower
from deepinfer.targets.base import KernelTable, Pass, Target

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


TARGET = Target(
    name="ascend950",
    facts=FACTS,
    passes=PASSES,
    kernels=KernelTable("deepinfer.targets.ascend950.kernels", KERNELS),
    lower=lower,
    build=build,
    versions=versions,
    is_built=is_built,
)
