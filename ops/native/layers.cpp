// Runs all decoder layers in one call and one team of threads, with memory that is kept between calls.
//
// If Python called each kernel, the calls and new memory would cost about 10 us per kernel, which is a
// fifth of a step with one row. The structures match the ctypes structures in ops/cpu_layers.py.
#include <algorithm>

#include "kernels.h"

namespace {

constexpr int64_t BLOCK_ROWS = 128;  // most rows that a thread computes together
constexpr int64_t MANY_ROWS = 64;    // rows per thread from which a thread computes whole blocks

struct Linear {
    const LinearPart* parts;
    const float* bias;
    const int32_t *projections, *widths;
    int64_t num_parts, num_projections, in_features, out_features;
};

struct Layer {
    Linear qkv, output, gate_up, down;
    Norm q, k, post_attention, mlp, post_mlp, following;
    const float* rope;
    int64_t layer, num_heads, window, silu;
    double scale, softcap;
};

struct Step {
    int64_t rows, num_seqs, max_context, table_stride;
    const int32_t *query_start, *token_seq, *positions;
    const int64_t* block_tables;
    char* arena;
    int64_t layer_bytes, num_kv, dim, kv_format;
    int64_t num_segments;  // 0 = no adapters; the members below are then undefined
    const int32_t *segment_start, *segment_slot;
    int64_t layer_entries, slot_entries;  // entries of the adapter tables per layer and per slot
    const int64_t *a_offset, *b_offset;
    const int32_t* rank;
    const char* lora_arena;
    int64_t lora_format;
};

void project(Team& team, const Linear& w, const Step& step, int64_t layer, const Rows& x, float* y) {
    linear(team, x, step.rows, w.parts, w.num_parts, w.bias, w.out_features, y);
    if (step.num_segments > 0)
        add_lora(team, y, x.x, w.in_features, w.projections, w.widths, w.num_projections,
                 layer * step.layer_entries, step.slot_entries, step.segment_start,
                 step.segment_slot, step.num_segments, step.a_offset, step.b_offset, step.rank,
                 step.lora_arena, step.lora_format);
}

// Returns memory of the team for the rounded form of the rows that a linear reads, if it reads one.
bf16* rounded_for(Team& team, Buffer buffer, const Linear& w, int64_t rows) {
    return rounded_memory(team, buffer, w.parts, w.num_parts, rows, w.in_features);
}

// Returns memory of the team for the rows that a linear reads.
Rows input_memory(Team& team, Buffer buffer, Buffer rounded, const Linear& w, int64_t rows) {
    return {team.buffer<float>(buffer, rows * w.in_features), w.in_features,
            rounded_for(team, rounded, w, rows)};
}

// Computes a layer up to its attention. x: input of the layer.
void before_attention(Team& team, const Layer& layer, const Step& step, const Rows& x, float* qkv) {
    project(team, layer.qkv, step, layer.layer, x, qkv);
    rope_write_kv(team, qkv, step.rows, layer.num_heads, step.num_kv, step.dim, layer.rope,
                  layer.q.weight, layer.k.weight, layer.q.eps, step.token_seq, step.positions,
                  step.block_tables, step.table_stride, step.arena, layer.layer * step.layer_bytes,
                  step.kv_format);
}

// Returns the activation of gate and up, in memory of the team.
Rows activate(Team& team, const Layer& layer, const Step& step, const Rows& x) {
    const Linear& w = layer.gate_up;
    const int64_t rows = step.rows, width = layer.down.in_features;
    const Rows act = input_memory(team, INNER, ACTIVATED, layer.down, rows);
    if (step.num_segments == 0 && w.num_parts == 2 && w.parts[0].columns == width) {
        gated_linear(team, x, rows, w.parts, w.bias, layer.silu, act);
    } else {
        float* gate_up = team.buffer<float>(GATE_UP, rows * w.out_features);
        project(team, w, step, layer.layer, x, gate_up);
        gated_activation(team, gate_up, rows, layer.silu, act);
    }
    return act;
}

// Computes a layer from its attention's output on. y: input of the next layer.
void after_attention(Team& team, const Layer& layer, const Step& step, const Rows& attended,
                     float* residual, const Rows& y) {
    const int64_t rows = step.rows;
    const auto norm = [&](const Norm& first, const Norm& last, const Rows& to) {
        rms_norm(team, y.x, last.weight ? residual : nullptr, first, last, rows, to);
    };
    project(team, layer.output, step, layer.layer, attended, y.x);
    const Rows normed{y.x, y.depth, rounded_for(team, NORMED, layer.gate_up, rows)};
    norm(layer.post_attention, layer.mlp, normed);
    project(team, layer.down, step, layer.layer, activate(team, layer, step, normed), y.x);
    norm(layer.post_mlp, layer.following, y);
}

// Returns the step's rows first..first + rows. starts: memory for their segments.
Step some_rows(Step step, int64_t first, int64_t rows, std::vector<int32_t>& starts) {
    step.token_seq += first;
    step.positions += first;
    step.rows = rows;
    if (step.num_segments > 0) {
        starts.assign(step.segment_start, step.segment_start + step.num_segments + 1);
        for (int32_t& start : starts)
            start = std::clamp<int64_t>(start - first, 0, rows);
        step.segment_start = starts.data();
    }
    return step;
}

// Computes `count` layers. Between two attentions no row depends on another. If there are many rows,
// each thread therefore computes whole blocks of rows from one attention to the next, so that a block
// stays in the cache and the threads do not wait for each other.
void run(Team& team, const Layer* layers, int64_t count, const Step& step, float* x,
         float* residual) {
    const int64_t rows = step.rows, hidden = layers->output.out_features;
    float* qkv = nullptr;
    Rows attended{};
    const auto compute = [&](Team& members, const Step& some, int64_t first, const Layer* last,
                             const Layer* next) {
        Rows y{x + first * hidden, hidden, nullptr};
        if (next) y.rounded = rounded_for(members, NORMED, next->qkv, some.rows);
        if (last)
            after_attention(members, *last, some, attended.from(first), residual + first * hidden, y);
        else
            round_rows(members, y, some.rows);
        if (next) before_attention(members, *next, some, y, qkv + first * next->qkv.out_features);
    };
    const int64_t blocks = team.threads * ceil_div(rows, BLOCK_ROWS * team.threads);
    const int64_t block = ceil_div(ceil_div(rows, blocks), 16) * 16;
    for (int64_t i = 0; i <= count; i++) {
        const Layer *last = i > 0 ? layers + i - 1 : nullptr, *next = i < count ? layers + i : nullptr;
        if (next) qkv = team.buffer<float>(QKV, rows * next->qkv.out_features);
        if (rows < MANY_ROWS * team.threads)
            compute(team, step, 0, last, next);
        else
            team.share(ceil_div(rows, block), [&](int64_t index) {
                static thread_local std::vector<int32_t> starts;
                Team alone = team.alone();
                const int64_t first = index * block;
                const Step some = some_rows(step, first, std::min(block, rows - first), starts);
                compute(alone, some, first, last, next);
            });
        if (!next) return;
        attended = input_memory(team, MIXED, ATTENDED, next->output, rows);
        paged_attention(team, qkv, step.num_seqs, step.query_start, step.positions,
                        step.max_context, step.block_tables, step.table_stride, step.arena,
                        next->layer * step.layer_bytes, step.kv_format, next->num_heads,
                        step.num_kv, step.dim, next->scale, next->window, next->softcap, nullptr,
                        attended);
    }
}

}  // namespace

// Semantics: computes the layers in order, each as in workers.layers.decoder_layer.
// Shape: x, residual float32 [rows, K], both changed in place.
EXPORT void run_layers(const Layer* layers, int64_t count, const Step* step, float* x,
                       float* residual) {
    const int64_t work = step->rows * layers->gate_up.in_features * layers->gate_up.out_features;
    in_team(work, [&](Team& team) { run(team, layers, count, *step, x, residual); });
}
