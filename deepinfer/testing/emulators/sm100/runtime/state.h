// The emulator's state, shared by the files of the runtime and by nothing else.
//
// Happens-before is tracked with vector clocks over *agents*: threads, mbarriers (a TMA write is an
// epoch of its mbarrier's phase), the tensor pipe of an issuing thread, and a thread's
// tcgen05.ld/st. A thread has three clocks: `causal`; `proxy`, causality with a fence.proxy.async
// on the path, which the async proxy needs before it reads generic writes; and `tensor`, causality
// as of the last tcgen05.fence::after_thread_sync, which tcgen05 accesses need.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "api.h"

namespace emu {

constexpr int kMaxAgents = 2560;
struct Clock {
    uint32_t v[kMaxAgents];
};

struct MBarrier {
    bool live = false, fenced = false;
    int owner = -1, agent = -1;
    uint32_t count = 0, pending = 0, phase = 0;
    int64_t tx = 0;
    Clock arrived, arrived_proxy, done, done_proxy;
};

enum class Wait { none, mbarrier, barrier, warp, done };
struct Fiber {
    void* stack = nullptr;
    Wait wait = Wait::none;
    MBarrier* mbarrier = nullptr;
    uint32_t parity = 0;
    int barrier = 0;
    long generation = 0;
    int tensor_agent = -1, move_agent = -1;  // agents are made when first used
    uint32_t tensor_clock = 0, move_clock = 0;
    uint64_t sync_hash = 0;
    long sync_count = 0;
};

// Shadow of one shared byte, one TMEM cell: the last write, and reads since.
enum class Written : uint8_t { never, generic, async };
struct Cell {
    uint32_t write_clock, read_clock[2];
    uint16_t write_agent, read_agent[2];
    Written written;
    uint8_t reads;  // kMany: the reads are in Shadow::many
};
constexpr uint8_t kMany = 255;

struct Shadow {
    const char* name;
    std::vector<Cell> cells;
    std::unordered_map<uint32_t, std::vector<uint32_t>> many;     // clock by reading agent
    std::unordered_map<uint32_t, std::vector<uint32_t>> atomics;  // clock by agent
    void reset(size_t n);
};

struct Access {
    int agent;
    uint32_t clock;
    const Clock* order;        // what this access is ordered after
    const Clock* weaker;       // ordered but for a missing after-fence; null: no such notion
    const Clock* proxy;        // generic writes must be in here too; null: not an async read
    bool async, atomic, once;  // once: one write per cell and epoch (TMA)
    const char* what;
};
void check(Shadow& shadow, size_t index, const Access& access, bool write);
void check_smem(size_t offset, size_t bytes, const Access& access, bool write);
void check_global(const void* p, size_t bytes, bool write);
bool inside_global(const void* p, size_t bytes);
Access generic_access(const char* what);

// Everything about the CTA that runs.
struct State {
    std::vector<Fiber> fibers;
    std::vector<Clock> causal, proxy, tensor;
    std::vector<std::string> agents;
    int current = -1, threads = 0;
    bool aborting = false;
    uint8_t* smem = nullptr;
    size_t smem_bytes = 0, dynamic_offset = 0;
    std::vector<size_t> static_offsets;
    Shadow smem_shadow{"smem"}, tmem_shadow{"tmem"};
    std::vector<uint32_t> tmem;       // lane * 512 + column
    std::vector<uint8_t> tmem_state;  // per column: 0 free, 1 allocated, 2 freed
    std::map<size_t, MBarrier*> mbarriers;
    std::map<std::string, long> operations, notes;
};
extern State state;

constexpr size_t kSmem = 256 * 1024, kSmemLimit = 227 * 1024;
constexpr int kColumns = 512, kLanes = 128;

inline Fiber& fiber() { return state.fibers[state.current]; }
inline int agents() { return (int)state.agents.size(); }
int new_agent(const std::string& name);
inline void join(Clock& a, const Clock& b) {
    for (int i = 0, n = agents(); i < n; i++) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
}
inline void copy(Clock& a, const Clock& b) { memcpy(a.v, b.v, sizeof(uint32_t) * agents()); }
inline void tick() { state.causal[state.current].v[state.current]++; }

// Fibers and asynchronous operations (launch.cpp).
void block(Wait reason);
// pipe < 0: unordered with everything (a copy); otherwise in order with the pipe's other
// operations.
void submit(int pipe, std::function<void()> run);

// mbarriers (sync.cpp).
MBarrier* find_mbarrier(void* p);
void touch_mbarrier(void* p);
void complete_if_done(MBarrier* b);
void require_fenced(const MBarrier* b, const char* what);
void arrive_from(MBarrier* b, const Clock& causal, const Clock& proxy, int agent, uint32_t clock);

struct NamedBarrier {
    int arrived = 0, count = 0;
    long generation = 0;
    Clock causal[2], proxy[2];
};
struct WarpBarrier {
    int arrived = 0;
    long generation = 0;
    Clock causal[2], proxy[2];
    uint32_t values[2][32];
};
extern NamedBarrier named_barriers[16];
extern std::vector<WarpBarrier> warp_barriers;

// TMA address swizzle: 0 none, 1 32 B, 2 64 B, 3 128 B.
inline uint32_t swizzle(uint32_t address, int mode) {
    switch (mode) {
        case 1: return address ^ ((address >> 3) & 0x10);
        case 2: return address ^ ((address >> 3) & 0x30);
        case 3: return address ^ ((address >> 3) & 0x70);
        default: return address;
    }
}

}  // namespace emu
