// The micro-kernels that generated kernels call, compiled once per library and ISA level.
#include "attention_body.h"
#include "gemm_body.h"
#include "linear_fp32_body.h"
#include "topk_body.h"
