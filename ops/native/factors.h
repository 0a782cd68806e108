// Factors of adapters in panels, and the division of the work of add_lora.
//
// A factor is a matrix [rows, depth]: A is [rank, K], and B is [N, rank]. A panel holds PANEL_ROWS of
// its rows, and the last panel the remaining rows. A panel of float32 is [depth][rows of the panel]. A
// panel of bfloat16 is [words][rows of the panel] of pairs: the number of an even k is in the low half
// of a 32-bit word, and the number of the next k in the high half. Python packs factors, see
// ops/factor_layout.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "vector.h"

namespace lora {

constexpr int PANEL_ROWS = 16;
constexpr int MAX_SUMS = 2 * PANEL_ROWS;  // sums of a row that are computed together
constexpr int AHEAD = 2048;               // bytes to prefetch ahead in a factor

// Steps of at most PANEL_ROWS pairs, of equal length, into which the depth of a bfloat16 factor is
// divided, so that tiles need few zeros beyond the depth.
struct Steps {
    int64_t count, pairs;

    explicit Steps(int64_t depth)
        : count(ceil_div(depth, 2 * PANEL_ROWS)), pairs(ceil_div(depth, 2 * count)) {}
};

// Number of words in a row of a factor: one float32 or two bfloat16 per word.
inline int64_t row_words(const float*, int64_t depth) { return depth; }
inline int64_t row_words(const uint32_t*, int64_t depth) {
    const Steps steps(depth);
    return steps.count * steps.pairs;
}

// Copies `count` numbers, rounded to the output's type, and zeros up to `size` numbers.
template <class T>
inline void put(const float* x, int64_t count, int64_t size, T* out) {
    for (int64_t i = 0; i < count; i++) narrow(x[i], out + i);
    std::fill(out + count, out + size, T{});
}

// One projection of one segment. The segment's rows begin at `first`; y has `width` columns from
// `column` on. hidden: memory for x A^T.
struct Part {
    int64_t first, rows, rank, width, column;
    const char *a, *b;
    uint32_t* hidden;
};

// Rows of a part, from `row` on, and their ranks (shrink) or columns (expand) begin..end.
struct Item {
    const Part* part;
    int64_t row, rows, begin, end;
};

// x [*, depth], y [*, stride].
struct Matrices {
    const float* x;
    float* y;
    int64_t depth, stride;
};

// Lists items of row_block rows and `block` ranks or columns, which are the member `extent` of a part.
inline void list_items(const std::vector<Part>& parts, int64_t row_block, int64_t Part::*extent,
                       int64_t block, std::vector<Item>& items) {
    items.clear();
    for (const Part& part : parts)
        for (int64_t begin = 0; begin < part.*extent; begin += block)
            for (int64_t row = 0; row < part.rows; row += row_block)
                items.push_back({&part, row, std::min(row_block, part.rows - row), begin,
                                 std::min(begin + block, part.*extent)});
}

// Orders items that have all ranks so that the parts of the threads, in which Team::share begins, have
// about the same work. Returns whether they have. Each part begins with its largest item.
inline bool balance(const Team& team, int64_t depth, std::vector<Item>& items) {
    constexpr int64_t READ = 8;  // rows whose products take as long as to read the factors
    struct Load { int64_t work, next, end; };
    static thread_local std::vector<Load> loads;
    static thread_local std::vector<Item> sorted;
    const auto work = [&](const Item& item) {
        return (item.rows + READ) * item.part->rank * (depth + item.part->width);
    };
    sorted = items;
    std::sort(sorted.begin(), sorted.end(),
              [&](const Item& a, const Item& b) { return work(a) > work(b); });
    loads.clear();
    const int64_t count = items.size();
    for (int thread = 0; thread < team.threads; thread++)
        loads.push_back({0, team.first_of(count, thread), team.first_of(count, thread + 1)});
    int64_t all = 0, most = 0;
    for (const Item& item : sorted) {
        Load* least = nullptr;
        for (Load& load : loads)
            if (load.next < load.end && (!least || load.work < least->work)) least = &load;
        items[least->next++] = item;
        least->work += work(item);
        most = std::max(most, least->work);
        all += work(item);
    }
    return 5 * team.threads * most <= 6 * all;
}

// Shrink and expand of items. A Product multiplies up to ROWS rows of elements, in words X, by some
// rows of a factor in words W. It writes MAX_SUMS sums of each row and returns how many are valid.
template <class Product>
class Kernel {
  public:
    typedef typename Product::X X;
    typedef typename Product::W W;
    typedef typename Product::Element Element;

    // Number of words in x A^T of a part, in whole tiles of rows.
    static int64_t hidden_words(const Part& part) {
        return ceil_div(part.rows, PANEL_ROWS) * PANEL_ROWS * row_size(part.rank);
    }

    void shrink(const Item& item, const Matrices& at) {
        static thread_local std::vector<Line> kept;
        const Part& part = *item.part;
        // NOTE: there is a gap between rows, because rows of some lengths would share few cache sets.
        const int64_t stride = row_size(at.depth) + 16, hidden_stride = row_size(part.rank);
        const int64_t lines = ceil_div(Product::ROWS * stride * sizeof(X), sizeof(Line));
        if ((int64_t)kept.size() < lines) kept.resize(lines);
        X* rows = (X*)kept.data();
        for (int64_t row = 0; row < item.rows; row++)
            put(at.x + (part.first + item.row + row) * at.depth, at.depth, num_elements(at.depth),
                (Element*)(rows + row * stride));
        for (int64_t rank = item.begin, count; rank < item.end; rank += count) {
            count = product(item.rows, rows, stride, (const W*)part.a, at.depth, rank, item.end, sums);
            const int64_t end = rank + count == part.rank ? num_elements(part.rank) : rank + count;
            for (int64_t row = 0; row < item.rows; row++)
                put(sums + row * MAX_SUMS, count, end - rank,
                    (Element*)((X*)part.hidden + (item.row + row) * hidden_stride) + rank);
        }
    }

    void expand(const Item& item, const Matrices& at) {
        const Part& part = *item.part;
        const int64_t stride = row_size(part.rank);
        for (int64_t c = item.begin, count; c < item.end; c += count) {
            count = product(item.rows, (const X*)part.hidden + item.row * stride, stride,
                            (const W*)part.b, part.rank, c, item.end, sums);
            float* y = at.y + (part.first + item.row) * at.stride + part.column + c;
            for (int64_t row = 0; row < item.rows; row++)
                for (int64_t i = 0; i < count; i++) y[row * at.stride + i] += sums[row * MAX_SUMS + i];
        }
    }

  private:
    Product product;
    alignas(64) float sums[Product::ROWS * MAX_SUMS];

    static int64_t num_elements(int64_t depth) {
        return row_words((const W*)nullptr, depth) * (std::is_same_v<W, float> ? 1 : 2);
    }
    static int64_t row_size(int64_t depth) { return num_elements(depth) * sizeof(Element) / sizeof(X); }
};

// Computes all parts. If the parts can be divided evenly, a thread computes shrink and expand of its
// items without waiting for others. Sets `hidden` of the parts.
template <class Product>
void run(Team& team, std::vector<Part>& parts, const Matrices& at) {
    constexpr int64_t COLUMNS = 256;  // of an item of expand
    static thread_local std::vector<Item> shrinks, expands;
    int64_t size = 0;
    for (const Part& part : parts) size += Kernel<Product>::hidden_words(part);
    uint32_t* free_hidden = team.buffer<uint32_t>(HIDDEN, size);
    for (Part& part : parts) {
        part.hidden = free_hidden;
        free_hidden += Kernel<Product>::hidden_words(part);
    }
    list_items(parts, Product::ROWS, &Part::rank, INT64_MAX / 2, shrinks);
    const bool are_whole = balance(team, at.depth, shrinks);
    if (!are_whole) {
        list_items(parts, Product::ROWS, &Part::rank, MAX_SUMS, shrinks);
        list_items(parts, Product::ROWS, &Part::width, COLUMNS, expands);
    }
    Kernel<Product> kernel;
    team.share(shrinks.size(), [&](int64_t i) {
        Item item = shrinks[i];
        kernel.shrink(item, at);
        item.begin = 0, item.end = item.part->width;
        if (are_whole) kernel.expand(item, at);
    });
    if (!are_whole) team.share(expands.size(), [&](int64_t i) { kernel.expand(expands[i], at); });
}

#ifdef TILES
// Semantics: add_lora() on tiles, for bfloat16 factors.
void add_lora_on_tiles(Team& team, std::vector<Part>& parts, const Matrices& at);
#endif

}  // namespace lora
