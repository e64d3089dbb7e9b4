// Included before every generated kernel: what TileLang's C text calls. Scalar functions are inline,
// so that loops over them vectorise; micro-kernels are declared here and compiled in micro.cc.
#pragma once
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "attention.h"
#include "formats.h"
#include "functions.h"
#include "gemm.h"
#include "linear_fp32.h"
#include "noise.h"
#include "sample.h"
#include "topk.h"
