// Computes y += (x A^T) B on tiles, see lora.cpp.
//
// x and x A^T are rounded to bfloat16. Each element of x A^T is a sum over K, and each element of y is
// a sum over the ranks. Both add TILE_DEPTH products at a time in ascending order, see tiles.h. Rows
// are computed in whole tiles, which may include rows of other segments. Only the results of the
// segment's rows are kept, so a row's bits depend neither on the other rows nor on the threads.
#ifdef TILES
#include <vector>

#include "lora_items.h"
#include "tile_checks.h"
#include "tile_product.h"

using namespace lora;

namespace {

constexpr int WIDE = 2;              // tiles of ranks or columns that are multiplied together
constexpr int WIDTH = WIDE * TILE;   // ranks or columns of these WIDE tiles
constexpr int ROW_BLOCK = 8 * TILE;  // rows per item, for which A and B are packed once
constexpr int COLUMN_BLOCK = 256;    // columns of an item of expand
constexpr int LINE = 64;             // bytes of a cache line

static_assert(WIDTH == TILE_DEPTH);  // WIDTH ranks of a shrink are one step of the expand

const float NO_SUMS[WIDTH] = {};

// Packed weights [steps][TILE pairs][WIDTH].
struct Packed {
    static constexpr int ROW_BYTES = WIDTH * 4;
    const uint32_t* words;

    const uint32_t* at(int64_t step) const { return words + step * TILE * WIDTH; }
};

// Transposes TILE rows of TILE words into out[word][row]. stride: bytes from one row to the next.
inline void transpose(const char* at, int64_t stride, uint32_t* out) {
#ifdef VECTOR_AVX512
    __m512i a[TILE], b[TILE];
    for (int r = 0; r < TILE; r++) a[r] = _mm512_loadu_si512(at + r * stride);
    for (int r = 0; r < TILE; r += 2) {
        b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    for (int r = 0; r < TILE; r += 4)
        for (int i = 0; i < 2; i++) {
            a[r + 2 * i] = _mm512_unpacklo_epi64(b[r + i], b[r + 2 + i]);
            a[r + 2 * i + 1] = _mm512_unpackhi_epi64(b[r + i], b[r + 2 + i]);
        }
    // Quarter q of a[4 g + i] has word 4 q + i of each of the rows 4 g to 4 g + 3.
    for (int i = 0; i < 4; i++) {
        const __m512i even0 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
        const __m512i odd0 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        const __m512i even1 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        const __m512i odd1 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
        const __m512i columns[4] = {
            _mm512_shuffle_i32x4(even0, even1, 0x88), _mm512_shuffle_i32x4(odd0, odd1, 0x88),
            _mm512_shuffle_i32x4(even0, even1, 0xdd), _mm512_shuffle_i32x4(odd0, odd1, 0xdd)};
        for (int q = 0; q < 4; q++)
            _mm512_storeu_si512(out + (4 * q + i) * WIDTH, columns[q]);
    }
#else
    for (int r = 0; r < TILE; r++) {
        uint32_t words[TILE];
        std::memcpy(words, at + r * stride, sizeof words);
        for (int c = 0; c < TILE; c++) out[c * WIDTH + r] = words[c];
    }
#endif
}

// Packs the first TILE rows of A [rows, depth] into columns of [steps][TILE][WIDTH]. Packs zeros for
// rows that do not exist.
void pack_ranks(const bf16* a, int64_t rows, int64_t depth, uint32_t* out) {
    rows = std::min<int64_t>(rows, TILE);
    for (int64_t k = 0; k < depth; k += TILE_DEPTH, out += TILE * WIDTH) {
        const int64_t count = std::min<int64_t>(TILE_DEPTH, depth - k);
        for (int64_t r = 0; r < rows; r++)
            __builtin_prefetch((const char*)(a + r * depth + k) + 4 * LINE);
        if (rows == TILE && count == TILE_DEPTH) {
            transpose((const char*)(a + k), depth * sizeof(bf16), out);
        } else {
            alignas(LINE) bf16 block[TILE][TILE_DEPTH] = {};
            for (int64_t r = 0; r < rows; r++)
                std::copy_n(a + r * depth + k, count, block[r]);
            transpose((const char*)block, sizeof block[0], out);
        }
    }
}

// Packs `width` columns of B [rank, stride] into [steps][TILE][WIDTH].
void pack_columns(const bf16* b, int64_t rank, int64_t stride, int64_t width, uint32_t* out) {
    const int64_t pairs = ceil_div(rank, TILE_DEPTH) * TILE;
    if (rank < 2 * pairs || width < WIDTH) std::fill_n(out, pairs * WIDTH, 0);
    for (int64_t r = 0; r < rank; r++) {
        const uint16_t* row = (const uint16_t*)(b + r * stride);
        uint32_t* to = out + r / 2 * WIDTH;
        __builtin_prefetch((const char*)row + 2 * LINE);
        if (width == WIDTH)
            for (int c = 0; c < WIDTH; c += LANES) {
                const U value = load(row + c);
                store(to + c, r % 2 ? load(to + c) | value << 16 : value);
            }
        else
            for (int64_t c = 0; c < width; c++) to[c] |= (uint32_t)row[c] << (r % 2 * 16);
    }
}

uint32_t* scratch(int64_t words) {
    static thread_local std::vector<uint32_t> buffer;
    if ((int64_t)buffer.size() < words) buffer.resize(words);
    return buffer.data();
}

// x A^T of a part's rows, as tiles [rows / TILE][rank / TILE_DEPTH][TILE][TILE_DEPTH].
struct Hidden {
    bf16* at;
    int64_t steps;

    explicit Hidden(const Part& part)
        : at((bf16*)part.hidden), steps(ceil_div(part.rank, TILE_DEPTH)) {}

    bf16* row(int64_t row, int64_t rank) const {
        return at + ((row / TILE * steps + rank / TILE_DEPTH) * TILE + row % TILE) * TILE_DEPTH;
    }
};

// Computes ranks item.begin..item.end of x A^T, WIDTH ranks at a time. x: all rows, as tiles.
template <class T>
void shrink(T& tiles, const Item& item, const uint32_t* x, int64_t depth) {
    const Part& part = *item.part;
    const Hidden hidden(part);
    const int64_t steps = ceil_div(depth, TILE_DEPTH);
    const int64_t first = part.first + item.row, end = first + item.rows;
    uint32_t* words = scratch(steps * TILE * WIDTH);
    alignas(LINE) float sums[2 * TILE * WIDTH];
    for (int64_t rank = item.begin; rank < item.end; rank += WIDTH) {
        for (int i = 0; i < WIDE; i++) {
            const int64_t from = rank + i * TILE;
            pack_ranks((const bf16*)part.a + from * depth, std::max<int64_t>(part.rank - from, 0),
                       depth, words + i * TILE);
        }
        int64_t next;
        for (int64_t row = first / TILE * TILE; row < end; row = next) {
            const uint32_t* rows = x + row / TILE * steps * TILE_WORDS;
            const TileSums<const float> from{NO_SUMS, 0};
            const TileSums<float> to{sums, WIDTH * 4};
            next = row + (row + TILE < end ? 2 * TILE : TILE);
            if (next == row + TILE)
                multiply_tiles<1, WIDE>(tiles, rows, Packed{words}, steps, from, to);
            else
                multiply_tiles<2, WIDE>(tiles, rows, Packed{words}, steps, from, to);
            for (int64_t r = std::max(row, first); r < std::min(next, end); r++) {
                bf16* out = hidden.row(r - part.first, rank);
                for (int i = 0; i < WIDTH; i++) narrow(sums[(r - row) * WIDTH + i], out + i);
            }
        }
    }
}

// Adds (x A^T) B to columns item.begin..item.end of y.
template <class T>
void expand(T& tiles, const Item& item, float* y, int64_t stride) {
    const Part& part = *item.part;
    const Hidden hidden(part);
    uint32_t* words = scratch(hidden.steps * TILE * WIDTH);
    alignas(LINE) float sums[2 * TILE * WIDTH] = {};
    for (int64_t c = item.begin; c < item.end; c += WIDTH) {
        const int64_t width = std::min<int64_t>(WIDTH, item.end - c);
        pack_columns((const bf16*)part.b + c, part.rank, part.width, width, words);
        for (int64_t row = item.row; row < item.row + item.rows; row += 2 * TILE) {
            const int64_t count = std::min<int64_t>(2 * TILE, item.row + item.rows - row);
            float* at = y + (part.first + row) * stride + part.column + c;
            const bool is_whole = count % TILE == 0 && width == WIDTH;
            for (int64_t r = 0; !is_whole && r < count; r++)
                std::copy_n(at + r * stride, width, sums + r * WIDTH);
            const TileSums<float> to{is_whole ? at : sums, is_whole ? stride * 4 : WIDTH * 4};
            const uint32_t* rows = (const uint32_t*)hidden.row(row, 0);
            if (count <= TILE)
                multiply_tiles<1, WIDE>(tiles, rows, Packed{words}, hidden.steps,
                                        {to.at, to.bytes}, to);
            else
                multiply_tiles<2, WIDE>(tiles, rows, Packed{words}, hidden.steps,
                                        {to.at, to.bytes}, to);
            for (int64_t r = 0; !is_whole && r < count; r++)
                std::copy_n(sums + r * WIDTH, width, at + r * stride);
        }
    }
}

template <class T>
void add(Team& team, std::vector<Part>& parts, const float* x, int64_t depth, float* y,
         int64_t stride) {
    static thread_local std::vector<Item> shrinks, expands;
    int64_t size = 0, rows = 0;
    for (const Part& part : parts) {
        size += tile_words(part.rows, part.rank);
        rows = std::max(rows, part.first + part.rows);
    }
    uint32_t* free_hidden = team.buffer<uint32_t>(HIDDEN, size);
    for (Part& part : parts) {
        part.hidden = (float*)free_hidden;
        free_hidden += tile_words(part.rows, part.rank);
    }
    const uint32_t* rounded = to_tiles(team, x, rows, depth);
    list_whole_items(parts, ROW_BLOCK, shrinks);
    // If there are enough items, a thread runs shrink and expand of an item without waiting for others.
    const bool are_whole = (int64_t)shrinks.size() >= ITEMS_A_THREAD * team.threads;
    if (!are_whole) {
        list_items(parts, &Part::rank, ROW_BLOCK, [](const Part&) { return WIDTH; }, shrinks);
        list_items(parts, &Part::width, ROW_BLOCK, [](const Part&) { return COLUMN_BLOCK; },
                   expands);
    }
    T tiles;
    team.share(shrinks.size(), [&](int64_t i) {
        Item item = shrinks[i];
        shrink(tiles, item, rounded, depth);
        item.end = item.part->width;
        if (are_whole) expand(tiles, item, y, stride);
    });
    if (!are_whole)
        team.share(expands.size(), [&](int64_t i) { expand(tiles, expands[i], y, stride); });
}

}  // namespace

void lora::add_lora_on_tiles(Team& team, std::vector<Part>& parts, const float* x, int64_t depth,
                             float* y, int64_t stride) {
    add<Tiles<TILE>>(team, parts, x, depth, y, stride);
}

#ifdef AMX
bool loras_agree() {
    for (int64_t rows : {1, 17, 33})
        for (int64_t rank : {8, 40}) {
            const int64_t first = 3, depth = 70, width = 49, all = first + rows + 2;
            std::vector<bf16> a(rank * depth), b(rank * width);
            various_bf16(a), various_bf16(b);
            const std::vector<float> x = various_floats(all * depth);
            std::vector<float> y = various_floats(all * width), expected = y;
            std::vector<Part> parts{{first, rows, rank, width, 0, (const char*)a.data(),
                                     (const char*)b.data(), nullptr}};
            in_team(0, [&](Team& team) {
                add<AmxTiles<TILE>>(team, parts, x.data(), depth, y.data(), width);
                add<ScalarTiles<TILE>>(team, parts, x.data(), depth, expected.data(), width);
            });
            if (std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)) != 0) return false;
        }
    return true;
}
#endif
#endif
