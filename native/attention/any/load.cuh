// How rows of any format, layout and table come to shared memory, for the kernels of attention on every architecture.
#pragma once
#include "attention/any/unit.cuh"
#include "attention/decode/args.cuh"

namespace kvx {
namespace cuda {

constexpr int kMostAnyDims = 512, kMostAnyTokens = 64;

struct AnyArgs {
  DecodeArgs d;  // the call; its scales are not used, nor its rows' offsets
  AnyPlane plane[2];
  int32_t tokens, row_bytes;  // of a tile, and of its rows in shared memory: multiples of 128
  int32_t query_parts;
  int32_t is_split;  // by a plan; else a block has its rows alone
  int32_t skip_rows;
  // Of prompts: V has a tile of its own; which raw buffers there are beside the first, 0 or 1; rows go to tiles as they
  // are; scores and weights are multiplied by scales.
  int32_t planes_apart, last_raw, is_straight, scales_rows;
  int32_t is_common;  // a packed table of 32-bit ids, and one buffer
  int32_t tile_at, query_at, scores_at, weights_at, scales_at,
      bytes;  // in shared memory; AnyRow[2][tokens] stand first
};

// Any table but the common one.
static __device__ __noinline__ BlockPlace find_apart(const GatherParams& kv, int32_t seq, int32_t position,
                                                     uint32_t logical, int plane) {
  return find_any_block(kv, seq, position, logical, plane);
}

// A row of a tile. `at` NULL: not there.
struct AnyRow {
  const char* at[2];
  int32_t id[2];
  float scale[2];  // what multiplies its scores and its weights
  uint32_t inside, reserved;
};

// What a block works on: query rows [first_row, first_row + rows) of a sequence, tokens [begin, end).
struct AnyWork {
  int32_t seq, head, first_row, rows, queries, length, begin, end, num_tiles;
  int32_t first;  // position of the first tile's first token
  bool counts;    // positions whose block is none
};

// How rows come to shared memory: found through the table a tile ahead of their use, copied as they lie, and turned
// into bf16 parts. By all threads of a block.
// kRounds: an element times a scale of more digits than bf16 has is rounded once, where one part holds the others.
template <int kParts, int kThreads, bool kRounds = false> struct AnyLoads {
  const AnyArgs& a;
  char* shared;
  const uint32_t at;
  const int thread, warp, lane;
  AnyWork w;
  float tensor_scale[2];

  __device__ __forceinline__ AnyLoads(const AnyArgs& args, char* memory)
      : a(args),
        shared(memory),
        at(tiles::shared_address(memory)),
        thread(threadIdx.x),
        warp(thread / 32),
        lane(thread % 32) {
#pragma unroll
    for (int i = 0; i < 2; i++)
      tensor_scale[i] =
          a.plane[i].p.scale.tensor_scale && a.plane[i].bits <= 8 ? *a.plane[i].p.scale.tensor_scale : 1.f;
  }

  __device__ __forceinline__ AnyRow* rows(int buffer) const {
    return reinterpret_cast<AnyRow*>(shared) + buffer * a.tokens;
  }
  __device__ __forceinline__ uint32_t tile_at(int part, uint32_t row, uint32_t chunk) const {
    return at + a.tile_at + (part * a.tokens + row) * a.row_bytes + ((chunk ^ (row & 7)) << 4);
  }
  __device__ __forceinline__ char* scales(int buffer, int plane) const {
    return shared + a.scales_at +
           ((buffer ? a.plane[0].scale_words + a.plane[1].scale_words : 0) + (plane ? a.plane[0].scale_words : 0)) *
               a.tokens * 4;
  }

  // ---- rows

  // Where the common table has this thread's token: read here, used a tile later. Asked for
  // or not, nobody waits for it here.
  __device__ __forceinline__ int32_t ask(const AnyWork& of, int32_t tile, bool is_asked) const {
    int32_t id = -1;
    if (warp * 32 >= a.tokens) return id;
    const TableParams& table = a.d.rows.kv.table;
    const int32_t position = of.first + tile * a.tokens + thread;
    const uint32_t logical = a.d.rows.block_size.divide(uint32_t(position));
    const char* from = static_cast<const char*>(table.indices) + of.seq * table.row_stride + logical * 4;
    const int is_read = is_asked && a.is_common && thread < a.tokens && position >= of.begin && position < of.end &&
                        logical < table.max_blocks;
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p ld.global.b32 %0, [%1]; }"
                 : "+r"(id)
                 : "l"(from), "r"(is_read)
                 : "memory");
    return id;
  }

  __device__ __forceinline__ void place(const AnyWork& of, int32_t tile, int32_t id, int buffer) const {
    if (thread >= a.tokens) return;
    const GatherParams& kv = a.d.rows.kv;
    const int32_t position = of.first + tile * a.tokens + thread;
    const uint32_t logical = a.d.rows.block_size.divide(uint32_t(position));
    AnyRow row = {};
    row.inside = uint32_t(position) - logical * a.d.rows.block_size.d;
    bool is_bad = false;
    if (position < of.begin || position >= of.end) {
    } else if (a.is_common) {
      is_bad = id < 0 || id >= kv.num_blocks;
#pragma unroll
      for (int i = 0; i < 2; i++)
        row.id[i] = id, row.at[i] = is_bad ? nullptr : kv.plane[i].data + int64_t(id) * kv.plane[i].block;
    } else {
      bool is_there = true;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const BlockPlace found = find_apart(kv, of.seq, position, logical, i);
        row.at[i] = found.base, row.id[i] = int32_t(found.id);
        is_there = is_there && found.state == BLOCK_FOUND, is_bad = is_bad || found.state == BLOCK_BAD;
      }
      if (!is_there) row.at[0] = row.at[1] = nullptr;
    }
    if (is_bad && of.counts) atomicAdd(kv.errors, 1ull);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      row.scale[i] = tensor_scale[i];
      if (!row.at[i]) continue;
      const PlaneParams& p = kv.plane[i];
      row.at[i] += row.inside * p.token + of.head * p.head;
      if (a.plane[i].bits <= 8 && !a.plane[i].has_groups && !a.plane[i].scale_words && p.scale.data)
        row.scale[i] *= load_scale(group_scales(row, i, of.head), p.scale.dtype);
    }
    rows(buffer)[thread] = row;
  }

  // What multiplies the scores of a row, or its weights.
  __device__ __forceinline__ float row_scale(int buffer, int plane, int token) const {
    const float x = rows(buffer)[token].scale[plane];
    return a.plane[plane].scale_words && !a.plane[plane].has_groups
               ? x * reinterpret_cast<const float*>(scales(buffer, plane))[token]
               : x;
  }

  __device__ __forceinline__ const char* group_scales(const AnyRow& row, int plane, int32_t head) const {
    const ScaleParams& s = a.plane[plane].p.scale;
    return s.data + row.id[plane] * s.block + row.inside * s.token + head * s.head;
  }
  // Scales of rows and of groups, ahead of what they multiply.
  __device__ __forceinline__ void copy_scales(int32_t head, int buffer) const {
#pragma unroll 1
    for (int plane = 0; plane < 2; plane++) {
      const int words = a.plane[plane].scale_words;
      for (int i = thread; i < a.tokens * words; i += kThreads) {
        const int r = i / words, word = i - r * words;
        const AnyRow& row = rows(buffer)[r];
        const bool is_there = row.at[plane] != nullptr;
        tiles::copy_4(tiles::shared_address(scales(buffer, plane)) + i * 4,
                      is_there ? group_scales(row, plane, head) + word * 4 : a.plane[plane].p.scale.data,
                      is_there ? 4 : 0);
      }
    }
    tiles::commit_copies();
  }

  // ---- units

  // Which row and unit is this thread's first; the j-th is j steps on. Where elements lie apart, neighbours have
  // neighbouring tokens.
  __device__ __forceinline__ uint2 first_unit(const AnyPlane& p) const {
    const uint32_t q = p.split.divide(thread), rest = thread - q * p.split.d;
    if (thread >= p.threads) return make_uint2(kMostAnyTokens, 0);
    return p.load_bytes ? make_uint2(q, rest) : make_uint2(rest, q);
  }
  __device__ __forceinline__ bool is_within(const AnyPlane& p, uint32_t r, uint32_t unit) const {
    return r < uint32_t(a.tokens) && unit < uint32_t(p.units);
  }

  // Puts a plane's bytes under way; each thread copies what it will convert, a unit in kCopies of kBytes.
  template <int kBytes, int kCopies> __device__ __forceinline__ void copy(int plane, int buffer) const {
    const AnyPlane& p = a.plane[plane];
    const uint2 first = first_unit(p);
    const bool has_unit = int32_t(first.y * kUnit) < p.dims;
    const int64_t inside = unit_offset(p, first.y);
    const char* none = p.p.data;
    const AnyRow* row = rows(buffer) + first.x;
    uint32_t to = raw_at(p, buffer, 0);
#pragma unroll 2
    for (uint32_t r = first.x; r < uint32_t(a.tokens);
         r += p.row_step, row += p.row_step, to += kThreads * kBytes * kCopies) {
      const char* begins = row->at[plane];
      const bool is_there = begins && has_unit;
      const char* from = is_there ? begins + inside : none;
#pragma unroll
      for (int i = 0; i < kCopies; i++)
        copy_unit<kBytes>(to + i * kBytes, is_there ? from + i * kBytes : none, is_there);
    }
  }
  __device__ __forceinline__ void copy_plane(int plane, int buffer) const {
    const AnyPlane& p = a.plane[plane];
    if (!p.is_staged) return;
    if (p.load_bytes == 16) {
      if (kParts == 3 && p.bits == 32) return copy<16, 2>(plane, buffer);
      return copy<16, 1>(plane, buffer);
    }
    if (p.load_bytes == 8) return copy<8, 1>(plane, buffer);
    if (p.bits == 4) return copy<4, 1>(plane, buffer);
    if (p.bits == 8) return copy<4, 2>(plane, buffer);
    if (p.bits == 16) return copy<4, 4>(plane, buffer);
    if constexpr (kParts == 3) copy<4, 8>(plane, buffer);
  }
  // A unit has as many bytes as its elements have bits.
  __device__ __forceinline__ uint32_t raw_at(const AnyPlane& p, int buffer, int j) const {
    return at + p.raw_at + (((buffer & a.last_raw) * p.raw_steps + j) * kThreads + thread) * p.bits;
  }

  template <int kBits> __device__ __forceinline__ void convert_unit(int plane, int buffer, const uint32_t* words,
                                                                    uint32_t r, uint32_t unit) const {
    const AnyPlane& p = a.plane[plane];
    float scale = 1.f;
    if (kBits <= 8 && p.has_groups) {
      const uint32_t group = p.per_group.divide(unit);
      const AnyRow& row = rows(buffer)[r];
      const ScaleParams& s = p.p.scale;
      if (!row.at[plane] || unit * kUnit >= uint32_t(p.dims)) {
        scale = 0.f;
      } else if (p.scale_words) {  // close to each other, of one byte, two or four
        const char* from = scales(buffer, plane) + r * p.scale_words * 4;
        if (s.dtype == KVX_DTYPE_E8M0) scale = e8m0_to_f32(reinterpret_cast<const uint8_t*>(from)[group]);
        else if (s.dtype == KVX_DTYPE_F8_E4M3)
          scale = __half2float(
              __ushort_as_half(uint16_t(tiles::e4m3_to_f16(reinterpret_cast<const uint8_t*>(from)[group]))));
        else scale = load_scale(from + group * (dtype_bits(s.dtype) / 8), s.dtype);
      } else {
        scale = load_scale(group_scales(row, plane, w.head) + group * s.group, s.dtype);
      }
    }
    const uint32_t to = tile_at(plane * a.planes_apart, r, unit);
    if constexpr (kParts == 1 && kBits <= 16) {
      uint32_t x[4];
      decode_pairs<kBits>(words, p.p.dtype, x);
      if (kBits <= 8 && p.has_groups) {
        const bool rounds = kRounds && (p.p.scale.dtype == KVX_DTYPE_F16 || p.p.scale.dtype == KVX_DTYPE_F32);
        const uint32_t two = tiles::Bf16Numbers::pack(scale, scale);
#pragma unroll
        for (int i = 0; i < 4; i++)
          x[i] = rounds ? tiles::Bf16Numbers::pack(__uint_as_float(x[i] << 16) * scale,
                                                   __uint_as_float(x[i] & 0xffff0000u) * scale)
                        : multiply_bf16(x[i], two);
      }
      tiles::store_shared_16(to, make_uint4(x[0], x[1], x[2], x[3]));
    } else {
      float x[kUnit];
      decode_unit<kBits>(words, p.p.dtype, x);
      if (kBits <= 8 && p.has_groups)
#pragma unroll
        for (int i = 0; i < kUnit; i++) x[i] *= scale;
      store_parts<kParts>(to, a.tokens * a.row_bytes, x);
    }
  }

  template <int kBits> __device__ __forceinline__ void convert(int plane, int buffer) const {
    const AnyPlane& p = a.plane[plane];
    const uint2 first = first_unit(p);
    if (p.load_bytes) {
      uint32_t from = raw_at(p, buffer, 0);
#pragma unroll 2
      for (uint32_t r = first.x; r < uint32_t(a.tokens); r += p.row_step, from += kThreads * kBits) {
        uint32_t words[kBits / 4];
        if (kParts == 3 && !p.is_staged) {
          const char* row = rows(buffer)[r].at[plane];
#pragma unroll
          for (int i = 0; i < kBits / 4; i++)
            words[i] = row && int32_t(first.y * kUnit) < p.dims
                           ? load_once<uint32_t>(row + unit_offset(p, first.y) + 4 * i)
                           : 0;
        } else if constexpr (kBits == 4) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[0]) : "r"(from));
        else if constexpr (kBits == 8)
          asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from));
        else
#pragma unroll
          for (int i = 0; i < kBits / 16; i++)
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(words[4 * i]), "=r"(words[4 * i + 1]), "=r"(words[4 * i + 2]), "=r"(words[4 * i + 3])
                         : "r"(from + 16 * i));
        convert_unit<kBits>(plane, buffer, words, r, first.y);
      }
      return;
    }
#pragma unroll 1
    for (uint32_t unit = first.y; is_within(p, first.x, unit); unit += p.unit_step) {
      const UnitWords<kBits> x = load_elements<kBits>(p, rows(buffer)[first.x].at[plane], unit * kUnit);
      convert_unit<kBits>(plane, buffer, x.w, first.x, unit);
    }
  }

  // `plane` is no constant: as much code again would serve nobody.
  __device__ __forceinline__ void convert_plane(int plane, int buffer) {
    switch (a.plane[plane].bits) {
      case 4: return convert<4>(plane, buffer);
      case 8: return convert<8>(plane, buffer);
      case 16: return convert<16>(plane, buffer);
      default:
        if constexpr (kParts == 3) convert<32>(plane, buffer);
    }
  }
};

// Blocks of rows, sequence by sequence, those that see most first. All lanes of a warp
// ask; seq -1: there is no such block.
template <int kRows> __device__ __forceinline__ AnyWork own_work(const AnyArgs& a, uint32_t index) {
  AnyWork w = {};
  w.seq = -1;
  const int lane = threadIdx.x % 32;
  for (int32_t from = 0; from < a.d.num_seqs; from += 32) {
    const int32_t seq = from + lane;
    uint32_t mine = 0;
    int32_t queries = 0;
    if (seq < a.d.num_seqs) {
      const SeqQueries found = queries_of(a.d, seq);
      const int64_t first = found.first;
      queries = found.count;
      if (queries < 0 || first < 0 || queries > a.d.num_tokens - first || int64_t(queries) * a.d.group <= a.skip_rows)
        queries = 0;
      mine = uint32_t((int64_t(queries) * a.d.group + kRows - 1) / kRows) * a.d.num_kv_heads;
    }
    uint32_t sum = mine;
    for (int hop = 1; hop < 32; hop *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, sum, hop);
      if (lane >= hop) sum += other;
    }
    const uint32_t found = __ballot_sync(0xffffffffu, index < sum);
    if (found == 0) {
      index -= __shfl_sync(0xffffffffu, sum, 31);
      continue;
    }
    const int is = __ffs(int(found)) - 1;
    const uint32_t inside = index - (__shfl_sync(0xffffffffu, sum, is) - __shfl_sync(0xffffffffu, mine, is)),
                   blocks = __shfl_sync(0xffffffffu, mine, is) / a.d.num_kv_heads;
    w.seq = from + is, w.queries = __shfl_sync(0xffffffffu, queries, is);
    w.head = int32_t(inside % a.d.num_kv_heads);
    w.first_row = int32_t(blocks - 1 - inside / a.d.num_kv_heads) * kRows;
    w.rows = min(w.queries * a.d.group - w.first_row, kRows);
    w.length = clamped_length(a.d.rows.kv, w.seq, a.d.max_seq_len);
    const int32_t before = a.d.is_causal ? w.length - w.queries + 1 : w.length,
                  of_last = a.d.is_causal ? before + (w.first_row + w.rows - 1) / a.d.group : before;
    const int32_t of_first = a.d.is_causal ? before + w.first_row / a.d.group : before;
    w.end = max(of_last, 0);
    w.begin = a.d.window > 0 ? int32_t(max(int64_t(0), of_first - a.d.window)) : 0;
    w.num_tiles =
        max((w.end + a.tokens - 1) / a.tokens - w.begin / a.tokens, 1);  // somebody has to write the empty result
    w.first = w.begin / a.tokens * a.tokens;
    w.counts = a.d.rows.kv.errors && w.head == 0 && inside < uint32_t(a.d.num_kv_heads);  // of the last rows
    return w;
  }
  return w;
}

}  // namespace cuda
}  // namespace kvx
