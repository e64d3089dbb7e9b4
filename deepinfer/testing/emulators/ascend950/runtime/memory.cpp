// On-chip and global memory: one arena, shadow cells, and the hooks through which the compiler
// reports every access of device code (-fsanitize=thread, without its library).
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "state.h"

namespace emu {

constexpr size_t kGap = 16 * 1024, kWild = 256ull << 20, kGlobal = 256ull << 20;
static size_t global_used;
static uint8_t* global_base;

static uint8_t* place(Space& s, uint8_t* at, const char* name, size_t bytes, size_t usable) {
    s.name = name, s.bytes = bytes, s.usable = usable, s.base = at;
    return at + bytes + kGap;
}

static void make_arena() {
    if (state.arena) return;
    state.arena_bytes = 2 * kWild + kGlobal;
    state.arena = (uint8_t*)mmap(nullptr, state.arena_bytes, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    uint8_t* at = state.arena + kWild;  // a wild address of a mutant is caught, not fatal
    at = place(state.ub[0], at, "UB0", kUb, kUbUsable);
    at = place(state.ub[1], at, "UB1", kUb, kUbUsable);
    at = place(state.l1, at, "L1", kL1, kL1);
    at = place(state.l0a, at, "L0A", kL0a, kL0a);
    at = place(state.l0b, at, "L0B", kL0b, kL0b);
    at = place(state.scales[0], at, "L0A scales", kScales, kScales);
    at = place(state.scales[1], at, "L0B scales", kScales, kScales);
    global_base = place(state.l0c, at, "L0C", kL0c, kL0c);
}

static Space* spaces[] = {&state.ub[0], &state.ub[1], &state.l1,        &state.l0a,
                          &state.l0b,   &state.l0c,   &state.scales[0], &state.scales[1]};

void reset_memories() {
    make_arena();
    for (Space* s : spaces) {
        // NaN as bf16 and as fp32, and no integer that a kernel would write
        std::fill_n((uint16_t*)s->base, s->bytes / 2, uint16_t(0xFFC1));
        s->cells.assign(s->bytes / kGranule, Cell());
    }
}

uint8_t* ub() { return ub_of(state.core == 2); }
uint8_t* ub_of(int vector_core) { return state.ub[vector_core].base; }
uint8_t* l1() { return state.l1.base; }
uint8_t* l0a() { return state.l0a.base; }
uint8_t* l0b() { return state.l0b.base; }
uint8_t* l0c() { return state.l0c.base; }

// ---- races between pipes

static void unordered(const char* hazard, const char* where, size_t offset, int other) {
    report("race", "%s at %s+0x%zx, not ordered after %s", hazard, where, offset,
           agent_name(other).c_str());
}

static void touch_space(Space& s, size_t offset, size_t bytes, bool write, int check) {
    int own = agent(state.core, state.pipe);
    uint32_t stamp = state.cores[state.core].stamps[state.pipe];
    const Clock& clock = clock_of(state.core, state.pipe);
    for (size_t g = offset / kGranule; g <= (offset + bytes - 1) / kGranule; g++) {
        Cell& c = s.cells[g];
        if (c.writer == own && c.written == stamp && write) continue;
        if (c.writer < 0) {
            if (!write && check & kInitialised)
                report("uninitialised", "read of %s+0x%zx", s.name, g * kGranule);
        } else if (c.written > clock[c.writer] && !(c.writer == own && c.written == stamp)) {
            unordered(write ? "write after write" : "read after write", s.name, g * kGranule,
                      c.writer);
        }
        if (!write) {
            c.read[own] = stamp;
            continue;
        }
        for (int a = 0; a < kAgents; a++)
            if (c.read[a] > clock[a] && !(a == own && c.read[a] == stamp))
                unordered("write after read", s.name, g * kGranule, a);
        c.writer = own, c.written = stamp;
        c.read.fill(0);
    }
}

// ---- races between the SIMT threads of one vector function

struct ThreadCell {
    uint32_t write_phase, read_phase, write_epoch, read_epoch;
    uint16_t writer, reader;
    uint8_t readers;  // 0: one thread, 1: lanes of one warp, 2: several warps
    bool atomic;
};
static std::vector<ThreadCell> thread_cells[2];
static uint32_t phase = 1, epochs[64];
int simt_thread = -1;
static const void* atomic_at;

void simt_begin(int threads) {
    for (auto& c : thread_cells)
        if (c.empty()) c.resize(kUb);
    phase++;
    for (int w = 0; w < (threads + 31) / 32; w++) epochs[w]++;
}
void simt_end() { simt_thread = -1; }
void simt_phase(int thread, bool whole_block) {
    if (whole_block) phase++;
    else epochs[thread / 32]++;
}

static bool apart(uint32_t then, int thread, uint32_t epoch) {
    if (then != phase || thread == simt_thread) return true;
    return thread / 32 == simt_thread / 32 && epoch != epochs[thread / 32];
}

static void touch_thread(int vector_core, size_t offset, size_t bytes, bool write, bool atomic) {
    int t = simt_thread, warp = t / 32;
    for (size_t i = offset; i < offset + bytes; i++) {
        ThreadCell& c = thread_cells[vector_core][i];
        if (!apart(c.write_phase, c.writer, c.write_epoch) && !(atomic && c.atomic))
            report("thread race", "%s of UB+0x%zx by thread %d, written by thread %d",
                   write ? "write" : "read", i, t, c.writer);
        if (!write) {
            bool same = c.read_phase == phase;
            if (!same || (c.readers < 2 && c.reader / 32 == warp && c.read_epoch != epochs[warp]))
                c.readers = 0;
            else if (c.reader / 32 != warp) c.readers = 2;
            else if (c.reader != t && c.readers == 0) c.readers = 1;
            c.read_phase = phase, c.reader = t, c.read_epoch = epochs[warp];
            continue;
        }
        bool safe = c.read_phase != phase;
        if (!safe && c.readers == 0) safe = apart(c.read_phase, c.reader, c.read_epoch);
        if (!safe && c.readers == 1)
            safe = c.reader / 32 == warp && c.read_epoch != epochs[warp];
        if (!safe)
            report("thread race", "write of UB+0x%zx by thread %d, read by thread %d", i, t,
                   c.reader);
        c.write_phase = phase, c.writer = t, c.write_epoch = epochs[warp], c.atomic = atomic;
    }
}

// ---- global memory

static Tensor* tensor_at(const uint8_t* p) {
    for (Tensor& t : state.tensors)
        if (p >= t.base && p < t.base + t.bytes) return &t;
    return nullptr;
}

static void touch_global(Tensor& t, size_t offset, size_t bytes, bool write) {
    int own = agent(state.core, state.pipe);
    uint32_t stamp = state.cores[state.core].stamps[state.pipe];
    const Clock& clock = clock_of(state.core, state.pipe);
    if (write && !t.writable) report("read-only", "write of %s+%zu", t.name.c_str(), offset);
    for (size_t i = offset; i < offset + bytes; i++) {
        GlobalCell& c = t.cells[i];
        bool ours = c.block == state.block;
        if (c.block >= 0 && !ours)
            report("race", "%s+%zu is written by block %d too", t.name.c_str(), i, c.block);
        else if (ours && c.written > clock[c.writer] && !(c.writer == own && c.written == stamp))
            unordered(write ? "write after write" : "read after write", t.name.c_str(), i,
                      c.writer);
        if (!write && !c.defined)
            report("uninitialised", "read of %s+%zu", t.name.c_str(), i);
        if (write) c.block = state.block, c.writer = own, c.written = stamp, c.defined = true;
    }
}

static bool inside(const uint8_t* p) {
    return p >= state.arena && p < state.arena + state.arena_bytes;
}

static void touch_any(const uint8_t* p, size_t bytes, bool write, int check, bool by_thread) {
    if (!bytes) return;
    bool atomic = by_thread && p == atomic_at;
    for (Space* s : spaces)
        if (p >= s->base && p < s->base + s->usable) {
            size_t offset = p - s->base;
            if (offset + bytes > s->usable)
                return report("out of bounds", "%s+0x%zx, %zu bytes", s->name, offset, bytes);
            touch_space(*s, offset, bytes, write, check);
            if (by_thread) touch_thread(s == &state.ub[1], offset, bytes, write, atomic);
            return;
        }
    Tensor* t = tensor_at(p);
    if (!t || p + bytes > t->base + t->bytes)
        report("out of bounds", "%zu bytes %s at no operand or buffer", bytes,
               write ? "written" : "read");
    else touch_global(*t, p - t->base, bytes, write);
}

void touch(const void* p, size_t bytes, bool write, int check) {
    touch_any((const uint8_t*)p, bytes, write, check, false);
}

void require_aligned(const void* p, size_t alignment, const char* what) {
    for (Space* s : spaces)
        if (p >= s->base && p < s->base + s->bytes && ((uint8_t*)p - s->base) % alignment)
            report("alignment", "%s at %s+0x%zx, expected a multiple of %zu", what, s->name,
                   size_t((uint8_t*)p - s->base), alignment);
}

void atomic(void* p, size_t bytes) {
    atomic_at = p;
    touch_any((uint8_t*)p, bytes, true, kInitialised, true);
    atomic_at = nullptr;
}

static void hook(void* address, size_t bytes, bool write) {
    const uint8_t* p = (const uint8_t*)address;
    if (!inside(p)) return;  // a local of the host's stack
    touch_any(p, bytes, write, kInitialised, simt_thread >= 0);
}

}  // namespace emu

using namespace emu;
extern "C" {

void emu_forget_tensors() {
    make_arena();
    state.tensors.clear();
    global_used = 0;
}

// A new operand, between gaps; returns its address.
void* emu_tensor(size_t bytes, const char* name, int writable, int defined) {
    uint8_t* base = global_base + global_used;
    Tensor t{name, base, bytes, writable != 0, std::vector<GlobalCell>(bytes)};
    for (auto& c : t.cells) c.defined = defined;
    state.tensors.push_back(std::move(t));
    global_used += (bytes + kGap + 511) / 512 * 512;
    memset(base, 0xFF, bytes);
    return base;
}

// How many bytes of the index-th operand nothing has written.
long emu_undefined(int index) {
    long n = 0;
    for (auto& c : state.tensors[index].cells) n += !c.defined;
    return n;
}

#define HOOKS(n)                                                             \
    void __tsan_read##n(void* p) { hook(p, n, false); }                      \
    void __tsan_write##n(void* p) { hook(p, n, true); }                      \
    void __tsan_unaligned_read##n(void* p) { hook(p, n, false); }            \
    void __tsan_unaligned_write##n(void* p) { hook(p, n, true); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* p, size_t n) { hook(p, n, false); }
void __tsan_write_range(void* p, size_t n) { hook(p, n, true); }
void* __tsan_memcpy(void* d, const void* s, size_t n) {
    hook((void*)s, n, false), hook(d, n, true);
    return memcpy(d, s, n);
}
void* __tsan_memset(void* d, int v, size_t n) {
    hook(d, n, true);
    return memset(d, v, n);
}
}
