// Products of rows and factors on tiles, see lora.cpp.
//
// Each sum begins with zero and adds a step of the factor at a time in ascending order, see factors.h
// and tiles.h. Rows are computed in whole tiles, of which only the segment's rows are kept.
#ifdef TILES
#include "factors.h"
#include "tile_checks.h"
#include "tile_product.h"

using namespace lora;

namespace {

static_assert(PANEL_ROWS == TILE);

template <class T>
struct TileProduct {
    typedef uint32_t X;
    typedef uint32_t W;
    typedef bf16 Element;
    static constexpr int64_t ROWS = 4 * TILE;

    int64_t operator()(int64_t rows, const X* x, int64_t stride, const W* factor, int64_t depth,
                       int64_t first, int64_t end, float* sums) {
        const Steps steps(depth);
        const W* panel = factor + first * steps.count * steps.pairs;
        const int64_t width = std::min<int64_t>(PANEL_ROWS, end - first);
        tiles.configure(steps.pairs, width);
        switch (ceil_div(rows, TILE)) {
            case 1: multiply<1>(x, stride, panel, steps, width, sums); break;
            case 2: multiply<2>(x, stride, panel, steps, width, sums); break;
            case 3: multiply<3>(x, stride, panel, steps, width, sums); break;
            case 4: multiply<4>(x, stride, panel, steps, width, sums); break;
        }
        return width;
    }

  private:
    T tiles;

    // Multiplies R tiles of rows by a panel of `width` rows.
    template <int R>
    void multiply(const X* x, int64_t stride, const W* panel, Steps steps, int64_t width, float* sums) {
        constexpr std::make_integer_sequence<int, R> row_tiles;
        clear_sums<R>(tiles);
        for (int64_t s = 0; s < steps.count; s++) {
            const W* weights = panel + s * steps.pairs * width;
            for (int64_t at = 0; at < steps.pairs * width * 4; at += LINE)
                __builtin_prefetch((const char*)weights + AHEAD + at);
            tiles.template load<7>(weights, width * 4);
            for_each(row_tiles, [&](auto r) {
                tiles.template load<6>(x + r * TILE * stride + s * steps.pairs, stride * 4);
                tiles.template multiply<decltype(r)::value>();
            });
        }
        for_each(row_tiles, [&](auto r) {
            tiles.template store<decltype(r)::value>(sums + r * TILE * MAX_SUMS, MAX_SUMS * 4);
        });
    }
};

}  // namespace

void lora::add_lora_on_tiles(Team& team, std::vector<Part>& parts, const Matrices& at) {
    run<TileProduct<Tiles<TILE>>>(team, parts, at);
}

#ifdef AMX
bool loras_agree() {
    for (int64_t rows : {1, 17, 70})
        for (int64_t rank : {8, 41}) {
            const int64_t first = 3, depth = 70, width = 49, all = first + rows + 2;
            const Steps of_a(depth), of_b(rank);
            std::vector<bf16> a(2 * rank * of_a.count * of_a.pairs), b(2 * width * of_b.count * of_b.pairs);
            various_bf16(a), various_bf16(b);
            const std::vector<float> x = various_floats(all * depth);
            std::vector<float> y = various_floats(all * width), expected = y;
            std::vector<Part> parts{{first, rows, rank, width, 0, (const char*)a.data(),
                                     (const char*)b.data(), nullptr}};
            const Matrices at{x.data(), y.data(), depth, width};
            const Matrices plain{x.data(), expected.data(), depth, width};
            in_team(0, [&](Team& team) {
                run<TileProduct<AmxTiles<TILE>>>(team, parts, at);
                run<TileProduct<ScalarTiles<TILE>>>(team, parts, plain);
            });
            if (std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)) != 0) return false;
        }
    return true;
}
#endif
#endif
