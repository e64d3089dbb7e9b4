// Tensor memory and the tcgen05 instructions: alloc, ld, st, cp, mma and commit, for one CTA.
//
// An MMA sums the exact products of one instruction in fp32, k ascending, and adds the sum to the
// accumulator once. Hardware aligns and truncates in its own way: no bit equality with it is
// claimed.
#include <algorithm>
#include <memory>

#include "../../formats.h"
#include "state.h"

namespace emu {

static size_t cell(int lane, uint32_t column) { return size_t(lane) * kColumns + column; }

void tmem_allocate(uint32_t* where, int columns) {
    converged(5);
    if (lane() != 0) return;
    state.operations["tcgen05.alloc"]++;
    if (columns < 32 || columns > kColumns || (columns & (columns - 1)))
        report("tmem", "alloc of %d columns; needs a power of two in 32..512", columns);
    int at = -1;
    for (int start = 0; at < 0 && start + columns <= kColumns; start += 32)
        if (std::count(&state.tmem_state[start], &state.tmem_state[start] + columns, 0) == columns)
            at = start;
    if (at < 0) report("tmem", "no room for %d columns", columns), at = 0;
    for (int c = at; c < std::min(at + columns, kColumns); c++) state.tmem_state[c] = 1;
    check_smem(smem_address(where), 4, generic_access("tcgen05.alloc"), true);
    *where = at;
}

void tmem_deallocate(uint32_t address, int columns) {
    converged(6);
    if (lane() != 0) return;
    state.operations["tcgen05.dealloc"]++;
    const Clock& causal = state.causal[state.current];
    auto late = [&](int agent, uint32_t clock) {
        return agent != state.current && agent != fiber().move_agent && clock > causal.v[agent];
    };
    for (int c = address; c < (int)address + columns; c++) {
        if (c >= kColumns || state.tmem_state[c] != 1) {
            report("tmem", "dealloc of column %d, which is not allocated", c);
            return;
        }
        state.tmem_state[c] = 2;
        for (int l = 0; l < kLanes; l++) {
            Cell& x = state.tmem_shadow.cells[cell(l, c)];
            bool bad = x.written != Written::never && late(x.write_agent, x.write_clock);
            for (int q = 0; x.reads != kMany && q < x.reads; q++)
                bad = bad || late(x.read_agent[q], x.read_clock[q]);
            if (bad)
                report("tmem-use-after-free", "dealloc of column %d is not ordered after its use",
                       c);
        }
    }
}

static bool usable(uint32_t column, const char* what) {
    if (column >= kColumns || state.tmem_state[column] == 0) {
        report("tmem", "%s of column %u, which is not allocated", what, column);
        return false;
    }
    if (state.tmem_state[column] == 2)
        report("tmem-use-after-free", "%s of column %u after its dealloc", what, column);
    return true;
}

static Access tensor_access(int agent, uint32_t clock, const char* what) {
    int t = state.current;
    return {agent, clock, &state.tensor[t], &state.causal[t], nullptr, true, false, false, what};
}
static Access async_read(int agent, uint32_t clock, const char* what) {
    int t = state.current;
    return {agent, clock, &state.causal[t], nullptr, &state.proxy[t], true, false, false, what};
}

// tcgen05.ld and .st, shape 32x32b: a thread owns its lane of its warp's quarter.
static Access move_access(uint32_t address, const char* what) {
    auto& f = fiber();
    if (f.move_agent < 0)
        f.move_agent = new_agent("tcgen05.ld/st of t" + std::to_string(state.current));
    int lanes = address >> 16;
    if (lanes && lanes != (warp() & 3) * 32) report("tmem", "%s with lane field %d", what, lanes);
    return tensor_access(f.move_agent, ++f.move_clock, what);
}

void tmem_load(uint32_t address, uint32_t* destination, int columns) {
    converged(7);
    state.operations["tcgen05.ld (thread)"]++;
    Access a = move_access(address, "tcgen05.ld");
    int l = (warp() & 3) * 32 + lane();
    for (int i = 0; i < columns; i++) {
        uint32_t c = (address & 0xffff) + i;
        destination[i] = 0x7fc00000;
        if (!usable(c, a.what)) continue;
        check(state.tmem_shadow, cell(l, c), a, false);
        destination[i] = state.tmem[cell(l, c)];
    }
}

void tmem_store(uint32_t address, const uint32_t* source, int columns) {
    converged(8);
    state.operations["tcgen05.st (thread)"]++;
    Access a = move_access(address, "tcgen05.st");
    int l = (warp() & 3) * 32 + lane();
    for (int i = 0; i < columns; i++) {
        uint32_t c = (address & 0xffff) + i;
        if (!usable(c, a.what)) continue;
        check(state.tmem_shadow, cell(l, c), a, true);
        state.tmem[cell(l, c)] = source[i];
    }
}

// The tensor pipe of the issuing thread: its operations run in order.
static int tensor_agent() {
    auto& f = fiber();
    if (f.tensor_agent < 0)
        f.tensor_agent = new_agent("tensor pipe of t" + std::to_string(state.current));
    return f.tensor_agent;
}

// tcgen05.cp 32x128b.warpx4: 32 rows of 16 bytes, to all four quarters.
void tmem_copy_scales(uint64_t descriptor, uint32_t address) {
    if (!elect()) return;
    state.operations["tcgen05.cp"]++;
    int agent = tensor_agent();
    uint32_t clock = ++fiber().tensor_clock, column = address & 0xffff;
    uint32_t start = (descriptor & 0x3fff) << 4, group = ((descriptor >> 32) & 0x3fff) << 4;
    if (descriptor >> 61) report("descriptor", "tcgen05.cp with swizzle %d", int(descriptor >> 61));
    auto row = [=](int r) { return start + (r / 8) * group + (r % 8) * 16; };
    Access read = async_read(agent, clock, "tcgen05.cp"),
           write = tensor_access(agent, clock, "tcgen05.cp");
    for (int r = 0; r < 32; r++) check_smem(row(r), 16, read, false);
    for (int c = 0; c < 4; c++) {
        if (!usable(column + c, "tcgen05.cp")) return;
        for (int l = 0; l < kLanes; l++) check(state.tmem_shadow, cell(l, column + c), write, true);
    }
    submit(agent, [=] {
        for (int l = 0; l < kLanes; l++)
            if (row(l & 31) + 16 <= state.smem_bytes)
                memcpy(&state.tmem[cell(l, column)], state.smem + row(l & 31), 16);
    });
}

// ---- matrix descriptors

struct Matrix {
    uint32_t start, leading, stride;
    int swizzle;  // TMA's numbering
    bool mn_major;
    int element, format;
    bool negate;
};

static Matrix decode(uint64_t d, bool mn_major, int element, int format, bool negate) {
    static const int swizzles[8] = {0, -1, 3, -1, 2, -1, 1, -1};
    int layout = (d >> 61) & 7;
    Matrix m{uint32_t(d & 0x3fff) << 4,
             uint32_t((d >> 16) & 0x3fff) << 4,
             uint32_t((d >> 32) & 0x3fff) << 4,
             swizzles[layout],
             mn_major,
             element,
             format,
             negate};
    if (m.swizzle < 0) report("descriptor", "layout type %d", layout), m.swizzle = 0;
    if (((d >> 46) & 3) != 1) report("descriptor", "version field %d", int((d >> 46) & 3));
    if ((d >> 49) & 7) report("descriptor", "base offset %d", int((d >> 49) & 7));
    return m;
}

// Shared address of element (row, k), row being m or n.
static uint32_t address_of(const Matrix& m, int row, int k) {
    int per = 16 / m.element, span = 1 << m.swizzle;  // elements and chunks of 16 bytes
    uint32_t a;
    if (!m.mn_major) {
        int chunk = k / per;
        a = m.swizzle ? (row % 8) * span * 16 + (row / 8) * m.stride + chunk * 16
                      : (row % 8) * 16 + (row / 8) * m.stride + chunk * m.leading;
        a += (k % per) * m.element;
    } else {
        int chunk = row / per;
        a = m.swizzle ? (chunk % span) * 16 + (chunk / span) * m.leading + (k % 8) * span * 16 +
                            (k / 8) * m.stride
                      : chunk * m.stride + (k % 8) * 16 + (k / 8) * m.leading;
        a += (row % per) * m.element;
    }
    return swizzle(m.start + a, m.swizzle);
}

enum { kE4M3 = 0, kE2M1 = 5, kBF16 = 1 };

static float fetch(const Matrix& m, Kind kind, int row, int k) {
    uint32_t at = address_of(m, row, k);
    if (at + m.element > state.smem_bytes) return NAN;
    float v = NAN;
    if (kind == Kind::f16) {
        uint16_t bits;
        memcpy(&bits, state.smem + at, 2);
        v = bf16_value(bits);
    } else if (m.format == kE4M3) {
        v = e4m3_value(state.smem[at]);
    } else {  // unpacked e2m1: a slot of 16 bytes holds 16 codes in its first 8
        uint8_t pair = state.smem[(at & ~15u) + (at & 15) / 2];
        v = e2m1_value(at & 1 ? pair >> 4 : pair & 15);
    }
    return m.negate ? -v : v;
}

static void check_matrix(const Matrix& m, int rows, int depth, const Access& read) {
    int per = 16 / m.element;
    for (int row = 0; row < rows; row += m.mn_major ? per : 1)
        for (int k = 0; k < depth; k += m.mn_major ? 1 : per)
            check_smem(address_of(m, row, k), 16, read, false);
}

// Where element (m, n) of an accumulator lives.
struct Place {
    int lane;
    uint32_t column;
};
static Place place(int M, int N, bool weight_stationary, int m, int n) {
    if (M == 128) return {m, (uint32_t)n};
    if (!weight_stationary) return {(m / 16) * 32 + m % 16, (uint32_t)n};
    int split = M == 64 ? 2 : 4;
    return {m + M * (n / (N / split)), (uint32_t)(n % (N / split))};
}

static float scale_of(uint32_t base, int row, int id) {
    return ue8m0_value(state.tmem[cell(row % 32, (base & 0xffff) + row / 32)] >> (8 * id) & 255);
}

void mma(Kind kind, bool weight_stationary, uint64_t da, uint64_t db, uint32_t d,
         uint32_t accumulate, uint32_t instruction, uint32_t scales_a, uint32_t scales_b) {
    if (!elect()) return;
    state.operations["tcgen05.mma"]++;
    auto bits = [=](int from, int count) { return int(instruction >> from & ((1u << count) - 1)); };
    int N = bits(17, 6) * 8, M = bits(24, 5) * 16, id_a = bits(29, 2), id_b = bits(4, 2);
    int element = kind == Kind::f16 ? 2 : 1, depth = 32 / element;
    bool scaled = kind == Kind::mxf8;
    Matrix A = decode(da, bits(15, 1), element, bits(7, 3), bits(13, 1));
    Matrix B = decode(db, bits(16, 1), element, bits(10, 3), bits(14, 1));
    for (const Matrix* m : {&A, &B})
        if (kind == Kind::f16 ? m->format != kBF16 : m->format != kE4M3 && m->format != kE2M1)
            report("unsupported", "operand format %d", m->format);
    if (!scaled && id_b != 1) report("unsupported", "accumulator format %d", id_b);
    if (scaled && !bits(23, 1)) report("mma", "scales are not ue8m0");
    if (bits(0, 3)) report("unsupported", "sparse or saturating mma");
    bool legal =
        weight_stationary
            ? (M == 32 || M == 64 || M == 128) && (N == 64 || N == 128 || N == 256)
            : (M == 128 && N % 16 == 0 && N >= 16 && N <= 256) || (M == 64 && N >= 8 && N <= 256);
    if (!legal) report("mma", "shape M=%d N=%d%s", M, N, weight_stationary ? " .ws" : "");
    int agent = tensor_agent();
    uint32_t clock = ++fiber().tensor_clock, base = d & 0xffff;
    Access read = async_read(agent, clock, "mma operand read"),
           tensor = tensor_access(agent, clock, "mma");
    check_matrix(A, M, depth, read);
    check_matrix(B, N, depth, read);
    int columns = weight_stationary && M < 128 ? N * M / 128 : N;
    for (int c = 0; c < columns; c++)
        if (!usable(base + c, "mma")) return;
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            Place p = place(M, N, weight_stationary, m, n);
            size_t at = cell(p.lane, base + p.column);
            Cell& x = state.tmem_shadow.cells[at];
            bool ours = x.written != Written::never && x.write_agent == agent;
            if (accumulate && ours && x.reads == 0) {  // the usual case, cheaply
                x.write_clock = clock;
                continue;
            }
            if (accumulate && !ours) check(state.tmem_shadow, at, tensor, false);
            check(state.tmem_shadow, at, tensor, true);
        }
    if (scaled)
        for (auto [address, rows] : {std::pair{scales_a, M}, std::pair{scales_b, N}})
            for (int c = 0; c < (rows + 31) / 32; c++)
                if (usable((address & 0xffff) + c, "mma scales"))
                    for (int r = 0; r < 32; r++)
                        check(state.tmem_shadow, cell(r, (address & 0xffff) + c), tensor, false);
    submit(agent, [=] {
        static float a[128 * 32], b[32 * 256], sums[256];
        for (int m = 0; m < M; m++) {
            float s = scaled ? scale_of(scales_a, m, id_a) : 1;
            for (int k = 0; k < depth; k++) a[m * depth + k] = fetch(A, kind, m, k) * s;
        }
        for (int n = 0; n < N; n++) {
            float s = scaled ? scale_of(scales_b, n, id_b) : 1;
            for (int k = 0; k < depth; k++) b[k * N + n] = fetch(B, kind, n, k) * s;
        }
        for (int m = 0; m < M; m++) {
            std::fill(sums, sums + N, 0.f);
            for (int k = 0; k < depth; k++)
                for (int n = 0; n < N; n++) sums[n] += a[m * depth + k] * b[k * N + n];
            for (int n = 0; n < N; n++) {
                Place p = place(M, N, weight_stationary, m, n);
                uint32_t& word = state.tmem[cell(p.lane, base + p.column)];
                float old, sum = sums[n];
                memcpy(&old, &word, 4);
                if (accumulate) sum = old + sum;
                memcpy(&word, &sum, 4);
            }
        }
    });
}

void commit(void* barrier) {
    if (!elect()) return;
    state.operations["tcgen05.commit"]++;
    MBarrier* b = find_mbarrier(barrier);
    if (!b) return;
    require_fenced(b, "tcgen05.commit");
    int agent = tensor_agent(), t = state.current;
    uint32_t clock = fiber().tensor_clock;
    // The arrival carries what the issuing thread had seen before the commit, and its MMAs.
    auto causal = std::make_shared<Clock>(state.causal[t]),
         proxy = std::make_shared<Clock>(state.proxy[t]);
    causal->v[t]--;
    submit(agent, [=] { arrive_from(b, *causal, *proxy, agent, clock); });
}

}  // namespace emu
