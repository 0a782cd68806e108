// Divides the work of attention into items, and computes the softmax of a chunk of a context.
//
// A context is split into chunks of CHUNK tokens at fixed positions. A softmax is computed for each
// chunk, and the results are combined in ascending order of the chunks. A row's bits therefore depend
// neither on the other rows nor on the distribution of chunks over threads.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "vector.h"

namespace attention {

constexpr int CHUNK = 512;
constexpr int CHUNK_PAGES = CHUNK / PAGE;
constexpr int MAX_DIM = 256;
constexpr float INF = __builtin_inff();

struct Call {
    const float* qkv;
    Rows out;
    int64_t width;  // number of elements in a row of qkv
    const int32_t* query_start;
    const int32_t* positions;
    const int64_t* block_tables;
    int64_t table_stride;
    const char* arena;  // this layer of the page at offset 0
    int64_t num_heads, num_kv, dim;
    int64_t window;  // 0 = the whole context
    float scale, softcap;
    const float* sinks;  // null = no sinks

    int64_t group() const { return num_heads / num_kv; }
};

// Query rows of one sequence and KV head, ordered by position, and the chunks that they attend to, from
// first_chunk to last_chunk - 1.
struct Item {
    int32_t seq, kv_head;
    int64_t first_row, num_rows;
    int64_t first_chunk, last_chunk;
    int64_t partial;  // index of the item's first partial state; -1 if the item has all chunks
};

// Unfinished softmax of one row, over the chunks that were combined so far.
struct State {
    float max, total;
    float sums[MAX_DIM];
};

static void clear(State& state, int64_t dim) {
    state.max = -INF;
    state.total = 0.0f;
    std::fill_n(state.sums, dim, 0.0f);
}

struct Span {
    int64_t low, high;  // first and last position that a row sees
};

static Span visible(const Call& call, const Item& item, int64_t row) {
    const int64_t token = call.query_start[item.seq] + (item.first_row + row) / call.group();
    const int64_t high = call.positions[token];
    return {call.window ? std::max<int64_t>(0, high - call.window + 1) : 0, high};
}

static int64_t column(const Call& call, const Item& item, int64_t row) {
    return (item.kv_head * call.group() + (item.first_row + row) % call.group()) * call.dim;
}

static int64_t token(const Call& call, const Item& item, int64_t row) {
    return call.query_start[item.seq] + (item.first_row + row) / call.group();
}

// Sets weights[begin..end) to e^(score - max), and to 0 outside the span. Sets `max` and `total`. Changes
// the scores, which may be the weights.
template <class T>
static void soften(float* scores, int64_t begin, int64_t end, Span span, float softcap, T* weights,
                   float* max, float* total) {
    const I lanes = lane_ids();
    F top = splat(-INF);
    for (int64_t t = begin; t < end; t += LANES) {
        F s = load(scores + t);
        if (softcap > 0) s = tanh(s / softcap) * softcap;
        if (t < span.low || t + LANES > span.high + 1) {
            const I at = lanes + (int32_t)t;
            s = ((at >= (int32_t)span.low) & (at <= (int32_t)span.high)) ? s : splat(-INF);
        }
        store(scores + t, s);
        top = maximum(top, s);
    }
    *max = maximum(top);
    const float shift = *max == -INF ? 0.0f : *max;
    F sums = {};
    for (int64_t t = begin; t < end; t += LANES) {
        const F p = exp(load(scores + t) - shift);
        store(weights + t, p);
        sums += p;
    }
    *total = sum(sums);
}

static float decay(float from, float to) {
    return from == -INF ? 0.0f : exp(splat(from - to))[0];
}

static void fold(State& state, float max, float total, const float* sums, int64_t dim) {
    const float both = std::max(state.max, max);
    const float old_part = decay(state.max, both), new_part = decay(max, both);
    state.max = both;
    state.total = state.total * old_part + total * new_part;
    for (int64_t d = 0; d < dim; d += LANES)
        store(state.sums + d, load(state.sums + d) * old_part + load(sums + d) * new_part);
}

static void finish(const Call& call, const Item& item, int64_t row, const State& state) {
    const int64_t at = token(call, item, row), first = column(call, item, row);
    float* out = call.out.x + at * call.out.depth + first;
    float part = 1.0f, total = state.total;
    if (call.sinks) {
        const float sink = call.sinks[first / call.dim];
        const float both = std::max(state.max, sink);
        part = decay(state.max, both);
        total = total * part + decay(sink, both);
    }
    for (int64_t d = 0; d < call.dim; d += LANES)
        store(out + d, load(state.sums + d) * part / total);
    call.out.round(at, first, call.dim);
}

// Makes one item for each KV head and block of query rows.
static void list_items(const Call& call, int64_t num_seqs, int64_t item_rows, std::vector<Item>& items) {
    items.clear();
    for (int32_t seq = 0; seq < num_seqs; seq++) {
        const int64_t rows = (call.query_start[seq + 1] - call.query_start[seq]) * call.group();
        for (int64_t row = 0; row < rows; row += item_rows)
            for (int32_t g = 0; g < call.num_kv; g++) {
                Item item{seq, g, row, std::min(item_rows, rows - row), 0, 0, -1};
                item.first_chunk = visible(call, item, 0).low / CHUNK;
                item.last_chunk = visible(call, item, item.num_rows - 1).high / CHUNK + 1;
                items.push_back(item);
            }
    }
}

// Makes one item for each chunk, for calls with too few items for the threads.
static void split(const std::vector<Item>& items, std::vector<Item>& parts) {
    parts.clear();
    for (const Item& item : items)
        for (int64_t chunk = item.first_chunk; chunk < item.last_chunk; chunk++) {
            parts.push_back(item);
            parts.back().first_chunk = chunk, parts.back().last_chunk = chunk + 1;
        }
}

// Moves parts from `first` on into `pass`, as many as have at most `max_states` partial states, and at
// least one. Returns the index of the first part of the next pass.
static size_t next_pass(const std::vector<Item>& parts, size_t first, int64_t max_states,
                        std::vector<Item>& pass) {
    pass.clear();
    int64_t states = 0;
    for (; first < parts.size(); first++) {
        if (states > 0 && states + parts[first].num_rows > max_states) break;
        pass.push_back(parts[first]);
        pass.back().partial = states;
        states += parts[first].num_rows;
    }
    return first;
}

static bool same_rows(const Item& a, const Item& b) {
    return a.seq == b.seq && a.kv_head == b.kv_head && a.first_row == b.first_row;
}

// Combines the partial states of a pass in ascending order of the chunks. `states` has the rows of the
// item whose chunks continue in the next pass. `next`: the first part of the next pass, or null.
static void fold_pass(const Call& call, const std::vector<Item>& pass, const Item* next,
                      const State* partials, State* states) {
    for (size_t i = 0; i < pass.size(); i++) {
        const Item& part = pass[i];
        const bool begins = part.first_chunk == visible(call, part, 0).low / CHUNK;
        const Item* after = i + 1 < pass.size() ? &pass[i + 1] : next;
        const bool ends = !after || !same_rows(part, *after);
        for (int64_t row = 0; row < part.num_rows; row++) {
            const State& state = partials[part.partial + row];
            if (begins) clear(states[row], call.dim);
            fold(states[row], state.max, state.total, state.sums, call.dim);
            if (ends) finish(call, part, row, states[row]);
        }
    }
}

// Calls act(chunk, keys, values) for each chunk of the item. keys, values: pointers to K and V of the
// item's KV head in each page of the chunk, or null if no row of the item sees the page.
template <class T, class Act>
void for_each_chunk(const Call& call, const Item& item, Act act) {
    const int64_t last_page = visible(call, item, item.num_rows - 1).high / PAGE;
    const int64_t first_page = visible(call, item, 0).low / PAGE;
    const int64_t head = item.kv_head * PAGE * call.dim, half = call.num_kv * PAGE * call.dim;
    for (int64_t chunk = item.first_chunk; chunk < item.last_chunk; chunk++) {
        const T *keys[CHUNK_PAGES] = {}, *values[CHUNK_PAGES] = {};
        for (int64_t p = 0; p < CHUNK_PAGES; p++) {
            const int64_t page = chunk * CHUNK_PAGES + p;
            if (page < first_page || page > last_page) continue;
            const int64_t offset = call.block_tables[item.seq * call.table_stride + page];
            keys[p] = (const T*)(call.arena + offset) + head;
            values[p] = keys[p] + half;
        }
        act(chunk, keys, values);
    }
}

#ifdef TILES
constexpr int TILE_ITEM_ROWS = 64;  // rows of an item of attend_on_tiles

// Computes the attention of the items on tiles, over pages of bfloat16.
void attend_on_tiles(Team& team, const Call& call, const std::vector<Item>& items, State* partials);
#endif

}  // namespace attention
