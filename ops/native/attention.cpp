// Attention over paged KV, prefill and decode in one call.
//
// Inner page layout: K [G][D][16], so that the scores of a page's tokens are one vector without
// horizontal sums, V [G][16][D]. A context is split into chunks of CHUNK tokens at fixed positions;
// each has a softmax of its own, and these are folded in ascending order. So a row's bits depend
// neither on the other rows nor on the distribution of chunks over threads.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "vector.h"

namespace {

constexpr int CHUNK = 512;
constexpr int CHUNK_PAGES = CHUNK / PAGE;
constexpr int TILE = LANES == 16 ? 8 : 4;  // rows whose sums live in registers together
constexpr int ITEM_ROWS = 8 * TILE;        // rows that share one pass over a chunk in the cache
constexpr int MAX_DIM = 256;
constexpr float INF = __builtin_inff();

struct Call {
    const float* qkv;
    float* out;
    int64_t width;  // of a row of qkv
    const int32_t* query_start;
    const int32_t* positions;
    const int64_t* block_tables;
    int64_t table_stride;
    const char* arena;  // of this layer
    int64_t num_heads, num_kv, dim;
    int64_t window;  // 0 = none
    float scale, softcap;
    const float* sinks;  // null = none

    int64_t group() const { return num_heads / num_kv; }
};

// Query rows of one sequence and KV head, position-major; chunks first_chunk..last_chunk of them.
struct Item {
    int32_t seq, kv_head;
    int64_t first_row, num_rows;
    int64_t first_chunk, last_chunk;
    int64_t partial;  // index of its partial states, -1 = the item has all chunks
};

// The folded softmax of one row so far.
struct State {
    float max, total;
    float sums[MAX_DIM];
};

void clear(State& state, int64_t dim) {
    state.max = -INF;
    state.total = 0.0f;
    std::fill_n(state.sums, dim, 0.0f);
}

struct Span {
    int64_t low, high;  // positions seen, both ends included
};

Span visible(const Call& call, const Item& item, int64_t row) {
    const int64_t token = call.query_start[item.seq] + (item.first_row + row) / call.group();
    const int64_t high = call.positions[token];
    return {call.window ? std::max<int64_t>(0, high - call.window + 1) : 0, high};
}

int64_t column(const Call& call, const Item& item, int64_t row) {
    return (item.kv_head * call.group() + (item.first_row + row) % call.group()) * call.dim;
}

int64_t token(const Call& call, const Item& item, int64_t row) {
    return call.query_start[item.seq] + (item.first_row + row) / call.group();
}

// scores[r][0..16) = q[r] · K of one page. q is [D][TILE]. Prefetches the next page's K and this
// page's V.
template <int R, class T>
void score_page(const float* q, const T* keys, const T* next_keys, const T* values, int64_t dim,
                float* scores) {
#pragma GCC unroll 4
    for (int v = 0; v < PAGE; v += LANES) {
        F even[R] = {}, odd[R] = {};
        for (int64_t d = 0; d < dim; d += 2) {
            for (int64_t i = d; i < d + (int64_t)sizeof(T) / 2; i++) {
                __builtin_prefetch(next_keys + i * PAGE);
                __builtin_prefetch(values + i * PAGE);
            }
            const F k0 = load(keys + d * PAGE + v), k1 = load(keys + (d + 1) * PAGE + v);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                even[r] = fma(splat(q[d * TILE + r]), k0, even[r]);
                odd[r] = fma(splat(q[(d + 1) * TILE + r]), k1, odd[r]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) store(scores + r * CHUNK + v, even[r] + odd[r]);
    }
}

// sums[r][0..NV * LANES) += probs[r][t] * V[t] for tokens begin..end of the chunk
template <int R, int NV, class T>
void sum_values(const float* probs, const T* const* pages, int64_t begin, int64_t end, int64_t dim,
                float* sums, int64_t stride) {
    F acc[R][NV] = {};
    for (int64_t page = begin / PAGE; page * PAGE < end; page++) {
        const int64_t first = std::max(begin, page * PAGE), last = std::min(end, (page + 1) * PAGE);
        for (int64_t t = first; t < last; t++) {
            const T* row = pages[page] + (t - page * PAGE) * dim;
            F v[NV];
#pragma GCC unroll 4
            for (int i = 0; i < NV; i++) v[i] = load(row + i * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const F p = splat(probs[r * CHUNK + t]);
#pragma GCC unroll 4
                for (int i = 0; i < NV; i++) acc[r][i] = fma(p, v[i], acc[r][i]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int i = 0; i < NV; i++) store(sums + r * stride + i * LANES, acc[r][i]);
}

template <int R, class T>
void sum_all_values(const float* probs, const T* const* pages, int64_t begin, int64_t end,
                    int64_t dim, float* sums, int64_t stride) {
    constexpr int NV = R > TILE / 2 ? 2 : 4;
    const T* moved[CHUNK_PAGES];
    int64_t d = 0;
    const auto at = [&]() {
        for (int64_t page = begin / PAGE; page * PAGE < end; page++) moved[page] = pages[page] + d;
        return moved;
    };
    for (; d + NV * LANES <= dim; d += NV * LANES)
        sum_values<R, NV>(probs, at(), begin, end, dim, sums + d, stride);
    for (; d < dim; d += LANES)
        sum_values<R, 1>(probs, at(), begin, end, dim, sums + d, stride);
}

// Turns scores[begin..end) into e^(score - max), 0 outside the span; returns the max and the total.
void soften(float* scores, int64_t begin, int64_t end, Span span, float softcap, float* max,
            float* total) {
    const I lanes = lane_ids();
    F top = splat(-INF);
    for (int64_t t = begin; t < end; t += LANES) {
        F s = load(scores + t);
        if (softcap > 0) s = tanh(s / softcap) * softcap;
        const I at = lanes + (int32_t)t;
        s = ((at >= (int32_t)span.low) & (at <= (int32_t)span.high))
                ? s : splat(-INF);
        store(scores + t, s);
        top = maximum(top, s);
    }
    *max = maximum(top);
    const float shift = *max == -INF ? 0.0f : *max;
    F sums = {};
    for (int64_t t = begin; t < end; t += LANES) {
        const F p = exp(load(scores + t) - shift);
        store(scores + t, p);
        sums += p;
    }
    *total = sum(sums);
}

float decay(float from, float to) {
    return from == -INF ? 0.0f : exp(splat(from - to))[0];
}

void fold(State& state, float max, float total, const float* sums, int64_t dim) {
    const float both = std::max(state.max, max);
    const float old_part = decay(state.max, both), new_part = decay(max, both);
    state.max = both;
    state.total = state.total * old_part + total * new_part;
    for (int64_t d = 0; d < dim; d += LANES)
        store(state.sums + d, load(state.sums + d) * old_part + load(sums + d) * new_part);
}

// Rows row..row + R of the item over one chunk. NOTE: only tokens that some row of the tile sees are
// read from V, because later ones may never have been written.
template <int R, class T>
void tile(const Call& call, const Item& item, int64_t row, int64_t chunk, const T* const* keys,
          const T* const* values, const float* q, float* scores, State* states) {
    Span spans[R], all = visible(call, item, row);
    for (int r = 0; r < R; r++) {
        spans[r] = visible(call, item, row + r);
        all = {std::min(all.low, spans[r].low), std::max(all.high, spans[r].high)};
    }
    const int64_t base = chunk * CHUNK;
    const int64_t begin = std::max<int64_t>(all.low - base, 0);
    const int64_t end = std::min<int64_t>(all.high + 1 - base, CHUNK);
    if (begin >= end) return;
    const int64_t first_page = begin / PAGE, last_page = (end - 1) / PAGE;
    for (int64_t page = first_page; page <= last_page; page++)
        score_page<R>(q, keys[page], keys[std::min(page + 1, last_page)], values[page], call.dim,
                      scores + page * PAGE);
    float max[R], total[R];
    for (int r = 0; r < R; r++)
        soften(scores + r * CHUNK, first_page * PAGE, (last_page + 1) * PAGE,
               {spans[r].low - base, spans[r].high - base}, call.softcap, max + r, total + r);
    float sums[R * MAX_DIM];
    sum_all_values<R>(scores, values, begin, end, call.dim, sums, MAX_DIM);
    for (int r = 0; r < R; r++) fold(states[r], max[r], total[r], sums + r * MAX_DIM, call.dim);
}

template <class T>
void tile_rows(int64_t rows, const Call& call, const Item& item, int64_t row, int64_t chunk,
               const T* const* keys, const T* const* values, const float* q, float* scores,
               State* states) {
    switch (rows) {
        case 1: return tile<1>(call, item, row, chunk, keys, values, q, scores, states);
        case 2: return tile<2>(call, item, row, chunk, keys, values, q, scores, states);
        case 3: return tile<3>(call, item, row, chunk, keys, values, q, scores, states);
        case 4: return tile<4>(call, item, row, chunk, keys, values, q, scores, states);
        case 5: return tile<5>(call, item, row, chunk, keys, values, q, scores, states);
        case 6: return tile<6>(call, item, row, chunk, keys, values, q, scores, states);
        case 7: return tile<7>(call, item, row, chunk, keys, values, q, scores, states);
        case 8: return tile<8>(call, item, row, chunk, keys, values, q, scores, states);
    }
}

// q of all tiles of the item, scaled, [tile][D][TILE]
void gather_queries(const Call& call, const Item& item, float* q) {
    for (int64_t first = 0; first < item.num_rows; first += TILE, q += TILE * call.dim) {
        const float* rows[TILE];
        for (int64_t r = 0; r < TILE; r++) {
            const int64_t row = std::min(first + r, item.num_rows - 1);
            rows[r] = call.qkv + token(call, item, row) * call.width + column(call, item, row);
        }
        for (int64_t d = 0; d < call.dim; d++)
            for (int64_t r = 0; r < TILE; r++) q[d * TILE + r] = rows[r][d] * call.scale;
    }
}

void finish(const Call& call, const Item& item, int64_t row, const State& state) {
    float* out = call.out + token(call, item, row) * call.num_heads * call.dim +
                 column(call, item, row);
    float part = 1.0f, total = state.total;
    if (call.sinks) {
        const float sink = call.sinks[column(call, item, row) / call.dim];
        const float both = std::max(state.max, sink);
        part = decay(state.max, both);
        total = total * part + decay(sink, both);
    }
    for (int64_t d = 0; d < call.dim; d += LANES)
        store(out + d, load(state.sums + d) * part / total);
}

template <class T>
void attend(const Call& call, const Item& item, State* partials) {
    static thread_local std::vector<float> q(ITEM_ROWS * MAX_DIM), scores(TILE * CHUNK);
    static thread_local std::vector<State> own(ITEM_ROWS);
    State* states = item.partial < 0 ? own.data() : partials + item.partial;
    for (int64_t r = 0; r < item.num_rows; r++) clear(states[r], call.dim);
    gather_queries(call, item, q.data());
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
        for (int64_t row = 0; row < item.num_rows; row += TILE)
            tile_rows(std::min<int64_t>(TILE, item.num_rows - row), call, item, row, chunk, keys,
                      values, q.data() + row * call.dim, scores.data(), states + row);
    }
    if (item.partial < 0)
        for (int64_t r = 0; r < item.num_rows; r++) finish(call, item, r, states[r]);
}

// Makes one item for each KV head and block of query rows.
void list_items(const Call& call, int64_t num_seqs, std::vector<Item>& items) {
    items.clear();
    for (int32_t seq = 0; seq < num_seqs; seq++) {
        const int64_t rows = (call.query_start[seq + 1] - call.query_start[seq]) * call.group();
        for (int64_t row = 0; row < rows; row += ITEM_ROWS)
            for (int32_t g = 0; g < call.num_kv; g++) {
                Item item{seq, g, row, std::min<int64_t>(ITEM_ROWS, rows - row), 0, 0, -1};
                item.first_chunk = visible(call, item, 0).low / CHUNK;
                item.last_chunk = visible(call, item, item.num_rows - 1).high / CHUNK + 1;
                items.push_back(item);
            }
    }
}

// If there are too few items for the threads, makes each chunk an item of its own.
int64_t split(const std::vector<Item>& items, std::vector<Item>& parts) {
    int64_t partials = 0;
    parts.clear();
    for (const Item& item : items)
        for (int64_t chunk = item.first_chunk; chunk < item.last_chunk; chunk++) {
            Item part = item;
            part.first_chunk = chunk, part.last_chunk = chunk + 1, part.partial = partials;
            partials += item.num_rows;
            parts.push_back(part);
        }
    return partials;
}

// Folds the chunks of an item whose states begin at `partials`; returns where the next item's begin.
const State* fold_parts(const Call& call, const Item& item, const State* partials) {
    static thread_local State state;
    const int64_t chunks = item.last_chunk - item.first_chunk;
    for (int64_t row = 0; row < item.num_rows; row++) {
        clear(state, call.dim);
        for (int64_t c = 0; c < chunks; c++) {
            const State& part = partials[c * item.num_rows + row];
            fold(state, part.max, part.total, part.sums, call.dim);
        }
        finish(call, item, row, state);
    }
    return partials + chunks * item.num_rows;
}

template <class T>
void run(const Call& call, const std::vector<Item>& items, State* partials, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < items.size(); i++) attend<T>(call, items[i], partials);
}

}  // namespace

// Semantics: causal attention of each query row over the pages of its sequence; scores = q · k * scale,
// capped by softcap * tanh(scores / softcap) if softcap > 0, over the last `window` positions if > 0;
// sinks[h], if there are sinks, is one more score of head h, whose value is zero.
// Shape: qkv float32 [T, (H + 2G) * D], q in front; block_tables int64 [S, table_stride]; the layer's
// K and V lie `layer` bytes into each page; sinks float32 [H] or null; out float32 [T, H * D]; D a
// multiple of 16, at most 256.
EXPORT void paged_attention(const float* qkv, int64_t num_seqs, const int32_t* query_start,
                            const int32_t* positions, int64_t max_context,
                            const int64_t* block_tables, int64_t table_stride, const char* arena,
                            int64_t layer, int format, int64_t num_heads, int64_t num_kv,
                            int64_t dim, float scale, int64_t window, float softcap,
                            const float* sinks, float* out) {
    static thread_local std::vector<Item> items, parts;
    static thread_local std::vector<State> partials;
    const Call call{qkv, out, (num_heads + 2 * num_kv) * dim, query_start, positions, block_tables,
                    table_stride, arena + layer, num_heads, num_kv, dim, window, scale, softcap, sinks};
    list_items(call, num_seqs, items);
    const bool apart = max_context > CHUNK && (int64_t)items.size() < 2 * num_threads;
    if (apart) partials.resize(std::max<int64_t>(split(items, parts), partials.size()));
    const int threads = team(query_start[num_seqs] * num_heads * dim * max_context);
    const auto& work = apart ? parts : items;
    format == BF16 ? run<bf16>(call, work, partials.data(), threads)
            : run<float>(call, work, partials.data(), threads);
    const State* state = partials.data();
    if (apart)
        for (const Item& item : items) state = fold_parts(call, item, state);
}
