// SIMT threads of one vector function: fibers that meet at block barriers and warp operations.
#include <sys/mman.h>

#include <cstring>

#include "state.h"

namespace emu {

extern "C" void emu_switch(void** save, void* to);
asm(".text\n.globl emu_switch\nemu_switch:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    " mov %rsp,(%rdi)\n mov %rsi,%rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");

void* make_stack(uint8_t* top, void (*main)()) {
    void** sp = (void**)(((uintptr_t)top & ~uintptr_t(15)) - 16);
    *--sp = nullptr;
    *--sp = (void*)main;
    for (int k = 0; k < 6; k++) *--sp = nullptr;
    return sp;
}

enum class Wait { none, block, warp, done };
struct Thread {
    void* stack;
    Wait wait;
    uint64_t value;  // given to the warp
    long barriers;   // of the block, passed
};

constexpr int kMaxThreads = 2048;
constexpr size_t kStack = 32 * 1024;
static std::vector<Thread> threads;
static uint8_t* stacks;
static void* scheduler_stack;
static const std::function<void()>* body;
static uint64_t exchanged[kMaxThreads / 32][32];
static bool present[kMaxThreads / 32][32];
Index thread_index{0, 0, 0};

int lane() { return simt_thread % 32; }

static void leave(Wait reason) {
    Thread& t = threads[simt_thread];
    t.wait = reason;
    emu_switch(&t.stack, scheduler_stack);
}

static void thread_main() {
    (*body)();
    leave(Wait::done);
    __builtin_trap();
}

void sync_threads() { leave(Wait::block); }

void exchange(uint64_t value, uint64_t* values, bool* there) {
    threads[simt_thread].value = value;
    leave(Wait::warp);
    memcpy(values, exchanged[simt_thread / 32], sizeof exchanged[0]);
    memcpy(there, present[simt_thread / 32], sizeof present[0]);
}

uint32_t shuffle(uint32_t value, int source) {
    uint64_t values[32];
    bool there[32];
    exchange(value, values, there);
    if (source < 0 || source > 31 || !there[source]) return value;
    return values[source];
}

uint32_t ballot(bool predicate) {
    uint64_t values[32];
    bool there[32];
    exchange(predicate, values, there);
    uint32_t mask = 0;
    for (int i = 0; i < 32; i++) mask |= uint32_t(there[i] && values[i]) << i;
    return mask;
}

// Lets a warp go on whose living lanes all stand at a warp operation.
static bool release_warp(int warp, int count) {
    int first = warp * 32, end = first + 32 < count ? first + 32 : count;
    bool any = false;
    for (int i = first; i < end; i++) {
        if (threads[i].wait == Wait::none || threads[i].wait == Wait::block) return false;
        any = any || threads[i].wait == Wait::warp;
    }
    if (!any) return false;
    for (int i = 0; i < 32; i++) {
        present[warp][i] = first + i < end && threads[first + i].wait == Wait::warp;
        if (!present[warp][i]) continue;
        exchanged[warp][i] = threads[first + i].value;
        threads[first + i].wait = Wait::none;
    }
    simt_phase(first, false);
    return true;
}

static bool release_block(int count) {
    bool any = false;
    for (int i = 0; i < count; i++) {
        if (threads[i].wait != Wait::block && threads[i].wait != Wait::done) return false;
        any = any || threads[i].wait == Wait::block;
    }
    if (!any) return false;
    for (int i = 0; i < count; i++)
        if (threads[i].wait == Wait::block) threads[i].wait = Wait::none, threads[i].barriers++;
    simt_phase(0, true);
    return true;
}

void run_threads(int count, const std::function<void()>& run) {
    if (count > kMaxThreads) return report("launch", "%d threads, at most %d", count, kMaxThreads);
    if (!stacks)
        stacks = (uint8_t*)mmap(nullptr, kStack * kMaxThreads, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    threads.resize(count);
    body = &run;
    simt_begin(count);
    for (int i = 0; i < count; i++) {
        uint8_t* top = stacks + kStack * (i + 1);
        memset(top - 2048, 0xFF, 2048);  // poison: uninitialised locals become NaN
        threads[i] = {make_stack(top, thread_main), Wait::none, 0, 0};
    }
    for (;;) {
        bool alive = false, ran = false;
        for (int k = 0; k < count; k++) {
            int i = mode == Mode::reversed ? count - 1 - k : k;
            alive = alive || threads[i].wait != Wait::done;
            if (threads[i].wait != Wait::none) continue;
            simt_thread = i;
            thread_index = {i, 0, 0};
            emu_switch(&scheduler_stack, threads[i].stack);
            ran = true;
        }
        if (!alive) break;
        for (int w = 0; w <= (count - 1) / 32; w++) ran = release_warp(w, count) || ran;
        if (ran) continue;
        if (!release_block(count)) {
            report("divergence", "SIMT threads wait at different barriers");
            state.aborting = true;
            break;
        }
    }
    for (int i = 1; i < count; i++)
        if (threads[i].barriers != threads[0].barriers) {
            report("divergence", "threads 0 and %d passed %ld and %ld barriers", i,
                   threads[0].barriers, threads[i].barriers);
            break;
        }
    simt_end();
}

}  // namespace emu
