// Attention over paged KV, prefill and decode in one call.
//
// In a page, K is [G][D][16] and V is [G][16][D]. With this K, the scores of a page's tokens are
// computed as one vector, without horizontal sums. For bfloat16 on tiles see tile_attention.cpp.
#include "attention_items.h"

using namespace attention;

namespace {

constexpr int TILE = LANES == 16 ? 8 : 4;  // rows whose sums stay in registers together
constexpr int ITEM_ROWS = 8 * TILE;        // rows that share one pass over a chunk in the cache
constexpr int PASS_ITEMS = 4;  // full items per thread whose partial states are in memory at a time

// Computes scores[r][0..16) = q[r] · K of one page. q is [D][TILE]. Prefetches the next page's K and
// this page's V.
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

// Computes sums[r][0..NV * LANES) = sum of probs[r][t] * V[t] over tokens begin..end of the chunk.
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

// Computes rows row..row + R of the item over one chunk. NOTE: V is read only for tokens that some row
// of the tile sees, because V of later tokens may never have been written.
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
               {spans[r].low - base, spans[r].high - base}, call.softcap, scores + r * CHUNK,
               max + r, total + r);
    float sums[R * MAX_DIM];
    sum_all_values<R>(scores, values, begin, end, call.dim, sums, MAX_DIM);
    for (int r = 0; r < R; r++) fold(states[r], max[r], total[r], sums + r * MAX_DIM, call.dim);
}

template <int R = 1, class T>
void tile_rows(int64_t rows, const Call& call, const Item& item, int64_t row, int64_t chunk,
               const T* const* keys, const T* const* values, const float* q, float* scores,
               State* states) {
    if (rows == R)
        tile<R>(call, item, row, chunk, keys, values, q, scores, states);
    else if constexpr (R < TILE)
        tile_rows<R + 1>(rows, call, item, row, chunk, keys, values, q, scores, states);
}

// Writes the item's q, scaled, as [tile][D][TILE].
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

template <class T>
void attend(const Call& call, const Item& item, State* partials) {
    static thread_local std::vector<float> q(ITEM_ROWS * MAX_DIM), scores(TILE * CHUNK);
    static thread_local std::vector<State> own(ITEM_ROWS);
    State* states = item.partial < 0 ? own.data() : partials + item.partial;
    for (int64_t r = 0; r < item.num_rows; r++) clear(states[r], call.dim);
    gather_queries(call, item, q.data());
    for_each_chunk<T>(call, item, [&](int64_t chunk, const T* const* keys, const T* const* values) {
        for (int64_t row = 0; row < item.num_rows; row += TILE)
            tile_rows(std::min<int64_t>(TILE, item.num_rows - row), call, item, row, chunk, keys,
                      values, q.data() + row * call.dim, scores.data(), states + row);
    });
    if (item.partial < 0)
        for (int64_t r = 0; r < item.num_rows; r++) finish(call, item, r, states[r]);
}

}  // namespace

void paged_attention(Team& team, const float* qkv, int64_t num_seqs, const int32_t* query_start,
                     const int32_t* positions, int64_t max_context, const int64_t* block_tables,
                     int64_t table_stride, const char* arena, int64_t layer, int format,
                     int64_t num_heads, int64_t num_kv, int64_t dim, float scale, int64_t window,
                     float softcap, const float* sinks, const Rows& out) {
    static thread_local std::vector<Item> items, parts, pass;
    static thread_local std::vector<State> states(ITEM_ROWS);
    const Call call{qkv, out, (num_heads + 2 * num_kv) * dim, query_start, positions, block_tables,
                    table_stride, arena + layer, num_heads, num_kv, dim, window, scale, softcap, sinks};
    list_items(call, num_seqs, ITEM_ROWS, items);
    const auto compute = [&](const std::vector<Item>& work, State* partials) {
#ifdef TILES
        if (format == BF16) return attend_on_tiles(team, call, work, partials);
#endif
        team.share(work.size(), [&](int64_t i) {
            format == FP32 ? attend<float>(call, work[i], partials)
                           : attend<bf16>(call, work[i], partials);
        });
    };
    if (max_context <= CHUNK || (int64_t)items.size() >= 2 * team.threads)
        return compute(items, nullptr);
    split(items, parts);
    // The memory of the partial states, which stays allocated, does not grow with the context.
    const int64_t max_states = PASS_ITEMS * team.threads * ITEM_ROWS;
    State* partials = team.buffer<State>(PARTIALS, max_states);
    for (size_t next = 0; next < parts.size();) {
        next = next_pass(parts, next, max_states, pass);
        compute(pass, partials);
        // One thread combines them in all passes, because its `states` continue in the next pass.
        if (team.thread == 0)
            fold_pass(call, pass, next < parts.size() ? &parts[next] : nullptr, partials,
                      states.data());
        team.wait();
    }
}

// Semantics: causal attention of each query row over the pages of its sequence; scores = q · k * scale,
// capped by softcap * tanh(scores / softcap) if softcap > 0, over the last `window` positions if > 0;
// sinks[h], if there are sinks, is one more score of head h, whose value is zero.
// Shape: qkv float32 [T, (H + 2G) * D], q first; block_tables int64 [S, table_stride]; the layer's K
// and V begin at byte `layer` of each page; sinks float32 [H] or null; out float32 [T, H * D]; D a
// multiple of 16, at most 256.
EXPORT void paged_attention(const float* qkv, int64_t num_seqs, const int32_t* query_start,
                            const int32_t* positions, int64_t max_context,
                            const int64_t* block_tables, int64_t table_stride, const char* arena,
                            int64_t layer, int format, int64_t num_heads, int64_t num_kv,
                            int64_t dim, float scale, int64_t window, float softcap,
                            const float* sinks, float* out) {
    in_team(query_start[num_seqs] * num_heads * dim * max_context, [&](Team& team) {
        paged_attention(team, qkv, num_seqs, query_start, positions, max_context, block_tables,
                        table_stride, arena, layer, format, num_heads, num_kv, dim, scale, window,
                        softcap, sinks, {out, num_heads * dim, nullptr});
    });
}
