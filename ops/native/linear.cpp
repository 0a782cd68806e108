// y = x W^T + bias over weights packed in panels of PANEL output columns.
//
// A panel of bfloat16 weights is [K / 2][PANEL] of pairs (k even in the low half of a 32-bit word,
// k odd in the high half), a panel of float32 weights [K][PANEL], a panel of quantised weights is
// described at `Quantized`. Every element of y is one chain of fused multiply-adds over k in
// ascending order, begun with the bias, whatever the number of rows or threads: a row alone and a
// row in a batch give the same bits. Quantised weights are rounded to bfloat16 on their way into a
// tile, so that they give the bits of their bfloat16 form.
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <type_traits>
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
constexpr int LINES = (WIDTH * 4 + LINE - 1) / LINE;  // cache lines that one step of a tile reads
constexpr int PREFETCH = 4096;      // bytes to prefetch ahead in a panel read as one stream

static_assert(PANEL % WIDTH == 0);

const float NO_BIAS[PANEL] = {};

// Location of a tile's sums. stride 0 = the same for every row (the bias).
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

// Prefetch of weights: each step of a tile prefetches LINES lines, `step` bytes ahead.
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
template <int R, class A>
void tile(const float* x, int64_t x_stride, const float* w, int64_t depth, A ahead, From from,
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
template <int R, class A>
void tile(const float* x, int64_t x_stride, const uint32_t* w, int64_t depth, A ahead, From from,
          To to) {
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

template <int R, class A>
void tile(const uint32_t* x, int64_t x_stride, const uint32_t* w, int64_t depth, A ahead, From from,
          To to) {
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

template <class X, class W, class A>
void tile_rows(int64_t rows, const X* x, int64_t x_stride, const W* w, int64_t depth, A ahead,
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

// Number of words that hold k elements of a row, two bfloat16 per word.
inline int64_t words(const float*, int64_t k) { return k; }
inline int64_t words(const uint32_t*, int64_t k) { return ceil_div(k, 2); }

// A tile's rows against a panel read from memory.
template <class X, class W>
void multiply_stream(int64_t rows, const X* x, int64_t x_stride, const W* w, int64_t depth,
                     From from, To to) {
    for (int c = 0; c < PANEL; c += WIDTH)
        tile_rows(rows, x, x_stride, w + c, depth,
                  Ahead{(const char*)(w + c) + PREFETCH, PANEL * sizeof(W)}, from.right(c),
                  to.right(c));
}

// Widens bfloat16 weights to float for float rows; returns other weights unchanged.
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

// Sums of a panel's rows between blocks of k.
// NOTE: not in y, because with a power of two of columns they would map to few cache sets.
inline To resting(int64_t rows) {
    static thread_local std::vector<float> scratch;
    scratch.resize(rows * PANEL);
    return {scratch.data(), PANEL};
}

// Rows against one block of a panel. ahead(call): what to prefetch during each call.
// Rows are divided evenly, so that no tile has only one or two.
template <class X, class W, class A>
void multiply_block(int64_t rows, const X* x, int64_t x_stride, const W* w, int64_t depth, A ahead,
                    From from, To to) {
    const int64_t blocks = ceil_div(rows, ROWS);
    for (int64_t b = 0, row = 0, call = 0; b < blocks; b++) {
        const int64_t count = (rows - row) / (blocks - b);
        for (int c = 0; c < PANEL; c += WIDTH, call++)
            tile_rows(count, x + row * x_stride, x_stride, w + c, depth, ahead(call),
                      from.down(row).right(c), to.down(row).right(c));
        row += count;
    }
}

// Many rows against a panel, a BLOCK of k at a time, while the next block is fetched.
template <class X, class W>
void multiply_blocks(int64_t rows, const X* x, int64_t x_stride, const W* w, int64_t depth,
                     From from, To to) {
    const To rest = resting(rows);
    alignas(64) float wide[BLOCK * PANEL];
    const int64_t calls = ceil_div(rows, ROWS) * (PANEL / WIDTH);
    for (int64_t k = 0; k < depth; k += BLOCK) {
        const int64_t part = std::min<int64_t>(BLOCK, depth - k);
        const W* block = w + words(w, k) * PANEL;
        const char* next = (const char*)(block + words(w, part) * PANEL);
        const int64_t bytes = words(w, BLOCK) * PANEL * sizeof(W);
        multiply_block(rows, x + words(x, k), x_stride, widen(x, block, part, wide), part,
                       [&](int64_t call) {
                           return Ahead{next + call * bytes / calls, bytes / (calls * part)};
                       },
                       from, k + BLOCK < depth ? rest : to);
        from = {rest.at, rest.stride};
    }
}

template <class X, class W>
void multiply(int64_t rows, const X* x, int64_t x_stride, const W* w, int64_t depth, From from,
              To to) {
    if (rows <= ROWS)
        multiply_stream(rows, x, x_stride, w, depth, from, to);
    else
        multiply_blocks(rows, x, x_stride, w, depth, from, to);
}

// Layout of a panel of quantised weights: consecutive groups of GROUP k, each
//
//     scales [PANEL], minimums [PANEL] if MINIMUM, levels [GROUP / 2][PANEL] of pairs
//
// A pair is one byte for levels of 4 bits and two for levels of 8, k even in the low half. A weight
// is scale * level + minimum, rounded to bfloat16; see ops/block_matrix.py. Levels of 4 bits are
// stored with OFFSET added.
template <int BITS, int GROUP, class S, bool MINIMUM, int OFFSET>
struct Quantized {
    typedef S Scale;
    typedef std::conditional_t<BITS == 4, uint8_t, uint16_t> Pair;
    static constexpr int group = GROUP, offset = OFFSET;
    static constexpr bool has_minimum = MINIMUM;
    static constexpr int64_t head = (MINIMUM ? 2 : 1) * PANEL * sizeof(S);
    static constexpr int64_t bytes = head + GROUP / 2 * PANEL * sizeof(Pair);
};

inline F scale_of(const float* p) { return load(p); }
inline F scale_of(const uint16_t* p) { return from_half(load(p)); }

inline I level_of(const uint8_t*, U pair, bool high) { return (I)(high ? pair >> 4 : pair & 15u); }
inline I level_of(const uint16_t*, U pair, bool high) {
    return (I)(high ? pair << 16 : pair << 24) >> 24;
}

// The product of a format with minimums is exact, so that it may be fused.
template <class Q>
inline F scaled(F level, F scale, F minimum) {
    return Q::has_minimum ? fma(level, scale, minimum) : level * scale;
}

// The weights of LANES columns in one group.
template <class Q>
struct Columns {
    typedef typename Q::Pair Pair;
    F scale, minimum;

    Columns() = default;
    Columns(F scale, F minimum) : scale(scale), minimum(minimum) {}

    U weight(U pair, bool high) const {
        const I level = level_of((const Pair*)nullptr, pair, high) - Q::offset;
        return round_bf16(scaled<Q>(__builtin_convertvector(level, F), scale, minimum));
    }

    void widened(const Pair* pairs, F& low, F& high) const {
        const U pair = load(pairs);
        low = (F)weight(pair, false), high = (F)weight(pair, true);
    }

    U narrowed(const Pair* pairs) const {
        const U pair = load(pairs);
        return weight(pair, false) >> 16 | weight(pair, true);
    }
};

#if defined(__AVX512BF16__) && defined(VECTOR_AVX512)
// 4-bit pairs of 16 columns are stored in the order in which 32 floats are narrowed at once: the
// levels of columns 0 to 7 in the low halves of bytes, k even and k odd in turns, those of columns 8
// to 15 in the high halves.
constexpr bool NARROW_ORDER = true;

// Lanes 0 to 7 of x twice each, or lanes 8 to 15.
inline F doubled(F x, int first) {
    return (F)_mm512_permutexvar_ps((__m512i)((lane_ids() >> 1) + first), (__m512)x);
}

// The weights of LANES columns in one group: of columns 0 to 7, k even and k odd in turns, and of
// columns 8 to 15.
template <class Q>
struct PairColumns {
    F scale[2], minimum[2] = {};

    PairColumns() = default;
    PairColumns(F s, F m) : scale{doubled(s, 0), doubled(s, 8)} {
        if (Q::has_minimum) minimum[0] = doubled(m, 0), minimum[1] = doubled(m, 8);
    }

    U narrowed(const uint16_t* pairs) const {
        const auto levels = [&](int first) {
            const __m128i bytes = _mm_loadu_si128((const __m128i*)(pairs + first));
            return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
        };
        return narrowed(levels(0), levels(8));
    }

    U narrowed(const uint8_t* pairs) const {
        const __m512 levels = (__m512)__builtin_convertvector(lane_ids() - Q::offset, F);
        const U pair = load(pairs);  // a look-up ignores what is above the lowest four bits
        return narrowed((F)_mm512_permutexvar_ps((__m512i)pair, levels),
                        (F)_mm512_permutexvar_ps((__m512i)(pair >> 4), levels));
    }

    U narrowed(F first, F second) const {
        first = scaled<Q>(first, scale[0], minimum[0]);
        second = scaled<Q>(second, scale[1], minimum[1]);
        return (U)(__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }
};
#else
constexpr bool NARROW_ORDER = false;

template <class Q>
using PairColumns = Columns<Q>;
#endif

template <class Q, class X>
using ColumnsFor = std::conditional_t<std::is_same_v<X, float>, Columns<Q>, PairColumns<Q>>;

template <class Q, class X>
inline ColumnsFor<Q, X> columns_at(const char* group, int64_t c) {
    const typename Q::Scale* scales = (const typename Q::Scale*)group;
    return {scale_of(scales + c), Q::has_minimum ? scale_of(scales + PANEL + c) : F{}};
}

// Stores the weights of a pair of k as rows of that type read them.
template <class C, class P>
inline void unpack(const C& columns, const P* pairs, float* out) {
    F low, high;
    columns.widened(pairs, low, high);
    store(out, low), store(out + PANEL, high);
}
template <class C, class P>
inline void unpack(const C& columns, const P* pairs, uint32_t* out) {
    store(out, columns.narrowed(pairs));
}

// Unpacks `depth` k of a panel to the type of the rows.
template <class Q, class X>
void dequantize(const char* group, int64_t depth, X* out) {
    for (int64_t k = 0; k < depth; k += Q::group, group += Q::bytes) {
        const auto* pairs = (const typename Q::Pair*)(group + Q::head);
        for (int c = 0; c < PANEL; c += LANES) {
            const auto columns = columns_at<Q, X>(group, c);
#pragma GCC unroll 4
            for (int p = 0; p < Q::group / 2; p++)
                unpack(columns, pairs + p * PANEL + c, out + words(out, k + 2 * p) * PANEL + c);
        }
    }
}

// A panel of quantised weights, or the first of several.
template <class Q>
struct Packed {
    const char* at;
};

// Multiplies a pair of k, straight from the levels.
template <int R, class C, class P>
inline void multiply_pair(F (&acc)[R][NV], const float* x, int64_t stride, int64_t k,
                          const C (&columns)[NV], const P* pairs) {
    F low[NV], high[NV];
#pragma GCC unroll 3
    for (int v = 0; v < NV; v++) columns[v].widened(pairs + v * LANES, low[v], high[v]);
    multiply_add<R>(acc, x + k, stride, low);
    multiply_add<R>(acc, x + k + 1, stride, high);
}
#ifdef PAIR_DOT
template <int R, class C, class P>
inline void multiply_pair(F (&acc)[R][NV], const uint32_t* x, int64_t stride, int64_t k,
                          const C (&columns)[NV], const P* pairs) {
#pragma GCC unroll 3
    for (int v = 0; v < NV; v++) {
        const U column = columns[v].narrowed(pairs + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
            acc[r][v] = pair_dot(acc[r][v], splat(x[r * stride + k / 2]), column);
    }
}
#endif

// Few rows against the columns of a panel from c on, whose weights stay in registers.
template <int R, class Q, class X>
void tile_packed(const X* x, int64_t x_stride, const char* group, int64_t c, int64_t depth,
                 From from, To to) {
    F acc[R][NV];
    start<R>(acc, from);
    for (int64_t k = 0; k < depth; k += Q::group, group += Q::bytes) {
        for (int64_t line = 0; c == 0 && line < Q::bytes; line += LINE)
            __builtin_prefetch(group + PREFETCH + line);
        const auto* pairs = (const typename Q::Pair*)(group + Q::head) + c;
        ColumnsFor<Q, X> columns[NV];
#pragma GCC unroll 3
        for (int v = 0; v < NV; v++) columns[v] = columns_at<Q, X>(group, c + v * LANES);
        for (int p = 0; p < Q::group / 2; p++)
            multiply_pair<R>(acc, x, x_stride, k + 2 * p, columns, pairs + p * PANEL);
    }
    finish<R>(acc, to);
}

template <class Q, class X>
void multiply_few(int64_t rows, const X* x, int64_t x_stride, const char* w, int64_t depth,
                  From from, To to) {
    for (int c = 0; c < PANEL; c += WIDTH, from = from.right(WIDTH), to = to.right(WIDTH))
        switch (rows) {
            case 1: tile_packed<1, Q>(x, x_stride, w, c, depth, from, to); break;
            case 2: tile_packed<2, Q>(x, x_stride, w, c, depth, from, to); break;
            case 3: tile_packed<3, Q>(x, x_stride, w, c, depth, from, to); break;
            case 4: tile_packed<4, Q>(x, x_stride, w, c, depth, from, to); break;
            case 5: tile_packed<5, Q>(x, x_stride, w, c, depth, from, to); break;
            case 6: tile_packed<6, Q>(x, x_stride, w, c, depth, from, to); break;
            case 7: tile_packed<7, Q>(x, x_stride, w, c, depth, from, to); break;
            case 8: tile_packed<8, Q>(x, x_stride, w, c, depth, from, to); break;
        }
}

// Any number of rows against a panel of quantised weights. Many take a BLOCK of k at a time, while
// the next block is fetched.
template <class X, class Q>
void multiply(int64_t rows, const X* x, int64_t x_stride, Packed<Q> w, int64_t depth, From from,
              To to) {
    static_assert(BLOCK % Q::group == 0);
    if (rows <= ROWS) return multiply_few<Q>(rows, x, x_stride, w.at, depth, from, to);
    const To rest = resting(rows);
    alignas(64) X block[BLOCK * PANEL];
    const int64_t calls = ceil_div(rows, ROWS) * (PANEL / WIDTH);
    const int64_t bytes = BLOCK / Q::group * Q::bytes;
    for (int64_t k = 0; k < depth; k += BLOCK) {
        const int64_t part = std::min<int64_t>(BLOCK, depth - k);
        const char* group = w.at + k / Q::group * Q::bytes;
        dequantize<Q>(group, part, block);
        multiply_block(rows, x + words(x, k), x_stride, (const X*)block, part,
                       [&](int64_t call) {
                           return Ahead{group + bytes + call * bytes / calls,
                                        bytes / (calls * words(x, part))};
                       },
                       from, k + BLOCK < depth ? rest : to);
        from = {rest.at, rest.stride};
    }
}

// Some rows against one panel, of which the first `width` columns count.
template <class X, class W>
void panel(const X* x, int64_t x_stride, int64_t rows, int64_t depth, W w, const float* bias,
           float* y, int64_t y_stride, int64_t width) {
    static thread_local std::vector<float> whole;
    To to{y, y_stride};
    if (width < PANEL) {
        whole.resize(rows * PANEL);
        to = {whole.data(), PANEL};
    }
    multiply(rows, x, x_stride, w, depth, From{bias, 0}, to);
    if (width < PANEL)
        for (int64_t r = 0; r < rows; r++)
            std::copy_n(whole.data() + r * PANEL, width, y + r * y_stride);
}

template <class W>
inline const W* panel_at(const W* w, int64_t p, int64_t depth) {
    return w + p * words(w, depth) * PANEL;
}
template <class Q>
inline Packed<Q> panel_at(Packed<Q> w, int64_t p, int64_t depth) {
    return {w.at + p * (depth / Q::group) * Q::bytes};
}

template <class X, class W>
void multiply_part(const X* x, int64_t x_stride, int64_t rows, int64_t depth, W weight,
                   const float* bias, int64_t columns, float* y, int64_t y_stride) {
    const int64_t panels = ceil_div(columns, PANEL);
    const int threads = team(rows * depth * columns);
    // Rows are divided, too, if there are fewer panels than threads need.
    const int64_t cuts = std::clamp<int64_t>(4 * threads / panels, 1, ceil_div(rows, 4 * ROWS));
    const int64_t cut = ceil_div(rows, cuts);
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t c = 0; c < cuts; c++) {
            const int64_t row = c * cut, count = std::min(cut, rows - row);
            if (count > 0)
                panel(x + row * x_stride, x_stride, count, depth, panel_at(weight, p, depth),
                      bias ? bias + p * PANEL : NO_BIAS, y + row * y_stride + p * PANEL, y_stride,
                      std::min<int64_t>(PANEL, columns - p * PANEL));
        }
}

typedef Quantized<8, 32, uint16_t, false, 0> Q8_0Panel;
typedef Quantized<4, 32, uint16_t, false, 8> Q4_0Panel;
typedef Quantized<4, 32, uint16_t, true, 0> Q4_1Panel;
typedef Quantized<4, 32, float, true, 0> Q4_KPanel;
typedef Quantized<8, 16, float, false, 0> Q6_KPanel;

// Calls `act` with the layout of a format of quantised weights.
template <class Act>
void with_layout(int64_t format, Act act) {
    switch (format) {
        case Q8_0: return act(Q8_0Panel{});
        case Q4_0: return act(Q4_0Panel{});
        case Q4_1: return act(Q4_1Panel{});
        case Q4_K: return act(Q4_KPanel{});
        case Q6_K: return act(Q6_KPanel{});
    }
}

void ask_for_huge_pages(void* out, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t from = ((uintptr_t)out + 4095) & ~(uintptr_t)4095;
    if (bytes > 1 << 21) madvise((void*)from, (uintptr_t)out + bytes - from, MADV_HUGEPAGE);
#endif
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

inline void store_scale(float scale, float* out) { *out = scale; }
// Exact only for float32 converted from float16.
inline void store_scale(float scale, uint16_t* out) {
    uint32_t bits;
    const float small = scale * 0x1p-112f;
    __builtin_memcpy(&bits, &small, 4);
    *out = (bits >> 13 & 0x7fff) | (bits >> 16 & 0x8000);
}

// Stores the levels of a pair of k in column c. pairs: zero before the first column.
inline void store_levels(int low, int high, int64_t c, uint8_t* pairs) {
    if (NARROW_ORDER) {
        uint8_t* at = pairs + c / 16 * 16 + c % 8 * 2;
        const int shift = c % 16 < 8 ? 0 : 4;
        at[0] |= low << shift, at[1] |= high << shift;
    } else {
        pairs[c] = low | high << 4;
    }
}
inline void store_levels(int low, int high, int64_t c, uint16_t* pairs) {
    pairs[c] = (low & 255) | (high & 255) << 8;
}

// levels [columns, depth], scales and minimums [columns, depth / group]
template <class Q>
void pack_groups(const int8_t* levels, const float* scales, const float* minimums, int64_t columns,
                 int64_t depth, char* out) {
    typedef typename Q::Scale S;
    typedef typename Q::Pair P;
    const int64_t groups = depth / Q::group;
#pragma omp parallel for schedule(static) num_threads(std::min(num_threads, omp_get_max_threads()))
    for (int64_t p = 0; p < ceil_div(columns, PANEL); p++)
        for (int64_t g = 0; g < groups; g++) {
            char* group = out + (p * groups + g) * Q::bytes;
            std::fill_n(group, Q::bytes, 0);
            P* pairs = (P*)(group + Q::head);
            for (int64_t c = 0; c < std::min<int64_t>(PANEL, columns - p * PANEL); c++) {
                const int64_t column = p * PANEL + c;
                store_scale(scales[column * groups + g], (S*)group + c);
                if (Q::has_minimum)
                    store_scale(minimums[column * groups + g], (S*)group + PANEL + c);
                const int8_t* row = levels + column * depth + g * Q::group;
                for (int i = 0; i < Q::group; i += 2)
                    store_levels(row[i] + Q::offset, row[i + 1] + Q::offset, c,
                                 pairs + i / 2 * PANEL);
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
    ask_for_huge_pages(out, ceil_div(columns, PANEL) * PANEL * padded * (format == BF16 ? 2 : 4));
    if (format == BF16)
        pack((const uint16_t*)weight, columns, depth, (uint32_t*)out);
    else
        pack((const uint32_t*)weight, columns, depth, (uint32_t*)out);
}

// Semantics: packs quantised weights, see ops/block_matrix.py, for linear().
// Shape: levels [columns, depth], scales and minimums (null if the format has none)
// [columns, depth / group]; out has ceil(columns / 48) panels.
EXPORT void pack_blocks(const int8_t* levels, const float* scales, const float* minimums, int format,
                        int64_t columns, int64_t depth, char* out) {
    with_layout(format, [&](auto layout) {
        typedef decltype(layout) Q;
        ask_for_huge_pages(out, ceil_div(columns, PANEL) * (depth / Q::group) * Q::bytes);
        pack_groups<Q>(levels, scales, minimums, columns, depth, out);
    });
}

// Semantics: y = x W^T + bias.
// Shape: x float32 [rows, depth]; the parts' columns are side by side in y float32 [rows, columns];
// bias float32 [columns + 48] or null.
EXPORT void linear(const float* x, int64_t rows, int64_t depth, const LinearPart* parts,
                   int64_t num_parts, const float* bias, int64_t columns, float* y) {
    if (rows == 0) return;
#ifdef PAIR_DOT
    static thread_local std::vector<uint32_t> pairs;
    const int64_t stride = ceil_div(depth, 2);
    if (parts[0].format != FP32) {
        pairs.resize(rows * stride);
        to_pairs(x, rows, depth, (bf16*)pairs.data());
    }
    const uint32_t* rounded = pairs.data();
#else
    const int64_t stride = depth;
    const float* rounded = x;
#endif
    for (int64_t i = 0; i < num_parts; i++) {
        const LinearPart& part = parts[i];
        const int64_t width = part.columns;
        if (part.format == FP32)
            multiply_part(x, depth, rows, depth, (const float*)part.panels, bias, width, y, columns);
        else if (part.format == BF16)
            multiply_part(rounded, stride, rows, depth, (const uint32_t*)part.panels, bias, width, y,
                          columns);
        else
            with_layout(part.format, [&](auto layout) {
                const Packed<decltype(layout)> panels{(const char*)part.panels};
                multiply_part(rounded, stride, rows, depth, panels, bias, width, y, columns);
            });
        y += width;
        if (bias) bias += width;
    }
}
