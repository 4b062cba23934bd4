// A conversion's rows that change their format, as kernels are given them, and where a thread's are.
#pragma once
#include "cuda/chunk.cuh"
#include "cuda/generic.cuh"
#include "move/cuda/convert.cuh"

namespace kvx {
namespace cuda {

constexpr int kThreads = 256, kCellJobs = 4, kMaxColumns = 4;

struct CellDeviceDigit {
  FastDivider size;
  uint32_t token, layer;
  int64_t stride[2], scale[2];
  int32_t step[2];
};

struct DeviceRow {
  ScaleParams scale;    // of the row at hand once data is set; strides of block, token and head are 0
  char* scales;         // index 0; NULL: inline or none
  const float* tensor;  // of layer 0
  int64_t scale_block, scale_token, scale_offset;
  int64_t dim_outer, dim_inner;
  int32_t dtype, pack, is_inline;
};

struct DeviceCell {
  DevicePlace place;
  DeviceRow row[2];
  int32_t head_dim, num_digits, num_columns;
  CellDeviceDigit digit[KVX_PLAN_MAX_DIGITS + 1];  // chunks: columns first, then the rest
  CellDeviceDigit token;                           // chunks: tokens, which a thread walks
  FastDivider per_unit;                            // rows: rows of a unit; chunks: blocks of threads
  FastDivider columns, column_tiles;               // chunks: columns of a block of threads; such tiles of an item
  uint32_t all_columns, tokens_each;  // chunks: columns of an item; tokens side by side. rows: all_columns = sequences
  uint32_t token_stride[2], token_scale[2];  // chunks: of the tokens
  FastDivider group;                         // chunks that share a scale
  uint32_t chunks;                           // of a row; digit 0 may be more, for the shuffles
  int32_t width[2];                          // bytes an access to codes may have
  uint32_t first;
};

enum Pass : int32_t { CLEAR, LARGEST, FINISH, WRITE };

struct CellArgs {
  DeviceTables tables;
  int32_t num_jobs;
  Pass pass;
  DeviceCell job[kCellJobs];
};

__device__ __forceinline__ const DeviceCell& find_job(const CellArgs& a) {
  int n = 0;
  while (n + 1 < a.num_jobs && blockIdx.x >= a.job[n + 1].first) n++;
  return a.job[n];
}

// Sum of digits [first, last) at an index.
struct Sum {
  int64_t byte[2], scale[2];
  int32_t step[2];
  uint32_t token, layer;
};

__device__ __forceinline__ void add_digits(const DeviceCell& job, int first, int last, uint32_t index, Sum* sum) {
#pragma unroll 1  // few, and once a thread: side by side they would be a fifth of a kernel's code
  for (int i = first; i < last; i++) {
    const CellDeviceDigit& d = job.digit[i];
    const uint32_t q = d.size.divide(index), n = index - q * d.size.d;
    index = q;
    sum->token += n * d.token, sum->layer += n * d.layer;
#pragma unroll
    for (int w = 0; w < 2; w++)
      sum->byte[w] += n * d.stride[w], sum->scale[w] += n * d.scale[w], sum->step[w] += int32_t(n) * d.step[w];
  }
}

// The first scale of a row.
__device__ __forceinline__ char* scale_of(const DeviceRow& row, const Here& here, int w, char* cell, int64_t moved) {
  if (row.is_inline) return cell + row.scale_offset;
  return row.scales ? row.scales + here.block[w] * row.scale_block + here.start[w] * row.scale_token + moved : nullptr;
}

// A thread's column: a chunk of some head, of which it walks the tokens. Finding it costs as much as turning a chunk.
struct CellColumn {
  char *from, *to;
  Here here;
  int64_t scale[2];              // moved
  uint32_t chunk, lane, tokens;  // of a row; the first token; those that are there
  uint32_t layer;
  bool idle;  // stays for the shuffles
};

// False: nothing of this block of threads is there.
__device__ __forceinline__ bool find_column(const CellArgs& a, const DeviceCell& job, CellColumn* c) {
  const uint32_t index = blockIdx.x - job.first, unit = job.per_unit.divide(index),
                 rest = index - unit * job.per_unit.d;
  c->here = find_unit(a.tables, job.place, unit, ALL_UNITS, threadIdx.x == 0 && rest == 0);
  if (c->here.tokens == 0) return false;
  const uint32_t item = job.column_tiles.divide(rest), column_tile = rest - item * job.column_tiles.d;
  c->lane = job.columns.divide(threadIdx.x);
  uint32_t column = column_tile * job.columns.d + threadIdx.x - c->lane * job.columns.d;
  c->idle = column >= job.all_columns || c->lane >= job.tokens_each;
  c->chunk = column - job.digit[0].size.divide(column) * job.digit[0].size.d;
  c->idle |= c->chunk >= job.chunks;
  if (c->idle) column = c->chunk = 0;
  Sum sum = {};
  add_digits(job, 0, job.num_columns, column, &sum);
  add_digits(job, job.num_columns, job.num_digits, item, &sum);
  move_on(a.tables, job.place, sum.byte, sum.step, &c->here);
  c->from = c->here.at[SRC], c->to = c->here.at[DST];
  c->scale[SRC] = sum.scale[SRC], c->scale[DST] = sum.scale[DST], c->layer = sum.layer;
  c->tokens = job.token.size.d;
  if (job.token.token) c->tokens = min(c->tokens, c->here.tokens > sum.token ? c->here.tokens - sum.token : 0u);
  else if (sum.token >= c->here.tokens) c->tokens = 0;
  return true;
}

}  // namespace cuda
}  // namespace kvx
