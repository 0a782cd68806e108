// Computes y = x W^T + bias with weights packed in panels.
//
// Every element of y is one chain of fused multiply-adds, which begins with the bias and runs over k
// in ascending order. The numbers of rows and threads do not change the chain, so a row has the same
// bits in every batch.
#include <algorithm>
#include <vector>

#include "panels.h"

namespace {

constexpr int NV = 3;               // vectors of columns in a tile
constexpr int WIDTH = NV * LANES;   // columns of a tile
constexpr int ROWS = LANES == 16 ? 8 : 4;
constexpr int STREAMED = LANES == 16 ? ROWS : 3;  // rows whose sums and plain weights fit in registers
template <class Q>  // rows up to which it is faster to unpack quantised weights in registers
constexpr int FEW = LANES == 16 ? 8 : LANES == 8 && Q::bits == 8 ? 2 : 1;
constexpr int SIDE = LANES == 16 ? NV : 1;  // vectors of columns that are unpacked side by side
constexpr int BLOCK = 128;          // k that are multiplied at a time: 24 KiB of float32 stay in L1
constexpr int LINES = (WIDTH * 4 + LINE - 1) / LINE;  // cache lines that one step of a tile reads
constexpr int PREFETCH = 4096;      // bytes to prefetch ahead in a panel read as one stream

static_assert(PANEL % WIDTH == 0);

const float NO_BIAS[PANEL] = {};

// Location of a tile's sums. stride: distance of two rows; 0 if all rows have the same sums (a bias).
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

inline F add_product(F acc, F a, F w) { return fma(a, w, acc); }
#ifdef PAIR_DOT
// Multiplies bfloat16 pairs of x and of the weights. The processor adds the products of two k at once.
inline F add_product(F acc, U a, U w) {
    return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)w);
}
#endif

// Adds the products of a word of each row to the sums of N vectors of columns, from `first` on.
template <int R, int N, class X, class V>
inline void multiply_add(F (&acc)[R][NV], const X* x, int64_t stride, const V (&w)[N],
                         int first = 0) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const V a = splat(x[r * stride]);
#pragma GCC unroll 3
        for (int v = 0; v < N; v++) acc[r][first + v] = add_product(acc[r][first + v], a, w[v]);
    }
}

// Memory to prefetch during a tile: step i prefetches LINES cache lines from `begin + i * step` on.
struct Ahead {
    const char* begin;
    int64_t step;

    void fetch(int64_t i) const {
#pragma GCC unroll 8
        for (int line = 0; line < LINES; line++)
            __builtin_prefetch(begin + i * step + line * LINE);
    }
};

// Multiplies a tile by weights that have the same form as the rows, [words(depth)][PANEL].
template <int R, class X, class A>
void tile(const X* x, int64_t x_stride, const X* w, int64_t depth, A ahead, From from, To to) {
    F acc[R][NV];
    start<R>(acc, from);
    for (int64_t k = 0; k < words(x, depth); k++) {
        decltype(load(w)) column[NV];
        ahead.fetch(k);
#pragma GCC unroll 3
        for (int v = 0; v < NV; v++) column[v] = load(w + k * PANEL + v * LANES);
        multiply_add<R>(acc, x + k, x_stride, column);
    }
    finish<R>(acc, to);
}

// Multiplies a tile by bfloat16 pairs [depth / 2][PANEL], which are widened in registers.
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

template <int R = 1, class X, class W, class A>
void tile_rows(int64_t rows, const X* x, int64_t x_stride, const W* w, int64_t depth, A ahead,
               From from, To to) {
    if (rows == R)
        tile<R>(x, x_stride, w, depth, ahead, from, to);
    else if constexpr (R < ROWS)
        tile_rows<R + 1>(rows, x, x_stride, w, depth, ahead, from, to);
}

// Multiplies the rows of one tile by a panel, which is read from memory once.
template <class X, class W>
void multiply_stream(int64_t rows, const X* x, int64_t x_stride, const W* w, int64_t depth,
                     From from, To to) {
    for (int c = 0; c < PANEL; c += WIDTH)
        tile_rows(rows, x, x_stride, w + c, depth,
                  Ahead{(const char*)(w + c) + PREFETCH, PANEL * sizeof(W)}, from.right(c),
                  to.right(c));
}

// Widens bfloat16 weights to float if the rows are float. Returns other weights unchanged.
inline const float* widen(const float*, const float* w, int64_t, float*) { return w; }
inline const uint32_t* widen(const uint32_t*, const uint32_t* w, int64_t, uint32_t*) { return w; }
inline const float* widen(const float*, const uint32_t* w, int64_t depth, float* wide) {
    for (int64_t k = 0; k < depth; k += 2)
        for (int c = 0; c < PANEL; c += LANES) {
            const U bits = load(w + k / 2 * PANEL + c);
            store(wide + k * PANEL + c, (F)(bits << 16));
            store(wide + (k + 1) * PANEL + c, (F)(bits & 0xffff0000u));
        }
    return wide;
}

// Returns memory for the sums of a panel's rows between two blocks of k.
// NOTE: the sums are not kept in y, because rows whose length is a power of two share few cache sets.
inline To resting(int64_t rows) {
    static thread_local std::vector<float> scratch;
    scratch.resize(rows * PANEL);
    return {scratch.data(), PANEL};
}

// Multiplies rows by one block of a panel. ahead(call): memory to prefetch during each tile.
// The rows are divided evenly into tiles, so that no tile has only one or two rows.
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

// Multiplies many rows by a panel, a BLOCK of k at a time, while the next block is prefetched. `bytes`:
// size of a block. `unpack(block, depth, out)` returns its weights in the form for x, maybe in `out`.
template <class X, class Unpack>
void multiply_blocks(int64_t rows, const X* x, int64_t x_stride, const void* panel, int64_t bytes,
                     int64_t depth, Unpack unpack, From from, To to) {
    const To rest = resting(rows);
    alignas(64) X out[BLOCK * PANEL];
    const int64_t calls = ceil_div(rows, ROWS) * (PANEL / WIDTH);
    const char* block = (const char*)panel;
    for (int64_t k = 0; k < depth; k += BLOCK, block += bytes) {
        const int64_t part = std::min<int64_t>(BLOCK, depth - k);
        multiply_block(rows, x + words(x, k), x_stride, unpack(block, part, out), part,
                       [&](int64_t call) {
                           return Ahead{block + bytes + call * bytes / calls,
                                        bytes / (calls * words(x, part))};
                       },
                       from, k + BLOCK < depth ? rest : to);
        from = {rest.at, rest.stride};
    }
}

template <class X, class W>
void multiply(int64_t rows, const X* x, int64_t x_stride, const W* w, int64_t depth, From from,
              To to) {
    if (rows <= STREAMED)
        multiply_stream(rows, x, x_stride, w, depth, from, to);
    else
        multiply_blocks(rows, x, x_stride, w, words(w, BLOCK) * PANEL * sizeof(W), depth,
                        [&](const char* block, int64_t part, X* out) {
                            return widen(x, (const W*)block, part, out);
                        },
                        from, to);
}

// Multiplies an octet of k by quantised weights, which are unpacked in registers.
template <int R, class X, class C>
inline void multiply_octet(F (&acc)[R][NV], const X* x, int64_t stride, const C (&columns)[NV],
                           const char* octet, int c) {
#pragma GCC unroll 3
    for (int first = 0; first < NV; first += SIDE)
#pragma GCC unroll 8
        for (int k = 0; k < OCTET; k += IN_WORD<X>) {
            decltype(load(x)) weights[SIDE];
#pragma GCC unroll 3
            for (int v = 0; v < SIDE; v++)
                unpack(columns[first + v], octet, k, c + (first + v) * LANES, weights[v]);
            multiply_add<R>(acc, x + words(x, k), stride, weights, first);
        }
}

// Multiplies up to FEW rows by the WIDTH columns of a panel from c on. Weights stay in registers.
template <int R, class Q, class X>
void tile_packed(const X* x, int64_t x_stride, const char* group, int64_t c, int64_t depth,
                 From from, To to) {
    F acc[R][NV];
    start<R>(acc, from);
    for (int64_t k = 0; k < depth; k += Q::group, group += Q::bytes) {
        for (int64_t line = 0; c == 0 && line < Q::bytes; line += LINE)
            __builtin_prefetch(group + PREFETCH + line);
        ColumnsFor<Q, X> columns[NV];
#pragma GCC unroll 3
        for (int v = 0; v < NV; v++) columns[v] = columns_at<Q, X>(group, c + v * LANES);
        const char* octet = group + Q::head;
        for (int i = 0; i < Q::group; i += OCTET, octet += Q::octet_bytes)
            multiply_octet<R>(acc, x + words(x, k + i), x_stride, columns, octet, c);
    }
    finish<R>(acc, to);
}

template <class Q, int R = 1, class X>
void multiply_few(int64_t rows, const X* x, int64_t x_stride, const char* w, int64_t depth,
                  From from, To to) {
    if (rows == R)
        for (int c = 0; c < PANEL; c += WIDTH)
            tile_packed<R, Q>(x, x_stride, w, c, depth, from.right(c), to.right(c));
    else if constexpr (R < FEW<Q>)
        multiply_few<Q, R + 1>(rows, x, x_stride, w, depth, from, to);
}

template <class X, class Q>
void multiply(int64_t rows, const X* x, int64_t x_stride, Packed<Q> w, int64_t depth, From from,
              To to) {
    static_assert(BLOCK % Q::group == 0);
    if (rows <= FEW<Q>)
        multiply_few<Q>(rows, x, x_stride, w.at, depth, from, to);
    else
        multiply_blocks(rows, x, x_stride, w.at, BLOCK / Q::group * Q::bytes, depth,
                        [](const char* block, int64_t part, X* out) {
                            dequantize<Q>(block, part, out);
                            return (const X*)out;
                        },
                        from, to);
}

// Multiplies some rows by one panel, whose first `width` columns exist in y.
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

// What a thread needs while it multiplies panels.
#ifdef TILES
typedef Tiles<TILE> Unit;
#else
struct Unit {};
#endif

// Multiplies some rows by one panel, whose columns begin at y.
void multiply_panel(Unit& unit, const Rows& x, int64_t rows, const PanelOf& at, const float* bias,
                    float* y, int64_t y_stride) {
    const int64_t depth = x.depth, format = at.part->format;
    const auto run = [&](auto from, int64_t stride, auto weight) {
        panel(from, stride, rows, depth, panel_at(weight, at.index, depth), bias, y, y_stride,
              at.width);
    };
    if (format == FP32) return run((const float*)x.x, depth, (const float*)at.part->panels);
#ifdef TILES
    multiply_on_tiles(unit, (const uint32_t*)x.rounded, rows, depth, at, bias, y, y_stride);
#else
#ifdef PAIR_DOT
    const auto* from = (const uint32_t*)x.rounded;
    const int64_t stride = ceil_div(depth, 2);
#else
    const float* from = x.x;
    const int64_t stride = depth;
#endif
    if (format == BF16) return run(from, stride, (const uint32_t*)at.part->panels);
    with_layout(format, [&](auto layout) {
        run(from, stride, Packed<decltype(layout)>{(const char*)at.part->panels});
    });
#endif
}

// Calls act(panel, row, count) for each panel and each group of `count` rows from `row` on.
template <class Act>
void share_panels(Team& team, int64_t panels, int64_t rows, Act act) {
    constexpr int64_t GROUP = 32;
    // If there are too few panels for the threads, the rows are divided, too.
    const int64_t cuts = std::clamp<int64_t>(4 * team.threads / panels, 1, ceil_div(rows, GROUP));
    const int64_t cut = ceil_div(ceil_div(rows, cuts), GROUP) * GROUP;
    team.share(panels * cuts, [&](int64_t i) {
        const int64_t row = i % cuts * cut, count = std::min(cut, rows - row);
        if (count > 0) act(i / cuts, row, count);
    });
}

}  // namespace

// Semantics: returns whether linear() rounds x to bfloat16 when the weights are bfloat16.
EXPORT int rounds_input() {
#if defined(PAIR_DOT) || defined(TILES)
    return 1;
#else
    return 0;
#endif
}

bf16* rounded_memory(Team& team, Buffer buffer, const LinearPart* parts, int64_t num_parts,
                     int64_t rows, int64_t depth) {
    const auto is_float = [](const LinearPart& part) { return part.format == FP32; };
    if (!rounds_input() || std::all_of(parts, parts + num_parts, is_float)) return nullptr;
    return team.buffer<bf16>(buffer, Rows::size(rows, depth));
}

void round_rows(Team& team, const Rows& x, int64_t rows) {
    if (x.rounded) team.share(rows, [&](int64_t r) { x.round(r, 0, x.depth); });
}

void linear(Team& team, const Rows& x, int64_t rows, const LinearPart* parts, int64_t num_parts,
            const float* bias, int64_t columns, float* y) {
    Unit unit;
    share_panels(team, count_panels(parts, num_parts), rows, [&](int64_t p, int64_t row, int64_t count) {
        const PanelOf at = find_panel(parts, p);
        multiply_panel(unit, x.from(row), count, at, bias ? bias + at.column : NO_BIAS,
                       y + row * columns + at.column, columns);
    });
}

void gated_linear(Team& team, const Rows& x, int64_t rows, const LinearPart* parts,
                  const float* bias, int silu, const Rows& y) {
    Unit unit;
    const int64_t panels = count_panels(parts, 1);
    share_panels(team, panels, rows, [&](int64_t p, int64_t row, int64_t count) {
        static thread_local std::vector<float> sums;
        sums.resize(2 * count * PANEL);
        float *gate = sums.data(), *up = gate + count * PANEL;
        const auto multiply = [&](const PanelOf& at, float* to) {
            multiply_panel(unit, x.from(row), count, at, bias ? bias + at.column : NO_BIAS, to, PANEL);
        };
        const PanelOf at = find_panel(parts, p);
        multiply(at, gate);
        multiply(find_panel(parts, panels + p), up);
        for (int64_t r = 0; r < count; r++) {
            gate_row(gate + r * PANEL, up + r * PANEL, at.width, silu,
                     y.x + (row + r) * y.depth + at.column);
            y.round(row + r, at.column, at.width);
        }
    });
}

// Semantics: y = x W^T + bias.
// Shape: x float32 [rows, depth]; the parts' columns are side by side in y float32 [rows, columns];
// bias float32 [columns + 48] or null.
EXPORT void linear(const float* x, int64_t rows, int64_t depth, const LinearPart* parts,
                   int64_t num_parts, const float* bias, int64_t columns, float* y) {
    if (rows == 0) return;
    in_team(rows * depth * columns, [&](Team& team) {
        const Rows from{(float*)x, depth,
                        rounded_memory(team, INPUT, parts, num_parts, rows, depth)};
        round_rows(team, from, rows);
        linear(team, from, rows, parts, num_parts, bias, columns, y);
    });
}
