// The AscendC names that generated text may use, on the host: one include for a kernel.
#pragma once
#include "cube.h"
#include "simt.h"
