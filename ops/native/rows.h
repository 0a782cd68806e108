// Rows in the form in which linears multiply them.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "tiles.h"
#include "vector.h"

// Rows x [*, depth]. If a linear rounds its input, `rounded` has x in bfloat16: as tiles [rows / TILE]
// [depth / TILE_DEPTH][TILE][TILE_DEPTH] with TILES, else [rows][depth]. In both forms, depth is rounded
// up, and the elements beyond it are zero. Whoever writes elements of x also rounds them.
struct Rows {
    float* x;
    int64_t depth;
    bf16* rounded;  // null = linears read x

#ifdef TILES
    static constexpr int64_t STEP = TILE_DEPTH, TOGETHER = TILE;
#else
    static constexpr int64_t STEP = 2, TOGETHER = 1;
#endif

    // Returns the number of elements that `rows` rounded rows have.
    static int64_t size(int64_t rows, int64_t depth) {
        return ceil_div(rows, TOGETHER) * TOGETHER * ceil_div(depth, STEP) * STEP;
    }

    // Returns the rows from `row` on, which is a multiple of TILE.
    Rows from(int64_t row) const {
        return {x + row * depth, depth, rounded ? rounded + size(row, depth) : nullptr};
    }

    // Rounds elements k..k + count of a row. k is a multiple of 16.
    void round(int64_t row, int64_t k, int64_t count) const {
        if (!rounded) return;
        const float* from = x + row * depth;
        const int64_t end = k + count;
        for (; k + LANES <= end; k += LANES) store(at(row, k), load(from + k));
        for (; k < end; k++) narrow(from[k], at(row, k));
        if (end == depth)
            for (; k % STEP != 0; k++) *at(row, k) = bf16{};
    }

  private:
    bf16* at(int64_t row, int64_t k) const {
#ifdef TILES
        const int64_t tile = row / TILE * ceil_div(depth, STEP) + k / STEP;
        return rounded + (tile * TILE + row % TILE) * STEP + k % STEP;
#else
        return rounded + row * ceil_div(depth, STEP) * STEP + k;
#endif
    }
};
