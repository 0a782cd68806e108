// y = x W^T + bias over weights packed in panels of PANEL output columns.
//
// A panel of bfloat16 weights is [K / 2][PANEL] of pairs (k even in the low half of a 32-bit word,
// k odd in the high half), a panel of float32 weights [K][PANEL]. Every element of y is one chain of
// fused multiply-adds over k in ascending order, begun with the bias, whatever the number of rows or
// threads: a row alone and a row in a batch give the same bits.
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "vector.h"

namespace {

constexpr int PANEL = 48;
constexpr int NV = 3;               // vectors in a tile's width
constexpr int WIDTH = NV * LANES;   // columns of a tile
constexpr int ROWS = LANES == 16 ? 8 : 4;
constexpr int BLOCK = 128;          // k of a panel at a time: 24 KiB of float32 stay in L1
constexpr int LINE = 64;            // bytes of a cache line
constexpr int LINES = (WIDTH * 4 + LINE - 1) / LINE;  // that one step of a tile reads
constexpr int PREFETCH = 4096;      // bytes ahead where a panel is one stream through memory

static_assert(PANEL % WIDTH == 0);

const float NO_BIAS[PANEL] = {};

// Where a tile's sums come from or go to; stride 0 = every row the same (the bias).
template <class T>
struct Sums {
    T* at;
    int64_t stride;

    Sums right(int64_t columns) const { return {at + columns, stride}; }
    Sums down(int64_t rows) const { return {at + rows * stride, stride}; }
};

typedef Sums<const float> From;
typedef Sums<float> To;

template <int R>
inline void start(F (&acc)[R][NV], From from) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 3
        for (int v = 0; v < NV; v++) acc[r][v] = load(from.at + r * from.stride + v * LANES);
}

template <int R>
inline void finish(F (&acc)[R][NV], To to) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 3
        for (int v = 0; v < NV; v++) store(to.at + r * to.stride + v * LANES, acc[r][v]);
}

template <int R>
inline void multiply_add(F (&acc)[R][NV], const float* x, int64_t stride, const F (&w)[NV]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const F a = splat(x[r * stride]);
#pragma GCC unroll 3
        for (int v = 0; v < NV; v++) acc[r][v] = fma(a, w[v], acc[r][v]);
    }
}

// The weights of the near future: each step of a tile fetches LINES lines, `step` bytes further on.
struct Ahead {
    const char* begin;
    int64_t step;

    void fetch(int64_t i) const {
#pragma GCC unroll 8
        for (int line = 0; line < LINES; line++)
            __builtin_prefetch(begin + i * step + line * LINE);
    }
};

// float32 weights [depth][PANEL]
template <int R>
void tile(const float* x, int64_t x_stride, const float* w, int64_t depth, Ahead ahead, From from,
          To to) {
    F acc[R][NV];
    start<R>(acc, from);
    for (int64_t k = 0; k < depth; k++) {
        F column[NV];
        ahead.fetch(k);
#pragma GCC unroll 3
        for (int v = 0; v < NV; v++) column[v] = load(w + k * PANEL + v * LANES);
        multiply_add<R>(acc, x + k, x_stride, column);
    }
    finish<R>(acc, to);
}

// bfloat16 pairs [depth / 2][PANEL], widened on the way
template <int R>
void tile(const float* x, int64_t x_stride, const uint32_t* w, int64_t depth, Ahead ahead,
          From from, To to) {
    F acc[R][NV];
    start<R>(acc, from);
    for (int64_t k = 0; k < depth; k += 2) {
        F low[NV], high[NV];
        const uint32_t* pair = w + k / 2 * PANEL;
        ahead.fetch(k / 2);
#pragma GCC unroll 3
        for (int v = 0; v < NV; v++) {
            const U bits = load(pair + v * LANES);
            low[v] = (F)(bits << 16);
            high[v] = (F)(bits & 0xffff0000u);
        }
        multiply_add<R>(acc, x + k, x_stride, low);
        if (k + 1 < depth) multiply_add<R>(acc, x + k + 1, x_stride, high);
    }
    finish<R>(acc, to);
}

#ifdef PAIR_DOT
// Both sides as bfloat16 pairs: the processor multiplies and adds two k at once.
inline F pair_dot(F acc, U a, U w) {
#ifdef __AVX512BF16__
    return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)w);
#else
    acc = fma((F)(a & 0xffff0000u), (F)(w & 0xffff0000u), acc);
    return fma((F)(a << 16), (F)(w << 16), acc);
#endif
}

template <int R>
void tile(const uint32_t* x, int64_t x_stride, const uint32_t* w, int64_t depth, Ahead ahead,
          From from, To to) {
    F acc[R][NV];
    start<R>(acc, from);
    for (int64_t k = 0; k < (depth + 1) / 2; k++) {
        U column[NV];
        ahead.fetch(k);
#pragma GCC unroll 3
        for (int v = 0; v < NV; v++) column[v] = load(w + k * PANEL + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const U a = splat(x[r * x_stride + k]);
#pragma GCC unroll 3
            for (int v = 0; v < NV; v++) acc[r][v] = pair_dot(acc[r][v], a, column[v]);
        }
    }
    finish<R>(acc, to);
}
#endif

template <class X, class W>
void tile_rows(int64_t rows, const X* x, int64_t x_stride, const W* w, int64_t depth, Ahead ahead,
               From from, To to) {
    switch (rows) {
        case 1: return tile<1>(x, x_stride, w, depth, ahead, from, to);
        case 2: return tile<2>(x, x_stride, w, depth, ahead, from, to);
        case 3: return tile<3>(x, x_stride, w, depth, ahead, from, to);
        case 4: return tile<4>(x, x_stride, w, depth, ahead, from, to);
        case 5: return tile<5>(x, x_stride, w, depth, ahead, from, to);
        case 6: return tile<6>(x, x_stride, w, depth, ahead, from, to);
        case 7: return tile<7>(x, x_stride, w, depth, ahead, from, to);
        case 8: return tile<8>(x, x_stride, w, depth, ahead, from, to);
    }
}

// Elements of a row that hold k of them: bfloat16 come in pairs.
inline int64_t words(const float*, int64_t k) { return k; }
inline int64_t words(const uint32_t*, int64_t k) { return ceil_div(k, 2); }

// A tile's rows against a panel that comes from memory.
template <class X, class W>
void multiply_stream(int64_t rows, const X* x, int64_t x_stride, const W* w, int64_t depth,
                     From from, To to) {
    for (int c = 0; c < PANEL; c += WIDTH)
        tile_rows(rows, x, x_stride, w + c, depth,
                  Ahead{(const char*)(w + c) + PREFETCH, PANEL * sizeof(W)}, from.right(c),
                  to.right(c));
}

// Float rows want float weights; others take them as they are.
inline const float* widen(const float*, const float* w, int64_t, float*) { return w; }
inline const uint32_t* widen(const uint32_t*, const uint32_t* w, int64_t, float*) { return w; }
inline const float* widen(const float*, const uint32_t* w, int64_t depth, float* wide) {
    for (int64_t k = 0; k < depth; k += 2)
        for (int c = 0; c < PANEL; c += LANES) {
            const U bits = load(w + k / 2 * PANEL + c);
            store(wide + k * PANEL + c, (F)(bits << 16));
            store(wide + (k + 1) * PANEL + c, (F)(bits & 0xffff0000u));
        }
    return wide;
}

// Many rows against a panel, a BLOCK of k at a time, while the next block is fetched.
// NOTE: sums rest in `scratch`, not in y, where with a power of two of columns they would share few
// sets of the cache.
template <class X, class W>
void multiply_blocks(int64_t rows, const X* x, int64_t x_stride, const W* w, int64_t depth,
                     From from, To to) {
    static thread_local std::vector<float> scratch;
    scratch.resize(rows * PANEL);
    const To rest{scratch.data(), PANEL};
    alignas(64) float wide[BLOCK * PANEL];
    const int64_t blocks = ceil_div(rows, ROWS), calls = blocks * (PANEL / WIDTH);
    for (int64_t k = 0; k < depth; k += BLOCK) {
        const int64_t part = std::min<int64_t>(BLOCK, depth - k);
        const W* block = w + words(w, k) * PANEL;
        const char* next = (const char*)(block + words(w, part) * PANEL);
        const int64_t bytes = words(w, BLOCK) * PANEL * sizeof(W);
        const auto* ready = widen(x, block, part, wide);
        const X* x_part = x + words(x, k);
        const To out = k + BLOCK < depth ? rest : to;
        // Rows are cut evenly, so that no tile is left with one or two.
        for (int64_t b = 0, row = 0, call = 0; b < blocks; b++) {
            const int64_t count = (rows - row) / (blocks - b);
            for (int c = 0; c < PANEL; c += WIDTH, call++)
                tile_rows(count, x_part + row * x_stride, x_stride, ready + c, part,
                          Ahead{next + call * bytes / calls, bytes / (calls * part)},
                          from.down(row).right(c), out.down(row).right(c));
            row += count;
        }
        from = {rest.at, rest.stride};
    }
}

// Some rows against one panel, of which the first `width` columns count.
template <class X, class W>
void panel(const X* x, int64_t x_stride, int64_t rows, int64_t depth, const W* w, const float* bias,
           float* y, int64_t columns, int64_t width) {
    static thread_local std::vector<float> whole;
    To to{y, columns};
    if (width < PANEL) {
        whole.resize(rows * PANEL);
        to = {whole.data(), PANEL};
    }
    if (rows <= ROWS)
        multiply_stream(rows, x, x_stride, w, depth, From{bias, 0}, to);
    else
        multiply_blocks(rows, x, x_stride, w, depth, From{bias, 0}, to);
    if (width < PANEL)
        for (int64_t r = 0; r < rows; r++)
            std::copy_n(whole.data() + r * PANEL, width, y + r * columns);
}

template <class X, class W>
void linear(const X* x, int64_t x_stride, int64_t rows, int64_t depth, const W* weight,
            const float* bias, int64_t columns, float* y) {
    const int64_t panels = ceil_div(columns, PANEL);
    const int threads = team(rows * depth * columns);
    // Rows are cut, too, where there are too few panels to go round.
    const int64_t cuts = std::clamp<int64_t>(4 * threads / panels, 1, ceil_div(rows, 4 * ROWS));
    const int64_t cut = ceil_div(rows, cuts);
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t c = 0; c < cuts; c++) {
            const int64_t row = c * cut, count = std::min(cut, rows - row);
            if (count > 0)
                panel(x + row * x_stride, x_stride, count, depth, weight + p * words(weight, depth) * PANEL,
                      bias ? bias + p * PANEL : NO_BIAS, y + row * columns + p * PANEL, columns,
                      std::min<int64_t>(PANEL, columns - p * PANEL));
        }
}

// A 32-bit word of a row: one float32, or a pair of bfloat16 of which the last may have no partner.
inline uint32_t word(const uint32_t* row, int64_t k, int64_t) { return row[k]; }
inline uint32_t word(const uint16_t* row, int64_t k, int64_t depth) {
    const uint32_t high = 2 * k + 1 < depth ? row[2 * k + 1] : 0;
    return row[2 * k] | high << 16;
}

// Word k of a row goes to [row / PANEL][k][row % PANEL]: a LINE of each row at a time, so that what
// is read and what is written stay in L1. By as many threads as the calling one may use: a loader's
// leaves the cores to others.
template <class T>
void pack(const T* weight, int64_t columns, int64_t depth, uint32_t* out) {
    constexpr int64_t RUN = LINE / sizeof(uint32_t);
    const int64_t row_words = ceil_div(depth, sizeof(uint32_t) / sizeof(T));
#pragma omp parallel for schedule(static) num_threads(std::min(num_threads, omp_get_max_threads()))
    for (int64_t p = 0; p < ceil_div(columns, PANEL); p++) {
        uint32_t* panel = out + p * row_words * PANEL;
        const int64_t rows = std::min<int64_t>(PANEL, columns - p * PANEL);
        for (int64_t start = 0; start < row_words; start += RUN) {
            const int64_t end = std::min(start + RUN, row_words);
            for (int64_t k = start; k < end; k++)
                for (int64_t c = 0; c < PANEL; c++)
                    panel[k * PANEL + c] =
                        c < rows ? word(weight + (p * PANEL + c) * depth, k, depth) : 0;
        }
    }
}

#ifdef PAIR_DOT
// x [rows, depth] as bfloat16 pairs [rows, (depth + 1) / 2]
void to_pairs(const float* x, int64_t rows, int64_t depth, bf16* out) {
    const int64_t padded = ceil_div(depth, 2) * 2;
#pragma omp parallel for schedule(static) num_threads(team(rows * depth)) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) {
        out[(r + 1) * padded - 1] = bf16{};
        for (int64_t k = 0; k < depth; k++) narrow(x[r * depth + k], out + r * padded + k);
    }
}
#endif

}  // namespace

// Semantics: whether linear() rounds x to bfloat16 when the weights are.
EXPORT int rounds_input() {
#ifdef PAIR_DOT
    return 1;
#else
    return 0;
#endif
}

// Semantics: packs weight [columns, depth], bfloat16 or float32, for linear().
// Shape: out has ceil(columns / 48) panels of 48 * depth elements, depth rounded up to even for bfloat16.
EXPORT void pack_linear(const void* weight, int format, int64_t columns, int64_t depth, void* out) {
    const int64_t padded = format == BF16 ? ceil_div(depth, 2) * 2 : depth;
#ifdef MADV_HUGEPAGE
    const int64_t bytes = ceil_div(columns, PANEL) * PANEL * padded * (format == BF16 ? 2 : 4);
    const uintptr_t from = ((uintptr_t)out + 4095) & ~(uintptr_t)4095;
    if (bytes > 1 << 21) madvise((void*)from, (uintptr_t)out + bytes - from, MADV_HUGEPAGE);
#endif
    if (format == BF16)
        pack((const uint16_t*)weight, columns, depth, (uint32_t*)out);
    else
        pack((const uint32_t*)weight, columns, depth, (uint32_t*)out);
}

// Semantics: y = x W^T + bias.
// Shape: x float32 [rows, depth], weight from pack_linear, bias float32 [columns rounded up to 48] or
// null, y float32 [rows, columns].
EXPORT void linear(const float* x, int64_t rows, int64_t depth, const void* weight, int format,
                   const float* bias, int64_t columns, float* y) {
    if (rows == 0) return;
    if (format == FP32)
        return linear(x, depth, rows, depth, (const float*)weight, bias, columns, y);
    const int64_t half = ceil_div(depth, 2);
#ifdef PAIR_DOT
    static thread_local std::vector<uint32_t> pairs;
    pairs.resize(rows * half);
    to_pairs(x, rows, depth, (bf16*)pairs.data());
    linear(pairs.data(), half, rows, depth, (const uint32_t*)weight, bias, columns, y);
#else
    linear(x, depth, rows, depth, (const uint32_t*)weight, bias, columns, y);
#endif
}
