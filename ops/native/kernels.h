// Kernels of a decoder layer, which each thread of a team calls. Each is documented where its exported
// form is defined.
#pragma once

#include "parallel.h"

// Some output columns of a linear. panels: their weights, as pack_linear or pack_blocks wrote them.
struct LinearPart {
    const void* panels;
    int64_t format, columns;
};

void linear(Team& team, const float* x, int64_t rows, int64_t depth, const LinearPart* parts,
            int64_t num_parts, const float* bias, int64_t columns, float* y);

void linear_on_tiles(Team& team, const float* x, int64_t rows, int64_t depth,
                     const LinearPart* parts, int64_t num_parts, const float* bias,
                     int64_t columns, float* y);

void rms_norm(Team& team, const float* x, float* residual, const float* weight, int64_t rows,
              int64_t width, float eps, float* y);

void gated_activation(Team& team, const float* gate_up, int64_t rows, int64_t width, int silu,
                      float* y);

void rope_write_kv(Team& team, float* qkv, int64_t rows, int64_t num_heads, int64_t num_kv,
                   int64_t dim, const float* rope, const float* q_weight, const float* k_weight,
                   float eps, const int32_t* token_seq, const int32_t* positions,
                   const int64_t* block_tables, int64_t table_stride, char* arena, int64_t layer,
                   int format);

void paged_attention(Team& team, const float* qkv, int64_t num_seqs, const int32_t* query_start,
                     const int32_t* positions, int64_t max_context, const int64_t* block_tables,
                     int64_t table_stride, const char* arena, int64_t layer, int format,
                     int64_t num_heads, int64_t num_kv, int64_t dim, float scale, int64_t window,
                     float softcap, const float* sinks, float* out);

void add_lora(Team& team, float* y, const float* x, int64_t depth, const int32_t* projections,
              const int32_t* widths, int64_t num_projections, int64_t first_entry,
              int64_t slot_entries, const int32_t* segment_start, const int32_t* segment_slot,
              int64_t num_segments, const int64_t* a_offset, const int64_t* b_offset,
              const int32_t* rank, const char* arena, int format);
