// Divides the work of add_lora into parts and items.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "parallel.h"

namespace lora {

// Items have all ranks of their rows only if there are at least this many items per thread.
constexpr int ITEMS_A_THREAD = 4;

// One projection of one segment. The segment's rows begin at `first`; `hidden` has `rank` columns, and
// y has `width` columns from `column` on.
struct Part {
    int64_t first, rows, rank, width, column;
    const char *a, *b;
    float* hidden;
};

struct Item {
    const Part* part;
    // Number of rows, from `row` of the part on, and their ranks (shrink) or columns (expand) begin..end.
    int64_t row, rows, begin, end;
};

// Lists items of row_block rows and block_of(part) ranks or columns. extent: member of Part that has
// the number of ranks or columns.
template <class Block>
void list_items(const std::vector<Part>& parts, int64_t Part::*extent, int64_t row_block,
                Block block_of, std::vector<Item>& items) {
    items.clear();
    for (const Part& part : parts) {
        const int64_t all = part.*extent, block = block_of(part);
        for (int64_t begin = 0; begin < all; begin += block)
            for (int64_t row = 0; row < part.rows; row += row_block)
                items.push_back({&part, row, std::min(row_block, part.rows - row), begin,
                                 std::min(begin + block, all)});
    }
}

// Lists items of row_block rows with all ranks. The items with the most work come first, so that the
// threads end at about the same time.
inline void list_whole_items(const std::vector<Part>& parts, int64_t row_block,
                             std::vector<Item>& items) {
    items.clear();
    for (const Part& part : parts)
        for (int64_t row = 0; row < part.rows; row += row_block)
            items.push_back({&part, row, std::min(row_block, part.rows - row), 0, part.rank});
    const auto work = [](const Item& item) { return item.rows * item.part->rank * item.part->width; };
    std::sort(items.begin(), items.end(),
              [&](const Item& a, const Item& b) { return work(a) > work(b); });
}

#ifdef TILES
// Semantics: add_lora() on tiles, for bfloat16 factors. Sets `hidden` of the parts.
void add_lora_on_tiles(Team& team, std::vector<Part>& parts, const float* x, int64_t depth,
                       float* y, int64_t stride);
#endif

}  // namespace lora
