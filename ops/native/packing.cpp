// Packing of weights into panels.
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>

#include "panels.h"

namespace {

void ask_for_huge_pages(void* out, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t from = ((uintptr_t)out + 4095) & ~(uintptr_t)4095;
    if (bytes > 1 << 18) madvise((void*)from, (uintptr_t)out + bytes - from, MADV_HUGEPAGE);
#endif
}

// Returns word k of a row: one float32, or a pair of bfloat16. If the depth is odd, the last pair has a
// zero as its second number.
inline uint32_t word(const uint32_t* row, int64_t k, int64_t) { return row[k]; }
inline uint32_t word(const uint16_t* row, int64_t k, int64_t depth) {
    const uint32_t high = 2 * k + 1 < depth ? row[2 * k + 1] : 0;
    return row[2 * k] | high << 16;
}

// Copies word k of each row to [row / PANEL][k][row % PANEL]. Copies one LINE of each row at a time, so
// that both the input and the output stay in L1. Uses at most as many threads as the calling thread's
// OpenMP limit, because a thread that loads a model has a limit of one.
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
// Converts a float32 to float16. The result is exact only if the number was converted from float16.
inline void store_scale(float scale, uint16_t* out) {
    uint32_t bits;
    const float small = scale * 0x1p-112f;
    __builtin_memcpy(&bits, &small, 4);
    *out = (bits >> 13 & 0x7fff) | (bits >> 16 & 0x8000);
}

// Returns the place of a column's scale. See NARROW_ORDER in panels.h.
inline int place_of(int c) { return NARROW_ORDER ? c / 16 * 16 + c % 8 * 2 + c % 16 / 8 : c; }

// Stores the level of column c and of one k of an octet, which was filled with zeros at first.
template <class Q>
void store_level(int level, int k, int c, char* octet) {
    const int even = k / 2 * 2, column = NARROW_ORDER ? c / 16 * 16 + c % 8 * 2 + k % 2 : c;
    if (Q::bits == 4)
        ((uint32_t*)octet)[column] |= (uint32_t)(level + Q::offset)
                                      << 4 * (NARROW_ORDER ? even + c % 16 / 8 : k);
    else
        octet[NARROW_ORDER ? even * PANEL + 2 * c + k % 2 : k * PANEL + c] = level;
}

// Packs levels [columns, depth], and scales and minimums [columns, depth / group].
template <class Q>
void pack_groups(const int8_t* levels, const float* scales, const float* minimums, int64_t columns,
                 int64_t depth, char* out) {
    typedef typename Q::Scale S;
    const int64_t groups = depth / Q::group;
#pragma omp parallel for schedule(static) num_threads(std::min(num_threads, omp_get_max_threads()))
    for (int64_t p = 0; p < ceil_div(columns, PANEL); p++)
        for (int64_t g = 0; g < groups; g++) {
            char* group = out + (p * groups + g) * Q::bytes;
            std::fill_n(group, Q::bytes, 0);
            for (int64_t c = 0; c < std::min<int64_t>(PANEL, columns - p * PANEL); c++) {
                const int64_t column = p * PANEL + c;
                store_scale(scales[column * groups + g], (S*)group + place_of(c));
                if (Q::has_minimum)
                    store_scale(minimums[column * groups + g], (S*)group + PANEL + place_of(c));
                const int8_t* row = levels + column * depth + g * Q::group;
                for (int k = 0; k < Q::group; k++)
                    store_level<Q>(row[k], k % OCTET, c, group + Q::head + k / OCTET * Q::octet_bytes);
            }
        }
}

}  // namespace

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
