// What device code sees of the emulator. Everything here runs on one OS thread; each CUDA thread is
// a fiber, and `threadIdx` is that of the fiber that runs.
#pragma once
#include <cstddef>
#include <cstdint>

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3() = default;
    dim3(unsigned a, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

// A tiled tensor map as cuTensorMapEncodeTiled takes it: dims and strides innermost first.
struct CUtensorMap {
    int dtype, rank;
    uint8_t* base;
    int64_t dim[5], stride[5];  // elements, bytes
    int box[5], element_stride[5];
    int interleave, swizzle, l2, oob;
};

namespace emu {

// Report a violation; `kind` is counted, the first few texts of a kind are kept.
void report(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Memory.
uint8_t* dynamic_smem();
void* static_smem(int id);
uint32_t smem_address(const void* p);  // generic -> shared address

// Threads of a warp and of the CTA.
int lane();
int warp();
bool elect();
void converged(int op);  // a .sync.aligned op: all lanes of a warp must run the same sequence
void barrier_sync(int id, int count);
void sync_warp();
uint32_t shuffle(uint32_t value, int source_lane);
uint32_t ballot(bool predicate);
int atomic_add(int* p, int value);

// Fences.
void fence_proxy_async();
void fence_mbarrier_init();
void fence_before_thread_sync();
void fence_after_thread_sync();

// mbarriers.
void mbarrier_init(void* p, uint32_t count);
void mbarrier_arrive(void* p);
void mbarrier_expect_tx(void* p, uint32_t bytes);
bool mbarrier_test(void* p, uint32_t parity);
void mbarrier_wait(void* p, uint32_t parity);

// TMA.
void tma_load(const CUtensorMap& map, void* barrier, void* destination, int rank,
              const int* coords);

// Tensor memory and tcgen05.
enum class Kind { f16, f8, mxf8 };
void tmem_allocate(uint32_t* where, int columns);
void tmem_deallocate(uint32_t address, int columns);
void tmem_load(uint32_t address, uint32_t* destination, int columns);
void tmem_store(uint32_t address, const uint32_t* source, int columns);
void tmem_copy_scales(uint64_t descriptor, uint32_t address);
void mma(Kind kind, bool weight_stationary, uint64_t a, uint64_t b, uint32_t d, uint32_t accumulate,
         uint32_t instruction, uint32_t scales_a, uint32_t scales_b);
void commit(void* barrier);

}  // namespace emu
