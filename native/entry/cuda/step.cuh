// Tokens of a step on the device: which sequence a token belongs to, and where its request stands.
#pragma once
#include "cuda/device.cuh"
#include "entry/hybrid.h"

namespace kvx {
namespace cuda {

struct StepToken {
  int32_t seq;         // -1: of no sequence, or of one that is skipped
  int32_t slot;        // of its request; -1 with seq
  int32_t begin, end;  // tokens of its sequence
  int32_t start;       // position of the first of them
  bool is_bad;         // its slot is outside the cache, or its sequence runs past the tokens
  __device__ __forceinline__ int32_t position(int32_t token) const { return start + token - begin; }
};

__device__ __forceinline__ StepToken open_sequence(const StepParams& s, int32_t seq) {
  StepToken t{
      seq,  __ldg(s.slots + seq), __ldg(s.cu_seqlens + seq), __ldg(s.cu_seqlens + seq + 1), __ldg(s.starts + seq),
      false};
  t.is_bad =
      t.slot >= s.num_slots || (t.slot >= 0 && (t.start < 0 || t.begin < 0 || t.end < t.begin || t.end > s.num_tokens ||
                                                t.start > INT32_MAX - (t.end - t.begin)));
  if (t.slot < 0 || t.is_bad) t.seq = -1, t.slot = -1;
  return t;
}

// The sequence of a token. All lanes of a warp come here with the same one: 32 places of
// cu_seqlens are looked at in a go.
__device__ __forceinline__ StepToken find_token(const StepParams& s, int32_t token) {
  if (s.num_seqs == 0) return StepToken{-1, -1, 0, 0, 0, false};
  const int lane = threadIdx.x % 32;
  int32_t first = 0,
          count = s.num_seqs;  // the answer is in [first, first + count): the last place that is not above token
  int32_t stride = (count + 31) / 32, at = lane * stride, begin = __ldg(s.cu_seqlens + min(at, count));
  // Where each sequence has one token it is that of the same number: asked for beside the first places.
  StepToken t = open_sequence(s, min(token, count - 1));
  if (token < t.begin || token >= t.end) {
    while (count > 1) {
      const unsigned under = __ballot_sync(0xffffffffu, at < count && begin <= token);
      if (under == 0) break;
      const int32_t hop = (31 - __clz(int(under))) * stride;
      first += hop, count = min(stride, count - hop);
      stride = (count + 31) / 32, at = lane * stride, begin = __ldg(s.cu_seqlens + first + min(at, count));
    }
    t = open_sequence(s, first);
    if (token < t.begin || token >= t.end) t.seq = -1, t.slot = -1, t.is_bad = false;
  }
  return t;
}

// Where the table has an entry's page, -1 where the request has none. NULL: it ends before that.
__device__ __forceinline__ const int32_t* entry_page_at(const EntryTable& t, int32_t slot, int32_t column) {
  return column < t.columns
             ? reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(t.pages) + slot * t.row) + column
             : nullptr;
}
// The page of an entry, -1 where the request has none; *is_bad: its number is outside the pool.
__device__ __forceinline__ int32_t entry_page(const EntryTable& t, const RowPages& rows, int32_t slot, int32_t column,
                                              bool* is_bad) {
  const int32_t* at = entry_page_at(t, slot, column);
  const int32_t page = at ? __ldg(at) : INT32_MAX;
  if (page >= rows.num_pages) *is_bad = true;
  return page < rows.num_pages ? page : -1;
}

// Element d of a row, decoded. Of any format; the fast kernels have loads of their own.
__device__ __forceinline__ float row_element(const RowPages& r, int64_t page, int32_t row, int32_t d) {
  const char* base = r.data + page * r.page;
  const char* at = base + int64_t(row) * r.data_bytes;
  if (d >= r.coded) return bf16_to_f32(*reinterpret_cast<const uint16_t*>(at + r.coded_bytes + 2 * (d - r.coded)));
  if (r.group == 0)
    return r.dtype == KVX_DTYPE_F32 ? *reinterpret_cast<const float*>(at + 4 * d)
                                    : bf16_to_f32(*reinterpret_cast<const uint16_t*>(at + 2 * d));
  const char* scales = base + int64_t(r.rows) * r.data_bytes + int64_t(row) * r.scale_bytes;
  const float scale = load_scale(scales + d / r.group * (r.scale_dtype == KVX_DTYPE_F32 ? 4 : 1), r.scale_dtype);
  const uint8_t byte = r.dtype == KVX_DTYPE_E2M1 ? uint8_t(uint8_t(at[d / 2]) >> (d % 2 * 4) & 15) : uint8_t(at[d]);
  return __fmul_rn(decode8(byte, r.dtype), scale);
}

}  // namespace cuda
}  // namespace kvx
