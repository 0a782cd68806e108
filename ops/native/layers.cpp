// Runs all decoder layers in one call and one team of threads, with memory that is kept between calls.
//
// If Python called each kernel, the calls and new memory would cost about 10 us per kernel, which is a
// fifth of a step with one row. The structures match the ctypes structures in ops/cpu_layers.py.
#include "kernels.h"

namespace {

struct Linear {
    const LinearPart* parts;
    const float* bias;
    const int32_t *projections, *widths;
    int64_t num_parts, num_projections, in_features, out_features;
};

struct Norm {
    const float* weight;  // null = the layer lacks this norm
    double eps;
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

void project(Team& team, const Linear& w, const Step& step, int64_t layer, const float* x, float* y) {
    linear(team, x, step.rows, w.in_features, w.parts, w.num_parts, w.bias, w.out_features, y);
    if (step.num_segments > 0)
        add_lora(team, y, x, w.in_features, w.projections, w.widths, w.num_projections,
                 layer * step.layer_entries, step.slot_entries, step.segment_start,
                 step.segment_slot, step.num_segments, step.a_offset, step.b_offset, step.rank,
                 step.lora_arena, step.lora_format);
}

// Computes one layer. x: input of the layer, replaced by the input of the next layer.
void run_layer(Team& team, const Layer& layer, const Step& step, float* x, float* residual) {
    const int64_t rows = step.rows, heads = layer.num_heads, index = layer.layer;
    const int64_t hidden = layer.output.out_features, inner = layer.down.in_features;
    const int64_t offset = index * step.layer_bytes;
    const auto norm = [&](const Norm& n, float* sum) {
        if (n.weight) rms_norm(team, x, sum, n.weight, rows, hidden, n.eps, x);
    };

    float* qkv = team.buffer<float>(QKV, rows * layer.qkv.out_features);
    float* mixed = team.buffer<float>(MIXED, rows * layer.output.in_features);
    project(team, layer.qkv, step, index, x, qkv);
    rope_write_kv(team, qkv, rows, heads, step.num_kv, step.dim, layer.rope, layer.q.weight,
                  layer.k.weight, layer.q.eps, step.token_seq, step.positions, step.block_tables,
                  step.table_stride, step.arena, offset, step.kv_format);
    paged_attention(team, qkv, step.num_seqs, step.query_start, step.positions, step.max_context,
                    step.block_tables, step.table_stride, step.arena, offset, step.kv_format,
                    heads, step.num_kv, step.dim, layer.scale, layer.window, layer.softcap, nullptr,
                    mixed);
    project(team, layer.output, step, index, mixed, x);
    norm(layer.post_attention, nullptr);
    norm(layer.mlp, residual);

    float* gate_up = team.buffer<float>(GATE_UP, rows * layer.gate_up.out_features);
    float* act = team.buffer<float>(INNER, rows * inner);
    project(team, layer.gate_up, step, index, x, gate_up);
    gated_activation(team, gate_up, rows, inner, layer.silu, act);
    project(team, layer.down, step, index, act, x);
    norm(layer.post_mlp, nullptr);
    norm(layer.following, residual);
}

}  // namespace

// Semantics: computes the layers in order, each as in workers.layers.decoder_layer.
// Shape: x, residual float32 [rows, K], both changed in place.
EXPORT void run_layers(const Layer* layers, int64_t count, const Step* step, float* x,
                       float* residual) {
    const int64_t work = step->rows * layers->gate_up.in_features * layers->gate_up.out_features;
    in_team(work, [&](Team& team) {
        for (int64_t i = 0; i < count; i++) run_layer(team, layers[i], *step, x, residual);
    });
}
