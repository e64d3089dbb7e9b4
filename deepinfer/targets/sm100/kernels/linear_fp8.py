"""linear_fp8 on sm100: the weight's scale of a 32x32 tile stands for each of its 32 rows."""

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.sm100.kernels._scaled_gemm import scaled_gemm, space


@kernel("linear_fp8", items="N", space=space)
def linear_fp8(spec: Spec):
    return scaled_gemm(spec, "e4m3")
