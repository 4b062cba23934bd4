#include "move/block_tables.h"

#include <string.h>

#include <algorithm>

#include "array.h"

namespace kvx {

namespace {

const char* const kNames[2] = {"src_blocks", "dst_blocks"};
const char* const kSides[2] = {"source", "destination"};

template <class T>
void copy_rows(const kvx_array_t& a, int64_t rows, int64_t columns, int64_t* out) {
  const T* data = static_cast<const T*>(a.data);
  const int64_t row_stride = a.ndim == 2 ? a.stride[0] : 0, stride = a.stride[a.ndim - 1];
  for (int64_t r = 0; r < rows; r++, out += columns) {
    const T* row = data + r * row_stride;
    if (stride == 1) std::copy(row, row + columns, out);
    else
      for (int64_t c = 0; c < columns; c++) out[c] = row[c * stride];
  }
}

void copy_indices(const kvx_array_t& a, std::vector<int64_t>* out) {
  const int64_t rows = a.ndim == 2 ? a.shape[0] : 1, columns = a.shape[a.ndim - 1];
  out->resize(size_t(rows * columns));
  if (out->empty()) return;
  if (a.dtype == KVX_DTYPE_S32) copy_rows<int32_t>(a, rows, columns, out->data());
  else copy_rows<int64_t>(a, rows, columns, out->data());
}

int64_t find_twice(const std::vector<int64_t>& ids) {
  std::vector<int64_t> sorted = ids;
  std::sort(sorted.begin(), sorted.end());
  auto twice = std::lower_bound(sorted.begin(), sorted.end(), 0);  // negative ones are no names
  twice = std::adjacent_find(twice, sorted.end());
  return twice == sorted.end() ? -1 : *twice;
}

// Whether an id is there twice, in the time it takes to read them: sorting 16,384 takes a millisecond. All ids are
// under num_blocks.
bool has_twice(const std::vector<int64_t>& ids, int64_t num_blocks) {
  constexpr int64_t kMostBlocks = int64_t(1) << 22;  // a byte each, kept by every thread that converts
  if (num_blocks > kMostBlocks) return find_twice(ids) >= 0;
  thread_local std::vector<uint8_t> kept;  // which blocks were named; 0 between calls
  if (kept.size() < size_t(num_blocks)) kept.resize(size_t(num_blocks), 0);
  uint8_t *named = kept.data(), twice = 0;
  const int64_t *first = ids.data(), *end = first + ids.size();  // not asked of the vector again: bytes may alias it
  for (const int64_t* id = first; id < end; id++) {
    if (*id < 0) continue;
    twice |= named[*id];
    named[*id] = 1;
  }
  if (size_t(num_blocks) < 16 * ids.size()) memset(named, 0, size_t(num_blocks));
  else
    for (const int64_t* id = first; id < end; id++)
      if (*id >= 0) named[*id] = 0;
  return twice != 0;
}

// Ids behind a sequence's length are not read, whatever they are: they become -1.
void cut_ids(const BlockTables& t, Which w, std::vector<int64_t>* ids) {
  for (int64_t s = 0; s < t.num_seqs; s++) {
    const int64_t used = (t.host_lens[size_t(s)] + t.block_size[w] - 1) / t.block_size[w];
    int64_t* row = ids->data() + s * t.columns[w];
    std::fill(row + used, row + t.columns[w], -1);
  }
}

kvx_status_t check_ids(const BlockTables& t, Which w, bool named_once) {
  const std::vector<int64_t>& ids = t.host_ids[w];
  const int64_t num_blocks = t.num_blocks[w];
  int64_t over = 0;
  for (const int64_t id : ids) over |= id >= num_blocks;  // all of them at vector speed, and then which
  if (over) {
    const auto bad = std::find_if(ids.begin(), ids.end(), [&](int64_t id) { return id >= num_blocks; });
    return fail(KVX_STATUS_OUT_OF_RANGE, "%s[%lld] is %lld; the %s has %lld blocks. Nothing was converted.", kNames[w],
                (long long)(bad - ids.begin()), (long long)*bad, kSides[w], (long long)num_blocks);
  }
  KVX_NEED(!named_once || !has_twice(ids, num_blocks), "dst_blocks names block %lld twice. Nothing was converted.",
           (long long)find_twice(ids));
  return KVX_STATUS_OK;
}

kvx_status_t copy_host_tables(const kvx_convert_args_t& args, int64_t most_tokens, bool has_destination,
                              BlockTables* t) {
  t->seq_lens = nullptr;
  t->len_bytes = 8, t->len_stride = 8;
  if (args.seq_lens.data) {
    copy_indices(args.seq_lens, &t->host_lens);
    t->seq_lens = t->host_lens.data();
    for (size_t s = 0; s < t->host_lens.size(); s++)
      if (t->host_lens[s] < 0 || t->host_lens[s] > most_tokens)
        return fail(KVX_STATUS_OUT_OF_RANGE,
                    "seq_lens[%zu] is %lld; the tables hold %lld tokens. Nothing was converted.", s,
                    (long long)t->host_lens[s], (long long)most_tokens);
  }
  for (const Which w : {SRC, DST}) {
    copy_indices(w == SRC ? args.src_blocks : args.dst_blocks, &t->host_ids[w]);
    if (t->seq_lens) cut_ids(*t, w, &t->host_ids[w]);
    KVX_TRY(check_ids(*t, w, w == DST && has_destination));
    t->ids[w] = t->host_ids[w].data(), t->index_bytes[w] = 8, t->index_stride[w] = 8,
    t->row_stride[w] = 8 * t->columns[w];
  }
  return KVX_STATUS_OK;
}

void refer_to_device_tables(const kvx_convert_args_t& args, BlockTables* t) {
  for (const Which w : {SRC, DST}) {
    const kvx_array_t& a = w == SRC ? args.src_blocks : args.dst_blocks;
    t->ids[w] = a.data, t->index_bytes[w] = a.dtype == KVX_DTYPE_S32 ? 4 : 8;
    t->index_stride[w] = a.stride[a.ndim - 1] * t->index_bytes[w];
    t->row_stride[w] = a.ndim == 2 ? a.stride[0] * t->index_bytes[w] : 0;
  }
  t->seq_lens = args.seq_lens.data;
  t->len_bytes = args.seq_lens.dtype == KVX_DTYPE_S32 ? 4 : 8;
  t->len_stride = t->seq_lens ? args.seq_lens.stride[0] * t->len_bytes : 0;
}

}  // namespace

kvx_status_t read_block_tables(const BlockSizes& sizes, const kvx_convert_args_t& args, bool has_destination,
                               BlockTables* out) {
  BlockTables& t = *out;
  int64_t seqs[2], tokens[2];
  for (const Which w : {SRC, DST}) {
    const kvx_array_t& a = w == SRC ? args.src_blocks : args.dst_blocks;
    KVX_NEED(a.ndim == 1 || a.ndim == 2, "%s has %u dimensions; it must be [n] or [num_seqs, columns].", kNames[w],
             a.ndim);
    KVX_NEED(a.dtype == KVX_DTYPE_S32 || a.dtype == KVX_DTYPE_S64, "%s is %s; it must be S32 or S64.", kNames[w],
             dtype_name(a.dtype));
    KVX_TRY(check_array("", kNames[w], a, true));
    // Each id is some work, and is copied. Sequences may share a row of the source.
    KVX_NEED(a.shape[a.ndim - 1] <= 1 || a.stride[a.ndim - 1] > 0,
             "%s has %lld ids of stride 0 in a row; the ids of a row must not be one. Call .contiguous().", kNames[w],
             (long long)a.shape[a.ndim - 1]);
    KVX_NEED(w == SRC || !has_destination || !overlaps_itself(a), "%s strides make two ids share an address.",
             kNames[w]);
    seqs[w] = a.ndim == 2 ? a.shape[0] : 1;
    t.columns[w] = a.shape[a.ndim - 1];
    t.num_blocks[w] = sizes.num_blocks[w], t.block_size[w] = sizes.block_size[w];
    KVX_NEED(mul_fits(t.columns[w], t.block_size[w], &tokens[w]), "%s is too long.", kNames[w]);
  }
  KVX_NEED(seqs[0] == seqs[1], "src_blocks has %lld sequences and dst_blocks %lld.", (long long)seqs[0],
           (long long)seqs[1]);
  const kvx_array_t& lens = args.seq_lens;
  KVX_NEED(lens.data != nullptr || tokens[0] == tokens[1],
           "src_blocks holds %lld tokens a sequence and dst_blocks %lld. Give seq_lens, or lists of equal length.",
           (long long)tokens[0], (long long)tokens[1]);
  if (lens.data) {
    KVX_NEED(lens.ndim == 1 && lens.shape[0] == seqs[0] && (lens.dtype == KVX_DTYPE_S32 || lens.dtype == KVX_DTYPE_S64),
             "seq_lens is [%lld] S32 or S64.", (long long)seqs[0]);
    KVX_TRY(check_array("", "seq_lens", lens, true));
  }
  t.num_seqs = seqs[0];
  t.unit_tokens = sizes.unit_tokens;
  const int64_t most = std::min(tokens[0], tokens[1]);
  t.units_per_seq = (most + t.unit_tokens - 1) / t.unit_tokens;
  int64_t units;
  KVX_NEED(mul_fits(t.num_seqs, t.units_per_seq, &units), "%lld sequences of %lld units are too many.",
           (long long)t.num_seqs, (long long)t.units_per_seq);
  t.on_device = args.table_memory != KVX_MEMORY_HOST;
  t.errors = static_cast<unsigned long long*>(args.errors);
  if (!t.on_device) return copy_host_tables(args, most, has_destination, out);
  refer_to_device_tables(args, out);
  return KVX_STATUS_OK;
}

}  // namespace kvx
