// Computes y += (x A^T) B for every segment and projection of one fused linear, as Punica's SGMV does.
//
// A is [rank, K], B [rank, N]. Shrink computes each (row, rank) as a dot product over K in LANES partial
// sums. Expand computes each element of y as one chain of multiply-adds over the ranks. Neither order
// depends on the other rows, the other segments or the threads.
#include "kernels.h"
#include "lora_items.h"
#include "vector.h"

using namespace lora;

namespace {

constexpr int SHRINK_ROWS = LANES == 16 ? 8 : 4;
constexpr int EXPAND_ROWS = LANES == 16 ? 8 : 4;
constexpr int ROW_BLOCK = 32;     // rows per item, for which A and B are read once
constexpr int RANK_BLOCK = 16;    // ranks of a shrink item
constexpr int DEPTH_BLOCK = 768;  // k of a shrink at a time, so that SHRINK_ROWS rows of x stay in L1
constexpr int FEW_ROWS = 8;
constexpr int LINE = 64;          // bytes of a cache line
constexpr int RANKS_AHEAD = 8;    // rows of B to prefetch, because they are too short for the hardware

// Number of vectors of A or B in a tile of M rows. It is chosen so that the sums stay in registers:
// AVX-512 has 32 vector registers, other instruction sets have 16.
constexpr int tile_width(int M) { return M < SHRINK_ROWS ? 4 : LANES == 16 ? 3 : 2; }

template <int M, int R, class T>
void dot_tile(const float* x, int64_t depth, const T* a, int64_t begin, int64_t end, float* hidden,
              int64_t rank) {
    F acc[M][R] = {};
    int64_t k = begin;
    for (; k + LANES <= end; k += LANES) {
        F row[R];
        const char* next = (const char*)(a + R * depth + R * k);
#pragma GCC unroll 16
        for (size_t at = 0; at < R * LANES * sizeof(T); at += LINE) __builtin_prefetch(next + at);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) row[r] = load(a + r * depth + k);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const F value = load(x + m * depth + k);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) acc[m][r] = fma(value, row[r], acc[m][r]);
        }
    }
    // NOTE: this loop is unrolled because the sums above would otherwise be kept in memory.
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            float* out = hidden + m * rank + r;
            *out = (begin ? *out : 0.0f) + sum(acc[m][r]);
        }
    for (; k < end; k++)
        for (int m = 0; m < M; m++)
            for (int r = 0; r < R; r++)
                hidden[m * rank + r] += x[m * depth + k] * widen(a[r * depth + k]);
}

template <int M, class T>
void dot_rows(const float* x, int64_t depth, const T* a, int64_t begin, int64_t end, int64_t ranks,
              float* hidden, int64_t rank) {
    constexpr int R = tile_width(M);
    int64_t r = 0;
    for (; r + R <= ranks; r += R)
        dot_tile<M, R>(x, depth, a + r * depth, begin, end, hidden + r, rank);
    for (; r < ranks; r++)
        dot_tile<M, 1>(x, depth, a + r * depth, begin, end, hidden + r, rank);
}

template <class T>
void shrink(const Item& item, const float* x, int64_t depth) {
    const Part& part = *item.part;
    const T* a = (const T*)part.a + item.begin * depth;
    const int64_t ranks = item.end - item.begin;
    const int64_t blocks = ceil_div(depth, DEPTH_BLOCK);
    const int64_t block = ceil_div(ceil_div(depth, blocks), 16) * 16;
    int64_t row = item.row;
    const auto run = [&](auto count) {
        constexpr int M = decltype(count)::value;
        for (; row + M <= item.row + item.rows; row += M)
            for (int64_t k = 0; k < depth; k += block)
                dot_rows<M>(x + (part.first + row) * depth, depth, a, k,
                            std::min(k + block, depth), ranks,
                            part.hidden + row * part.rank + item.begin, part.rank);
    };
    run(std::integral_constant<int, SHRINK_ROWS>{});
    run(std::integral_constant<int, 4>{});
    run(std::integral_constant<int, 2>{});
    run(std::integral_constant<int, 1>{});
}

// Adds the products of all ranks to a tile of y, which stays in registers. Each element is summed in
// the same order as by add_ranks.
template <int M, int V, class T>
void add_all_ranks(const float* hidden, int64_t rank, const T* b, int64_t width, float* y,
                   int64_t stride) {
    F acc[M][V];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) acc[m][v] = load(y + m * stride + v * LANES);
    for (int64_t r = 0; r < rank; r++) {
        F row[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) row[v] = load(b + r * width + v * LANES);
        const char* next = (const char*)(b + (r + RANKS_AHEAD) * width);
#pragma GCC unroll 4
        for (size_t at = 0; at < V * LANES * sizeof(T); at += LINE) __builtin_prefetch(next + at);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const F h = splat(hidden[m * rank + r]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[m][v] = fma(h, row[v], acc[m][v]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store(y + m * stride + v * LANES, acc[m][v]);
}

// Computes y[m][0..columns) += hidden[m][0..R) · B[0..R)[0..columns) for R ranks at a time. Used for a
// single row, and for columns that do not fill a tile.
template <int M, int R, class T>
void add_ranks(const float* hidden, int64_t rank, const T* b, int64_t width, int64_t columns,
               float* y, int64_t stride) {
    int64_t c = 0;
    for (; c + LANES <= columns; c += LANES) {
        F row[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) row[r] = load(b + r * width + c);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            F value = load(y + m * stride + c);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) value = fma(splat(hidden[m * rank + r]), row[r], value);
            store(y + m * stride + c, value);
        }
    }
    for (; c < columns; c++)
        for (int m = 0; m < M; m++)
            for (int r = 0; r < R; r++)
                y[m * stride + c] += hidden[m * rank + r] * widen(b[r * width + c]);
}

template <int M, class T>
void expand_rows(const float* hidden, const Part& part, const T* b, int64_t columns, float* y,
                 int64_t stride) {
    constexpr int V = tile_width(M);
    int64_t c = 0, r = 0;
    if constexpr (M > 1)
        for (; c + V * LANES <= columns; c += V * LANES)
            add_all_ranks<M, V>(hidden, part.rank, b + c, part.width, y + c, stride);
    if (c == columns) return;
    for (; r + 4 <= part.rank; r += 4)
        add_ranks<M, 4>(hidden + r, part.rank, b + r * part.width + c, part.width, columns - c,
                        y + c, stride);
    for (; r < part.rank; r++)
        add_ranks<M, 1>(hidden + r, part.rank, b + r * part.width + c, part.width, columns - c,
                        y + c, stride);
}

template <class T>
void expand(const Item& item, float* y, int64_t stride) {
    const Part& part = *item.part;
    int64_t row = item.row;
    const auto run = [&](auto count) {
        constexpr int M = decltype(count)::value;
        for (; row + M <= item.row + item.rows; row += M)
            expand_rows<M>(part.hidden + row * part.rank, part, (const T*)part.b + item.begin,
                           item.end - item.begin,
                           y + (part.first + row) * stride + part.column + item.begin, stride);
    };
    run(std::integral_constant<int, EXPAND_ROWS>{});
    run(std::integral_constant<int, 4>{});
    run(std::integral_constant<int, 2>{});
    run(std::integral_constant<int, 1>{});
}

inline void list_shrinks(const std::vector<Part>& parts, std::vector<Item>& items) {
    list_items(parts, &Part::rank, ROW_BLOCK, [](const Part&) { return RANK_BLOCK; }, items);
}

template <class T>
void run(Team& team, const std::vector<Part>& parts, const float* x, int64_t depth, float* y,
         int64_t stride) {
    static thread_local std::vector<Item> shrinks, expands;
    list_whole_items(parts, ROW_BLOCK, shrinks);
    // If there are enough items, a thread runs shrink and expand of an item without waiting for others.
    if ((int64_t)shrinks.size() >= ITEMS_A_THREAD * team.threads)
        return team.share(shrinks.size(), [&](int64_t i) {
            Item item = shrinks[i];
            shrink<T>(item, x, depth);
            item.end = item.part->width;
            expand<T>(item, y, stride);
        });
    list_shrinks(parts, shrinks);
    list_items(parts, &Part::width, ROW_BLOCK,
               [](const Part& part) { return part.rows < FEW_ROWS ? 1024 : 256; }, expands);
    team.share(shrinks.size(), [&](int64_t i) { shrink<T>(shrinks[i], x, depth); });
    team.share(expands.size(), [&](int64_t i) { expand<T>(expands[i], y, stride); });
}

}  // namespace

void add_lora(Team& team, float* y, const float* x, int64_t depth, const int32_t* projections,
              const int32_t* widths, int64_t num_projections, int64_t first_entry,
              int64_t slot_entries, const int32_t* segment_start, const int32_t* segment_slot,
              int64_t num_segments, const int64_t* a_offset, const int64_t* b_offset,
              const int32_t* rank, const char* arena, int format) {
    static thread_local std::vector<Part> parts;
    parts.clear();
    int64_t stride = 0, size = 0;
    for (int64_t p = 0; p < num_projections; p++) stride += widths[p];
    for (int64_t n = 0; n < num_segments; n++) {
        const int64_t first = segment_start[n], rows = segment_start[n + 1] - first;
        int64_t column = 0;
        for (int64_t p = 0; p < num_projections; column += widths[p++]) {
            const int64_t i = segment_slot[n] * slot_entries + first_entry + projections[p];
            if (rows == 0 || rank[i] == 0) continue;
            parts.push_back({first, rows, rank[i], widths[p], column, arena + a_offset[i],
                             arena + b_offset[i], nullptr});
            size += rows * rank[i];
        }
    }
    if (parts.empty()) return;
#ifdef TILES
    if (format == BF16) return add_lora_on_tiles(team, parts, x, depth, y, stride);
#endif
    float* free_hidden = team.buffer<float>(HIDDEN, size);
    for (Part& part : parts) {
        part.hidden = free_hidden;
        free_hidden += part.rows * part.rank;
    }
    format == BF16 ? run<bf16>(team, parts, x, depth, y, stride)
                   : run<float>(team, parts, x, depth, y, stride);
}

// Semantics: y[rows of n, columns of p] += (x[rows of n] A^T) B for segment n and projection p, with A
// and B of the slot's entry first_entry + projections[p]. Does nothing where the rank is 0.
// Shape: x float32 [*, depth], y float32 [*, sum of widths]; segment_start int32 [N + 1],
// segment_slot int32 [N]; a_offset, b_offset int64 and rank int32 [slots, slot_entries].
EXPORT void add_lora(float* y, const float* x, int64_t depth, const int32_t* projections,
                     const int32_t* widths, int64_t num_projections, int64_t first_entry,
                     int64_t slot_entries, const int32_t* segment_start,
                     const int32_t* segment_slot, int64_t num_segments, const int64_t* a_offset,
                     const int64_t* b_offset, const int32_t* rank, const char* arena, int format) {
    in_team(segment_start[num_segments] * depth * 8, [&](Team& team) {
        add_lora(team, y, x, depth, projections, widths, num_projections, first_entry, slot_entries,
                 segment_start, segment_slot, num_segments, a_offset, b_offset, rank, arena, format);
    });
}

// Computes y += (a B) * scale for one row, one rank after the other.
template <class T>
static void add_row(float* y, const T* a, const T* b, int64_t rank, int64_t width, float scale) {
    for (int64_t r = 0; r < rank; r++) {
        const float h = widen(a[r]) * scale;
        const T* row = b + r * width;
        int64_t c = 0;
        for (; c + LANES <= width; c += LANES)
            store(y + c, fma(splat(h), load(row + c), load(y + c)));
        for (; c < width; c++) y[c] += h * widen(row[c]);
    }
}

// Semantics: y[row] += (A[ids[row]] B) * scale for the rows of each segment, with A and B of the slot's
// `entry`. Does nothing where the rank is 0. Rows do not depend on each other.
// Shape: y float32 [*, width], ids int32 [*]; A [V, rank], B [rank, width]; tables as in add_lora.
EXPORT void add_embedding_lora(float* y, const int32_t* ids, int64_t width, float scale,
                               int64_t entry, int64_t slot_entries,
                               const int32_t* segment_start, const int32_t* segment_slot,
                               int64_t num_segments,
                               const int64_t* a_offset, const int64_t* b_offset,
                               const int32_t* rank, const char* arena, int format) {
    for (int64_t n = 0; n < num_segments; n++) {
        const int64_t i = segment_slot[n] * slot_entries + entry;
        if (rank[i] == 0) continue;
        const int64_t first = segment_start[n], end = segment_start[n + 1];
        in_team((end - first) * rank[i] * width, [&](Team& team) {
            team.share(end - first, [&](int64_t index) {
                const int64_t row = first + index;
                const auto add = [&](auto type) {
                    using T = decltype(type);
                    const T* a = (const T*)(arena + a_offset[i]) + (int64_t)ids[row] * rank[i];
                    add_row(y + row * width, a, (const T*)(arena + b_offset[i]), rank[i], width,
                            scale);
                };
                format == BF16 ? add(bf16{}) : add(0.0f);
            });
        });
    }
}

// Semantics: y = x A^T. Each element is summed in the same order as in a shrink.
// Shape: x float32 [rows, depth], A [count, depth] -> y float32 [rows, count].
EXPORT void row_products(const float* x, int64_t rows, int64_t depth, const char* a, int64_t count,
                         int format, float* y) {
    const std::vector<Part> parts = {{0, rows, count, 0, 0, a, nullptr, y}};
    std::vector<Item> items;
    list_shrinks(parts, items);
    in_team(rows * count * depth, [&](Team& team) {
        team.share(items.size(), [&](int64_t i) {
            format == BF16 ? shrink<bf16>(items[i], x, depth) : shrink<float>(items[i], x, depth);
        });
    });
}
