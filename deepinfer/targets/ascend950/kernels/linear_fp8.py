"""linear_fp8 on ascend950: see ``_scaled_gemm``."""

from deepinfer.targets.ascend950.kernels._scaled_gemm import scaled_gemm, space
from deepinfer.targets.base import Spec, kernel


@kernel("linear_fp8", items="N", space=space)
def linear_fp8(spec: Spec):
    return scaled_gemm(spec, "e4m3")
