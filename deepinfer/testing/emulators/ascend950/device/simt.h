// SIMT vector functions: threads, warp operations, atomics.
#pragma once
#include "sync.h"

#define threadIdx emu::thread_index

namespace cce {
struct dim3 {
    int x, y, z;
    dim3(int a, int b = 1, int c = 1) : x(a), y(b), z(c) {}
};
}  // namespace cce

template <auto Function, class... A>
inline void asc_vf_call(cce::dim3 size, A... arguments) {
    emu::issue(PIPE_V, "vf", [=] {
        emu::run_threads(size.x * size.y * size.z, [&] { Function(arguments...); });
    });
}

inline void asc_syncthreads() { emu::sync_threads(); }
inline uint32_t asc_ballot(bool predicate) { return emu::ballot(predicate); }

template <class T>
inline T shuffle_bits(T value, int source) {
    static_assert(sizeof(T) == 4);
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = emu::shuffle(bits, source);
    memcpy(&value, &bits, 4);
    return value;
}
template <class T>
inline T asc_shfl_xor(T value, int mask) {
    return shuffle_bits(value, emu::lane() ^ mask);
}
template <class T>
inline T asc_shfl_up(T value, int delta) {
    return shuffle_bits(value, emu::lane() - delta);
}

template <class T>
inline T reduce_lanes(T value, emu::Reduce how) {
    uint64_t values[32];
    bool there[32], first = true;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    emu::exchange(bits, values, there);
    T result{};
    for (int i = 0; i < 32; i++) {
        if (!there[i]) continue;
        uint32_t word = values[i];
        T v;
        memcpy(&v, &word, 4);
        if (first) result = v;
        else if (how == emu::Reduce::add) result = result + v;
        else if (how == emu::Reduce::max) result = v > result ? v : result;
        else result = v < result ? v : result;
        first = false;
    }
    return result;
}
template <class T>
inline T asc_reduce_add(T v) { return reduce_lanes(v, emu::Reduce::add); }
template <class T>
inline T asc_reduce_max(T v) { return reduce_lanes(v, emu::Reduce::max); }
template <class T>
inline T asc_reduce_min(T v) { return reduce_lanes(v, emu::Reduce::min); }

template <class T>
__attribute__((no_sanitize_thread)) inline T asc_atomic_add(T* p, T value) {
    emu::atomic(p, sizeof(T));
    T old = *p;
    *p = old + value;
    return old;
}
