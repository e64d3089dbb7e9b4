// The emulator's state, shared by the files of the runtime and by nothing else.
//
// Happens-before is tracked with vector clocks over the pipes of the three cores of a group. An
// operation's stamp counts the operations of its pipe. The pipes S, V and M run their operations
// one after the other; on MTE1, MTE2, MTE3 and FIX the issue order alone does not protect
// overlapping accesses (TileLang 0.1.15, insert_sync.cc), so a pipe's clock holds of itself only
// what a barrier or an event brought back.
#pragma once
#include <array>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "api.h"
#include "../../formats.h"

namespace emu {

constexpr int kAgents = kCores * kPipes, kGranule = 32;
using Clock = std::array<uint32_t, kAgents>;

inline void join(Clock& a, const Clock& b) {
    for (int i = 0; i < kAgents; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
}
inline bool in_order(int pipe) { return pipe == PIPE_S || pipe == PIPE_V || pipe == PIPE_M; }
std::string agent_name(int agent);

// Shadow of one granule of an on-chip memory: its last write, and the last read by each pipe.
struct Cell {
    int16_t writer = -1;
    uint32_t written = 0;
    std::array<uint32_t, kAgents> read{};
};
struct Space {
    const char* name;
    size_t bytes, usable;
    uint8_t* base = nullptr;
    std::vector<Cell> cells;
};

// One byte of global memory: the last write of this launch.
struct GlobalCell {
    int32_t block = -1;  // -1: not written in this launch
    int16_t writer = -1;
    uint32_t written = 0;
    bool defined = false;
};
struct Tensor {
    std::string name;
    uint8_t* base;
    size_t bytes;
    bool writable;
    std::vector<GlobalCell> cells;
};

enum class Kind { work, notify, wait, lock, unlock, arrive, await, barrier };
struct Operation {
    Kind kind;
    const char* name;
    std::function<void()> run;
    long key = 0;    // of a flag or a lock
    long ticket = 0; // of a lock
    Clock issued;    // what the scalar unit had seen
};

struct Lock {
    long issued = 0, released = 0;
    Clock clock{};
};

struct Core {
    void* stack = nullptr;
    bool alive = false;
    std::deque<Operation> queues[kPipes];
    Clock clocks[kPipes];
    uint32_t stamps[kPipes];
    std::function<bool()> blocked;  // empty: the scalar unit can run
};

struct State {
    Core cores[kCores];
    Space ub[2], l1, l0a, l0b, l0c, scales[2];  // scale slots of tiles in L0A and L0B
    std::vector<Tensor> tensors;
    std::map<long, std::deque<Clock>> flags;
    std::map<long, Lock> locks;
    int core = 0, block = 0, pipe = PIPE_S;  // of what runs now
    uint8_t* arena = nullptr;
    size_t arena_bytes = 0;
    bool aborting = false;
    const char* operation = "";
    std::map<std::string, long> operations;
};
extern State state;

inline int agent(int core, int pipe) { return core * kPipes + pipe; }
inline Clock& clock_of(int core, int pipe) { return state.cores[core].clocks[pipe]; }

// Fibers (fibers.cpp).
extern "C" void emu_switch(void** save, void* to);
void* make_stack(uint8_t* top, void (*entry)());

// Schedules (machine.cpp).
enum class Mode { eager, lazy, random, reversed };
extern Mode mode;
uint32_t random_number();

// Memory (memory.cpp).
void reset_memories();
void simt_begin(int threads);
void simt_end();
void simt_phase(int thread, bool whole_block);
extern int simt_thread;  // -1 outside of vector functions

}  // namespace emu
