// Work of add_lora in parts and items.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace lora {

// With this many for each thread, a segment's projection is one item.
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

// Rows of each part in blocks, and its ranks or columns, which `extent` is, in blocks of their own.
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

// Rows of each part in blocks, the most work first, so that the threads end together. Of an item, all
// ranks are meant.
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
