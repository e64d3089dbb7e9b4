// Runs a grid: groups of cores one after the other; inside a group the scalar units and the pipes
// take turns as the schedule says. Everything is deterministic in (schedule, seed).
#include <setjmp.h>
#include <signal.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "state.h"

namespace emu {

State state;
Mode mode;
static uint64_t random_state;
static std::map<std::string, long> counts;
static std::string texts;
static void* scheduler_stack;
static void (*entry)(void**);
static void** entry_arguments;
static bool active[kCores];
static const char* kPipeNames[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX"};
static const char* kCoreNames[] = {"AIC", "AIV0", "AIV1"};
constexpr int kMaxFlags = 15;  // of a cross-core counter

std::string agent_name(int agent) {
    return std::string(kCoreNames[agent / kPipes]) + " " + kPipeNames[agent % kPipes];
}

void report(const char* kind, const char* format, ...) {
    if (++counts[kind] > 4) return;
    char text[400], line[520];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    snprintf(line, sizeof line, "%s: block %d %s %s: %s\n", kind, state.block,
             agent_name(agent(state.core, state.pipe)).c_str(), state.operation, text);
    texts += line;
}

uint32_t random_number() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state >> 11;
}

int core() { return state.core; }
int block() { return state.block; }

// ---- what the scalar units issue

static void pause() {  // back to the scheduler
    Core& c = state.cores[state.core];
    emu_switch(&c.stack, scheduler_stack);
}

static void pause_until(std::function<bool()> ready) {
    state.cores[state.core].blocked = std::move(ready);
    pause();
    state.pipe = PIPE_S;
}

static void enqueue(pipe_t pipe, Operation op) {
    int own = agent(state.core, PIPE_S);
    clock_of(state.core, PIPE_S)[own] = ++state.cores[state.core].stamps[PIPE_S];
    op.issued = clock_of(state.core, PIPE_S);
    state.cores[state.core].queues[pipe].push_back(std::move(op));
    pause();
    state.pipe = PIPE_S;
}

static long key_of(int kind, int core, int a, int b, int id) {
    return (((long(kind) * 8 + core) * 8 + a) * 8 + b) * 64 + id;
}

static void start(int core_id, int pipe, const Operation& op) {
    int own = agent(core_id, pipe);
    Clock& clock = clock_of(core_id, pipe);
    join(clock, op.issued);
    uint32_t stamp = ++state.cores[core_id].stamps[pipe];
    if (in_order(pipe)) clock[own] = stamp;
    state.core = core_id, state.pipe = pipe, state.operation = op.name;
}

// The clock that an operation hands on: all that its pipe did before is done.
static Clock handed(int core_id, int pipe) {
    Clock clock = clock_of(core_id, pipe);
    clock[agent(core_id, pipe)] = state.cores[core_id].stamps[pipe];
    return clock;
}

static Clock take(long key) {
    auto& tokens = state.flags[key];
    Clock clock = tokens.front();
    tokens.pop_front();
    return clock;
}

// An event is one bit: whoever sets it twice before it is waited for loses one.
static void set_event(long key, const Clock& clock) {
    state.flags[key].push_back(clock);
    if (state.flags[key].size() > 1) report("event overflow", "event %ld is set already", key & 63);
}

void issue(pipe_t pipe, const char* name, std::function<void()> run) {
    state.operations[name]++;
    enqueue(pipe, {Kind::work, name, std::move(run), 0, 0, {}});
}

static void check_event(int event) {
    if (event < 0 || event > 7) report("event id", "event %d, expected 0 to 7", event);
}

void notify(pipe_t source, pipe_t target, int event) {
    check_event(event);
    long key = key_of(0, state.core, source, target, event);
    if (source == PIPE_S) {
        ++state.cores[state.core].stamps[PIPE_S];
        set_event(key, handed(state.core, PIPE_S));
        return;
    }
    enqueue(source, {Kind::notify, "notify", {}, key, 0, {}});
}

void wait(pipe_t source, pipe_t target, int event) {
    check_event(event);
    long key = key_of(0, state.core, source, target, event);
    if (target == PIPE_S) {
        pause_until([key] { return !state.flags[key].empty(); });
        join(clock_of(state.core, PIPE_S), take(key));
        return;
    }
    enqueue(target, {Kind::wait, "wait", {}, key, 0, {}});
}

void lock(pipe_t pipe, int id) {
    long key = key_of(1, state.core, 0, 0, id);
    enqueue(pipe, {Kind::lock, "lock", {}, key, state.locks[key].issued++, {}});
}

void unlock(pipe_t pipe, int id) {
    enqueue(pipe, {Kind::unlock, "unlock", {}, key_of(1, state.core, 0, 0, id), 0, {}});
}

void arrive(pipe_t pipe, int flag) {
    int target = state.core ? 0 : 1 + flag / 16;
    int id = state.core ? flag + 16 * (state.core - 1) : flag % 16;
    if (flag < 0 || flag > (state.core ? 15 : 31)) report("event id", "flag %d", flag);
    enqueue(pipe, {Kind::arrive, "arrive", {}, key_of(2, target, 0, 0, id), 0, {}});
}

void await(pipe_t pipe, int flag) {
    if (flag < 0 || flag > (state.core ? 15 : 31)) report("event id", "flag %d", flag);
    enqueue(pipe, {Kind::await, "await", {}, key_of(2, state.core, 0, 0, flag), 0, {}});
}

void barrier(pipe_t pipe) {
    if (pipe != PIPE_ALL) {
        enqueue(pipe, {Kind::barrier, "barrier", {}, 0, 0, {}});
        return;
    }
    Core& c = state.cores[state.core];
    pause_until([&c] {
        for (auto& q : c.queues)
            if (!q.empty()) return false;
        return true;
    });
    Clock all = clock_of(state.core, PIPE_S);
    for (int p = 0; p < kPipes; p++) join(all, handed(state.core, p));
    for (int p = 0; p < kPipes; p++) clock_of(state.core, p) = all;
}

// ---- the scheduler

static bool ready(const Operation& op) {
    if (op.kind == Kind::wait || op.kind == Kind::await) return !state.flags[op.key].empty();
    if (op.kind == Kind::lock) return state.locks[op.key].released == op.ticket;
    return true;
}

static void run_operation(int core_id, int pipe) {
    auto& queue = state.cores[core_id].queues[pipe];
    Operation op = std::move(queue.front());
    queue.pop_front();
    start(core_id, pipe, op);
    Clock& clock = clock_of(core_id, pipe);
    switch (op.kind) {
        case Kind::work: op.run(); break;
        case Kind::notify: set_event(op.key, handed(core_id, pipe)); break;
        case Kind::arrive:
            state.flags[op.key].push_back(handed(core_id, pipe));
            if (state.flags[op.key].size() > kMaxFlags)
                report("flag overflow", "%zu arrivals wait", state.flags[op.key].size());
            break;
        case Kind::wait:
        case Kind::await: join(clock, take(op.key)); break;
        case Kind::lock: join(clock, state.locks[op.key].clock); break;
        case Kind::unlock: {
            Lock& l = state.locks[op.key];
            l.released++;
            join(l.clock, handed(core_id, pipe));
            break;
        }
        case Kind::barrier: clock = handed(core_id, pipe); break;
    }
}

static void core_main() {
    entry(entry_arguments);
    Core& c = state.cores[state.core];
    c.alive = false;
    emu_switch(&c.stack, scheduler_stack);
    __builtin_trap();
}

static void run_scalar(int core_id) {
    Core& c = state.cores[core_id];
    c.blocked = nullptr;
    state.core = core_id, state.pipe = PIPE_S, state.operation = "scalar";
    emu_switch(&scheduler_stack, c.stack);
}

struct Actor {
    int core, pipe;  // pipe -1: the scalar unit
};

static std::vector<Actor> runnable() {
    std::vector<Actor> scalars, pipes;
    for (int i = 0; i < kCores; i++) {
        Core& c = state.cores[i];
        if (c.alive && (!c.blocked || c.blocked())) scalars.push_back({i, -1});
        for (int p = 0; p < kPipes; p++)
            if (!c.queues[p].empty() && ready(c.queues[p].front())) pipes.push_back({i, p});
    }
    auto& first = mode == Mode::lazy ? scalars : pipes;
    auto& second = mode == Mode::lazy ? pipes : scalars;
    first.insert(first.end(), second.begin(), second.end());
    return first;
}

static void report_stuck() {
    std::string all;
    for (int i = 0; i < kCores; i++) {
        Core& c = state.cores[i];
        if (c.alive) all += std::string(kCoreNames[i]) + " scalar unit; ";
        for (int p = 0; p < kPipes; p++)
            if (!c.queues[p].empty())
                all += agent_name(agent(i, p)) + " at " + c.queues[p].front().name + "; ";
    }
    report("deadlock", "nothing can run: %s", all.c_str());
}

static bool run_group() {
    for (;;) {
        std::vector<Actor> actors = runnable();
        if (actors.empty()) break;
        size_t pick = 0;
        if (mode == Mode::random) pick = random_number() % actors.size();
        if (mode == Mode::reversed) pick = actors.size() - 1;
        Actor a = actors[pick];
        if (a.pipe < 0) run_scalar(a.core);
        else run_operation(a.core, a.pipe);
        if (state.aborting) return false;
    }
    for (int i = 0; i < kCores; i++) {
        Core& c = state.cores[i];
        bool stuck = c.alive;
        for (auto& q : c.queues) stuck = stuck || !q.empty();
        if (stuck) {
            report_stuck();
            return false;
        }
    }
    return true;
}

static void check_exit() {
    static const char* kinds[] = {"event", "lock", "flag"};
    for (auto& f : state.flags)
        if (!f.second.empty())
            report("unmatched", "%zu %s tokens of core %ld, pipes %ld to %ld, id %ld are left",
                   f.second.size(), kinds[f.first >> 15], (f.first >> 12) & 7,
                   (f.first >> 9) & 7, (f.first >> 6) & 7, f.first & 63);
    for (auto& l : state.locks)
        if (l.second.issued != l.second.released)
            report("unmatched", "lock %ld is never released", l.first & 63);
}

static uint8_t core_stacks[kCores][1 << 18];

static void reset_group() {
    state.flags.clear();
    state.locks.clear();
    reset_memories();
    for (int i = 0; i < kCores; i++) {
        Core& c = state.cores[i];
        c.alive = active[i];
        c.blocked = nullptr;
        for (int p = 0; p < kPipes; p++) {
            c.queues[p].clear();
            c.clocks[p].fill(0);
            c.stamps[p] = 0;
        }
        c.stack = make_stack(core_stacks[i] + sizeof core_stacks[i], core_main);
    }
}

// ---- addresses that no arena holds: a mutant's index may be anything

static sigjmp_buf run_end;
static uint8_t signal_stack[1 << 16];

static void wild_address(int) {
    report("out of bounds", "an address far from every memory");
    siglongjmp(run_end, 1);  // the fibers' stacks are left as they are
}

struct SignalGuard {
    struct sigaction before;
    stack_t stack_before;
    SignalGuard() {
        stack_t stack{signal_stack, 0, sizeof signal_stack};
        sigaltstack(&stack, &stack_before);
        struct sigaction action = {};
        action.sa_handler = wild_address;
        action.sa_flags = SA_ONSTACK;
        sigaction(SIGSEGV, &action, &before);
    }
    ~SignalGuard() {
        sigaction(SIGSEGV, &before, nullptr);
        sigaltstack(&stack_before, nullptr);
    }
};

static void run_grid(int grid) {
    for (state.block = 0; state.block < grid; state.block++) {
        reset_group();
        if (!run_group()) return;
        check_exit();
    }
}

}  // namespace emu

using namespace emu;
extern "C" {

// cores: 1 cube, 2 vector, 3 mixed.
void emu_run(void (*kernel)(void**), void** arguments, int grid, int cores, int schedule,
             uint64_t seed) {
    counts.clear();
    texts.clear();
    state.operations.clear();
    entry = kernel, entry_arguments = arguments, mode = Mode(schedule);
    random_state = seed * 0x9E3779B97F4A7C15ull + 1;
    state.aborting = false;
    active[0] = cores & 1, active[1] = cores & 2, active[2] = cores == 3;
    SignalGuard guard;
    if (!sigsetjmp(run_end, 1)) run_grid(grid);
    simt_end();
}

// Writes three sections: lines "kind count", the texts, lines "operation = count"; '\f' between.
void emu_report(char* out, int size) {
    std::string all;
    for (auto& c : counts) all += c.first + " " + std::to_string(c.second) + "\n";
    all += "\f" + texts + "\f";
    for (auto& o : state.operations) all += o.first + " = " + std::to_string(o.second) + "\n";
    snprintf(out, size, "%s", all.c_str());
}
}
