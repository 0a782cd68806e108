// Computes y = x W^T + bias on tiles, with weights packed in panels.
//
// x is rounded to bfloat16. Every element of y begins as the bias. The products of TILE_DEPTH k at a
// time are then added in ascending order, see tiles.h. Any number of rows is computed in whole tiles,
// so a row has the same bits alone and in a batch.
#ifdef TILES
#include <algorithm>
#include <vector>

#include "panels.h"
#include "tile_checks.h"
#include "tile_product.h"

namespace {

constexpr int WIDE = PANEL / TILE;  // tiles side by side in a panel
constexpr int STEP = TILE * PANEL;  // words of a panel for TILE_DEPTH k
constexpr int ROWS = 2 * TILE;      // rows that are multiplied together
constexpr int AHEAD = 4 * STEP;     // words to prefetch ahead in a panel

// A panel of bfloat16: `whole` steps of TILE_DEPTH k in `panel`, and one step in `last`, which has
// zeros beyond the panel's depth.
template <class W>
struct Steps {
    static constexpr int ROW_BYTES = PANEL * 4;
    const uint32_t* panel;
    int64_t whole;
    alignas(LINE) uint32_t last[STEP];
    mutable int64_t next = 0;  // the first step that was not read

    Steps(const uint32_t* panel, int64_t depth, int64_t) : panel(panel), whole(depth / TILE_DEPTH) {
        if (const int64_t rest = ceil_div(depth % TILE_DEPTH, 2) * PANEL)
            std::fill(std::copy_n(panel + whole * STEP, rest, last), last + STEP, 0);
    }

    // Returns the weights of a step, and prefetches the weights of a later step for the first rows.
    const uint32_t* at(int64_t step) const {
        const uint32_t* weights = step < whole ? panel + step * STEP : last;
        if (step < next) return weights;
        next = step + 1;
        for (int line = 0; line < STEP * 4; line += LINE)
            __builtin_prefetch((const char*)(weights + AHEAD) + line);
        return weights;
    }
};

// A panel of quantised weights, which is unpacked while the first ROWS rows are multiplied: each step
// when the step before it is multiplied, so that it comes from the first-level cache. All steps are kept
// only if there are more rows.
template <class Q>
class Steps<Packed<Q>> {
  public:
    static constexpr int ROW_BYTES = PANEL * 4;

    Steps(Packed<Q> panel, int64_t depth, int64_t rows)
        : panel(panel.at), steps(depth / TILE_DEPTH), kept(rows > ROWS ? steps : 2) {
        static thread_local std::vector<Line> lines;
        lines.resize(kept * STEP * 4 / LINE);
        unpacked = (uint32_t*)lines.data();
    }

    const uint32_t* at(int64_t step) const {
        for (; next < steps && next <= step + 1; next++) {
            const char* groups = panel + next * BYTES;
            for (int line = 0; line < BYTES; line += LINE)
                __builtin_prefetch(groups + PREFETCH + line);
            dequantize<Q>(groups, TILE_DEPTH, place(next));
        }
        return place(step);
    }

  private:
    static constexpr int64_t BYTES = TILE_DEPTH / Q::group * Q::bytes, PREFETCH = 4096;
    const char* panel;
    int64_t steps, kept;
    uint32_t* unpacked;
    mutable int64_t next = 0;  // the first step that is not unpacked

    uint32_t* place(int64_t step) const {
        return unpacked + (kept == 2 ? step % 2 : step) * STEP;
    }
};

// Multiplies some rows by one panel, whose first `width` columns exist in y. x: the rows, as tiles.
template <class T, class W>
void panel(T& tiles, const uint32_t* x, int64_t rows, int64_t depth, W weight, const float* bias,
           float* y, int64_t y_stride, int64_t width) {
    alignas(LINE) float sums[ROWS * PANEL];
    const int64_t steps = ceil_div(depth, TILE_DEPTH);
    const Steps<W> w(weight, depth, rows);
    for (int64_t row = 0; row < rows; row += ROWS) {
        const uint32_t* tile = x + row / TILE * steps * TILE_WORDS;
        const int64_t part = std::min<int64_t>(ROWS, rows - row);
        float* out = y + row * y_stride;
        const bool is_whole = part % TILE == 0 && width == PANEL;
        const TileSums<float> to{is_whole ? out : sums, is_whole ? y_stride * 4 : Steps<W>::ROW_BYTES};
        if (part > TILE)
            multiply_tiles<2, WIDE>(tiles, tile, w, steps, {bias, 0}, to);
        else
            multiply_tiles<1, WIDE>(tiles, tile, w, steps, {bias, 0}, to);
        for (int64_t r = 0; !is_whole && r < part; r++)
            std::copy_n(sums + r * PANEL, width, out + r * y_stride);
    }
}

template <class T>
void multiply(T& tiles, const uint32_t* x, int64_t rows, int64_t depth, const PanelOf& at,
              const float* bias, float* y, int64_t y_stride) {
    const auto run = [&](auto weight) {
        panel(tiles, x, rows, depth, panel_at(weight, at.index, depth), bias, y, y_stride, at.width);
    };
    if (at.part->format == BF16) return run((const uint32_t*)at.part->panels);
    with_layout(at.part->format, [&](auto layout) {
        run(Packed<decltype(layout)>{(const char*)at.part->panels});
    });
}

}  // namespace

void multiply_on_tiles(Tiles<TILE>& tiles, const uint32_t* x, int64_t rows, int64_t depth,
                       const PanelOf& at, const float* bias, float* y, int64_t y_stride) {
    multiply(tiles, x, rows, depth, at, bias, y, y_stride);
}

#ifdef AMX
bool linears_agree() {
    for (int64_t rows : {1, 16, 17, 33})
        for (int64_t depth : {32, 63, 160}) {
            const int64_t columns = PANEL + 20;
            const std::vector<float> x = various_floats(rows * depth);
            std::vector<float> bias = various_floats(2 * PANEL);
            std::vector<bf16> weight(2 * PANEL * ceil_div(depth, 2) * 2);
            various_bf16(weight);
            const LinearPart part{weight.data(), BF16, columns};
            std::vector<float> y(rows * columns), expected(rows * columns);
            in_team(0, [&](Team& team) {
                bf16* rounded = rounded_memory(team, INPUT, &part, 1, rows, depth);
                round_rows(team, {(float*)x.data(), depth, rounded}, rows);
                const auto run = [&](auto tiles, float* to) {
                    for (int64_t p = 0; p < count_panels(&part, 1); p++) {
                        const PanelOf at = find_panel(&part, p);
                        multiply(tiles, (const uint32_t*)rounded, rows, depth, at,
                                 bias.data() + at.column, to + at.column, columns);
                    }
                };
                run(AmxTiles<TILE>{}, y.data());
                run(ScalarTiles<TILE>{}, expected.data());
            });
            if (std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)) != 0) return false;
        }
    return true;
}
#endif
#endif
