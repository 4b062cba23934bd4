// What kernels are given: plain structs of addresses and byte strides, already checked.
// lower.cpp makes them from descriptors; cpu/ and cuda/ only read them. All strides here are in bytes.
#pragma once
#include <stdint.h>

namespace kvx {

// Where the scale of one row (or group) comes from when a row is written.
enum ScaleMode : int32_t {
  SCALE_NONE = 0,     // unquantised cache, or scale 1
  SCALE_READ = 1,     // stands in the scale array already (per tensor, head, block, block-head)
  SCALE_GIVEN = 2,    // comes with the token and is stored (per token-head, per group)
  SCALE_COMPUTED = 3  // found from the row and stored (per token-head, per group)
};

struct ScaleParams {
  char* data;                         // NULL: only tensor_scale, or nothing
  int64_t block, token, head, group;  // byte strides; 0 on axes the granularity does not have
  const char* given;                  // SCALE_GIVEN: f32 [T, H, G]
  int64_t given_token, given_head, given_group;
  const float* tensor_scale;  // NULL = 1
  int32_t dtype;              // kvx_dtype_t of data
  int32_t mode;               // ScaleMode
  int32_t group_size;         // elements along dim under one scale; head_dim when one per row
  int32_t num_groups;         // head_dim / group_size
};

// K or V in the cache. Element (b, t, h, d) starts at
//   data + b*block + t*token + h*head + (d/pack)*dim_hi + (d%pack)*dim_lo
// and 4-bit types have two elements a byte along dim_lo, even element in the low nibble.
struct PlaneParams {
  char* data;
  int64_t block, token, head, dim_hi, dim_lo;
  int32_t pack;  // = head_dim when dim is not split
  int32_t head_dim;
  int32_t dtype;     // kvx_dtype_t
  int32_t is_dense;  // elements of one row are adjacent: pack == head_dim and dim_lo is one element
  ScaleParams scale;
};

// [T, H, D] (or one row per output position) on the caller's side.
struct RowsParams {
  char* data;
  int64_t token, head, dim;
  int32_t dtype;     // F16, BF16 or F32
  int32_t is_dense;  // dim stride is one element
};

struct WriteParams {
  PlaneParams plane[2];  // K, V
  RowsParams rows[2];
  const void* slots;    // [T]
  int64_t slot_stride;  // bytes
  int32_t slot_bytes;   // 4 or 8
  int32_t device;
  int64_t num_tokens, num_slots, block_size, num_heads, invalid_slot;
  unsigned long long* errors;  // NULL = not counted
};

// Sequence -> blocks. One struct for the four encodings; kernels switch on `format`.
struct TableParams {
  const void* indices;
  const void* indptr;         // RAGGED, PAGE_CSR
  const void* last_page_len;  // PAGE_CSR
  const void* seq_lens;       // NULL for PAGE_CSR
  int64_t row_stride;         // PACKED: bytes from sequence to sequence; KV_OFFSETS: from beam to beam
  int64_t kv_stride;          // KV_OFFSETS: bytes from the K row to the V row
  int64_t index_stride;       // bytes from entry to entry
  int64_t num_indices;        // bound for RAGGED and PAGE_CSR
  int64_t max_blocks;         // PACKED, KV_OFFSETS: columns
  int64_t num_seqs;           // sequences; output sequences = num_seqs * beam_width
  int32_t format;             // kvx_block_table_format_t
  int32_t index_bytes, indptr_bytes, last_bytes, len_bytes;  // 4 or 8
  int32_t beam_width;
};

struct GatherParams {
  PlaneParams plane[2];
  RowsParams rows[2];
  TableParams table;
  int64_t seq_rows[2];     // padded output: bytes from sequence to sequence, K and V
  const void* cu_seqlens;  // packed output: [S + 1]; NULL = padded
  int32_t cu_bytes;
  int32_t device;
  int64_t num_rows;  // packed output: rows there are
  int64_t max_seq_len, block_size, num_blocks, num_heads;
  char* pool[2];            // KV_OFFSETS: primary, secondary
  int64_t pool_blocks[2];   // bound of an index in each
  int64_t pool_stride;      // bytes_per_block
  const int64_t* bases[2];  // K, V: an address a block, 0 = none, instead of data + block * stride; NULL = one buffer
  unsigned long long* errors;
};

struct AmaxParams {
  RowsParams rows;
  int64_t num_tokens, num_heads, head_dim;
  const void* slots;  // NULL = no block axis
  int64_t slot_stride;
  int32_t slot_bytes, device;
  int64_t invalid_slot, num_slots, block_size;
  char* amax;           // f32
  int64_t block, head;  // byte strides, 0 = axis absent
  unsigned long long* errors;
};

}  // namespace kvx
