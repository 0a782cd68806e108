// Ops that process every row once: embedding, RMS norm, gated activation, and rope with the write of
// keys and values. A row's result never depends on the other rows.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "vector.h"

namespace {

template <class T>
void embed_row(const T* row, int64_t width, float scale, float* y) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(y + i, load(row + i) * scale);
    for (; i < width; i++) y[i] = widen(row[i]) * scale;
}

template <class T>
void embed_rows(const int32_t* ids, int64_t rows, const T* table, int64_t width, float scale,
                float* y) {
    in_team(rows * width, [&](Team& team) {
        team.share(rows, [&](int64_t r) {
            embed_row(table + ids[r] * width, width, scale, y + r * width);
        });
    });
}

float sum_of_squares(const float* x, int64_t width) {
    F total[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
        for (int v = 0; v < 4; v++) {
            const F value = load(x + i + v * LANES);
            total[v] = fma(value, value, total[v]);
        }
    float squares = sum((total[0] + total[1]) + (total[2] + total[3]));
    for (; i < width; i++) squares += x[i] * x[i];
    return squares;
}

void normalise(const float* x, const float* weight, int64_t width, float eps, float* y) {
    const float factor = 1.0f / __builtin_sqrtf(sum_of_squares(x, width) / (float)width + eps);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(y + i, load(x + i) * factor * load(weight + i));
    for (; i < width; i++) y[i] = x[i] * factor * weight[i];
}

void add(float* to, const float* x, int64_t width) {
    for (int64_t i = 0; i < width; i++) to[i] += x[i];
}

template <bool SILU>
void gate_row(const float* gate, const float* up, int64_t width, float* y) {
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t left = width - i;
        float g_tail[LANES] = {}, u_tail[LANES] = {}, y_tail[LANES];
        if (left < LANES) {
            std::copy_n(gate + i, left, g_tail);
            std::copy_n(up + i, left, u_tail);
        }
        const F g = load(left < LANES ? g_tail : gate + i), u = load(left < LANES ? u_tail : up + i);
        F act;
        if constexpr (SILU) {
            act = g / (splat(1.0f) + exp(-g));
        } else {
            const F inner = fma(g * g * g, splat(0.044715f), g) * 0.7978845608028654f;
            act = g * 0.5f * (splat(1.0f) + tanh(inner));
        }
        store(left < LANES ? y_tail : y + i, act * u);
        if (left < LANES) std::copy_n(y_tail, left, y + i);
    }
}

// Rotates x [D] in place. angles: D / 2 cosines, then D / 2 sines.
void rotate(float* x, const float* angles, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float first = x[i], second = x[i + half];
        const float cos = angles[i], sin = angles[i + half];
        x[i] = first * cos - second * sin;
        x[i + half] = second * cos + first * sin;
    }
}

// Whether two neighbouring elements of K, and two neighbouring tokens of V, are stored as a pair, as
// tiles need them.
#ifdef TILES
template <class T>
constexpr bool ARE_PAIRED = std::is_same_v<T, bf16>;
#else
template <class T>
constexpr bool ARE_PAIRED = false;
#endif

// Returns the index of element d of a token in K, which is [D][16], or [D / 2][16][2] with pairs.
template <class T>
int64_t key_index(int64_t slot, int64_t d) {
    return ARE_PAIRED<T> ? (d / 2 * PAGE + slot) * 2 + d % 2 : d * PAGE + slot;
}

// Returns the index of element d of a token in V, which is [16][D], or [8][D][2] with pairs.
template <class T>
int64_t value_index(int64_t slot, int64_t d, int64_t dim) {
    return ARE_PAIRED<T> ? (slot / 2 * dim + d) * 2 + slot % 2 : slot * dim + d;
}

struct Heads {
    int64_t queries, kv, dim;
};

template <class T>
void rope_row(float* row, const float* angles, const Heads& heads, const float* q_weight,
              const float* k_weight, float eps, T* keys, T* values, int64_t slot) {
    for (int64_t h = 0; h < heads.queries + heads.kv; h++) {
        float* head = row + h * heads.dim;
        const float* weight = h < heads.queries ? q_weight : k_weight;
        if (weight) normalise(head, weight, heads.dim, eps, head);
        if (angles) rotate(head, angles, heads.dim);
    }
    const float* k = row + heads.queries * heads.dim;
    const float* v = k + heads.kv * heads.dim;
    const int64_t head = heads.dim * PAGE;
    for (int64_t g = 0; g < heads.kv; g++) {
        for (int64_t d = 0; d < heads.dim; d++)
            narrow(k[g * heads.dim + d], keys + g * head + key_index<T>(slot, d));
        for (int64_t d = 0; d < heads.dim; d++)
            narrow(v[g * heads.dim + d], values + g * head + value_index<T>(slot, d, heads.dim));
    }
}

}  // namespace

// Shape: ids int32 [rows], table [*, width] bfloat16 or float32, y float32 [rows, width].
EXPORT void embed(const int32_t* ids, int64_t rows, const void* table, int format, int64_t width,
                  float scale, float* y) {
    if (format == BF16)
        embed_rows(ids, rows, (const bf16*)table, width, scale, y);
    else
        embed_rows(ids, rows, (const float*)table, width, scale, y);
}

void rms_norm(Team& team, const float* x, float* residual, Norm first, Norm last, int64_t rows,
              const Rows& y) {
    const int64_t width = y.depth;
    team.share(rows, [&](int64_t r) {
        const float* row = x + r * width;
        float* out = y.x + r * width;
        if (first.weight) {
            normalise(row, first.weight, width, first.eps, out);
            row = out;
        }
        if (residual) {
            add(residual + r * width, row, width);
            row = residual + r * width;
        }
        if (last.weight) normalise(row, last.weight, width, last.eps, out);
        y.round(r, 0, width);
    });
}

// Semantics: with residual: residual += x, y = norm(residual); else y = norm(x).
// Shape: x, residual (or null), y float32 [rows, width]; weight float32 [width].
EXPORT void rms_norm(const float* x, float* residual, const float* weight, int64_t rows,
                     int64_t width, float eps, float* y) {
    in_team(rows * width, [&](Team& team) {
        rms_norm(team, x, residual, {}, {weight, eps}, rows, {y, width, nullptr});
    });
}

void gate_row(const float* gate, const float* up, int64_t width, int silu, float* y) {
    silu ? gate_row<true>(gate, up, width, y) : gate_row<false>(gate, up, width, y);
}

void gated_activation(Team& team, const float* gate_up, int64_t rows, int silu, const Rows& y) {
    // Each row is divided into parts, so that even one row keeps all threads busy.
    constexpr int64_t PART = 512;
    const int64_t width = y.depth, parts = ceil_div(width, PART);
    team.share(rows * parts, [&](int64_t i) {
        const int64_t row = i / parts, first = i % parts * PART;
        const int64_t count = std::min(PART, width - first);
        const float* gate = gate_up + 2 * row * width + first;
        gate_row(gate, gate + width, count, silu, y.x + row * width + first);
        y.round(row, first, count);
    });
}

// Semantics: y = act(gate) * up, where act is silu or the tanh form of gelu.
// Shape: gate_up float32 [rows, 2 * width], gate first; y float32 [rows, width].
EXPORT void gated_activation(const float* gate_up, int64_t rows, int64_t width, int silu, float* y) {
    in_team(16 * rows * width,
            [&](Team& team) { gated_activation(team, gate_up, rows, silu, {y, width, nullptr}); });
}

void rope_write_kv(Team& team, float* qkv, int64_t rows, int64_t num_heads, int64_t num_kv,
                   int64_t dim, const float* rope, const float* q_weight, const float* k_weight,
                   float eps, const int32_t* token_seq, const int32_t* positions,
                   const int64_t* block_tables, int64_t table_stride, char* arena, int64_t layer,
                   int format) {
    const Heads heads{num_heads, num_kv, dim};
    const int64_t width = (num_heads + 2 * num_kv) * dim, half = num_kv * dim * PAGE;
    team.share(rows, [&](int64_t r) {
        const int64_t position = positions[r], slot = position % PAGE;
        char* page = arena + block_tables[token_seq[r] * table_stride + position / PAGE] + layer;
        const float* angles = rope ? rope + position * dim : nullptr;
        float* row = qkv + r * width;
        if (format == BF16)
            rope_row(row, angles, heads, q_weight, k_weight, eps, (bf16*)page, (bf16*)page + half,
                     slot);
        else
            rope_row(row, angles, heads, q_weight, k_weight, eps, (float*)page,
                     (float*)page + half, slot);
    });
}

// Semantics: norms q and k in place (if q_weight), rotates them (if rope), writes k and v to pages.
// Shape: qkv float32 [rows, (H + 2G) * D]; rope float32 [*, D], q_weight, k_weight float32 [D] or null;
// page, from byte `layer` on: K of all heads (see key_index), then V of all heads (see value_index).
EXPORT void rope_write_kv(float* qkv, int64_t rows, int64_t num_heads, int64_t num_kv, int64_t dim,
                          const float* rope, const float* q_weight, const float* k_weight,
                          float eps, const int32_t* token_seq, const int32_t* positions,
                          const int64_t* block_tables, int64_t table_stride, char* arena,
                          int64_t layer, int format) {
    in_team(4 * rows * (num_heads + 2 * num_kv) * dim, [&](Team& team) {
        rope_write_kv(team, qkv, rows, num_heads, num_kv, dim, rope, q_weight, k_weight, eps,
                      token_seq, positions, block_tables, table_stride, arena, layer, format);
    });
}
