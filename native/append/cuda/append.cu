// Norm, rotation and append on the device, one launch a call. Two kernels: sixteen elements a lane, and one row a warp
// by way of shared memory for the rest (odd sizes, strided elements, casts, formats that differ in K and V).
//
// What the first needs most is many threads on their way to memory, so few registers each: weights are in shared
// memory, cos and sin are read again for every row (L1 has them), and halves of a row that rotate together are coded
// where they are. Only rows that rotate in part, and have scales of groups, are brought back into order first.
#include "append/append.h"

#include "cuda/columns.cuh"
#include "cuda/generic.cuh"
#include "cuda/rope.cuh"
#include "run.h"
#include "table.h"

namespace kvx {
namespace cuda {

namespace {

constexpr int kThreads = 128;

// ---- sixteen elements a lane

struct RowPlace {
  const char* in;
  char* out;
  uint32_t in_token, in_head, out_token, out_head;
};

struct CellPlace {
  char* data;
  const int64_t* bases;  // NULL: blocks lie in one buffer
  uint32_t block, token, head, piece;
  FastDivider pack;  // elements of the inner part of dim

  __device__ __forceinline__ char* row(uint32_t block_id, uint32_t offset, uint32_t head_id) const {
    char* base = bases ? reinterpret_cast<char*>(uintptr_t(__ldg(reinterpret_cast<const long long*>(bases) + block_id)))
                       : data + step(block_id, block);
    return base + step(offset, token) + step(head_id, head);
  }
  template <int C> __device__ __forceinline__ uint64_t element(uint32_t e) const {
    const uint32_t hi = pack.divide(e);
    return step(hi, piece) + (e - hi * pack.d) * element_bits<C> / 8;
  }
};

struct LaneArgs {
  NormRopeParams norm_rope;
  RowPlace row[ROW_KINDS];
  const char* packed;  // rows of all kinds, if they follow each other in one tensor; or NULL
  uint32_t packed_token, packed_head;
  CellPlace cell[2];
  ScaleParams scale[2];
  PlainScale plain[2];  // data NULL: scale says which
  PieceMap map[2];      // Q and K; V
  const void* slots;
  int64_t num_slots, invalid;
  unsigned long long* errors;
  FastDivider block_size;
  FastDivider share;  // groups of lanes that share the rows of a token
  uint32_t num_tokens, num_rows, q_end, k_end, rounds;
  uint32_t lanes, lane_shift;  // of a row: a power of two
  uint32_t scale_lanes;        // that share a scale
  uint32_t half_lanes;         // that share one where a lane's halves have different ones (is_split)
  uint32_t group_shift;        // log2 of elements under a scale; 31: all of a row
  uint32_t slot_stride;
  int32_t slot_bytes, width;  // width: bytes a store of codes may have
  bool has_cache, is_ordered, has_norm, finds_scale;
  bool reorders;  // K's pieces go back into order before they are coded
  bool is_split;  // K's; where all is usual, V's too
};

// What a lane needs of the row it works on; found when the row is asked for, a round ahead.
struct LaneRow {
  int kind;
  uint32_t head;
  bool is_row, is_busy;  // there is such a row; this lane holds a part of it
};

// The usual row, known when compiled: all of it rotates by halves of 8 * Lanes elements, K and V are as wide as Q, and
// Q and K are both normed or neither is. Lanes 0 with NORM_AS_TOLD is everything else.
enum NormKind { NORM_NONE, NORM_BOTH, NORM_AS_TOLD };

// Weights of Q, then of K, as lanes read them: 16 bytes of each lane, four times.
__device__ __forceinline__ void put_weights(const NormRopeParams& n, const PieceMap& map, uint32_t lane_shift,
                                            float* weights) {
  const uint32_t pairs = map.pieces * kPiece / 2;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < 2 * pairs; i += kThreads) {
    const uint32_t k = i >= pairs, d = 2 * (i - k * pairs), piece = d / kPiece;
    if (!n.weight[k]) continue;
    const uint32_t quarter = 4 * k + 2 * map.is_b(piece) + d % kPiece / 4;
    const int dtype = n.weight_dtype[k], size = dtype == KVX_DTYPE_F32 ? 4 : 2;
    float* to = weights + ((quarter << lane_shift) + map.lane_of(piece)) * 4 + d % 4;
#pragma unroll
    for (int e = 0; e < 2; e++) to[e] = __fadd_rn(load_float(n.weight[k] + (d + e) * size, dtype), n.weight_offset);
  }
}

// The largest magnitude among this lane's `sharing` lanes; `most`: as many as any lane has. Every lane of the warp
// comes here.
template <int kLanes>
__device__ __forceinline__ uint32_t largest_among(uint32_t mine, uint32_t sharing, uint32_t most) {
#pragma unroll
  for (int hop = kLanes / 2; hop > 0; hop /= 2) {
    if (hop >= int(most)) continue;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, mine, hop);
    mine = hop < int(sharing) ? max(mine, other) : mine;
  }
  return mine;
}

// The first or the second four of eight numbers of a table, widened.
__device__ __forceinline__ void load_four(const char* p, int half, int dtype, float* x) {
  if (dtype == KVX_DTYPE_F32) {
    const float4 v = __ldg(reinterpret_cast<const float4*>(p) + half);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    return;
  }
  const uint2 v = __ldg(reinterpret_cast<const uint2*>(p) + half);
  const uint32_t w[2] = {v.x, v.y};
#pragma unroll
  for (int i = 0; i < 4; i++)
    x[i] = dtype == KVX_DTYPE_BF16 ? element_of<KVX_DTYPE_BF16>(w, i) : element_of<KVX_DTYPE_F16>(w, i);
}

__device__ __forceinline__ void prefetch(const char* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }

// Blocks of threads that an SM holds: memory is kept busy by many of them.
template <int IO, int Lanes> constexpr int kLaneBlocks = IO == KVX_DTYPE_F32 ? 5 : Lanes ? 8 : 6;

// Everything of a token is found once; its rows then go by with the next one already on its way.
template <int IO, int C, int Lanes, int Norm>
__global__ void __launch_bounds__(kThreads, kLaneBlocks<IO, Lanes>) append_lanes(const __grid_constant__ LaneArgs a) {
  constexpr bool is_usual = Lanes != 0;
  __shared__ float4 weights[Norm == NORM_NONE ? 1 : 2 * 4 * (is_usual ? Lanes : 32)];
  const NormRopeParams& n = a.norm_rope;
  const uint32_t lanes = is_usual ? Lanes : a.lanes, lane_shift = is_usual ? (Lanes == 4   ? 2
                                                                              : Lanes == 8 ? 3
                                                                                           : 4)
                                                                           : a.lane_shift;
  const PieceMap map = is_usual ? PieceMap{Lanes, 2 * Lanes} : a.map[0];
  const bool is_half = is_usual || n.style == KVX_ROPE_HALF;
  const uint32_t lane = threadIdx.x & (lanes - 1);
  const uint32_t index = blockIdx.x * (kThreads >> lane_shift) + (threadIdx.x >> lane_shift);
  const uint32_t token = a.share.divide(index), first = index - token * a.share.d;
  const bool is_token = token < a.num_tokens;
  // Bytes of this lane's pieces inside a row of Q or K, and of V: in order where the two may differ.
  const uint32_t qk_a = map.a(lane) * piece_bytes<IO>, qk_b = map.b(lane) * piece_bytes<IO>;
  const uint32_t v_a = is_usual ? qk_a : 2 * lane * piece_bytes<IO>, v_b = is_usual ? qk_b : v_a + piece_bytes<IO>;
  const bool has_qk = is_usual || !map.is_idle(lane), has_v = is_usual || !a.map[1].is_idle(lane);
  wait_for_previous();
  let_next_start();

  const auto find = [&](uint32_t row) {
    LaneRow r;
    const bool past_q = row >= a.q_end, past_k = row >= a.k_end;
    r.kind = int(past_q) + int(past_k);
    r.head = row - (past_k ? a.k_end : past_q ? a.q_end : 0u);
    r.is_row = row < a.num_rows;
    r.is_busy = r.is_row && (past_k ? has_v : has_qk);
    return r;
  };
  const auto piece_a = [&](const LaneRow& r) { return r.kind == ROW_V ? v_a : qk_a; };
  const auto piece_b = [&](const LaneRow& r) { return r.kind == ROW_V ? v_b : qk_b; };
  const auto load = [&](const LaneRow& r, uint32_t row) {
    if (!is_token || !r.is_busy) return RawChunk<IO>{};
    const RowPlace& place = a.row[r.kind];
    const char* p = a.packed ? a.packed + step(token, a.packed_token) + step(row, a.packed_head)
                             : place.in + step(token, place.in_token) + step(r.head, place.in_head);
    return load_pieces<IO>(p + piece_a(r), p + piece_b(r));
  };

  int64_t slot = -1, at = 0;
  if (is_token && a.has_cache) slot = read_index(a.slots, step(token, a.slot_stride), a.slot_bytes);
  if (is_token && n.rotary) at = read_index(n.positions, token * n.position_stride, n.position_bytes);
  LaneRow next = find(first);
  RawChunk<IO> next_chunk = load(next, first);

  const bool is_placed = is_token && (n.rotary == 0 || uint64_t(at) < uint64_t(n.max_positions));
  const bool is_cached = is_placed && uint64_t(slot) < uint64_t(a.num_slots) && slot != a.invalid;
  const uint32_t block = a.block_size.divide(uint32_t(slot)), offset = uint32_t(slot) - block * a.block_size.d;
  if (a.errors && is_token && first == 0 && lane == 0 && (!is_placed || (slot >= a.num_slots && slot != a.invalid)))
    atomicAdd(a.errors, 1ull);

  const bool rotates = is_usual || (n.rotary && is_placed && lane * kChunk < uint32_t(n.rotary));
  if (!is_placed) at = 0;  // rows that are never stored rotate by the first position
  const uint32_t table_piece = lane * kPiece * (n.table_dtype == KVX_DTYPE_F32 ? 4 : 2);
  const char *cos = n.cos + at * n.cos_row + table_piece, *sin = n.sin + at * n.sin_row + table_piece;
  if (rotates) prefetch(cos), prefetch(sin);
  if (Norm == NORM_BOTH || (Norm == NORM_AS_TOLD && a.has_norm)) {
    put_weights(n, map, lane_shift, &weights[0].x);
    __syncthreads();
  }

  for (uint32_t round = 0, row = first; round < a.rounds; round++) {
    const LaneRow here = next;
    RawChunk<IO> chunk = next_chunk;
    row += a.share.d;
    if (round + 1 < a.rounds) {
      next = find(row);
      next_chunk = load(next, row);
    }
    const bool is_busy = here.is_busy && is_placed;
    const bool is_changed = here.kind != ROW_V && (is_usual || n.rotary || n.weight[here.kind]);
    if (__any_sync(0xffffffffu, is_changed)) {
      float x[kChunk];
#pragma unroll
      for (int j = 0; j < kChunk; j++) x[j] = element(chunk, j);
      if (is_usual ? Norm == NORM_BOTH : a.has_norm) {
        const float sum = sum_row(add_squares(x), add_squares(x + kPiece), map, lane, lanes, is_usual || a.is_ordered);
        const char* weight = here.kind == ROW_V ? nullptr : n.weight[here.kind];
        if (is_usual ? is_changed : weight && here.is_busy) {
          const float r = norm_factor(sum, n.inverse_dim, n.eps);
          const float4* of_lane = weights + here.kind * 4 * lanes + lane;
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const float4 four = of_lane[j * lanes];
            const float w[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int k = 0; k < 4; k++) x[4 * j + k] = __fmul_rn(__fmul_rn(x[4 * j + k], r), w[k]);
          }
        }
      }
      if (rotates) {  // from L1 for every row, four at a time: registers are worth more
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float c[4], s[4];
          load_four(cos, half, n.table_dtype, c), load_four(sin, half, n.table_dtype, s);
#pragma unroll
          for (int k = 0; k < 4; k++) {
            const int j = 4 * half + k;
            if (is_half) rotate_pair(&x[j], &x[j + kPiece], c[k], s[k]);
            else rotate_pair(&x[2 * j], &x[2 * j + 1], c[k], s[k]);
          }
        }
      }
      if (is_changed) chunk = round_chunk<IO>(x);
    }

    if (!a.has_cache || here.kind == ROW_Q) {
      const RowPlace& place = a.row[here.kind];
      char* p = place.out + step(token, place.out_token) + step(here.head, place.out_head);
      if (is_busy) store_pieces<IO>(p + piece_a(here), p + piece_b(here), chunk);
    } else if constexpr (C == IO) {
      const CellPlace& cell = a.cell[here.kind - 1];
      if (is_busy && is_cached) {
        char* p = cell.row(block, offset, here.head);
        store_pieces<IO>(p + cell.element<C>(piece_a(here) / element_bytes<IO>),
                         p + cell.element<C>(piece_b(here) / element_bytes<IO>), chunk);
      }
    }
    if constexpr (C != IO) {
      const bool is_coded = a.has_cache && is_busy && is_cached && here.kind != ROW_Q;
      if (!__any_sync(0xffffffffu, is_coded)) continue;
      uint32_t of_a = piece_a(here) / piece_bytes<IO>, of_b = piece_b(here) / piece_bytes<IO>;  // pieces
      if (!is_usual && a.reorders) {
        const RawChunk<IO> ordered = in_order(chunk, map, lane, lanes);
        if (here.kind == ROW_K) chunk = ordered, of_a = 2 * lane, of_b = 2 * lane + 1;
      }
      if (!is_coded) chunk = RawChunk<IO>{};  // also lanes past the row, which must not raise its largest magnitude
      constexpr int kWords = chunk_bytes<IO> / 8;  // of a piece
      const uint32_t mine[2] = {magnitude_bits<IO, kPiece>(chunk.w), magnitude_bits<IO, kPiece>(chunk.w + kWords)};
      const bool is_split = a.is_split && (is_usual || here.kind == ROW_K);
      const uint32_t sharing = is_split ? a.half_lanes : a.scale_lanes;
      uint32_t most[2] = {is_split ? mine[0] : max(mine[0], mine[1]), mine[1]};
      if (a.finds_scale) {
        const auto largest = [&](uint32_t x) {
          return largest_among<is_usual ? Lanes : 32>(x, sharing, a.is_split ? a.half_lanes : a.scale_lanes);
        };
        const auto all_largest = [&] {
          most[0] = largest(most[0]);
          if (a.is_split) most[1] = largest(most[1]);
        };
        all_largest();
        // Rare: a NaN or an infinity somewhere in the warp, which does not count.
        if (__any_sync(0xffffffffu, max(most[0], most[1]) >= kInfinity)) {
          most[0] = finite_magnitude_bits<IO, kPiece>(chunk.w),
          most[1] = finite_magnitude_bits<IO, kPiece>(chunk.w + kWords);
          if (!is_split) most[0] = max(most[0], most[1]);
          all_largest();
        }
      }
      if (is_coded) {
        const int i = here.kind - 1;
        const bool owns = (lane & (sharing - 1)) == 0;
        const auto quantiser = [&](uint32_t piece, uint32_t amax) {
          const uint32_t group = (piece * kPiece) >> a.group_shift;
          const PlainScale& plain = a.plain[i];
          if (plain.data) {
            const float found = plain_scale<C>(amax);
            if (owns) *plain.place(block, offset, here.head, group) = found;
            return Quantiser<C>::of_largest(found);
          }
          return Quantiser<C>(
              settle_scale(a.scale[i], C, token, block, offset, here.head, group, __uint_as_float(amax), owns));
        };
        const Quantiser<C> first_half = quantiser(of_a, most[0]);
        const Quantiser<C> second_half = is_split ? quantiser(of_b, most[1]) : first_half;
        uint32_t codes[chunk_bytes<C> / 4];
        encode_words<IO, C>(chunk, mine[0] < first_half.limit_bits && mine[1] < second_half.limit_bits, first_half,
                            second_half, codes);
        const CellPlace& cell = a.cell[i];
        char* row = cell.row(block, offset, here.head);
        char* place = row + cell.element<C>(of_a * kPiece);
        constexpr int kHalf = chunk_bytes<C> / 8;  // words of a piece
        if (of_b == of_a + 1) {
          store_words<2 * kHalf>(place, codes, a.width);
        } else {
          store_words<kHalf>(place, codes, a.width);
          store_words<kHalf>(row + cell.element<C>(of_b * kPiece), codes + kHalf, a.width);
        }
      }
    }
  }
}

// ---- one row a warp

struct WarpArgs {
  AppendParams p;
  BlockDivider divider;
  uint32_t row_floats;  // of the widest row
  uint32_t sum_floats;  // its sums of eight: a power of two
};

__device__ __forceinline__ float sum_of_squares(const float* x, int64_t dim, float* sums, uint32_t count) {
  const int lane = threadIdx.x % 32;
  for (uint32_t piece = lane; piece < count; piece += 32) {
    float v[kPiece];
#pragma unroll
    for (int i = 0; i < kPiece; i++) v[i] = int64_t(piece) * kPiece + i < dim ? x[piece * kPiece + i] : 0.0f;
    sums[piece] = add_squares(v);
  }
  __syncwarp();
  for (uint32_t half = count / 2; half > 0; half /= 2) {
    for (uint32_t i = lane; i < half; i += 32) sums[i] = __fadd_rn(sums[i], sums[i + half]);
    __syncwarp();
  }
  return sums[0];
}

__global__ void __launch_bounds__(kThreads) append_warps(const __grid_constant__ WarpArgs a) {
  extern __shared__ float shared[];
  const AppendParams& p = a.p;
  const NormRopeParams& n = p.norm_rope;
  const int lane = threadIdx.x % 32;
  // Floats of the row, the row as it is rounded, and the sums.
  float* x = shared + (threadIdx.x / 32) * (2 * a.row_floats + a.sum_floats);
  char* made = reinterpret_cast<char*>(x + a.row_floats);
  float* sums = x + 2 * a.row_floats;
  const int64_t per_token = p.heads[0] + p.heads[1] + p.heads[2], num_rows = p.num_tokens * per_token,
                warps = int64_t(gridDim.x) * (blockDim.x / 32);
  for (int64_t index = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; index < num_rows; index += warps) {
    const int64_t token = index / per_token, row = index % per_token;
    const int kind = row < p.heads[0] ? ROW_Q : row < p.heads[0] + p.heads[1] ? ROW_K : ROW_V;
    const int64_t head = kind == ROW_Q   ? row
                         : kind == ROW_K ? row - p.heads[0]
                                         : row - p.heads[0] - p.heads[1],
                  dim = p.dim[kind];
    const int64_t at = n.rotary ? read_index(n.positions, token * n.position_stride, n.position_bytes) : 0;
    const int64_t slot = p.has_cache ? read_index(p.kv.slots, token * p.kv.slot_stride, p.kv.slot_bytes) : -1;
    const bool is_placed = n.rotary == 0 || uint64_t(at) < uint64_t(n.max_positions),
               is_past = slot >= p.kv.num_slots && slot != p.kv.invalid_slot && p.has_cache;
    if (p.errors && row == 0 && lane == 0 && (!is_placed || is_past)) atomicAdd(p.errors, 1ull);
    const bool to_cell = p.has_cache && kind != ROW_Q;
    if (!is_placed || (to_cell && (slot < 0 || is_past || slot == p.kv.invalid_slot))) continue;

    RowsParams rows = p.rows[kind];
    const char* src = rows.data + token * rows.token + head * rows.head;
    if (kind != ROW_V && (n.rotary || n.weight[kind])) {
      __syncwarp();  // the row before has been stored
      for (int64_t d = lane; d < dim; d += 32) x[d] = load_float(src + d * rows.dim, rows.dtype);
      __syncwarp();
      if (n.weight[kind]) {
        const float r = norm_factor(sum_of_squares(x, dim, sums, a.sum_floats), n.inverse_dim, n.eps);
        const int size = dtype_bits(n.weight_dtype[kind]) / 8;
        for (int64_t d = lane; d < dim; d += 32)
          x[d] = __fmul_rn(__fmul_rn(x[d], r),
                           __fadd_rn(load_float(n.weight[kind] + d * size, n.weight_dtype[kind]), n.weight_offset));
        __syncwarp();
      }
      const int64_t half = n.rotary / 2, size = dtype_bits(n.table_dtype) / 8;
      for (int64_t i = lane; i < half; i += 32) {
        const float c = load_float(n.cos + at * n.cos_row + i * size, n.table_dtype),
                    s = load_float(n.sin + at * n.sin_row + i * size, n.table_dtype);
        if (n.style == KVX_ROPE_HALF) rotate_pair(&x[i], &x[i + half], c, s);
        else rotate_pair(&x[2 * i], &x[2 * i + 1], c, s);
      }
      __syncwarp();
      rows.dim = dtype_bits(rows.dtype) / 8;
      for (int64_t d = lane; d < dim; d += 32) store_float(made + d * rows.dim, rows.dtype, x[d]);
      __syncwarp();
      src = made;
    }
    if (to_cell) {
      const PlaneParams& plane = p.kv.plane[kind - 1];
      int64_t block, offset;
      a.divider.split(slot, &block, &offset);
      char* base = p.bases[kind - 1] ? reinterpret_cast<char*>(uintptr_t(p.bases[kind - 1][block]))
                                     : plane.data + block * plane.block;
      write_row(plane, rows, base + offset * plane.token + head * plane.head, src, token, block, offset, head);
    } else {
      const RowsParams& out = p.rows_out[kind];
      char* dst = out.data + token * out.token + head * out.head;
      for (int64_t d = lane; d < dim; d += 32)
        copy_element(dst + d * out.dim, src + d * rows.dim, dtype_bits(rows.dtype));
    }
  }
}

// ---- which kernel, and how it is laid out

bool is_aligned(const RowsParams& r) {
  return r.is_dense && r.token <= kMaxStride && r.head <= kMaxStride && common_alignment(rows_address_bits(r)) == 16;
}

bool fits_lanes(const AppendParams& p) {
  const NormRopeParams& n = p.norm_rope;
  const int io = p.rows[p.has_cache ? ROW_K : ROW_Q].dtype;
  int64_t rows = 0;
  for (int kind = 0; kind < ROW_KINDS; kind++) {
    if (p.heads[kind] == 0) continue;
    rows += p.heads[kind];
    if (p.dim[kind] % kChunk || p.dim[kind] > 32 * kChunk || !is_aligned(p.rows[kind])) return false;
    if (!(p.has_cache && kind != ROW_Q) && !is_aligned(p.rows_out[kind])) return false;
  }
  uint64_t bits = uint64_t(uintptr_t(n.cos)) | uint64_t(uintptr_t(n.sin)) | uint64_t(n.cos_row) | uint64_t(n.sin_row);
  for (const char* w : n.weight) bits |= uint64_t(uintptr_t(w));
  if (common_alignment(bits) < 16 || n.rotary % kChunk || p.num_tokens * rows > kMaxCount) return false;
  if (!p.has_cache) return true;
  const PlaneParams* const plane = p.kv.plane;
  const int dtype = plane[0].dtype;
  if (plane[1].dtype != dtype || p.kv.num_slots > kMaxCount || p.kv.slot_stride > kMaxStride) return false;
  if (!is_quantised(dtype) && dtype != io) return false;
  for (int i = 0; i < 2; i++) {
    const PlaneParams& c = plane[i];
    const int group = c.scale.group_size;
    if (!has_dense_pieces(c) || c.block > kMaxStride || c.token > kMaxStride || c.head > kMaxStride ||
        c.dim_hi > kMaxStride)
      return false;
    if (c.pack % (is_quantised(dtype) ? kChunk : kPiece)) return false;
    if (common_alignment(uint64_t(uintptr_t(c.data)) | cell_address_bits(c)) < (is_quantised(dtype) ? 4 : 16))
      return false;
    if (c.scale.num_groups > 1 && (group % kChunk || (group & (group - 1)))) return false;
  }
  const ScaleParams &k = plane[0].scale, &v = plane[1].scale;
  return (k.num_groups > 1) == (v.num_groups > 1) && (k.num_groups == 1 || k.group_size == v.group_size);
}

// Rows a thread sees: few where the device would not be filled, otherwise as many as slot, position and weights are
// worth being read for, and such that few threads are left over.
uint32_t rounds_of(int64_t tokens, uint32_t rows, uint32_t lanes, int num_sms) {
  uint32_t best = 1, waste = rows;
  for (uint32_t rounds = 6; rounds > 1; rounds--) {
    const uint32_t share = uint32_t(divide_up(rows, rounds)), idle = share * rounds - rows;
    if (tokens * share * lanes >= int64_t(num_sms) * 1024 && idle < waste && idle * 8 <= rows)
      best = rounds, waste = idle;
  }
  return best;
}

// Q, K and V as slices of one tensor, one after the other.
void set_packed(const AppendParams& p, LaneArgs* a) {
  const RowsParams* first = nullptr;
  const char* end = nullptr;
  for (int kind = 0; kind < ROW_KINDS; kind++) {
    const RowsParams& rows = p.rows[kind];
    if (p.heads[kind] == 0) continue;
    if (first && (rows.data != end || rows.token != first->token || rows.head != first->head)) return;
    if (!first) first = &rows;
    end = rows.data + p.heads[kind] * rows.head;
  }
  a->packed = first->data, a->packed_token = uint32_t(first->token), a->packed_head = uint32_t(first->head);
}

kvx_status_t run_lanes(const AppendParams& p, int num_sms, void* stream) {
  LaneArgs a{};
  const NormRopeParams& n = p.norm_rope;
  a.norm_rope = n;
  int64_t widest = 0;
  for (int kind = 0; kind < ROW_KINDS; kind++) {
    const RowsParams &in = p.rows[kind], &out = p.rows_out[kind];
    a.row[kind] =
        RowPlace{in.data, out.data, uint32_t(in.token), uint32_t(in.head), uint32_t(out.token), uint32_t(out.head)};
    if (p.heads[kind]) widest = p.dim[kind] > widest ? p.dim[kind] : widest;
  }
  set_packed(p, &a);
  for (a.lanes = 1; a.lanes * kChunk < widest; a.lanes *= 2) a.lane_shift++;
  const int64_t dim = p.heads[ROW_Q] ? p.dim[ROW_Q] : p.dim[ROW_K];
  a.map[0] = PieceMap{n.style == KVX_ROPE_HALF ? uint32_t(n.rotary / kChunk) : 0u, uint32_t(dim / kPiece)};
  a.map[1] = PieceMap{0, uint32_t(p.dim[ROW_V] / kPiece)};
  a.is_ordered = n.style == KVX_ROPE_HALF && n.rotary == dim && (dim & (dim - 1)) == 0;
  a.has_norm = n.weight[0] || n.weight[1];
  a.q_end = uint32_t(p.heads[ROW_Q]);
  a.k_end = a.q_end + uint32_t(p.heads[ROW_K]);
  a.num_rows = a.k_end + uint32_t(p.heads[ROW_V]);
  a.num_tokens = uint32_t(p.num_tokens);
  a.rounds = rounds_of(p.num_tokens, a.num_rows, a.lanes, num_sms);
  a.share = make_fast_divider(divide_up(a.num_rows, a.rounds));
  a.errors = p.errors;
  a.has_cache = p.has_cache;
  a.block_size = make_fast_divider(1);
  int io = p.rows[ROW_Q].dtype, dtype = io;
  if (p.has_cache) {
    io = p.rows[ROW_K].dtype, dtype = p.kv.plane[0].dtype;
    uint64_t bits = 0;
    for (int i = 0; i < 2; i++) {
      const PlaneParams& c = p.kv.plane[i];
      a.cell[i] = CellPlace{c.data,           p.bases[i],         uint32_t(c.block),        uint32_t(c.token),
                            uint32_t(c.head), uint32_t(c.dim_hi), make_fast_divider(c.pack)};
      a.scale[i] = c.scale;
      if (is_plain(c.scale)) a.plain[i] = make_plain(c.scale);
      a.finds_scale = a.finds_scale || c.scale.mode == SCALE_COMPUTED;
      bits |= uint64_t(uintptr_t(c.data)) | cell_address_bits(c);
    }
    const ScaleParams& scale = p.kv.plane[0].scale;
    a.scale_lanes = a.lanes, a.group_shift = 31;
    if (scale.num_groups > 1) {
      a.scale_lanes = uint32_t(scale.group_size / kChunk), a.half_lanes = uint32_t(scale.group_size / kPiece);
      a.group_shift = uint32_t(__builtin_ctz(unsigned(scale.group_size)));
      a.is_split = a.map[0].paired > 0 && a.is_ordered, a.reorders = a.map[0].paired > 0 && !a.is_ordered;
    }
    a.width = common_alignment(bits);
    a.slots = p.kv.slots, a.num_slots = p.kv.num_slots, a.invalid = p.kv.invalid_slot;
    a.slot_stride = uint32_t(p.kv.slot_stride), a.slot_bytes = p.kv.slot_bytes;
    a.block_size = make_fast_divider(p.kv.block_size);
  }
  const int64_t blocks = divide_up(p.num_tokens * a.share.d, kThreads >> a.lane_shift);
  const dim3 grid(unsigned(blocks), 1, 1), threads(kThreads, 1, 1);
  const bool is_norm_alike =
      p.heads[ROW_Q] == 0 || p.heads[ROW_K] == 0 || (n.weight[0] != nullptr) == (n.weight[1] != nullptr);
  const bool is_usual = a.is_ordered && is_norm_alike && (p.heads[ROW_V] == 0 || p.dim[ROW_V] == dim);
  const int key = is_usual ? io << 16 | dtype << 8 | int(a.lanes) << 1 | int(a.has_norm) : 0;
#define KVX_USUAL(io_, c, lanes_)                                                                           \
  case io_ << 16 | c << 8 | lanes_ << 1:                                                                    \
    return launch_early("append_lanes", append_lanes<io_, c, lanes_, NORM_NONE>, grid, threads, stream, a); \
  case io_ << 16 | c << 8 | lanes_ << 1 | 1:                                                                \
    return launch_early("append_lanes", append_lanes<io_, c, lanes_, NORM_BOTH>, grid, threads, stream, a);
  switch (key) {
    KVX_USUAL(KVX_DTYPE_BF16, KVX_DTYPE_BF16, 8)
    KVX_USUAL(KVX_DTYPE_BF16, KVX_DTYPE_BF16, 4)
    KVX_USUAL(KVX_DTYPE_BF16, KVX_DTYPE_F8_E4M3, 8)
    KVX_USUAL(KVX_DTYPE_BF16, KVX_DTYPE_S8, 8)
    KVX_USUAL(KVX_DTYPE_BF16, KVX_DTYPE_E2M1, 8)
    KVX_USUAL(KVX_DTYPE_F16, KVX_DTYPE_F16, 8)
    KVX_USUAL(KVX_DTYPE_F16, KVX_DTYPE_F8_E4M3, 8)
  }
#undef KVX_USUAL
  // The rest of the table: every IO type to itself and to every quantised type.
#define KVX_LANES(io_, c) \
  case c: return launch_early("append_lanes", append_lanes<io_, c, 0, NORM_AS_TOLD>, grid, threads, stream, a);
#define KVX_FROM(io_)                   \
  case io_:                             \
    switch (dtype) {                    \
      KVX_LANES(io_, io_)               \
      KVX_LANES(io_, KVX_DTYPE_F8_E4M3) \
      KVX_LANES(io_, KVX_DTYPE_F8_E5M2) \
      KVX_LANES(io_, KVX_DTYPE_S8)      \
      KVX_LANES(io_, KVX_DTYPE_S4)      \
      KVX_LANES(io_, KVX_DTYPE_E2M1)    \
    }                                   \
    break;
  switch (io) {
    KVX_FROM(KVX_DTYPE_F16)
    KVX_FROM(KVX_DTYPE_BF16)
    KVX_FROM(KVX_DTYPE_F32)
  }
#undef KVX_FROM
#undef KVX_LANES
  return fail(KVX_STATUS_INTERNAL_ERROR, "no kernel from %s to %s.", dtype_name(io), dtype_name(dtype));
}

kvx_status_t run_warps(const AppendParams& p, int num_sms, void* stream) {
  WarpArgs a{p, make_divider(p.has_cache ? p.kv.block_size : 1), 0, 1};
  int64_t widest = 0, rows = 0;
  for (int kind = 0; kind < ROW_KINDS; kind++) {
    rows += p.heads[kind];
    if (p.norm_rope.changes(kind) && p.heads[kind]) widest = p.dim[kind] > widest ? p.dim[kind] : widest;
  }
  a.row_floats = uint32_t(divide_up(widest, 4) * 4);
  while (a.sum_floats * kPiece < widest) a.sum_floats *= 2;
  const int64_t warp_bytes = 4 * (2 * int64_t(a.row_floats) + a.sum_floats);
  constexpr int64_t kSharedBytes = 48 << 10;  // what every device gives without asking
  if (warp_bytes > kSharedBytes)
    return fail(KVX_STATUS_UNSUPPORTED,
                "head_dim %lld is more than the device kernel's rows hold (%lld). The host has no such bound.",
                (long long)widest, (long long)(kSharedBytes / 9));
  int warps = kThreads / 32;
  while (warps * warp_bytes > kSharedBytes) warps /= 2;
  const int64_t blocks = divide_up(p.num_tokens * rows, warps), most = int64_t(num_sms) * 32;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(blocks < most ? blocks : most)), config.blockDim = dim3(unsigned(32 * warps));
  config.dynamicSmemBytes = size_t(warps * warp_bytes), config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, append_warps, a);
  return error == cudaSuccess ? KVX_STATUS_OK : launch_failed("append_warps", error);
}

}  // namespace

kvx_status_t append(const AppendParams& p, void* stream) {
  DeviceGuard guard(p.device);
  KVX_TRY(guard.status());
  if (p.num_tokens == 0) return KVX_STATUS_OK;
  return fits_lanes(p) ? run_lanes(p, guard.num_sms(), stream) : run_warps(p, guard.num_sms(), stream);
}

}  // namespace cuda
}  // namespace kvx
