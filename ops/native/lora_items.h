// Divides the work of add_lora into parts and items.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace lora {

// Number of items per thread from which on a block of rows of a part is one item with all ranks.
constexpr int ITEMS_A_THREAD = 4;

// One projection of one segment: rows first..first + rows, rank columns of `hidden` per row.
struct Part {
    int64_t first, rows, rank, width, column;
    const char *a, *b;
    float* hidden;
};

struct Item {
    const Part* part;
    int64_t row, rows, begin, end;  // ranks (shrink) or columns (expand) begin..end
};

// Lists items of row_block rows and block_of(part) ranks or columns. extent: member with their number.
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

// Lists items of row_block rows with all ranks. Items with the most work are first, so that the
// threads end together.
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
// add_lora() for bfloat16. `hidden` of the parts is set.
void add_lora_on_tiles(std::vector<Part>& parts, const float* x, int64_t depth, float* y,
                       int64_t stride);
#endif

}  // namespace lora
