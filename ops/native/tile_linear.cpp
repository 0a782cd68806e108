// y = x W^T + bias on tiles, of weights packed in panels.
//
// x is rounded to bfloat16. Every element of y is the bias, to which the products of TILE_DEPTH k at
// a time are added in ascending order, see tiles.h. Rows are computed in whole tiles whatever their
// number, so a row alone and a row in a batch give the same bits.
#ifdef TILES
#include <algorithm>
#include <vector>

#include "panels.h"
#include "tile_checks.h"
#include "tiles.h"

namespace {

constexpr int WIDE = PANEL / TILE;      // tiles in a panel's width
constexpr int TILE_WORDS = TILE * TILE;
constexpr int STEP = TILE * PANEL;      // words of a panel that TILE_DEPTH k take
constexpr int ROW_BYTES = PANEL * 4;    // of a panel
constexpr int ROWS = 2 * TILE;          // rows that are multiplied together
constexpr int LINE = 64;                // bytes of a cache line
constexpr int AHEAD = 4 * STEP;         // words to prefetch ahead in a panel

const float NO_BIAS[PANEL] = {};

// x [rows, depth] as tiles [rows / TILE][depth / TILE_DEPTH][TILE][TILE_DEPTH]. Beyond `depth` they
// are zero, and beyond `rows` whatever they were.
void to_tiles(const float* x, int64_t rows, int64_t depth, bf16* out) {
    const int64_t steps = ceil_div(depth, TILE_DEPTH);
#pragma omp parallel for schedule(static) num_threads(team(rows * depth)) if (rows > 1)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t s = 0; s < steps; s++) {
            const int64_t tile = r / TILE * steps + s, k = s * TILE_DEPTH;
            bf16* row = out + (tile * TILE + r % TILE) * TILE_DEPTH;
            const int64_t count = std::min<int64_t>(TILE_DEPTH, depth - k);
            for (int64_t i = 0; i < count; i++) narrow(x[r * depth + k + i], row + i);
            std::fill(row + count, row + TILE_DEPTH, bf16{});
        }
}

// The panel as bfloat16.
inline const uint32_t* unpacked(const uint32_t* panel, int64_t) { return panel; }
template <class Q>
const uint32_t* unpacked(Packed<Q> panel, int64_t depth) {
    static thread_local std::vector<uint32_t> words;
    words.resize(depth / 2 * PANEL);
    dequantize<Q>(panel.at, depth, words.data());
    return words.data();
}

// A panel of bfloat16: `whole` steps of TILE_DEPTH k, and `last`, which has zeros beyond the panel's
// depth.
struct Steps {
    const uint32_t *panel, *last;
    int64_t whole, count;

    const uint32_t* at(int64_t step) const { return step < whole ? panel + step * STEP : last; }
};

// The rows of TILES tiles against a panel. Tiles 0 to 2 hold the sums of the first, 3 to 5 those of
// the second, 6 rows of x, and 7 weights.
template <int TILES_DOWN, class T>
void multiply(T& tiles, const uint32_t* x, const Steps& w, const float* bias, float* y,
              int64_t y_bytes) {
    tiles.template load<0>(bias, 0);
    tiles.template load<1>(bias + TILE, 0);
    tiles.template load<2>(bias + 2 * TILE, 0);
    if (TILES_DOWN == 2) {
        tiles.template load<3>(bias, 0);
        tiles.template load<4>(bias + TILE, 0);
        tiles.template load<5>(bias + 2 * TILE, 0);
    }
    for (int64_t s = 0; s < w.count; s++) {
        const uint32_t* weights = w.at(s);
        for (int line = 0; line < STEP * 4; line += LINE)
            __builtin_prefetch((const char*)(weights + AHEAD) + line);
        tiles.template load<6>(x + s * TILE_WORDS, LINE);
        tiles.template load<7>(weights, ROW_BYTES);
        tiles.template multiply<0, 6, 7>();
        tiles.template load<7>(weights + TILE, ROW_BYTES);
        tiles.template multiply<1, 6, 7>();
        tiles.template load<7>(weights + 2 * TILE, ROW_BYTES);
        tiles.template multiply<2, 6, 7>();
        if (TILES_DOWN == 2) {
            tiles.template load<6>(x + (w.count + s) * TILE_WORDS, LINE);
            tiles.template multiply<5, 6, 7>();
            tiles.template load<7>(weights + TILE, ROW_BYTES);
            tiles.template multiply<4, 6, 7>();
            tiles.template load<7>(weights, ROW_BYTES);
            tiles.template multiply<3, 6, 7>();
        }
    }
    tiles.template store<0>(y, y_bytes);
    tiles.template store<1>(y + TILE, y_bytes);
    tiles.template store<2>(y + 2 * TILE, y_bytes);
    if (TILES_DOWN == 2) {
        y += TILE * y_bytes / 4;
        tiles.template store<3>(y, y_bytes);
        tiles.template store<4>(y + TILE, y_bytes);
        tiles.template store<5>(y + 2 * TILE, y_bytes);
    }
}

// Some rows against one panel, of which the first `width` columns count. x: their tiles.
template <class T, class W>
void panel(T& tiles, const uint32_t* x, int64_t rows, int64_t depth, W weight, const float* bias,
           float* y, int64_t y_stride, int64_t width) {
    alignas(LINE) uint32_t last[STEP];
    alignas(LINE) float sums[ROWS * PANEL];
    const int64_t whole = depth / TILE_DEPTH, count = ceil_div(depth, TILE_DEPTH);
    const Steps w{unpacked(weight, depth), last, whole, count};
    if (whole < count) {
        const int64_t rest = ceil_div(depth % TILE_DEPTH, 2) * PANEL;
        std::fill(std::copy_n(w.panel + whole * STEP, rest, last), last + STEP, 0);
    }
    for (int64_t row = 0; row < rows; row += ROWS) {
        const uint32_t* tile = x + row / TILE * count * TILE_WORDS;
        const int64_t part = std::min<int64_t>(ROWS, rows - row);
        float* out = y + row * y_stride;
        const bool is_whole = part % TILE == 0 && width == PANEL;
        float* to = is_whole ? out : sums;
        const int64_t bytes = is_whole ? y_stride * 4 : ROW_BYTES;
        if (part > TILE)
            multiply<2>(tiles, tile, w, bias, to, bytes);
        else
            multiply<1>(tiles, tile, w, bias, to, bytes);
        for (int64_t r = 0; !is_whole && r < part; r++)
            std::copy_n(sums + r * PANEL, width, out + r * y_stride);
    }
}

template <class T, class W>
void multiply_part(const uint32_t* x, int64_t rows, int64_t depth, W weight, const float* bias,
                   int64_t columns, float* y, int64_t y_stride) {
    const int64_t panels = ceil_div(columns, PANEL), steps = ceil_div(depth, TILE_DEPTH);
    const int threads = team(rows * depth * columns);
    // Rows are divided, too, if there are fewer panels than threads need.
    const int64_t cuts = std::clamp<int64_t>(4 * threads / panels, 1, ceil_div(rows, ROWS));
    const int64_t cut = ceil_div(ceil_div(rows, cuts), ROWS) * ROWS;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        T tiles;
#pragma omp for collapse(2) schedule(static)
        for (int64_t p = 0; p < panels; p++)
            for (int64_t c = 0; c < cuts; c++) {
                const int64_t row = c * cut, count = std::min(cut, rows - row);
                if (count > 0)
                    panel(tiles, x + row * steps * TILE, count, depth, panel_at(weight, p, depth),
                          bias ? bias + p * PANEL : NO_BIAS, y + row * y_stride + p * PANEL,
                          y_stride, std::min<int64_t>(PANEL, columns - p * PANEL));
            }
    }
}

template <class T>
void multiply_parts(const float* x, int64_t rows, int64_t depth, const LinearPart* parts,
                    int64_t num_parts, const float* bias, int64_t columns, float* y) {
    static thread_local std::vector<uint32_t> rounded;
    rounded.resize(ceil_div(rows, TILE) * ceil_div(depth, TILE_DEPTH) * TILE_WORDS);
    to_tiles(x, rows, depth, (bf16*)rounded.data());
    const uint32_t* tiles = rounded.data();
    for (int64_t i = 0; i < num_parts; i++) {
        const int64_t format = parts[i].format, width = parts[i].columns;
        const auto run = [&](auto panels) {
            multiply_part<T>(tiles, rows, depth, panels, bias, width, y, columns);
        };
        if (format == BF16)
            run((const uint32_t*)parts[i].panels);
        else
            with_layout(format, [&](auto layout) {
                run(Packed<decltype(layout)>{(const char*)parts[i].panels});
            });
        y += width;
        if (bias) bias += width;
    }
}

}  // namespace

// Semantics: linear() for weights in bfloat16 or quantised.
void linear_on_tiles(const float* x, int64_t rows, int64_t depth, const LinearPart* parts,
                     int64_t num_parts, const float* bias, int64_t columns, float* y) {
    multiply_parts<Tiles>(x, rows, depth, parts, num_parts, bias, columns, y);
}

#ifdef AMX
bool linears_agree() {
    for (int64_t rows : {1, 16, 17, 33})
        for (int64_t depth : {32, 63, 160}) {
            const int64_t columns = PANEL + 20;
            const std::vector<float> x = various_floats(rows * depth);
            std::vector<float> bias = various_floats(2 * PANEL);
            std::vector<bf16> weight(2 * PANEL * ceil_div(depth, 2) * 2);
            const std::vector<float> wide = various_floats(weight.size());
            for (size_t i = 0; i < weight.size(); i++) narrow(wide[i], &weight[i]);
            const LinearPart part{weight.data(), BF16, columns};
            std::vector<float> y(rows * columns), expected(rows * columns);
            multiply_parts<AmxTiles>(x.data(), rows, depth, &part, 1, bias.data(), columns, y.data());
            multiply_parts<ScalarTiles>(x.data(), rows, depth, &part, 1, bias.data(), columns,
                                        expected.data());
            if (std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)) != 0) return false;
        }
    return true;
}
#endif
#endif
