// The blocks of one run of a conversion: ids on both sides and lengths, which change from run to run while buffers
// stay.
#pragma once
#include <vector>

#include "check.h"

namespace kvx {

enum Which { SRC = 0, DST = 1 };

// What a plan says of the blocks that its runs name.
struct BlockSizes {
  int64_t num_blocks[2], block_size[2];
  int64_t unit_tokens;
};

// Unit i of sequence s covers tokens [i*unit, ...) of it.
struct BlockTables {
  const void* ids[2];
  int64_t row_stride[2], index_stride[2];  // bytes
  int64_t columns[2], num_blocks[2], block_size[2];
  int32_t index_bytes[2], len_bytes;
  const void* seq_lens;  // NULL = full
  int64_t len_stride;
  int64_t num_seqs, units_per_seq, unit_tokens;
  bool on_device;                               // the ids and lengths are
  unsigned long long* errors;                   // on the device; NULL = bad ids are not counted
  std::vector<int64_t> host_ids[2], host_lens;  // tables of the host, copied: the caller's may change

  BlockTables() = default;
  BlockTables(const BlockTables&) = delete;  // ids and seq_lens point into its own copies
  BlockTables& operator=(const BlockTables&) = delete;
  int64_t num_units() const { return num_seqs * units_per_seq; }
};

// Every field of `out` is set, so that one serves many runs. Tables of the host are checked: ids are in range and, with
// a destination, named once.
kvx_status_t read_block_tables(const BlockSizes& sizes, const kvx_convert_args_t& args, bool has_destination,
                               BlockTables* out);

}  // namespace kvx
