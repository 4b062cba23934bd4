// Where the rows of a tile of positions lie, and how they reach the inner loops (attend.h).
#pragma once
#include <string.h>

#include <vector>

#include "attention/attention.h"
#include "attention/cpu/attend.h"
#include "cpu/row.h"
#include "table.h"

namespace kvx {
namespace cpu {

inline float* aligned(float* p) {  // to a line: fifteen more may have to be there
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64);
}
inline int64_t padded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Where the positions of a tile lie, from KV head `head` on.
struct Tile {
  int64_t first, count, head;
  const char*
      at[2][kTile + kRoom];  // that head's row of K and of V, of zeros where there is none. Past count, the last again
  int64_t id[2][kTile];      // block ids, for scales
  int64_t offset[kTile];     // in the block
  int32_t there[kTile];      // -1, or 0 where K or V has no block
  bool is_whole;

  void find(const GatherParams& kv, int64_t seq, int64_t begin, int64_t end, const char* zeros) {
    first = begin, count = end - begin, is_whole = true;
    const bool ragged = kv.table.format == KVX_BLOCK_TABLE_RAGGED;
    BlockPlace place[2] = {};
    int64_t offset_now = begin % kv.block_size, logical = begin / kv.block_size;
    for (int64_t t = 0; t < count; t++) {
      if (t == 0 || offset_now == 0 || ragged)
        for (int i = 0; i < 2; i++) place[i] = find_any_block(kv, seq, begin + t, logical, i);
      offset[t] = offset_now;
      there[t] = place[0].state == BLOCK_FOUND && place[1].state == BLOCK_FOUND ? -1 : 0;
      is_whole &= there[t] != 0;
      for (int i = 0; i < 2; i++)
        at[i][t] = there[t] ? place[i].base + offset_now * kv.plane[i].token + head * kv.plane[i].head : zeros,
        id[i][t] = place[i].id;
      if (++offset_now == kv.block_size) offset_now = 0, logical++;
    }
    for (int i = 0; i < 2; i++)
      for (int64_t t = count; t < kTile + kRoom; t++) at[i][t] = at[i][count - 1];
  }
};

// The numbers of a scale's 256 codes; NULL: it has more. Rows have many of them, and a look-up is the shortest way.
inline const float* byte_scales_of(int dtype) {
  struct Codes {
    float of[256];
    explicit Codes(int dtype) {
      for (int i = 0; i < 256; i++) {
        const char code = char(i);
        of[i] = load_scale(&code, dtype);
      }
    }
  };
  static const Codes e4m3(KVX_DTYPE_F8_E4M3), e8m0(KVX_DTYPE_E8M0);
  return dtype == KVX_DTYPE_F8_E4M3 ? e4m3.of : dtype == KVX_DTYPE_E8M0 ? e8m0.of : nullptr;
}

// How rows of K or V reach the inner loops. Types the loops know are taken as they lie, every head of the tile at once.
// So are those of few bits for a few query rows, where there are TileLoops for them. Of the others, rows that are no
// whole number of the loops' steps are copied and padded, and rows of few bits are copied as int8 where the loops
// multiply bytes and as bf16 where they multiply tiles, a head at a time. Anything else is made f32, a head at a time.
struct Reader {
  const PlaneParams* plane;
  int index;
  bool is_direct, is_copied;
  bool is_grouped;             // copied, with several scales a row
  bool has_f32 = false;        // `made`, since rows were copied
  const TileLoops* few;        // NULL: other loops
  int dtype;                   // of the rows the loops see
  int64_t dim;                 // of those rows
  float lift_in, lift_out;     // AttendTable's, of these rows
  float lift;                  // of scales
  float lower;                 // what rows with NaN in them are made with, instead of their scale
  Unpack unpack;               // of copied rows; NULL: they stay as they are
  UnpackScaled unpack_scaled;  // the same, where rows have several scales
  WidenRow widen;              // NULL: by row.h
  WidenGroups widen_groups;
  const float* byte_scales;         // by code; NULL: scales are wider
  std::vector<float> room;          // what `made` lies in
  float* made;                      // [kTile, dim], of a head: f32, or copied rows where those would begin
  std::vector<float> scales;        // [heads, kTile]; grouped ones, of one head: [groups, kTile]
  std::vector<float> group_scales;  // of a row
  const char *made_at[kTile + kRoom], *copied_at[kTile + kRoom];
  const uint8_t* scale_of[kTile];  // the first of each position, where scales are bytes
  ByteScales bytes_now;

  void open(const AttentionParams& p, const AttendTable& loops, int i, int64_t rows, int64_t heads) {
    plane = &p.kv.plane[i], index = i, has_f32 = false;
    const bool is_16_bit = p.q.dtype != KVX_DTYPE_F32;
    const ScaleParams& s = plane->scale;
    few = is_16_bit && rows <= 2 * kLanes && plane->is_dense ? choose_few(loops) : nullptr;
    unpack = is_16_bit || loops.unpacked == KVX_DTYPE_S8 ? loops.unpack[plane->dtype] : nullptr;
    if (few) unpack = nullptr;
    const int d = unpack ? loops.unpacked : plane->dtype;
    // Above two fours of rows, turning a row into f32 once is cheaper than each time it is
    // used; V's are also put close together. Products of bytes and of tiles are cheaper than either.
    const bool is_cheap = (d == KVX_DTYPE_F32 && i == 0) || (d == KVX_DTYPE_S8 && loops.pack_s8) ||
                          (d == KVX_DTYPE_BF16 && loops.pack_tiles && is_16_bit) || rows <= 2 * kLanes;
    unpack_scaled = is_16_bit && can_unpack_scaled(s) ? loops.unpack_scaled[plane->dtype] : nullptr;
    is_grouped = unpack && (d == KVX_DTYPE_S8 || unpack_scaled) && plane->is_dense && s.data && s.num_groups > 1 &&
                 (s.group_size == 16 || s.group_size == 32) && is_16_bit;
    if (few) is_grouped = s.num_groups > 1;
    if (!is_grouped || few) unpack_scaled = nullptr;
    is_direct = few || (is_cheap && loops.scores[d] && plane->is_dense && (is_grouped || s.num_groups <= 1));
    const bool by_tiles = d == KVX_DTYPE_BF16 && loops.pack_tiles && is_16_bit && rows <= 2 * kLanes;
    is_copied = is_direct && !few && (unpack || (plane->head_dim % loops.step(d) != 0 && !by_tiles));
    dtype = is_direct ? d : KVX_DTYPE_F32;
    dim = padded(plane->head_dim, few ? 64 : loops.step(dtype));
    lift_in = few ? 1 : loops.lift_in[dtype], lift_out = few ? 1 : loops.lift_out[dtype];
    lift = few ? few->lift : i == 0 ? lift_out : lift_in;
    if (is_copied && plane->dtype == KVX_DTYPE_E2M1 && dtype == KVX_DTYPE_S8) lift /= 2;  // its numbers are doubled
    lower = 1 / loops.lift_in[dtype] / loops.lift_out[dtype];
    widen = plane->is_dense ? loops.widen[plane->dtype] : nullptr;
    widen_groups = plane->is_dense ? loops.widen_groups[plane->dtype] : nullptr;
    group_scales.resize(size_t(s.num_groups));
    byte_scales = byte_scales_of(s.dtype);
    bytes_now = ByteScales{scale_of, s.group, s.group_size, s.dtype, s.head, byte_scales};
    if (is_scaled()) scales.resize(size_t(heads * kTile));
    if (is_grouped && !few) scales.resize(size_t(s.num_groups * kTile));
    if (is_grouped && few) scales.assign(size_t(heads * kTile), (s.tensor_scale ? *s.tensor_scale : 1.0f) * lift);
    if (unpack_scaled) scales.assign(size_t(kTile), s.tensor_scale ? *s.tensor_scale : 1.0f);
    if (is_direct && !is_copied && (few || !is_fp8())) return;
    room.resize(size_t(kTile * dim) + 16);
    if (dim != plane->head_dim) room.assign(room.size(), 0.0f);  // what pads rows is zeros
    made = aligned(room.data());
    for (int64_t t = 0; t < kTile + kRoom; t++) {
      const int64_t row = least(t, kTile - 1);
      made_at[t] = reinterpret_cast<const char*>(made + row * dim);
      copied_at[t] = reinterpret_cast<const char*>(made) + row * span_bytes(dtype, dim);
    }
  }

  bool is_fp8() const { return dtype == KVX_DTYPE_F8_E4M3 || dtype == KVX_DTYPE_F8_E5M2; }
  bool is_scaled() const { return is_direct && !is_grouped && is_quantised(plane->dtype); }

  // NULL: these rows have none.
  const TileLoops* choose_few(const AttendTable& loops) const {
    const ScaleParams& s = plane->scale;
    const bool is_taken = s.data && (s.group_size == 16 || s.group_size == 32);
    const TileLoops* found = s.num_groups <= 1                  ? &loops.few[plane->dtype]
                             : is_taken && can_unpack_scaled(s) ? &loops.few_scaled[plane->dtype]
                             : is_taken && plane->dtype == KVX_DTYPE_S4 && s.dtype == KVX_DTYPE_F16
                                 ? &loops.few_s4_by_f16
                                 : nullptr;
    return found && found->dots ? found : nullptr;
  }

  TileRows lie(const Tile& tile, int64_t num_heads) const {
    const bool has_scale = is_scaled() || (few && is_grouped && (plane->scale.tensor_scale || lift != 1));
    TileRows rows{tile.at[index],
                  tile.count,
                  dim,
                  num_heads,
                  plane->head,
                  plane->head > plane->token,
                  has_scale ? scales.data() : nullptr};
    rows.width = plane->head_dim;
    if (few && is_grouped) rows.byte_scales = &bytes_now;
    return rows;
  }

  // Of every head and position, times the lift; 0 where there is no row.
  void read_scales(const Tile& tile, int64_t num_heads) {
    const ScaleParams& s = plane->scale;
    const bool is_f32 = s.data && s.dtype == KVX_DTYPE_F32 && s.mode != SCALE_NONE && !s.tensor_scale;
    if (is_f32 && s.head == 4 && num_heads <= 64) return turn_scales(tile, num_heads);
    const float by = lift;  // a store of a float might change it
    for (int64_t t = 0; t < tile.count; t++)
      for (int64_t h = 0; h < num_heads; h++) {
        const ScaleAt scale{tile.id[index][t], tile.offset[t], tile.head + h, 0};
        scales[size_t(h * kTile + t)] = !tile.there[t] ? 0
                                        : is_f32       ? *reinterpret_cast<const float*>(scale_at(s, scale, 0)) * by
                                                       : read_scale(s, scale, 0) * by;
      }
  }

  // f32 scales of a token's heads, which lie side by side: four tokens at a time, so that what is written does too.
  void turn_scales(const Tile& tile, int64_t num_heads) {
    static constexpr float kNone[64] = {};
    const float by = lift;
    for (int64_t t = 0; t < tile.count; t += 4) {
      const float* at[4];
      for (int64_t i = 0; i < 4; i++) {
        const int64_t pos = least(t + i, tile.count - 1);
        const ScaleAt first{tile.id[index][pos], tile.offset[pos], tile.head, 0};
        at[i] = tile.there[pos] ? reinterpret_cast<const float*>(scale_at(plane->scale, first, 0)) : kNone;
      }
      float* to = scales.data() + t;
      for (int64_t h = 0; h < num_heads; h++, to += kTile) {
        const float four[4] = {at[0][h] * by, at[1][h] * by, at[2][h] * by, at[3][h] * by};
        memcpy(to, four, sizeof four);
      }
    }
  }

  // Every head of a unit, as they lie; false where that is not possible.
  bool read(const AttendTable& loops, const Tile& tile, int64_t num_heads) {
    if (is_scaled()) read_scales(tile, num_heads);
    if (few && is_grouped) find_byte_scales(tile, tile.head);
    if (few) return true;
    if (!is_direct || is_copied) return false;
    bool is_odd = false;
    const bool is_close = plane->head == dim;  // heads without anything between them are one row
    for (int64_t t = 0; t < tile.count && is_fp8(); t++)
      for (int64_t h = 0; h < (is_close ? 1 : num_heads); h++)
        is_odd |= loops.has_nan(dtype, tile.at[index][t] + h * plane->head, is_close ? num_heads * dim : dim);
    return !is_odd;
  }

  // The unit's head h, made or copied.
  TileRows rows_of(const Tile& tile, int64_t h) const {
    TileRows rows{has_f32 ? made_at : copied_at, tile.count, dim, 1, 0, true};
    if (!has_f32) rows.stride = span_bytes(dtype, dim);
    if (is_scaled()) rows.scale = scales.data() + h * kTile;
    if (unpack_scaled) rows.scale = plane->scale.tensor_scale ? scales.data() : nullptr;
    else if (is_grouped) rows.group_scale = scales.data(), rows.group = plane->scale.group_size;
    return rows;
  }

  // Scales of a tile that comes next.
  inline __attribute__((always_inline)) void ask_scales(const Tile& tile) const {
    const ScaleParams& s = plane->scale;
    if (s.data && s.token != 0)
      for (int64_t t = 0; t < tile.count; t++)
        if (tile.there[t])
          __builtin_prefetch(scale_at(s, ScaleAt{tile.id[index][t], tile.offset[t], tile.head, 0}, 0), 0, 2);
  }

  // The unit's head h, copied; false where rows are not, or have to be made f32.
  bool copy(const AttendTable& loops, const Tile& tile, int64_t h, const TileRows* next) {
    if (!is_copied) return false;
    if (has_f32 && dim != plane->head_dim) room.assign(room.size(), 0.0f);
    has_f32 = false;
    const int64_t bytes = span_bytes(plane->dtype, plane->head_dim);
    bool is_odd = false;
    if (unpack_scaled) return copy_scaled(tile, h, next), true;
    if (unpack) unpack(lie(tile, h + 1), h, bytes, const_cast<char*>(copied_at[0]), span_bytes(dtype, dim), next);
    AskAhead ahead(next, h, bytes);
    for (int64_t t = 0; t < tile.count && !unpack; t++) {
      char* row = const_cast<char*>(copied_at[t]);
      ahead.ask(bytes);
      copy_row(row, tile.at[index][t] + h * plane->head, bytes);
      is_odd |= is_fp8() && loops.has_nan(dtype, row, dim);
    }
    for (int64_t t = 0; t < tile.count && is_grouped; t++) {
      const ScaleAt scale{tile.id[index][t], tile.offset[t], tile.head + h, 0};
      if (tile.there[t]) read_group_scales(scale_at(plane->scale, scale, 0), lift, scales.data() + t, kTile);
      else
        for (int64_t g = 0; g < plane->scale.num_groups; g++) scales[size_t(g * kTile + t)] = 0;
    }
    return !is_odd;
  }

  // With their scales in them: all but that of the tensor.
  void copy_scaled(const Tile& tile, int64_t h, const TileRows* next) {
    find_byte_scales(tile, tile.head + h);
    const int64_t stride = span_bytes(dtype, dim);
    for (int64_t t = 0; t < tile.count && !tile.is_whole; t++)
      if (!tile.there[t]) scale_of[t] = reinterpret_cast<const uint8_t*>(plane->scale.data);
    unpack_scaled(lie(tile, h + 1), h, plane->head_dim, bytes_now, const_cast<char*>(copied_at[0]), stride, next);
    for (int64_t t = 0; t < tile.count && !tile.is_whole; t++)
      if (!tile.there[t]) memset(const_cast<char*>(copied_at[t]), 0, size_t(stride));
  }
  void find_byte_scales(const Tile& tile, int64_t head) {
    for (int64_t i = 0; i < kTile; i++) {
      const int64_t t = least(i, tile.count - 1);
      const ScaleAt scale{tile.id[index][t], tile.offset[t], head, 0};
      scale_of[i] = reinterpret_cast<const uint8_t*>(tile.there[t] ? scale_at(plane->scale, scale, 0) : nullptr);
    }
  }

  // Whether elements times scales are exact in bf16.
  bool can_unpack_scaled(const ScaleParams& s) const {
    if (dtype_bits(plane->dtype) == 4) return s.dtype == KVX_DTYPE_F8_E4M3 || s.dtype == KVX_DTYPE_E8M0;
    return s.dtype == KVX_DTYPE_E8M0 && s.group_size == 32;
  }

  // Rows are short: calls of memcpy take longer than they do. The last step goes back over the one before.
  static void copy_row(char* to, const char* row, int64_t bytes) {
    if (bytes < 16) return void(memcpy(to, row, size_t(bytes)));
    for (int64_t i = 0; i + 16 < bytes; i += 16) memcpy(to + i, row + i, 16);
    memcpy(to + bytes - 16, row + bytes - 16, 16);
  }

  // Of one row, from `at` on, times `by`.
  void read_group_scales(const char* at, float by, float* to, int64_t stride) const {
    const ScaleParams& s = plane->scale;
    if (s.tensor_scale) by *= *s.tensor_scale;
    if (byte_scales)
      for (int64_t g = 0; g < s.num_groups; g++) to[g * stride] = byte_scales[uint8_t(at[g * s.group])] * by;
#if defined(__ARM_FP16_FORMAT_IEEE)
    else if (s.dtype == KVX_DTYPE_F16)
      for (int64_t g = 0; g < s.num_groups; g++)
        to[g * stride] = float(*reinterpret_cast<const __fp16*>(at + g * s.group)) * by;
#endif
    else
      for (int64_t g = 0; g < s.num_groups; g++) to[g * stride] = load_scale(at + g * s.group, s.dtype) * by;
  }

  // The unit's head h, made f32.
  TileRows make(const RowTable& ops, const Tile& tile, int64_t h, const TileRows* next) {
    has_f32 = true;
    const RowsParams f32{nullptr, 0, 0, 4, KVX_DTYPE_F32, 1};
    const int64_t bytes = span_bytes(plane->dtype, plane->head_dim);
    AskAhead ahead(next, h, bytes);
    for (int64_t t = 0; t < tile.count; t++) {
      float* row = made + t * dim;
      char* cell = const_cast<char*>(tile.at[index][t]) + h * plane->head;
      const ScaleAt scale{tile.id[index][t], tile.offset[t], tile.head + h, 0};
      ahead.ask(bytes);
      if (!tile.there[t]) memset(row, 0, size_t(plane->head_dim) * 4);
      else if (widen && plane->scale.num_groups <= 1)
        widen(row, cell, plane->head_dim, is_direct ? lower : read_scale(plane->scale, scale, 0));
      else if (widen_groups && plane->scale.data) {
        read_group_scales(scale_at(plane->scale, scale, 0), 1, group_scales.data(), 1);
        widen_groups(row, cell, plane->head_dim, group_scales.data(), plane->scale.group_size);
      } else gather_row(ops, *plane, f32, reinterpret_cast<char*>(row), cell, scale);
    }
    return rows_of(tile, h);
  }
};

}  // namespace cpu
}  // namespace kvx
