// Attention over pages of bfloat16 on tiles, see attention.cpp.
//
// In a page, K is [G][D / 2][16][2] and V is [G][8][D][2]. In this form, K can be loaded as the second
// operand of products over 16 elements of D, and V as the second operand of products over 16 tokens.
// The scaled q and the weights of a softmax are rounded to bfloat16. Scores are summed over D, and
// values over the tokens of a chunk, 16 products at a time in ascending order. Tokens that a row does
// not see have weight zero, which changes no sum, so a row's bits do not depend on the other rows.
#ifdef TILES
#include "attention_items.h"
#include "tile_checks.h"
#include "tile_product.h"

using namespace attention;

namespace {

constexpr int PAIRS = PAGE / 2;
constexpr int TILE_BF16 = TILE * PAGE;  // elements of a tile of rows, and of a tile of K or V
constexpr int WIDE = 4;                 // pages, or tiles of D, that are multiplied together

static_assert(PAGE == TILE && TILE_ITEM_ROWS % TILE == 0);

struct Scratch {
    alignas(64) bf16 q[TILE_ITEM_ROWS * MAX_DIM];
    alignas(64) float scores[TILE * CHUNK];
    alignas(64) bf16 weights[TILE * CHUNK];
    alignas(64) float sums[TILE * MAX_DIM];
    alignas(64) bf16 last_values[PAGE * MAX_DIM];
    State states[TILE_ITEM_ROWS];
};

// Writes the item's q, scaled, as tiles [rows / TILE][D / 16][TILE][16].
void gather_queries(const Call& call, const Item& item, bf16* q) {
    for (int64_t row = 0; row < item.num_rows; row++) {
        const float* from = call.qkv + token(call, item, row) * call.width + column(call, item, row);
        bf16* to = q + row / TILE * TILE * call.dim + row % TILE * PAGE;
        for (int64_t d = 0; d < call.dim; d += LANES)
            store(to + d / PAGE * TILE_BF16 + d % PAGE, load(from + d) * call.scale);
    }
}

// Computes scores [TILE][CHUNK] of the tokens of N pages. keys: K of each page.
template <int N, class T>
void score(T& tiles, const bf16* q, const bf16* const* keys, int64_t dim, float* scores) {
    constexpr std::make_integer_sequence<int, N> pages;
    clear_sums<N>(tiles);
    for (int64_t step = 0; step < dim / PAGE; step++) {
        tiles.template load<6>(q + step * TILE_BF16, PAGE * sizeof(bf16));
        for_each(pages, [&](auto i) {
            tiles.template load<7>(keys[i] + step * TILE_BF16, TILE_ROW_BYTES);
            tiles.template multiply<decltype(i)::value>();
        });
    }
    for_each(pages, [&](auto i) {
        tiles.template store<decltype(i)::value>(scores + i * PAGE, CHUNK * sizeof(float));
    });
}

// Computes 16 * N columns, from d on, of the sums [TILE][MAX_DIM] of weighted values over the pages.
// values: V of each page.
template <int N, class T>
void sum_values(T& tiles, const bf16* weights, const bf16* const* values, int64_t num_pages,
                int64_t d, int64_t dim, float* sums) {
    constexpr std::make_integer_sequence<int, N> columns;
    clear_sums<N>(tiles);
    for (int64_t page = 0; page < num_pages; page++) {
        tiles.template load<6>(weights + page * PAGE, CHUNK * sizeof(bf16));
        for_each(columns, [&](auto i) {
            tiles.template load<7>(values[page] + (d + i * TILE) * 2, dim * 2 * sizeof(bf16));
            tiles.template multiply<decltype(i)::value>();
        });
    }
    for_each(columns, [&](auto i) {
        tiles.template store<decltype(i)::value>(sums + d + i * TILE, MAX_DIM * sizeof(float));
    });
}

// Copies V of the first `count` tokens of a page, and sets V of the other tokens to zero. It may never
// have been written, and a weight of zero times NaN is NaN.
void copy_values(const bf16* values, int64_t count, int64_t dim, bf16* out) {
    std::fill_n(out, PAGE * dim, bf16{});
    for (int64_t t = 0; t < count; t++)
        for (int64_t d = 0; d < dim; d++) {
            const int64_t index = (t / 2 * dim + d) * 2 + t % 2;
            out[index] = values[index];
        }
}

// Computes the attention of up to TILE rows of the item, from `row` on, over one chunk.
template <class T>
void attend_rows(T& tiles, const Call& call, const Item& item, int64_t row, int64_t chunk,
                 const bf16* const* keys, const bf16* const* values, Scratch& scratch,
                 State* states) {
    const int64_t rows = std::min<int64_t>(TILE, item.num_rows - row), base = chunk * CHUNK;
    Span spans[TILE], all = visible(call, item, row);
    for (int64_t r = 0; r < rows; r++) {
        spans[r] = visible(call, item, row + r);
        all = {std::min(all.low, spans[r].low), std::max(all.high, spans[r].high)};
    }
    const int64_t begin = std::max<int64_t>(all.low - base, 0);
    const int64_t end = std::min<int64_t>(all.high + 1 - base, CHUNK);
    if (begin >= end) return;
    const int64_t first = begin / PAGE, last = ceil_div(end, PAGE);
    const bf16* q = scratch.q + row * call.dim;
    int64_t page = first;
    for (; page + WIDE <= last; page += WIDE)
        score<WIDE>(tiles, q, keys + page, call.dim, scratch.scores + page * PAGE);
    for (; page < last; page++)
        score<1>(tiles, q, keys + page, call.dim, scratch.scores + page * PAGE);
    float max[TILE], total[TILE];
    for (int64_t r = 0; r < rows; r++) {
        float* scores = scratch.scores + r * CHUNK;
        soften(scores, first * PAGE, last * PAGE, {spans[r].low - base, spans[r].high - base},
               call.softcap, scratch.weights + r * CHUNK, max + r, total + r);
    }
    const bf16* pages[CHUNK_PAGES];
    std::copy(values + first, values + last, pages);
    if (end % PAGE != 0) {
        copy_values(values[last - 1], end % PAGE, call.dim, scratch.last_values);
        pages[last - 1 - first] = scratch.last_values;
    }
    const bf16* weights = scratch.weights + first * PAGE;
    int64_t d = 0;
    for (; d + WIDE * TILE <= call.dim; d += WIDE * TILE)
        sum_values<WIDE>(tiles, weights, pages, last - first, d, call.dim, scratch.sums);
    for (; d < call.dim; d += TILE)
        sum_values<1>(tiles, weights, pages, last - first, d, call.dim, scratch.sums);
    for (int64_t r = 0; r < rows; r++)
        fold(states[r], max[r], total[r], scratch.sums + r * MAX_DIM, call.dim);
}

template <class T>
void attend(T& tiles, const Call& call, const Item& item, State* partials) {
    static thread_local std::vector<Scratch> buffer(1);
    Scratch& scratch = buffer[0];
    State* states = item.partial < 0 ? scratch.states : partials + item.partial;
    for (int64_t r = 0; r < item.num_rows; r++) clear(states[r], call.dim);
    gather_queries(call, item, scratch.q);
    for_each_chunk<bf16>(call, item, [&](int64_t chunk, auto keys, auto values) {
        for (int64_t row = 0; row < item.num_rows; row += TILE)
            attend_rows(tiles, call, item, row, chunk, keys, values, scratch, states + row);
    });
    if (item.partial < 0)
        for (int64_t r = 0; r < item.num_rows; r++) finish(call, item, r, states[r]);
}

template <class T>
void run(Team& team, const Call& call, const std::vector<Item>& items, State* partials) {
    T tiles;
    team.share(items.size(), [&](int64_t i) { attend(tiles, call, items[i], partials); });
}

}  // namespace

void attention::attend_on_tiles(Team& team, const Call& call, const std::vector<Item>& items,
                                State* partials) {
    run<Tiles<PAIRS>>(team, call, items, partials);
}

#ifdef AMX
bool attentions_agree() {
    for (int64_t dim : {16, 80}) {
        // Two sequences of 20 rows and of one row, with three query heads and one KV head.
        const int64_t heads = 3, rows = 21, context = dim == 16 ? CHUNK + 50 : 90;
        const int64_t pages = ceil_div(context, PAGE), page = 2 * dim * PAGE;
        const std::vector<float> qkv = various_floats(rows * (heads + 2) * dim);
        std::vector<bf16> arena(2 * pages * page);
        various_bf16(arena);
        std::vector<int64_t> tables(2 * pages);
        for (int64_t i = 0; i < 2 * pages; i++) tables[i] = i * page * sizeof(bf16);
        const int32_t query_start[] = {0, rows - 1, rows};
        int32_t positions[rows];
        for (int64_t i = 0; i < rows; i++) positions[i] = (i < rows - 1 ? i : 0) + context - rows;
        std::vector<float> out(rows * heads * dim), expected(out.size());
        const auto compute = [&](auto run, float* to) {
            const Call call{qkv.data(), {to, heads * dim, nullptr}, (heads + 2) * dim, query_start, positions, tables.data(),
                            pages, (const char*)arena.data(), heads, 1, dim, 0, 0.1f, 0.0f, nullptr};
            std::vector<Item> items;
            list_items(call, 2, TILE_ITEM_ROWS, items);
            in_team(0, [&](Team& team) { run(team, call, items, nullptr); });
        };
        compute(run<AmxTiles<PAIRS>>, out.data());
        compute(run<ScalarTiles<PAIRS>>, expected.data());
        if (std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) != 0) return false;
    }
    return true;
}
#endif
#endif
