// Computes y = x A^T for rows that are not packed. Each element is a sum over K in LANES partial sums.
#include <algorithm>

#include "parallel.h"
#include "vector.h"

namespace {

constexpr int ROWS = 4;    // rows of x that are multiplied together
constexpr int BLOCK = 16;  // rows of A that stay in cache for all rows of x

// Multiplies M rows of x by one row of A.
template <int M, class T>
void multiply(const float* x, int64_t depth, const T* a, float* y, int64_t stride) {
    F sums[M] = {};
    int64_t k = 0;
    for (; k + LANES <= depth; k += LANES) {
        const F row = load(a + k);
        __builtin_prefetch(a + k + 4 * depth);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) sums[m] = fma(load(x + m * depth + k), row, sums[m]);
    }
    for (int m = 0; m < M; m++) {
        float total = sum(sums[m]);
        for (int64_t i = k; i < depth; i++) total += x[m * depth + i] * widen(a[i]);
        y[m * stride] = total;
    }
}

template <class T>
void multiply_all(const float* x, int64_t rows, int64_t depth, const T* a, int64_t count, float* y) {
    in_team(rows * count * depth, [&](Team& team) {
        team.share(ceil_div(count, BLOCK), [&](int64_t block) {
            const int64_t first = block * BLOCK, end = std::min(first + BLOCK, count);
            int64_t row = 0;
            for (; row + ROWS <= rows; row += ROWS)
                for (int64_t i = first; i < end; i++)
                    multiply<ROWS>(x + row * depth, depth, a + i * depth, y + row * count + i, count);
            for (; row < rows; row++)
                for (int64_t i = first; i < end; i++)
                    multiply<1>(x + row * depth, depth, a + i * depth, y + row * count + i, count);
        });
    });
}

}  // namespace

// Semantics: y = x A^T.
// Shape: x float32 [rows, depth], A [count, depth] -> y float32 [rows, count].
EXPORT void row_products(const float* x, int64_t rows, int64_t depth, const char* a, int64_t count,
                         int format, float* y) {
    format == BF16 ? multiply_all(x, rows, depth, (const bf16*)a, count, y)
                   : multiply_all(x, rows, depth, (const float*)a, count, y);
}
