// Computes y += (x A^T) B^T for every segment and projection of one fused linear, as Punica's SGMV does.
//
// Factors are packed in panels, see factors.h. Each (row, rank) of x A^T and each element that is added
// to y is a few sums over the words of a factor, whose number depends on the factor alone. They depend
// neither on the other rows nor on the other segments or the threads. If the processor can multiply
// pairs of bfloat16, x and x A^T are rounded to bfloat16, as a linear's input is.
#include "factors.h"
#include "kernels.h"

using namespace lora;

namespace {

template <int N>
using Int = std::integral_constant<int, N>;

constexpr int VECTORS = PANEL_ROWS / LANES;  // vectors in one word of a panel
constexpr int WIDE = LANES == 16 ? 2 : 1;    // panels that are multiplied together

// Loads the first `count` words of a vector, which may be none or more than all, and zeros.
template <class T>
inline auto load_first(const T* p, int64_t count) {
    typedef decltype(load(p)) V;
#if defined(VECTOR_AVX512)
    const __mmask16 mask = count >= LANES ? 0xffff : (1u << count) - 1;
    return (V)_mm512_maskz_loadu_epi32(mask, p);
#elif defined(VECTOR_AVX2)
    const __m256i mask = (__m256i)(lane_ids() < splat((int32_t)count));
    return (V)_mm256_maskload_epi32((const int*)p, mask);
#else
    V out = {};
    for (int i = 0; i < LANES && i < count; i++) out[i] = p[i];
    return out;
#endif
}

inline F multiply_add(F sum, const float* x, F w) { return fma(splat(*x), w, sum); }
inline F multiply_add(F sum, const float* x, U w) {
    sum = fma(splat(x[0]), (F)(w << 16), sum);
    return fma(splat(x[1]), (F)(w & 0xffff0000u), sum);
}
#ifdef PAIR_DOT
inline F multiply_add(F sum, const uint32_t* x, U w) {
    return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)splat(*x), (__m512bh)w);
}
#endif

// Multiplies M rows of x by P panels side by side. A sum consists of C chains, of which chain i has the
// words i, i + C, .... If not WHOLE, the panel has fewer than PANEL_ROWS rows, `width`.
template <int M, int P, int C, int WHOLE, class X, class W>
void multiply(const X* x, int64_t stride, const W* w, int64_t words, int64_t width, float* sums) {
    constexpr int PER_WORD = std::is_same_v<X, W> ? 1 : 2;  // X in a word of a factor
    if (WHOLE) width = PANEL_ROWS;
    F chains[C][M][P][VECTORS] = {};
    const auto step = [&](int64_t word, F(&chain)[M][P][VECTORS]) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const W* from = w + word * width + p * words * PANEL_ROWS + v * LANES;
                const auto column = WHOLE ? load(from) : load_first(from, width - v * LANES);
                __builtin_prefetch((const char*)from + AHEAD);
#pragma GCC unroll 4
                for (int m = 0; m < M; m++)
                    chain[m][p][v] =
                        multiply_add(chain[m][p][v], x + m * stride + word * PER_WORD, column);
            }
    };
    int64_t word = 0;
    for (; word + C <= words; word += C)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) step(word + c, chains[c]);
    for (; word < words; word++) step(word, chains[0]);
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int i = 0; i < P * VECTORS; i++) {
            F sum = chains[0][m][i / VECTORS][i % VECTORS];
#pragma GCC unroll 4
            for (int c = 1; c < C; c++) sum += chains[c][m][i / VECTORS][i % VECTORS];
            store(sums + m * MAX_SUMS + i * LANES, sum);
        }
}

// Product with vector instructions, for rows of words XWord and factors of words WWord.
template <class XWord, class WWord>
struct VectorProduct {
    typedef XWord X;
    typedef WWord W;
    typedef std::conditional_t<std::is_same_v<X, float>, float, bf16> Element;
    static constexpr int64_t ROWS = 32;

    int64_t operator()(int64_t rows, const X* x, int64_t stride, const W* factor, int64_t depth,
                       int64_t first, int64_t end, float* sums) {
        const int64_t words = row_words(factor, depth);
        const auto run = [&](auto panels, auto chains, auto is_whole, int64_t width) {
            int64_t row = 0;
            const auto run_rows = [&](auto count) {
                for (; row + count <= rows; row += count)
                    multiply<count, panels, chains, is_whole>(x + row * stride, stride,
                                                              factor + first * words, words, width,
                                                              sums + row * MAX_SUMS);
            };
            run_rows(Int<4>{}), run_rows(Int<2>{}), run_rows(Int<1>{});
            return width;
        };
        if (end - first >= WIDE * PANEL_ROWS)
            return run(Int<WIDE>{}, Int<WIDE>{}, Int<true>{}, WIDE * PANEL_ROWS);
        if (end - first >= PANEL_ROWS)
            return run(Int<1>{}, Int<WIDE * WIDE>{}, Int<true>{}, PANEL_ROWS);
        return run(Int<1>{}, Int<WIDE * WIDE>{}, Int<false>{}, end - first);
    }
};

// Computes y += (a B^T) * scale for one row. a: row of A [V, rank].
template <class T, class W>
void add_row(float* y, const T* a, const W* b, int64_t rank, int64_t width, float scale) {
    static thread_local std::vector<float> scaled;
    scaled.assign(row_words(b, rank) * sizeof(W) / sizeof(T), 0.0f);
    for (int64_t r = 0; r < rank; r++) scaled[r] = widen(a[r]) * scale;
    float sums[MAX_SUMS];
    for (int64_t c = 0, count; c < width; c += count) {
        count = VectorProduct<float, W>()(1, scaled.data(), 0, b, rank, c, width, sums);
        for (int64_t i = 0; i < count; i++) y[c + i] += sums[i];
    }
}

}  // namespace

void add_lora(Team& team, float* y, const float* x, int64_t depth, const int32_t* projections,
              const int32_t* widths, int64_t num_projections, int64_t first_entry,
              int64_t slot_entries, const int32_t* segment_start, const int32_t* segment_slot,
              int64_t num_segments, const int64_t* a_offset, const int64_t* b_offset,
              const int32_t* rank, const char* arena, int format) {
    static thread_local std::vector<Part> parts;
    parts.clear();
    int64_t stride = 0;
    for (int64_t p = 0; p < num_projections; p++) stride += widths[p];
    for (int64_t n = 0; n < num_segments; n++) {
        const int64_t first = segment_start[n], rows = segment_start[n + 1] - first;
        for (int64_t p = 0, column = 0; p < num_projections; column += widths[p++]) {
            const int64_t i = segment_slot[n] * slot_entries + first_entry + projections[p];
            if (rows == 0 || rank[i] == 0) continue;
            parts.push_back({first, rows, rank[i], widths[p], column, arena + a_offset[i],
                             arena + b_offset[i], nullptr});
        }
    }
    if (parts.empty()) return;
    const Matrices at{x, y, depth, stride};
    if (format == FP32) return run<VectorProduct<float, float>>(team, parts, at);
#if defined(TILES)
    add_lora_on_tiles(team, parts, at);
#elif defined(PAIR_DOT)
    run<VectorProduct<uint32_t, uint32_t>>(team, parts, at);
#else
    run<VectorProduct<float, uint32_t>>(team, parts, at);
#endif
}

// Semantics: y[rows of n, columns of p] += (x[rows of n] A^T) B^T for segment n and projection p, with A
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

// Semantics: y[row] += (A[ids[row]] B^T) * scale for the rows of each segment, with A and B of the
// slot's `entry`. Does nothing where the rank is 0. Rows do not depend on each other.
// Shape: y float32 [*, width], ids int32 [*]; A [V, rank], not in panels; tables as in add_lora.
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
        const char *a = arena + a_offset[i], *b = arena + b_offset[i];
        in_team((end - first) * rank[i] * width, [&](Team& team) {
            team.share(end - first, [&](int64_t row) {
                const int64_t at = (int64_t)ids[first + row] * rank[i];
                float* out = y + (first + row) * width;
                if (format == BF16)
                    add_row(out, (const bf16*)a + at, (const uint32_t*)b, rank[i], width, scale);
                else
                    add_row(out, (const float*)a + at, (const float*)b, rank[i], width, scale);
            });
        });
    }
}
