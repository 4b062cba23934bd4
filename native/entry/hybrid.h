// Ops of hybrid caches: what their kernels are given. Made and checked by hybrid.cpp, append_swa.cpp, compress.cpp,
// index_scores.cpp and attention/sparse/sparse.cpp. All strides are in bytes.
// docs/spec.md section 23 has the arithmetic.
#pragma once
#include "check.h"
#include "params.h"

namespace kvx {

// Pages of rows. Row r of page p has its elements at data + p * page + r * data_bytes and its scales at
// data + p * page + rows * data_bytes + r * scale_bytes.
struct RowPages {
  char* data;    // NULL = absent
  int64_t page;  // bytes from page to page
  int64_t num_pages;
  int32_t rows;                  // of a page
  int32_t dim, coded, rope_dim;  // coded = dim - rope_dim; the rotary part is bf16 behind the coded elements
  int32_t group, num_groups;     // 0: no scales
  int32_t data_bytes, coded_bytes, scale_bytes;
  int32_t dtype, scale_dtype;
  float least_amax, least_scale;
  bool rounds_first, has_power_scale, ties_down;
};

struct StepParams {
  const int32_t* slots;       // [S]
  const int32_t* cu_seqlens;  // [S + 1]
  const int32_t* starts;      // [S]
  int32_t num_seqs, num_slots;
  int64_t num_tokens;  // rows of [T, ...] arrays: cu_seqlens is not to lead past them
};

// Norm and rotation of a row before it is coded.
struct FinishParams {
  const char* weight;  // NULL = no norm
  int32_t weight_dtype;
  const float *cos, *sin;  // NULL = no rotation
  int64_t table_row;       // bytes from position to position; the same for both
  int64_t num_positions;
  int32_t rope_dim;  // elements that turn: the last
  float inverse_dim, eps;
};

// Entry j of a slot is row j % rows of page [slot, j / rows].
struct EntryTable {
  const int32_t* pages;
  int64_t row;  // bytes from slot to slot
  int32_t columns;
};

struct AppendSwaParams {
  RowPages window;
  int32_t* positions;  // [num_pages, rows]; NULL = rows of this step alone
  RowsParams x;        // head stride unused
  FinishParams finish;
  StepParams step;
  unsigned long long* errors;
  int32_t device;
};

struct CompressParams {
  float* state;
  int64_t state_slot;    // bytes
  RowsParams kv, score;  // [T, parts * dim]; head stride unused
  const float* bias;     // [ratio, parts * dim]; NULL = none
  FinishParams finish;
  RowPages entries;
  EntryTable table;
  const int32_t* num_shared;  // NULL = none
  StepParams step;
  int32_t ratio, dim, parts;
  bool has_overlap, is_running, has_hadamard;
  unsigned long long* errors;
  int32_t device;
};

struct IndexScoresParams {
  RowsParams q;  // [T, H, dim]; dtype may be F8_E4M3
  const char* weights;
  int64_t weight_token, weight_head;
  int32_t num_heads;
  RowPages keys;
  EntryTable table;
  float* scores;
  int64_t score_token;
  int64_t num_entries;  // columns of scores
  StepParams step;
  int32_t ratio;
  unsigned long long* errors;
  int32_t device;
};

struct TopkParams {
  const float* scores;
  int64_t score_token;
  const int32_t* lengths;  // NULL = all
  int32_t* indices;
  int64_t index_token;
  int64_t num_tokens, num_entries;
  int32_t k;
  char* workspace;
  uint64_t workspace_bytes;
  int32_t device;
};

struct SparseParams {
  RowsParams q, out;
  char* lse;
  int64_t lse_token, lse_head;
  const float* sinks;
  RowPages window, fresh, entries;
  const int32_t* positions;
  EntryTable table;
  const int32_t* selected;  // NULL = every entry a token may read
  int64_t selected_token;
  int32_t num_selected;
  const float *cos, *sin;  // NULL = out is not turned back
  int64_t table_row, num_positions;
  int32_t rope_dim;  // of cos and sin
  StepParams step;
  int32_t ratio, window_tokens, num_heads, dim;
  int64_t max_entries;  // that a token reads: bounds loops and parts
  float scale;
  char* workspace;
  uint64_t workspace_bytes;
  unsigned long long* errors;
  int32_t device;
};

// Shared checks (hybrid.cpp).
kvx_status_t lower_row_pages(const char* what, const kvx_rows_t& rows, RowPages* out);
kvx_status_t lower_step(const kvx_step_t& step, int64_t num_tokens, int64_t num_slots, StepParams* out);
// For host memory, where contents can be read: slots and positions are in range, and tokens in order.
kvx_status_t check_host_step(const StepParams& step);
kvx_status_t lower_finish(const kvx_finish_t& finish, int64_t dim, FinishParams* out);
kvx_status_t lower_entry_table(const kvx_array_t& table, int64_t num_slots, EntryTable* out);
kvx_status_t lower_turn(const kvx_array_t& cos, const kvx_array_t& sin, int64_t dim, const float** c, const float** s,
                        int64_t* row, int64_t* positions, int32_t* rope_dim);
// [T, dim] or [T, H, dim] as rows; H of a [T, dim] is 1.
kvx_status_t lower_tokens(const char* what, const kvx_array_t& a, int64_t heads, int64_t dim, RowsParams* out);

namespace cpu {
kvx_status_t append_swa(const AppendSwaParams& p);
kvx_status_t compress(const CompressParams& p);
kvx_status_t index_scores(const IndexScoresParams& p);
kvx_status_t topk(const TopkParams& p);
kvx_status_t attention_sparse(const SparseParams& p);
}  // namespace cpu
namespace cuda {
KVX_ON_DEVICE(append_swa, AppendSwaParams)
KVX_ON_DEVICE(compress, CompressParams)
KVX_ON_DEVICE(index_scores, IndexScoresParams)
uint64_t topk_workspace(const TopkParams& p);
KVX_ON_DEVICE(topk, TopkParams)
uint64_t sparse_workspace(const SparseParams& p);
KVX_ON_DEVICE(attention_sparse, SparseParams)
}  // namespace cuda

}  // namespace kvx
