// Products of rows of x with packed weights, on tiles.
#pragma once

#include <utility>

#include "tiles.h"

namespace {

constexpr int TILE_WORDS = TILE * TILE;
constexpr int TILE_ROW_BYTES = 4 * TILE;
const float NO_SUMS[TILE] = {};

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

// Sets the first N tiles to zero.
template <int N, class T>
void clear_sums(T& tiles) {
    for_each(std::make_integer_sequence<int, N>{},
             [&](auto i) { tiles.template load<decltype(i)::value>(NO_SUMS, 0); });
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
