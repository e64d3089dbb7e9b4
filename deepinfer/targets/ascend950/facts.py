"""Machine facts of Ascend 950 (dav-3510). None was measured by us."""

from __future__ import annotations

from deepinfer.targets.base import Fact

_IR = "AscendNPU-IR 1.2.0, HACC NPUTargetSpec.td, Ascend950 (dav-c310)"
_DT = "TileLang examples/ascend/flashmla, environment.json: Ascend950DT_9581"
_TL = "TileLang 0.1.15, src/ascend/transform/estimate_latency.h"
_GEMM = "TileLang 0.1.15, src/tl_templates/ascend/gemm.h"
_PAPER = "Ascend 950PR white paper, table 3-1, as quoted in cann/ops-nn issue 6033, 32 cores"
_MEMORY = "CANN 9.0.0 beta 2 operator guide, SIMT memory hierarchy (atlas_ascendc_10_10066)"
_CALL = "CANN 9.0.0 beta 2 API reference, asc_vf_call (atlasascendc_api_07_10303)"
_ROADMAP = "Huawei Connect 2025 roadmap, Ascend 950DT (press)"

FACTS: dict[str, Fact] = {
    "cube_cores": Fact(32, "cube cores (AIC)", _DT),
    "vector_cores": Fact(64, "vector cores (AIV), two beside each cube core", _DT),
    "ub_bytes": Fact(248 * 1024, "bytes of UB a vector core may use, 8 KiB are reserved", _IR),
    "simt_ub_bytes": Fact(216 * 1024, "bytes of UB beside SIMT functions, whose data cache needs "
                          "32 KiB of it", _MEMORY),
    "l1_bytes": Fact(512 * 1024, "bytes a cube core", _IR),
    "l0a_bytes": Fact(64 * 1024, "bytes a cube core", _IR),
    "l0b_bytes": Fact(64 * 1024, "bytes a cube core", _IR),
    "l0c_bytes": Fact(256 * 1024, "bytes a cube core", _IR),
    "ub_align": Fact(32, "bytes", _IR),
    "l1_align": Fact(32, "bytes", _IR),
    "l0c_align": Fact(512, "bytes", _IR),
    "events": Fact(8, "events of a pair of pipes", _TL),
    "flags": Fact(16, "flags between a cube core and one vector core", _TL),
    "fractal_rows": Fact(16, "rows of a fractal of L0A, L0B and L0C", _GEMM),
    "simt_threads": Fact(2048, "threads of a SIMT function", _CALL),
    "simt_registers": Fact(127, "registers a thread of up to 256; 64, 32, 16 for twice as many "
                           "threads each", _MEMORY),
    "clock": Fact(1.65e9, "cycles/s of the cube cores", "CANN ini Ascend950PR_957b, second-hand"),
    "mxfp8_flops": Fact(8.65e14, "flop/s, dense", _PAPER),
    "bf16_flops": Fact(4.32e14, "flop/s, dense", _PAPER),
    "memory_bytes_per_second": Fact(4.0e12, "bytes/s", _ROADMAP),
    "memory_bytes": Fact(144e9, "bytes", _ROADMAP),
}
