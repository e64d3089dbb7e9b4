// The x86 floating point control word (MXCSR) of the micro-kernels and of native entry points.
//
// Every kernel runs with DI_MXCSR_DEFAULT: round to nearest even, exceptions masked, denormals
// kept. Only the GEMM micro-kernels switch to DI_MXCSR_FLUSH (FTZ | DAZ), which is what an AMX
// tile multiply does whatever MXCSR says. Both are absolute values, so a host process that runs
// with FTZ, DAZ or another rounding mode changes no bit.
#pragma once
#include <stdint.h>

enum : uint32_t {
  DI_MXCSR_DEFAULT = 0x1F80,
  DI_MXCSR_FLUSH = 0x9FC0,
  DI_MXCSR_FLUSH_RESULTS = 0x9F80  // FTZ alone, where no operand but a weight can be denormal
};

// Sets MXCSR to `value` and returns the old one, which the caller hands back here to restore it.
//
// The asm is a barrier for memory only: arithmetic on values that stay in registers may move
// across it. So a function that switches the mode must be `noinline` and read its operands from
// memory and store its results to memory between the two calls.
extern "C" inline __attribute__((always_inline)) uint32_t di_mxcsr_swap(uint32_t value) {
#if defined(__x86_64__)
  uint32_t old;
  __asm__ volatile("stmxcsr %0" : "=m"(old) : : "memory");
  __asm__ volatile("ldmxcsr %0" : : "m"(value) : "memory");
  return old;
#else  // the generic level flushes by itself and needs the default mode only
  return value;
#endif
}
