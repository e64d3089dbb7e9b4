// Included before every generated kernel: what TileLang's C text calls, and the micro-kernels.
#pragma once
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "formats.h"
#include "attention.h"
#include "functions.h"
#include "gemm.h"
#include "topk.h"

#include "noise.h"
#include "sample.h"
