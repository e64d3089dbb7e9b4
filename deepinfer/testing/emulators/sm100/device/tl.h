// TileLang's device templates for sm_100a, on the emulator: the closed list our kernels use.
// Included in front of a generated kernel in place of <tl_templates/cuda/...>.
#pragma once
#include "cuda_types.h"

struct alignas(8) Barrier {
    uint64_t word;
    Barrier() = delete;
    void init(uint32_t count) { emu::mbarrier_init(this, count); }
    void wait(uint32_t parity) { emu::mbarrier_wait(this, parity); }
    bool try_wait(uint32_t parity) { return emu::mbarrier_test(this, parity); }
    void arrive() { emu::mbarrier_arrive(this); }
    void expect_transaction(uint32_t bytes) { emu::mbarrier_expect_tx(this, bytes); }
    void arrive_and_expect_tx(uint32_t bytes) { expect_transaction(bytes), arrive(); }
};

namespace tl {

enum class DataType { kFloat8_e4m3, kFloat4_e2m1fn, kBFloat16, kFloat32 };

// N = 0: one lane of the CTA's first warp; 32: one lane of each warp; else of every N/32-th warp.
template <int N>
inline bool tl_shuffle_elect() {
    bool elected = emu::elect();
    if constexpr (N == 0) return elected && emu::warp() == 0;
    else return elected && emu::warp() % ((N + 31) / 32) == 0;
}
inline void prefetch_tma_descriptor(const CUtensorMap&) {}
inline void fence_barrier_init() { emu::fence_mbarrier_init(); }
inline void fence_proxy_async() { emu::fence_proxy_async(); }
inline void __sync_thread_partial(int id, int count) { emu::barrier_sync(id, count); }

template <class... I>
inline void tma_load(const CUtensorMap& map, Barrier& barrier, const void* to, I... coords) {
    int at[] = {(int)coords...};
    emu::tma_load(map, &barrier, (void*)to, sizeof...(coords), at);
}

// ---- tensor memory

inline void tmem_allocate(void* where, int columns) {
    emu::tmem_allocate((uint32_t*)where, columns);
}
inline void tmem_deallocate(uint32_t* where, int columns) { emu::tmem_deallocate(*where, columns); }
inline void tcgen05_before_thread_sync() { emu::fence_before_thread_sync(); }
inline void tcgen05_after_thread_sync() { emu::fence_after_thread_sync(); }
template <int N, bool pack, class T>
inline void tcgen05_ld_32dp32bNx(uint32_t address, uint32_t offset, T* to) {
    static_assert(!pack);
    emu::tmem_load(address + offset, (uint32_t*)to, N);
}
template <int N, bool pack, class T>
inline void tcgen05_st_32dp32bNx(uint32_t address, uint32_t offset, const T* from) {
    static_assert(!pack);
    emu::tmem_store(address + offset, (const uint32_t*)from, N);
}

// ---- tcgen05 with its descriptors

union Tcgen05SMemDescriptor {
    uint64_t word;
    uint32_t half[2];
    Tcgen05SMemDescriptor() : word(0) {}
    operator uint64_t() const { return word; }
    template <class T>
    Tcgen05SMemDescriptor operator+(T bytes) const {
        Tcgen05SMemDescriptor moved;
        moved.word = word;
        moved.half[0] += uint32_t(bytes) >> 4;
        return moved;
    }
};
template <class T>
inline void initialize_tcgen05_descriptor(Tcgen05SMemDescriptor& d, T* start, int leading,
                                          int stride, int base_offset, bool absolute, int layout) {
    d.word = uint64_t(emu::smem_address(start) >> 4 & 0x3fff) | uint64_t(leading & 0x3fff) << 16 |
             uint64_t(stride & 0x3fff) << 32 | 1ull << 46 | uint64_t(base_offset & 7) << 49 |
             uint64_t(absolute) << 52 | uint64_t(layout & 7) << 61;
}
template <class T>
inline void increase_descriptor_offset(Tcgen05SMemDescriptor& d, T bytes) {
    d.half[0] += bytes >> 4;
}
inline uint64_t make_sf_smem_desc(void* p) {
    return uint64_t(emu::smem_address(p) >> 4 & 0x3fff) | 8ull << 32 | 1ull << 46;
}
template <bool two>
inline void tcgen05_cp(uint64_t descriptor, uint32_t address) {
    static_assert(!two, "pairs of CTAs are not emulated");
    emu::tmem_copy_scales(descriptor, address);
}
constexpr emu::Kind kind_of(DataType t) {
    return t == DataType::kBFloat16 ? emu::Kind::f16 : emu::Kind::f8;
}
template <DataType T, bool two = false>
inline void tcgen05mma_ss(uint64_t a, uint64_t b, uint32_t d, uint32_t accumulate,
                          uint32_t instruction, int, int, int, int) {
    static_assert(!two, "pairs of CTAs are not emulated");
    emu::mma(kind_of(T), false, a, b, d, accumulate, instruction, 0, 0);
}
template <DataType T>
inline void tcgen05mma_ws_ss(uint64_t a, uint64_t b, uint32_t d, uint32_t accumulate,
                             uint32_t instruction, int, int, int, int) {
    emu::mma(kind_of(T), true, a, b, d, accumulate, instruction, 0, 0);
}
template <DataType T, bool two>
inline void tcgen05mma_blockscaled_ss(uint64_t a, uint64_t b, uint32_t d, uint32_t accumulate,
                                      uint32_t instruction, uint32_t scales_a, uint32_t scales_b) {
    static_assert(!two, "pairs of CTAs are not emulated");
    emu::mma(emu::Kind::mxf8, false, a, b, d, accumulate, instruction, scales_a, scales_b);
}
inline void tcgen05_mma_arrive(const void* barrier) { emu::commit((void*)barrier); }

// ---- arithmetic and reductions

inline float2 add2(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
inline float2 sub2(float2 a, float2 b) { return {a.x - b.x, a.y - b.y}; }
inline float2 mul2(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
inline float2 max2(float2 a, float2 b) { return {fmaxf(a.x, b.x), fmaxf(a.y, b.y)}; }

struct SumOp {
    template <class T>
    T operator()(T a, T b) {
        return a + b;
    }
};
struct MaxOp {
    template <class T>
    T operator()(T a, T b) {
        return a > b ? a : b;
    }
    float operator()(float a, float b) { return fmaxf(a, b); }
};
struct SyncThreadsBarrier {
    template <int>
    static void sync() {
        __syncthreads();
    }
};
template <int count>
struct NamedBarrier {
    template <int id>
    static void sync() {
        emu::barrier_sync(id, count);
    }
};
template <class Reduce, int threads, int scale, int offset = 0, class Sync = SyncThreadsBarrier>
struct AllReduce {
    template <class T>
    static T run(T x, T* workspace = nullptr) {
        for (int t = threads; t > scale; t /= 2) {
            int distance = t / 2, self = threadIdx.x - offset;
            if (distance >= 32) {
                Sync::template sync<1>();
                workspace[self] = x;
                Sync::template sync<2>();
                x = Reduce()(x, workspace[self ^ distance]);
            } else {
                x = Reduce()(x, __shfl_xor_sync(~0u, x, distance));
            }
        }
        return x;
    }
};

// ---- wide global accesses

template <class T>
inline T load_global_256(const T* p) {
    if ((uintptr_t)p & 31) emu::report("alignment", "256-bit global load");
    return *p;
}
template <class T>
inline void store_global_256(void* p, const T& v) {
    if ((uintptr_t)p & 31) emu::report("alignment", "256-bit global store");
    *(ulonglong4*)p = *(const ulonglong4*)&v;
}

}  // namespace tl
