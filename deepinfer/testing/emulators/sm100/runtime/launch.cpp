// Runs a grid: CTAs one after the other, threads as fibers, asynchronous operations when the
// schedule says so. Everything is deterministic in (schedule, seed).
#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "state.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emu {

// ---- reports

static std::map<std::string, long> counts;
static std::string texts;

void report(const char* kind, const char* format, ...) {
    if (++counts[kind] > 4) return;
    char text[400], line[520];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    snprintf(line, sizeof line, "%s: block (%u,%u,%u) thread %u: %s\n", kind, blockIdx.x,
             blockIdx.y, blockIdx.z, threadIdx.x, text);
    texts += line;
}

int new_agent(const std::string& name) {
    if (agents() >= kMaxAgents) {
        fprintf(stderr, "sm100 emulator: more than %d agents\n", kMaxAgents);
        abort();
    }
    state.agents.push_back(name);
    return agents() - 1;
}

// ---- fibers

extern "C" void emu_switch(void** save, void* to);
asm(".text\n.globl emu_switch\nemu_switch:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    " mov %rsp,(%rdi)\n mov %rsi,%rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");

constexpr size_t kStack = 128 * 1024;
static uint8_t* stacks;
static size_t stacks_bytes;
static void* scheduler_stack;
static void (*entry)(void**);
static void** entry_arguments;

static void fiber_main() {
    entry(entry_arguments);
    fiber().wait = Wait::done;
    emu_switch(&fiber().stack, scheduler_stack);
    abort();
}

void block(Wait reason) {
    fiber().wait = reason;
    emu_switch(&fiber().stack, scheduler_stack);
}

static void make_fibers(int threads) {
    size_t need = kStack * threads;
    if (stacks_bytes < need) {
        stacks = (uint8_t*)mmap(nullptr, need, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        stacks_bytes = need;
    }
    state.fibers.assign(threads, Fiber());
    for (int i = 0; i < threads; i++) {
        uint8_t* top = stacks + kStack * (i + 1);
        memset(top - kStack / 4, 0xFF, kStack / 4);  // poison: uninitialised locals become NaN
        void** sp = (void**)(((uintptr_t)top & ~uintptr_t(15)) - 16);
        *--sp = nullptr;
        *--sp = (void*)fiber_main;
        for (int k = 0; k < 6; k++) *--sp = nullptr;
        state.fibers[i].stack = sp;
    }
}

// ---- asynchronous operations and schedules

enum class Mode { eager, lazy, random, reversed, late_mma };
static Mode mode;
static uint64_t random_state;
static uint32_t random_number() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state >> 11;
}

struct Operation {
    std::function<void()> run;
    int pipe;
};
static std::deque<Operation> pending;

void submit(int pipe, std::function<void()> run) {
    if (mode == Mode::eager || (mode == Mode::late_mma && pipe < 0)) run();
    else pending.push_back({std::move(run), pipe});
}

static bool run_pending() {
    if (pending.empty()) return false;
    size_t pick = 0;
    if (mode == Mode::random) {  // any copy, or the first of any pipe
        std::vector<size_t> free;
        std::map<int, bool> seen;
        for (size_t i = 0; i < pending.size(); i++)
            if (pending[i].pipe < 0 || !std::exchange(seen[pending[i].pipe], true))
                free.push_back(i);
        pick = free[random_number() % free.size()];
    }
    Operation op = std::move(pending[pick]);
    pending.erase(pending.begin() + pick);
    op.run();
    return true;
}

static bool ready(const Fiber& f, int thread) {
    switch (f.wait) {
        case Wait::none: return true;
        case Wait::mbarrier: return (f.mbarrier->phase & 1) != f.parity;
        case Wait::barrier: return named_barriers[f.barrier].generation != f.generation;
        case Wait::warp: return warp_barriers[thread / 32].generation != f.generation;
        default: return false;
    }
}

static void arrange(std::vector<int>& order) {
    int threads = order.size();
    if (mode == Mode::reversed)
        for (int i = 0; i < threads; i++) order[i] = threads - 1 - i;
    if (mode == Mode::random)
        for (int w = threads / 32 - 1; w > 0; w--)
            std::swap_ranges(&order[w * 32], &order[w * 32] + 32,
                             &order[random_number() % (w + 1) * 32]);
}

static void report_deadlock() {
    std::map<std::string, int> waits;
    for (auto& f : state.fibers) {
        char text[128] = "a warp operation";
        if (f.wait == Wait::done) continue;
        if (f.wait == Wait::mbarrier)
            snprintf(text, sizeof text, "%s parity %u (phase %u, pending %u, tx %ld)",
                     state.agents[f.mbarrier->agent].c_str(), f.parity, f.mbarrier->phase,
                     f.mbarrier->pending, (long)f.mbarrier->tx);
        if (f.wait == Wait::barrier)
            snprintf(text, sizeof text, "barrier %d (%d of %d)", f.barrier,
                     named_barriers[f.barrier].arrived, named_barriers[f.barrier].count);
        waits[text]++;
    }
    std::string all;
    for (auto& w : waits) all += std::to_string(w.second) + " threads wait for " + w.first + "; ";
    report("deadlock", "%s", all.c_str());
}

// Runs the CTA to its end; false on a deadlock.
static bool run_threads(int threads) {
    std::vector<int> order(threads);
    for (int i = 0; i < threads; i++) order[i] = i;
    for (;;) {
        bool ran = false, alive = false;
        arrange(order);
        for (int i : order) {
            Fiber& f = state.fibers[i];
            if (f.wait == Wait::done) continue;
            alive = true;
            if (!ready(f, i)) continue;
            f.wait = Wait::none;
            state.current = i;
            threadIdx = dim3(i, 0, 0);
            emu_switch(&scheduler_stack, f.stack);
            ran = true;
        }
        state.current = -1;
        if (!alive) return true;
        if (!ran && !run_pending()) {
            report_deadlock();
            return false;
        }
    }
}

static void check_exit(int threads) {
    for (auto& entry : state.mbarriers)
        if (entry.second->tx)
            report("exit", "%s has tx-count %ld at exit", state.agents[entry.second->agent].c_str(),
                   (long)entry.second->tx);
    for (int c = 0; c < kColumns; c++)
        if (state.tmem_state[c] == 1) {
            report("exit", "TMEM column %d is never deallocated", c);
            break;
        }
    for (int i = 0; i < threads; i++) {
        Fiber &f = state.fibers[i], &first = state.fibers[i / 32 * 32];
        if (f.sync_hash != first.sync_hash || f.sync_count != first.sync_count) {
            report("convergence", "lanes of warp %d ran different sequences of .sync.aligned ops",
                   i / 32);
            break;
        }
    }
}

static void reset_block(int threads) {
    state.agents.clear();
    for (int i = 0; i < threads; i++) state.agents.push_back("t" + std::to_string(i));
    for (auto* clocks : {&state.causal, &state.proxy, &state.tensor}) {
        clocks->resize(threads);
        memset(clocks->data(), 0, sizeof(Clock) * threads);
    }
    for (int i = 0; i < threads; i++) state.causal[i].v[i] = 1;
    for (auto& entry : state.mbarriers) delete entry.second;
    state.mbarriers.clear();
    for (auto& b : named_barriers) b.arrived = 0, b.generation = 0;
    warp_barriers.resize((threads + 31) / 32);
    for (auto& b : warp_barriers) b.arrived = 0, b.generation = 0;
    state.smem_shadow.reset(state.smem_bytes);
    state.tmem_shadow.reset(kLanes * kColumns);
    state.tmem.assign(kLanes * kColumns, 0x7fbadbad);
    state.tmem_state.assign(kColumns, 0);
    memset(state.smem, 0xFF, kSmem);
    pending.clear();
    make_fibers(threads);
}

static void place_smem(size_t dynamic, const size_t* statics, int count) {
    if (!state.smem)
        state.smem = (uint8_t*)mmap(nullptr, kSmem + (1 << 20), PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    size_t used = 0;
    state.static_offsets.clear();
    for (int i = 0; i < count; i++) {
        size_t align = statics[2 * i + 1];
        used = (used + align - 1) / align * align;
        state.static_offsets.push_back(used);
        used += statics[2 * i];
    }
    state.dynamic_offset = (used + 1023) & ~size_t(1023);
    state.smem_bytes = state.dynamic_offset + dynamic;
    if (used + dynamic > kSmemLimit)
        report("out-of-bounds", "%zu static + %zu dynamic bytes of smem; the limit is %zu", used,
               dynamic, kSmemLimit);
}

}  // namespace emu

using namespace emu;
extern "C" {

// statics: (bytes, alignment) of each static shared array.
void emu_run(void (*kernel)(void**), void** arguments, const int* grid, int threads, size_t dynamic,
             const size_t* statics, int count, int schedule, uint64_t seed) {
    counts.clear();
    texts.clear();
    state.operations.clear();
    state.notes.clear();
    entry = kernel, entry_arguments = arguments, mode = Mode(schedule);
    random_state = seed * 0x9E3779B97F4A7C15ull + 1;
    state.threads = threads, state.aborting = false;
    gridDim = dim3(grid[0], grid[1], grid[2]);
    blockDim = dim3(threads, 1, 1);
    place_smem(dynamic, statics, count);
    for (int z = 0; z < grid[2]; z++)
        for (int y = 0; y < grid[1]; y++)
            for (int x = 0; x < grid[0]; x++) {
                blockIdx = dim3(x, y, z);
                reset_block(threads);
                if (!run_threads(threads)) return;
                while (run_pending()) {
                }
                check_exit(threads);
            }
}

// Writes four sections, '\f' between: violations, their texts, operations, notes; the counts as
// lines "name = count".
void emu_report(char* out, int size) {
    std::string all;
    auto add = [&](const std::map<std::string, long>& lines) {
        for (auto& c : lines) all += c.first + " = " + std::to_string(c.second) + "\n";
    };
    add(counts);
    all += "\f" + texts + "\f";
    add(state.operations);
    all += "\f";
    add(state.notes);
    snprintf(out, size, "%s", all.c_str());
}
}
