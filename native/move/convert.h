// Conversion between two caches: a loaded plan, and a plan with addresses. Made in convert.cpp, run by cpu/ and cuda/.
#pragma once
#include <memory>
#include <vector>

#include "check.h"

namespace kvx {

enum Which { SRC = 0, DST = 1 };

struct Digit {
  int64_t size;
  int64_t stride[2];  // bytes
  int64_t token;      // 0 = not tokens, or not counted
  int32_t step[2];    // buffers
};

// One box with addresses. Digits are folded: what is adjacent on both sides has become part of the run.
struct Job {
  int64_t run;
  int num_digits;
  Digit digit[KVX_PLAN_MAX_DIGITS];      // those with steps last
  char* base[2];                         // address of index 0; NULL where buffers are looked up
  int32_t buffer[2], block_step[2];      // looked up: the first, and from block to block
  int64_t offset[2];                     // looked up: added to the buffer's address
  int64_t block[2];                      // bytes from block to block
  int64_t split[2], outer[2], inner[2];  // where a unit that starts inside a block begins
  int align;                             // bytes every address and the run are a multiple of, at most 16
};

// A row of elements that changes its format, on one side.
struct RowSide {
  kvx_plan_format_t format;
  char* scales;         // address of index 0; NULL = none or inline
  const float* tensor;  // of the box's first layer; NULL = none
};

struct CellDigit {
  int64_t size, stride[2], scale[2], token, layer;
  int32_t step[2];
};

// One box with addresses whose rows change their format. Its digits are as the plan has them, without those of one.
struct CellJob {
  RowSide side[2];
  int64_t head_dim;
  int num_digits;
  CellDigit digit[KVX_PLAN_MAX_DIGITS];
  int32_t buffer[2], block_step[2];
  int64_t offset[2], block[2], split[2], outer[2], inner[2];
};

// Which blocks: unit i of sequence s covers tokens [i*unit, ...) of it.
struct BlockTables {
  const void* ids[2];
  int64_t row_stride[2], index_stride[2];  // bytes
  int64_t columns[2], num_blocks[2], block_size[2];
  int32_t index_bytes[2], len_bytes;
  const void* seq_lens;  // NULL = full
  int64_t len_stride;
  int64_t num_seqs, units_per_seq, unit_tokens;
};

// What a backend keeps for a bound plan: tables on the device. Freed with it.
struct Resident {
  virtual ~Resident() = default;
};

struct Bound {
  std::vector<Job> jobs;      // for units of which every token is there
  std::vector<Job> cut_jobs;  // with seq_lens: for units that end early; tokens are counted
  std::vector<CellJob> cell_jobs;
  std::vector<char*> buffers[2];
  std::vector<int64_t> ids[2], lens;  // host tables, copied: the caller's may change
  BlockTables tables;
  bool on_device, tables_on_device;
  int32_t device;
  uint32_t content;  // of a digest: what the rows hold
  unsigned long long* errors;
  std::unique_ptr<Resident> resident;
};

// Digits that continue each other on both sides become one; the innermost becomes part of the run. `by` is the side
// whose order the digits are put in.
void fold(Job* job, Which by);

// For the digest, whose destination is coordinates: the digit that leads from piece to piece of a row, taken out of the
// job; one of size 1 where rows are whole.
Digit take_pieces(Job* job);

namespace cpu {
kvx_status_t convert(const Bound& bound);
void digest(const Bound& bound, uint64_t out[2]);  // added to out
}  // namespace cpu
namespace cuda {
kvx_status_t prepare_convert(Bound* bound);  // pinned memory checked, tables put on the device
KVX_ON_DEVICE(convert, Bound)
kvx_status_t digest(Bound* bound, uint64_t* out, void* stream);  // out is on the device
}  // namespace cuda

}  // namespace kvx
