// Shared and global memory: arenas, shadow cells, and the hooks through which the compiler reports
// every access of device code (-fsanitize=thread, without its library).
#include <sys/mman.h>

#include "state.h"

namespace emu {

State state;

void Shadow::reset(size_t n) {
    cells.assign(n, Cell{});
    many.clear();
    atomics.clear();
}

static bool after(const Clock* order, int agent, uint32_t clock) {
    return clock <= order->v[agent];
}

static void unordered(const Shadow& s, size_t i, const Access& a, int agent, uint32_t clock,
                      const char* hazard) {
    if (agent == a.agent || after(a.order, agent, clock)) return;
    const char* name = state.agents[agent].c_str();
    if (a.weaker && after(a.weaker, agent, clock))
        report("tcgen05-fence",
               "%s of %s+0x%zx is ordered after %s, but no "
               "tcgen05.fence::after_thread_sync is between them",
               a.what, s.name, i, name);
    else
        report("race", "%s: %s of %s+0x%zx is not ordered after %s", hazard, a.what, s.name, i,
               name);
}

static void remember_read(Shadow& s, Cell& c, size_t i, const Access& a) {
    if (c.reads == kMany) {
        auto& clocks = s.many[i];
        if ((int)clocks.size() < agents()) clocks.resize(agents());
        clocks[a.agent] = a.clock;
        return;
    }
    for (int q = 0; q < c.reads; q++)  // our own, or one that is ordered before us, is replaced
        if (c.read_agent[q] == a.agent || after(a.order, c.read_agent[q], c.read_clock[q])) {
            c.read_agent[q] = a.agent, c.read_clock[q] = a.clock;
            return;
        }
    if (c.reads < 2) {
        c.read_agent[c.reads] = a.agent, c.read_clock[c.reads++] = a.clock;
        return;
    }
    auto& clocks = s.many[i];
    clocks.assign(agents(), 0);
    for (int q = 0; q < 2; q++) clocks[c.read_agent[q]] = c.read_clock[q];
    clocks[a.agent] = a.clock;
    c.reads = kMany;
}

static void check_reads(Shadow& s, const Cell& c, size_t i, const Access& a) {
    if (c.reads == kMany) {
        auto& clocks = s.many[i];
        for (size_t q = 0; q < clocks.size(); q++)
            if (clocks[q]) unordered(s, i, a, q, clocks[q], "write after read");
    } else {
        for (int q = 0; q < c.reads; q++)
            unordered(s, i, a, c.read_agent[q], c.read_clock[q], "write after read");
    }
}

void check(Shadow& s, size_t i, const Access& a, bool write) {
    Cell& c = s.cells[i];
    if (c.written == Written::never) {
        if (!write || a.atomic) report("uninitialised", "%s of %s+0x%zx", a.what, s.name, i);
    } else {
        unordered(s, i, a, c.write_agent, c.write_clock,
                  write ? "write after write" : "read after write");
        if (a.proxy && c.written == Written::generic &&
            !after(a.proxy, c.write_agent, c.write_clock))
            report("proxy",
                   "%s of %s+0x%zx: a generic write by %s, but no fence.proxy.async is between",
                   a.what, s.name, i, state.agents[c.write_agent].c_str());
        if (write && a.once && c.written == Written::async && c.write_agent == a.agent &&
            c.write_clock == a.clock)
            report("race", "two %ss of %s+0x%zx in one mbarrier phase", a.what, s.name, i);
    }
    auto found = s.atomics.find(i);
    if (found != s.atomics.end() && !a.atomic)
        for (size_t q = 0; q < found->second.size(); q++)
            if (found->second[q]) unordered(s, i, a, q, found->second[q], "access after an atomic");
    if (a.atomic) {  // atomics do not race with each other
        check_reads(s, c, i, a);
        auto& clocks = s.atomics[i];
        if ((int)clocks.size() < agents()) clocks.resize(agents());
        clocks[a.agent] = a.clock;
    } else if (write) {
        check_reads(s, c, i, a);
        if (c.reads == kMany) s.many.erase(i);
        if (found != s.atomics.end()) s.atomics.erase(found);
        c.write_agent = a.agent, c.write_clock = a.clock, c.reads = 0;
        c.written = a.async ? Written::async : Written::generic;
    } else {
        remember_read(s, c, i, a);
    }
}

void check_smem(size_t offset, size_t bytes, const Access& a, bool write) {
    if (offset + bytes > state.smem_bytes) {
        report("out-of-bounds", "%s of smem+0x%zx, %zu bytes; %zu bytes are allocated", a.what,
               offset, bytes, state.smem_bytes);
        return;
    }
    for (size_t i = offset; i < offset + bytes; i++) check(state.smem_shadow, i, a, write);
}

Access generic_access(const char* what) {
    int t = state.current;
    return {t, state.causal[t].v[t], &state.causal[t], nullptr, nullptr, false, false, false, what};
}

// ---- global memory: one arena, a gap after every tensor

constexpr size_t kGlobal = size_t(1) << 32;
static uint8_t* arena;
static size_t arena_used = 4096;
struct Tensor {
    uint8_t* base;
    size_t bytes;
    std::string name;
    std::vector<uint8_t> defined;
    bool output;
    std::vector<uint32_t> writer;  // block that wrote the byte in this launch, plus 1
};
static std::vector<Tensor> tensors;

static Tensor* tensor_of(const void* p, size_t bytes) {
    auto* at = (const uint8_t*)p;
    for (auto& t : tensors)
        if (at >= t.base && at + bytes <= t.base + t.bytes) return &t;
    return nullptr;
}

bool inside_global(const void* p, size_t bytes) { return tensor_of(p, bytes) != nullptr; }

void check_global(const void* p, size_t bytes, bool write) {
    Tensor* t = tensor_of(p, bytes);
    if (!t) {
        report("out-of-bounds", "global %s of %zu bytes is outside every tensor",
               write ? "write" : "read", bytes);
        return;
    }
    size_t offset = (const uint8_t*)p - t->base;
    // Blocks run one after the other here, but nothing orders them on a GPU.
    uint32_t self = 1 + blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    for (size_t i = offset; i < offset + bytes && (write || !t->writer.empty()); i++) {
        if (t->writer.empty()) t->writer.resize(t->bytes);
        if (t->writer[i] && t->writer[i] != self) {
            report("race", "global %s of %s+0x%zx, which block %u wrote", write ? "write" : "read",
                   t->name.c_str(), i, t->writer[i] - 1);
            break;
        }
        if (write) t->writer[i] = self;
    }
    if (write) {
        if (t->output && t->defined[offset])
            report("written-twice", "%s+0x%zx", t->name.c_str(), offset);
        memset(&t->defined[offset], 1, bytes);
        return;
    }
    for (size_t i = offset; i < offset + bytes; i++)
        if (!t->defined[i]) {
            report("uninitialised", "global read of %s+0x%zx", t->name.c_str(), i);
            return;
        }
}

static void hook(const void* p, size_t bytes, bool write) {
    size_t offset = (const uint8_t*)p - state.smem;
    bool power = (bytes & (bytes - 1)) == 0;
    if (offset < kSmem) {
        if (state.current < 0) return;
        if (bytes <= 16 && power && (offset & (bytes - 1)))
            report("alignment", "shared access of %zu bytes at 0x%zx", bytes, offset);
        check_smem(offset, bytes, generic_access(write ? "store" : "load"), write);
        return;
    }
    size_t global = (const uint8_t*)p - arena;
    if (global >= kGlobal) return;  // the fiber's own stack
    if (bytes <= 32 && power && (global & (bytes - 1)))
        report("alignment", "global access of %zu bytes", bytes);
    check_global(p, bytes, write);
}

uint8_t* dynamic_smem() { return state.smem + state.dynamic_offset; }
void* static_smem(int id) { return state.smem + state.static_offsets[id]; }
uint32_t smem_address(const void* p) {
    size_t offset = (const uint8_t*)p - state.smem;
    if (offset >= kSmem) report("address", "a pointer is not in shared memory");
    return (uint32_t)offset;
}

int atomic_add(int* p, int value) {
    state.operations["atom.add"]++;
    size_t offset = (const uint8_t*)p - state.smem;
    if (offset >= kSmem) {
        report("unsupported", "an atomic on global memory");
        return 0;
    }
    Access a = generic_access("atomic");
    a.atomic = true;
    check_smem(offset, 4, a, true);
    int old = *p;
    *p = old + value;
    return old;
}

}  // namespace emu

using namespace emu;
extern "C" {

void* emu_tensor(size_t bytes, const char* name, int output, int defined) {
    if (!arena)
        arena = (uint8_t*)mmap(nullptr, kGlobal, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    uint8_t* base = arena + arena_used;
    arena_used += ((bytes + 4095) & ~size_t(4095)) + 4096;
    tensors.push_back(
        {base, bytes, name, std::vector<uint8_t>(bytes, defined != 0), output != 0, {}});
    memset(base, 0xFF, bytes);
    return base;
}
void emu_forget_tensors() {
    tensors.clear();
    arena_used = 4096;
}
// Bytes of the index-th tensor that hold nothing defined.
long emu_undefined(int index) {
    long n = 0;
    for (auto d : tensors[index].defined) n += !d;
    return n;
}

#define HOOKS(n)                                                  \
    void __tsan_read##n(void* p) { hook(p, n, false); }           \
    void __tsan_write##n(void* p) { hook(p, n, true); }           \
    void __tsan_unaligned_read##n(void* p) { hook(p, n, false); } \
    void __tsan_unaligned_write##n(void* p) { hook(p, n, true); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* p, unsigned long n) { hook(p, n, false); }
void __tsan_write_range(void* p, unsigned long n) { hook(p, n, true); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
}
