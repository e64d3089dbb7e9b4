"""linear_fp4 on sm100: TMA unpacks the e2m1 weight to a byte a code."""

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.sm100.kernels._scaled_gemm import scaled_gemm, space


@kernel("linear_fp4", items="N", space=space)
def linear_fp4(spec: Spec):
    return scaled_gemm(spec, "e2m1")
