// Products of rows of x with packed weights, on tiles.
#pragma once

#include <algorithm>
#include <utility>

#include "parallel.h"
#include "tiles.h"
#include "vector.h"

namespace {

constexpr int TILE_WORDS = TILE * TILE;
constexpr int TILE_ROW_BYTES = 4 * TILE;

// Number of words in the tiles that to_tiles returns.
inline int64_t tile_words(int64_t rows, int64_t depth) {
    return ceil_div(rows, TILE) * ceil_div(depth, TILE_DEPTH) * TILE_WORDS;
}

// Returns x [rows, depth], rounded to bfloat16, as tiles [rows / TILE][depth / TILE_DEPTH][TILE]
// [TILE_DEPTH]. Elements beyond `depth` are zero, and rows beyond `rows` are undefined.
inline const uint32_t* to_tiles(Team& team, const float* x, int64_t rows, int64_t depth) {
    const int64_t steps = ceil_div(depth, TILE_DEPTH);
    uint32_t* words = team.buffer<uint32_t>(INPUT, tile_words(rows, depth));
    team.share(rows, [&](int64_t r) {
        for (int64_t s = 0; s < steps; s++) {
            const int64_t tile = r / TILE * steps + s, k = s * TILE_DEPTH;
            bf16* row = (bf16*)words + (tile * TILE + r % TILE) * TILE_DEPTH;
            const int64_t count = std::min<int64_t>(TILE_DEPTH, depth - k);
            for (int64_t i = 0; i < count; i++) narrow(x[r * depth + k + i], row + i);
            std::fill(row + count, row + TILE_DEPTH, bf16{});
        }
    });
    return words;
}

// Location of sums. bytes: distance of two rows in bytes; 0 if all rows have the same sums (a bias).
template <class T>
struct TileSums {
    T* at;
    int64_t bytes;
};

template <class Act, int... I>
inline void for_each(std::integer_sequence<int, I...>, Act act) {
    (act(std::integral_constant<int, I>{}), ...);
}

// Multiplies ROWS tiles of rows of x by WIDE tiles of weights side by side, and adds the products of
// TILE_DEPTH k at a time to `from` in ascending order. x: tiles of the first TILE rows, followed by the
// tiles of the second TILE rows. w: w.at(step) points to the weights of a step, whose rows are
// w.ROW_BYTES apart. Tile ROW * WIDE + COLUMN holds sums, tile 6 rows of x, and tile 7 weights.
template <int ROWS, int WIDE, class T, class W>
void multiply_tiles(T& tiles, const uint32_t* x, const W& w, int64_t steps,
                    TileSums<const float> from, TileSums<float> to) {
    static_assert(ROWS <= 2 && ROWS * WIDE <= 6);
    constexpr std::make_integer_sequence<int, WIDE> columns;
    const auto load_weights = [&](const uint32_t* weights, auto column) {
        tiles.template load<7>(weights + decltype(column)::value * TILE, W::ROW_BYTES);
    };
    for_each(columns, [&](auto column) {
        constexpr int C = decltype(column)::value;
        tiles.template load<C>(from.at + C * TILE, from.bytes);
        if constexpr (ROWS == 2)
            tiles.template load<WIDE + C>(
                (const char*)(from.at + C * TILE) + TILE * from.bytes, from.bytes);
    });
    for (int64_t s = 0; s < steps; s++) {
        const uint32_t* weights = w.at(s);
        tiles.template load<6>(x + s * TILE_WORDS, TILE_ROW_BYTES);
        for_each(columns, [&](auto column) {
            load_weights(weights, column);
            tiles.template multiply<decltype(column)::value>();
        });
        if constexpr (ROWS == 2) {
            tiles.template load<6>(x + (steps + s) * TILE_WORDS, TILE_ROW_BYTES);
            // The order is reversed because the weights of the last column are already loaded.
            for_each(columns, [&](auto column) {
                constexpr int C = WIDE - 1 - decltype(column)::value;
                if constexpr (C < WIDE - 1) load_weights(weights, std::integral_constant<int, C>{});
                tiles.template multiply<WIDE + C>();
            });
        }
    }
    for_each(columns, [&](auto column) {
        constexpr int C = decltype(column)::value;
        tiles.template store<C>(to.at + C * TILE, to.bytes);
        if constexpr (ROWS == 2)
            tiles.template store<WIDE + C>((char*)(to.at + C * TILE) + TILE * to.bytes, to.bytes);
    });
}

}  // namespace
