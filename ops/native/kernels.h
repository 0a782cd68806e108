// Kernels of a decoder layer, which each thread of a team calls. Each is documented where its exported
// form is defined.
#pragma once

#include "parallel.h"
#include "rows.h"

// Some output columns of a linear. panels: their weights, as pack_linear or pack_blocks wrote them.
struct LinearPart {
    const void* panels;
    int64_t format, columns;
};

struct Norm {
    const float* weight;  // null = no norm
    double eps;
};

// Returns memory for x [rows, depth] in the form in which a linear with these parts reads it; null if
// they all read x itself.
bf16* rounded_memory(Team& team, Buffer buffer, const LinearPart* parts, int64_t num_parts,
                     int64_t rows, int64_t depth);

// Rounds the rows, which were written without being rounded.
void round_rows(Team& team, const Rows& x, int64_t rows);

void linear(Team& team, const Rows& x, int64_t rows, const LinearPart* parts, int64_t num_parts,
            const float* bias, int64_t columns, float* y);

// Computes y = act(gate) * up, where gate and up are the linears of the two parts, each with as many
// columns as y.
void gated_linear(Team& team, const Rows& x, int64_t rows, const LinearPart* parts,
                  const float* bias, int silu, const Rows& y);

// For each row: x = first(x), residual += x, y = last(residual). Without residual, y = last(x).
void rms_norm(Team& team, const float* x, float* residual, Norm first, Norm last, int64_t rows,
              const Rows& y);

void gated_activation(Team& team, const float* gate_up, int64_t rows, int silu, const Rows& y);

void gate_row(const float* gate, const float* up, int64_t width, int silu, float* y);

void rope_write_kv(Team& team, float* qkv, int64_t rows, int64_t num_heads, int64_t num_kv,
                   int64_t dim, const float* rope, const float* q_weight, const float* k_weight,
                   float eps, const int32_t* token_seq, const int32_t* positions,
                   const int64_t* block_tables, int64_t table_stride, char* arena, int64_t layer,
                   int format);

void paged_attention(Team& team, const float* qkv, int64_t num_seqs, const int32_t* query_start,
                     const int32_t* positions, int64_t max_context, const int64_t* block_tables,
                     int64_t table_stride, const char* arena, int64_t layer, int format,
                     int64_t num_heads, int64_t num_kv, int64_t dim, float scale, int64_t window,
                     float softcap, const float* sinks, const Rows& out);

void add_lora(Team& team, float* y, const float* x, int64_t depth, const int32_t* projections,
              const int32_t* widths, int64_t num_projections, int64_t first_entry,
              int64_t slot_entries, const int32_t* segment_start, const int32_t* segment_slot,
              int64_t num_segments, const int64_t* a_offset, const int64_t* b_offset,
              const int32_t* rank, const char* arena, int format);
