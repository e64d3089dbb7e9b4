// mbarriers, named barriers, warp operations and fences.
#include <algorithm>

#include "state.h"

namespace emu {

NamedBarrier named_barriers[16];
std::vector<WarpBarrier> warp_barriers;

int lane() { return threadIdx.x & 31; }
int warp() { return threadIdx.x >> 5; }

void converged(int op) {
    auto& f = fiber();
    f.sync_count++;
    f.sync_hash = f.sync_hash * 1000003u + op;
}

bool elect() {
    converged(1);
    return lane() == 0;
}

// ---- mbarriers

static size_t offset_of(void* p) { return (uint8_t*)p - state.smem; }

MBarrier* find_mbarrier(void* p) {
    auto found = state.mbarriers.find(offset_of(p));
    if (found != state.mbarriers.end() && found->second->live) return found->second;
    report("mbarrier", "smem+0x%zx is no initialised mbarrier", offset_of(p));
    return nullptr;
}

void mbarrier_init(void* p, uint32_t count) {
    state.operations["mbarrier.init"]++;
    auto*& b = state.mbarriers[offset_of(p)];
    if (b && b->live)
        report("mbarrier", "smem+0x%zx is initialised again while live", offset_of(p));
    char name[32];
    snprintf(name, sizeof name, "mbarrier 0x%zx", offset_of(p));
    int agent = b ? b->agent : new_agent(name);
    delete b;
    b = new MBarrier;
    memset(&b->arrived, 0, sizeof(Clock) * 4);
    b->agent = agent, b->live = true, b->owner = state.current, b->count = b->pending = count;
    check_smem(offset_of(p), 8, generic_access("mbarrier.init"), true);
}

void touch_mbarrier(void* p) {
    Cell& c = state.smem_shadow.cells[offset_of(p)];
    int t = state.current;
    if (c.written != Written::never && c.write_agent != t &&
        c.write_clock > state.causal[t].v[c.write_agent])
        report("race", "mbarrier smem+0x%zx is used without being ordered after its init",
               offset_of(p));
}

void require_fenced(const MBarrier* b, const char* what) {
    if (!b->fenced)
        report("proxy", "%s on %s, whose init no fence.mbarrier_init or fence.proxy.async followed",
               what, state.agents[b->agent].c_str());
}

void complete_if_done(MBarrier* b) {
    if (b->pending || b->tx) return;
    b->phase++;
    b->pending = b->count;
    join(b->done, b->arrived);
    join(b->done_proxy, b->arrived_proxy);
    b->done.v[b->agent] = b->done_proxy.v[b->agent] = b->phase;
}

static void count_down(MBarrier* b) {
    if (!b->pending) {
        report("mbarrier", "%s: more arrivals than its count of %u", state.agents[b->agent].c_str(),
               b->count);
        return;
    }
    b->pending--;
    complete_if_done(b);
}

void arrive_from(MBarrier* b, const Clock& causal, const Clock& proxy, int agent, uint32_t clock) {
    join(b->arrived, causal);
    join(b->arrived_proxy, proxy);
    b->arrived.v[agent] = std::max(b->arrived.v[agent], clock);
    b->arrived_proxy.v[agent] = std::max(b->arrived_proxy.v[agent], clock);
    count_down(b);
}

void mbarrier_arrive(void* p) {
    state.operations["mbarrier.arrive"]++;
    MBarrier* b = find_mbarrier(p);
    if (!b) return;
    touch_mbarrier(p);
    join(b->arrived, state.causal[state.current]);
    join(b->arrived_proxy, state.proxy[state.current]);
    tick();
    count_down(b);
}

void mbarrier_expect_tx(void* p, uint32_t bytes) {
    state.operations["mbarrier.expect_tx"]++;
    MBarrier* b = find_mbarrier(p);
    if (!b) return;
    touch_mbarrier(p);
    b->tx += bytes;
}

bool mbarrier_test(void* p, uint32_t parity) {
    MBarrier* b = find_mbarrier(p);
    if (!b) return true;
    if ((b->phase & 1) == (parity & 1)) return false;
    join(state.causal[state.current], b->done);
    join(state.proxy[state.current], b->done_proxy);
    return true;
}

void mbarrier_wait(void* p, uint32_t parity) {
    state.operations["mbarrier.wait"]++;
    if (parity > 1) state.notes["a parity operand above 1: its low bit is taken"]++;
    MBarrier* b = find_mbarrier(p);
    if (!b) return;
    touch_mbarrier(p);
    while (!mbarrier_test(p, parity)) {
        fiber().mbarrier = b;
        fiber().parity = parity & 1;
        block(Wait::mbarrier);
        if (state.aborting) return;
    }
}

// ---- named barriers and warp operations: two sets of clocks, for the generation that gathers and
// the one whose last threads have not left yet

template <class Barrier>
static void gather(Barrier& b, bool memory) {
    Clock &causal = b.causal[b.generation & 1], &proxy = b.proxy[b.generation & 1];
    if (b.arrived == 0) memset(&causal, 0, sizeof causal), memset(&proxy, 0, sizeof proxy);
    if (!memory) return;
    join(causal, state.causal[state.current]);
    join(proxy, state.proxy[state.current]);
    tick();
}

template <class Barrier>
static void spread(Barrier& b, long generation) {
    join(state.causal[state.current], b.causal[generation & 1]);
    join(state.proxy[state.current], b.proxy[generation & 1]);
}

void barrier_sync(int id, int count) {
    state.operations["bar.sync"]++;
    NamedBarrier& b = named_barriers[id];
    if (count % 32) report("barrier", "bar.sync %d, %d: not a multiple of a warp", id, count);
    if (b.arrived == 0) b.count = count;
    if (b.count != count)
        report("barrier", "bar.sync %d with counts %d and %d", id, b.count, count);
    gather(b, true);
    long generation = b.generation;
    if (++b.arrived >= count) b.arrived = 0, b.generation++;
    while (b.generation == generation) {
        fiber().barrier = id, fiber().generation = generation;
        block(Wait::barrier);
        if (state.aborting) return;
    }
    spread(b, generation);
}

// All lanes meet; returns the values they brought.
static const uint32_t* meet(uint32_t value, bool memory) {
    WarpBarrier& b = warp_barriers[warp()];
    gather(b, memory);
    long generation = b.generation;
    b.values[generation & 1][lane()] = value;
    if (++b.arrived >= std::min(32, state.threads - warp() * 32)) b.arrived = 0, b.generation++;
    while (b.generation == generation) {
        fiber().generation = generation;
        block(Wait::warp);
        if (state.aborting) break;
    }
    if (memory) spread(b, generation);
    return b.values[generation & 1];
}

void sync_warp() {
    state.operations["bar.warp.sync"]++;
    converged(2);
    meet(0, true);
}

uint32_t shuffle(uint32_t value, int source_lane) {
    state.operations["shfl.sync"]++;
    converged(3);
    return meet(value, false)[source_lane & 31];
}

uint32_t ballot(bool predicate) {
    state.operations["vote.sync"]++;
    converged(4);
    const uint32_t* values = meet(predicate, false);
    uint32_t mask = 0;
    for (int l = 0; l < 32; l++) mask |= values[l] ? 1u << l : 0;
    return mask;
}

// ---- fences

void fence_mbarrier_init() {
    for (auto& entry : state.mbarriers)
        if (entry.second->owner == state.current) entry.second->fenced = true;
}

void fence_proxy_async() {
    state.operations["fence.proxy.async"]++;
    copy(state.proxy[state.current], state.causal[state.current]);
    fence_mbarrier_init();
}

void fence_after_thread_sync() { copy(state.tensor[state.current], state.causal[state.current]); }

void fence_before_thread_sync() {
    auto& f = fiber();
    if (f.move_agent >= 0) state.causal[state.current].v[f.move_agent] = f.move_clock;
}

}  // namespace emu
