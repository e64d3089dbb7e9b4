"""Machine facts of SM100 (compute capability 10.0: B200, GB200). None was measured by us."""

from __future__ import annotations

from deepinfer.targets.base import Fact

_GUIDE = "NVIDIA CUDA C++ Programming Guide 13.0, table of compute capabilities, column 10.0"
_PTX = "NVIDIA PTX ISA 9.0, section on tcgen05 tensor memory"
_DGX = "NVIDIA DGX B200 datasheet, one eighth of the system"

FACTS: dict[str, Fact] = {
    "smem_per_block": Fact(227 * 1024, "bytes a block may allocate", _GUIDE),
    "smem_per_sm": Fact(228 * 1024, "bytes", _GUIDE),
    "registers_per_sm": Fact(65536, "32-bit registers", _GUIDE),
    "registers_per_thread": Fact(255, "32-bit registers", _GUIDE),
    "threads_per_block": Fact(1024, "threads", _GUIDE),
    "warps_per_sm": Fact(64, "warps", _GUIDE),
    "tmem_columns": Fact(512, "columns of 128 lanes of 32 bits", _PTX),
    "tmem_lanes": Fact(128, "lanes", _PTX),
    "tmem_alloc_min": Fact(32, "columns; an allocation is a power of two", _PTX),
    "memory_bytes_per_second": Fact(8e12, "bytes/s of HBM3e", _DGX),
    "memory_bytes": Fact(180e9, "bytes of HBM3e", _DGX),
    "fp8_dense_flops": Fact(4.5e15, "flop/s, half the datasheet's sparse figure", _DGX),
}
