// Norm, rotation and append on the host. Positions and slots are checked first, so that an OUT_OF_RANGE call has
// written nothing.
#include "append/append.h"

#include <string.h>

#include <vector>

#include "cpu/carry.h"
#include "cpu/row.h"
#include "run.h"
#include "table.h"

namespace kvx {
namespace cpu {

namespace {

constexpr int64_t kThreadBytes = 64 << 10;  // under this, starting threads costs more than it saves

int64_t slot_of(const WriteParams& p, int64_t token) {
  return read_index(p.slots, token * p.slot_stride, p.slot_bytes);
}
int64_t position_of(const NormRopeParams& p, int64_t token) {
  return read_index(p.positions, token * p.position_stride, p.position_bytes);
}

kvx_status_t check_indices(const AppendParams& p) {
  for (int64_t t = 0; t < p.num_tokens && p.norm_rope.rotary; t++) {
    const int64_t at = position_of(p.norm_rope, t);
    if (at < 0 || at >= p.norm_rope.max_positions)
      return fail(KVX_STATUS_OUT_OF_RANGE, "positions[%lld] is %lld; cos and sin have %lld rows. Nothing was written.",
                  (long long)t, (long long)at, (long long)p.norm_rope.max_positions);
  }
  for (int64_t t = 0; t < p.num_tokens && p.has_cache; t++) {
    const int64_t slot = slot_of(p.kv, t);
    if (slot >= p.kv.num_slots && slot != p.kv.invalid_slot)
      return fail(KVX_STATUS_OUT_OF_RANGE, "slot_mapping[%lld] is %lld; the cache has %lld slots. Nothing was written.",
                  (long long)t, (long long)slot, (long long)p.kv.num_slots);
  }
  return KVX_STATUS_OK;
}

// n elements of a strided row side by side, and back.
void pack_row(const RowsParams& r, const char* src, int64_t n, char* dst) {
  const int size = element_bytes(r.dtype);
  for (int64_t d = 0; d < n; d++) memcpy(dst + d * size, src + d * r.dim, size_t(size));
}
void unpack_row(const RowsParams& r, char* dst, int64_t n, const char* src) {
  const int size = element_bytes(r.dtype);
  for (int64_t d = 0; d < n; d++) memcpy(dst + d * r.dim, src + d * size, size_t(size));
}

// What one thread keeps: f32 tables of its token, a row in the making.
class Worker {
 public:
  Worker(const AppendParams& p, const RowTable& ops, const float* const weight[2])
      : p_(p), n_(p.norm_rope), ops_(ops), io_(p.rows[ROW_K].dtype ? p.rows[ROW_K].dtype : p.rows[ROW_Q].dtype) {
    const int64_t widest = greatest(greatest(p.dim[ROW_Q], p.dim[ROW_K]), p.dim[ROW_V]);
    int64_t room = 8;
    while (room < widest) room *= 2;
    const int64_t scratch = widest + 2 * room;
    floats_.resize(size_t(scratch + n_.rotary));
    bytes_.resize(size_t(2 * widest * element_bytes(io_)));
    in_ = bytes_.data(), made_ = in_ + widest * element_bytes(io_);
    tables_ = floats_.data() + scratch;
    for (int kind = 0; kind < 2; kind++)
      rope_[kind] = RopeRow{p.dim[kind],    n_.rotary, weight[kind],   tables_, tables_ + n_.rotary / 2,
                            floats_.data(), n_.eps,    n_.inverse_dim, n_.style};
  }

  void token(int64_t t) {
    if (n_.rotary) load_tables(position_of(n_, t));
    int64_t slot = -1;
    if (p_.has_cache) slot = slot_of(p_.kv, t);
    const bool is_cached = slot >= 0 && slot != p_.kv.invalid_slot;
    const int64_t block = is_cached ? slot / p_.kv.block_size : 0, offset = is_cached ? slot % p_.kv.block_size : 0;
    for (int kind = 0; kind < ROW_KINDS; kind++) {
      const bool to_cell = p_.has_cache && kind != ROW_Q;
      if (to_cell && !is_cached) continue;
      for (int64_t h = 0; h < p_.heads[kind]; h++) {
        const char* src = p_.rows[kind].data + t * p_.rows[kind].token + h * p_.rows[kind].head;
        if (to_cell) cell(kind, src, block, ScaleAt{block, offset, h, t});
        else row(kind, p_.rows_out[kind].data + t * p_.rows_out[kind].token + h * p_.rows_out[kind].head, src);
      }
    }
  }

 private:
  void load_tables(int64_t at) {
    const int64_t half = n_.rotary / 2;
    if (n_.table_dtype == KVX_DTYPE_F32) {  // read in place
      for (RopeRow& r : rope_)
        r.cos = reinterpret_cast<const float*>(n_.cos + at * n_.cos_row),
        r.sin = reinterpret_cast<const float*>(n_.sin + at * n_.sin_row);
      return;
    }
    ops_.encode[n_.table_dtype][KVX_DTYPE_F32](reinterpret_cast<char*>(tables_), n_.cos + at * n_.cos_row, half, 1.0f);
    ops_.encode[n_.table_dtype][KVX_DTYPE_F32](reinterpret_cast<char*>(tables_ + half), n_.sin + at * n_.sin_row, half,
                                               1.0f);
  }

  // The changed row, adjacent: in `to` where that is given.
  const char* change(int kind, const char* src, char* to) {
    const RowsParams& r = p_.rows[kind];
    if (!r.is_dense) pack_row(r, src, p_.dim[kind], in_), src = in_;
    if (!n_.changes(kind)) return src;
    ops_.rotate[io_](to, src, rope_[kind]);
    return to;
  }

  void row(int kind, char* dst, const char* src) {
    const RowsParams& out = p_.rows_out[kind];
    const char* made = change(kind, src, out.is_dense ? dst : made_);
    if (!out.is_dense) unpack_row(out, dst, p_.dim[kind], made);
    else if (made != dst) ops_.copy(dst, made, p_.dim[kind] * element_bytes(io_));
  }

  void cell(int kind, const char* src, int64_t block, const ScaleAt& at) {
    const PlaneParams& plane = p_.kv.plane[kind - 1];
    const int64_t* bases = p_.bases[kind - 1];
    char* base = bases ? reinterpret_cast<char*>(uintptr_t(bases[block])) : plane.data + block * plane.block;
    char* place = base + at.offset * plane.token + at.head * plane.head;
    if (!n_.changes(kind)) return write_row(ops_, plane, p_.rows[kind], place, src, at);
    if (plane.is_dense && plane.dtype == io_) {
      change(kind, src, place);
      return;
    }
    const RowsParams adjacent{nullptr, 0, 0, element_bytes(io_), io_, 1};
    write_row(ops_, plane, adjacent, place, change(kind, src, made_), at);
  }

  const AppendParams& p_;
  const NormRopeParams& n_;
  const RowTable& ops_;
  const int io_;
  RopeRow rope_[2];
  std::vector<float> floats_;
  std::vector<char> bytes_;
  char *in_, *made_;
  float* tables_;
};

}  // namespace

kvx_status_t append(const AppendParams& p) {
  KVX_TRY(check_indices(p));
  if (p.num_tokens == 0) return KVX_STATUS_OK;  // rows of any length are then no rows
  const RowTable& ops = best_rows();
  std::vector<float> weights[2];
  const float* weight[2] = {};
  for (int i = 0; i < 2; i++) {
    if (p.norm_rope.weight[i] == nullptr) continue;
    weights[i].resize(size_t(p.dim[i]));
    ops.encode[p.norm_rope.weight_dtype[i]][KVX_DTYPE_F32](reinterpret_cast<char*>(weights[i].data()),
                                                           p.norm_rope.weight[i], p.dim[i], 1.0f);
    for (float& w : weights[i]) w += p.norm_rope.weight_offset;
    weight[i] = weights[i].data();
  }
  int64_t bytes = 0;
  for (int kind = 0; kind < ROW_KINDS; kind++) bytes += mul_most(p.num_tokens, p.heads[kind] * p.dim[kind] * 2);
  Carry carry;
  const int threads = bytes < kThreadBytes ? 1 : int(least(max_threads(), p.num_tokens));
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int i = 0; i < threads; i++) {
    carry([&] {
      Worker worker(p, ops, weight);
      for (int64_t t = p.num_tokens * i / threads; t < p.num_tokens * (i + 1) / threads; t++) worker.token(t);
    });
  }
  carry.rethrow();
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
