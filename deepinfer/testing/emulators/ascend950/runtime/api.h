// What device code sees of the emulator. Everything runs on one OS thread: the scalar unit of each
// core is a coroutine, its pipes are queues of operations, SIMT threads are fibers inside one
// operation of the vector pipe.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };

namespace emu {

constexpr int kPipes = 7, kCores = 3;  // cores of a group: one cube core, two vector cores
// Of UB, 8 KiB are reserved and 32 KiB are the data cache of SIMT functions.
constexpr size_t kUb = 256 * 1024, kL1 = 512 * 1024, kL0a = 64 * 1024, kL0b = 64 * 1024,
                 kL0c = 256 * 1024, kUbUsable = 216 * 1024, kScales = 4 * 1024;

// Report a violation; `kind` is counted, the first few texts of a kind are kept.
void report(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Memories of the running core. A buffer of the text at address n is base + n.
uint8_t* ub();
uint8_t* l1();
uint8_t* l0a();
uint8_t* l0b();
uint8_t* l0c();
uint8_t* ub_of(int vector_core);

int core();   // 0 is the cube core, 1 and 2 are the vector cores
int block();  // index in the grid

// The current operation reads or writes bytes: checked for bounds, order and initialisation.
enum Check { kOrder = 0, kInitialised = 1 };
void touch(const void* p, size_t bytes, bool write, int check = kOrder);
void require_aligned(const void* p, size_t alignment, const char* what);

// Operations of the scalar unit: each is put into a pipe's queue, or runs at once on PIPE_S.
void issue(pipe_t pipe, const char* name, std::function<void()> run);
void notify(pipe_t source, pipe_t target, int event);
void wait(pipe_t source, pipe_t target, int event);
void lock(pipe_t pipe, int id);
void unlock(pipe_t pipe, int id);
void arrive(pipe_t pipe, int flag);
void await(pipe_t pipe, int flag);
void barrier(pipe_t pipe);  // PIPE_ALL: the scalar unit waits for every pipe

// SIMT threads of one vector function.
struct Index {
    int x, y, z;
};
extern Index thread_index;
void run_threads(int count, const std::function<void()>& body);
void sync_threads();
uint32_t shuffle(uint32_t value, int source_lane);
int lane();
uint32_t ballot(bool predicate);
void atomic(void* p, size_t bytes);  // the next access of p by this thread is atomic
enum class Reduce { add, max, min };
// All lanes give their value, every lane gets all of them; absent lanes have present[i] == false.
void exchange(uint64_t value, uint64_t* values, bool* present);

// The cube unit. Formats are those of formats.h.
enum class Format { bf16, f16, f32, e4m3, e2m1 };
void mmad(float* c, const void* a, const void* b, Format format, int m, int k, int n, bool clear,
          bool scaled);
void load_scales(bool is_a, uint64_t destination, const uint8_t* source, int m0, int k0, int ms,
                 int ks, int source_stride, int destination_stride);

}  // namespace emu
