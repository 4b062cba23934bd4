// Conversion between two caches: a loaded plan, and a plan with addresses. Made in convert.cpp, run by cpu/ and cuda/.
#pragma once
#include <memory>
#include <vector>

#include "move/block_tables.h"

namespace kvx {

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

// What a backend keeps for a bound plan, ready to be launched. Freed with it.
struct Resident {
  virtual ~Resident() = default;
};

// A plan with the addresses of its buffers. Nothing of it changes after it was made, so any number of threads run it.
struct Bound {
  std::vector<Job> jobs;      // for units of which every token is there
  std::vector<Job> cut_jobs;  // for units that end early, which lengths make: tokens are counted
  std::vector<CellJob> cell_jobs;
  std::vector<char*> buffers[2];
  BlockSizes sizes;
  std::unique_ptr<BlockTables> blocks;  // those it was bound with; NULL: each run brings its own
  bool on_device;
  int32_t device;
  uint32_t content;    // of a digest: what the rows hold
  int64_t unit_bytes;  // that a unit moves, at most kMaxBytes
  std::unique_ptr<Resident> resident;
};

// Digits that continue each other on both sides become one; the innermost becomes part of the run. `by` is the side
// whose order the digits are put in.
void fold(Job* job, Which by);

// For the digest, whose destination is coordinates: the digit that leads from piece to piece of a row, taken out of the
// job; one of size 1 where rows are whole.
Digit take_pieces(Job* job);

// Runs a bound plan with these blocks in place of its own. `args` is read for them, and for `errors`.
kvx_status_t run_blocks(const Bound& bound, const kvx_convert_args_t& args, void* stream);

namespace cpu {
kvx_status_t convert(const Bound& bound, const BlockTables& blocks);
void digest(const Bound& bound, const BlockTables& blocks, uint64_t out[2]);  // added to out
}  // namespace cpu
namespace cuda {
kvx_status_t prepare_convert(Bound* bound);  // pinned memory checked, launches made, its tables on their way
kvx_status_t convert(const Bound& bound, const BlockTables& blocks, void* stream);
kvx_status_t digest(const Bound& bound, const BlockTables& blocks, uint64_t* out,
                    void* stream);  // out is on the device
}  // namespace cuda

}  // namespace kvx
