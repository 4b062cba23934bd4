// Attention over a latent cache (MLA) on the host. All heads read one row a token, latent and rotary part side by side,
// so a tile of rows serves up to kRowsTogether query rows twice: whole for scores, its latents for values. The loops
// are attend.h's. Rows are made f32 for them. Where they multiply tiles and queries are of 16 bits, rows of bf16 are
// taken as they are. Codes of 8 and 4 bits become bf16, exactly: the elements under one scale are a head of their own,
// whose scale multiplies scores before they are added up, and weights. Other rows are made two parts of bf16, 2^-17 of
// a number off at most: scores are then of rows twice as long, against each query twice, and values of twice as many
// rows, with each weight twice.
#include "attention/attention.h"

#include <math.h>
#include <string.h>

#include <memory>
#include <vector>

#include "attention/cpu/tile_reader.h"
#include "cpu/carry.h"
#include "cpu/row.h"
#include "run.h"
#include "table.h"

namespace kvx {
namespace cpu {

namespace {

constexpr int64_t kRowsTogether =
    64;  // query rows (a query and a head): with their sums and a tile they fill half a second level
constexpr int64_t kLeastSpan = 256;       // positions worth a unit of their own
constexpr int64_t kMostScales = 8;        // of a row of codes: each has scores of its own
constexpr int64_t kThreadWork = 1 << 14;  // rows times positions: below, waking threads costs more than they bring

// Query rows [first, first + count) of a sequence, numbered query by query, over positions [begin, end).
struct Unit {
  int64_t seq, length;
  int64_t first_token, num_queries;  // of the sequence, in q
  int64_t first, count;
  int64_t begin, end;
  int64_t partial;  // index of its first partial row; -1: the result is whole
};

int64_t last_seen(const AttentionParams& p, const Unit& u, int64_t query) {
  return p.is_causal ? u.length - u.num_queries + query : u.length - 1;
}
int64_t first_seen(const AttentionParams& p, const Unit& u, int64_t query) {
  return p.window ? greatest(0, last_seen(p, u, query) - p.window + 1) : 0;
}

// The positions that some of the unit's rows see.
void set_positions(const AttentionParams& p, Unit* u) {
  u->begin = first_seen(p, *u, u->first / p.num_heads);
  u->end = greatest(u->begin, last_seen(p, *u, (u->first + u->count - 1) / p.num_heads) + 1);
}

kvx_status_t check_blocks(const AttentionParams& p, const Unit& u) {
  const GatherParams& kv = p.kv;
  const bool ragged = kv.table.format == KVX_BLOCK_TABLE_RAGGED;
  for (int64_t pos = u.begin; pos < u.end; pos = ragged ? pos + 1 : (pos / kv.block_size + 1) * kv.block_size)
    for (int plane = 0; plane < (kv.table.format == KVX_BLOCK_TABLE_KV_OFFSETS ? 2 : 1); plane++)
      if (find_block(kv, u.seq, pos, pos / kv.block_size, plane).state == BLOCK_BAD)
        return fail(KVX_STATUS_OUT_OF_RANGE,
                    "block_table of sequence %lld has no block inside the cache (num_blocks %lld) for position %lld of "
                    "%lld, which a query sees.",
                    (long long)u.seq, (long long)kv.num_blocks, (long long)pos, (long long)u.length);
  return KVX_STATUS_OK;
}

// Groups of rows, after every length, range and block id has been looked at.
kvx_status_t make_groups(const AttentionParams& p, std::vector<Unit>* out) {
  for (int64_t s = 0; s < p.num_seqs; s++) {
    const int64_t first = p.cu_seqlens ? read_index(p.cu_seqlens, s * p.cu_bytes, p.cu_bytes) : s * p.query_len;
    const int64_t end = p.cu_seqlens ? read_index(p.cu_seqlens, (s + 1) * p.cu_bytes, p.cu_bytes) : first + p.query_len;
    if (first < 0 || end < first || end > p.num_tokens || end - first > p.max_query_len)
      return fail(KVX_STATUS_OUT_OF_RANGE,
                  "cu_seqlens[%lld..%lld] is not a range of at most max_query_len %lld rows inside the %lld of q.",
                  (long long)s, (long long)s + 1, (long long)p.max_query_len, (long long)p.num_tokens);
    const int64_t length = sequence_length(p.kv.table, s, p.kv.block_size);
    if (length < 0)
      return fail(KVX_STATUS_OUT_OF_RANGE, "sequence %lld has a negative or impossible length.", (long long)s);
    if (length > p.max_seq_len)
      return fail(KVX_STATUS_OUT_OF_RANGE,
                  "sequence %lld has %lld tokens; max_seq_len, or what the table holds, is %lld.", (long long)s,
                  (long long)length, (long long)p.max_seq_len);
    if (first == end) continue;
    Unit whole{s, length, first, end - first, 0, (end - first) * p.num_heads, 0, 0, -1};
    set_positions(p, &whole);
    KVX_TRY(check_blocks(p, whole));
    for (int64_t i = 0; i < whole.count; i += kRowsTogether) {
      Unit group = whole;
      group.first = i, group.count = least(kRowsTogether, whole.count - i);
      set_positions(p, &group);
      out->push_back(group);
    }
  }
  return KVX_STATUS_OK;
}

// Groups cut into spans of about the same work, several a thread. `partials` becomes the number of partial rows.
std::vector<Unit> make_units(const std::vector<Unit>& groups, int64_t* work, int64_t* partials) {
  *work = *partials = 0;
  for (const Unit& g : groups) *work += (g.end - g.begin) * g.count;
  const int64_t share = greatest(1, *work / (8 * max_threads()));
  std::vector<Unit> units;
  for (const Unit& g : groups) {
    const int64_t length = g.end - g.begin, spans = greatest(1, least(length / kLeastSpan, length * g.count / share));
    const int64_t span = greatest(1, (length + spans - 1) / spans);
    int64_t begin = g.begin;
    do {
      Unit u = g;
      u.begin = begin, u.end = least(g.end, begin + span);
      if (u.begin != g.begin || u.end != g.end) u.partial = *partials, *partials += g.count;
      units.push_back(u);
      begin = u.end;
    } while (begin < g.end);
  }
  return units;
}

int64_t partial_floats(const AttentionParams& p) { return p.head_dim + 2; }  // most, sum, values

// How rows reach the loops: as f32, as bf16 where they lie or copied, as codes in bf16 without their scales, or made
// two parts of bf16.
enum class Rows { F32, BF16, CODES, TWO_PARTS };

// What a thread works in.
struct Desk {
  Rows rows;
  int64_t dim;      // of a key, and what pads it to whole vectors: zeros
  int64_t k_dim;    // of what scores are made with
  int64_t out_dim;  // of a row of sums
  int64_t size;     // positions of a tile
  int64_t groups;   // of a row of codes, each under one scale: heads, as the loops see them. Others: 1
  std::vector<float> room, q, packed, sums, scores, row, line;
  float *tile, *out;  // tile: [size, dim] of f32, or as many bytes
  std::vector<Softmax> softmax;
  const char* at[kTile + kRoom];     // where a row begins; in two parts, where it does, then where the second parts do
  const char* next[kTile + kRoom];   // where rows of the next tile lie, to be asked for
  const char* raw[kTile + kRoom];    // where rows of codes lie
  float scale[kMostScales * kTile];  // theirs, [groups, kTile]
  int32_t there[kTile];              // -1, or 0 where the latent or the rotary part has no block
  bool is_whole;

  void open(const AttentionParams& p, const AttendTable& loops) {
    const auto is_bf16 = [&](int i) { return p.kv.plane[i].dtype == KVX_DTYPE_BF16 && p.kv.plane[i].is_dense; };
    const bool by_tiles = loops.pack_tiles && p.q.dtype != KVX_DTYPE_F32;
    const int64_t step = loops.step(by_tiles ? KVX_DTYPE_BF16 : KVX_DTYPE_F32);
    const PlaneParams& latent = p.kv.plane[0];
    groups = latent.scale.data ? latent.scale.num_groups : 1;
    const bool are_codes = latent.is_dense && loops.unpacked == KVX_DTYPE_BF16 && loops.unpack[latent.dtype] &&
                           groups <= kMostScales && p.head_dim % (groups * step) == 0;
    rows = !by_tiles                  ? Rows::F32
           : is_bf16(0) && is_bf16(1) ? Rows::BF16
           : are_codes && is_bf16(1)  ? Rows::CODES
                                      : Rows::TWO_PARTS;
    if (rows != Rows::CODES) groups = 1;
    dim = padded(p.head_dim + p.rope_dim, step), k_dim = rows == Rows::TWO_PARTS ? 2 * dim : dim;
    // Sums of the rotary columns come along where rows are f32, an eighth more work: rows stay one run of memory.
    out_dim = by_tiles ? padded(p.head_dim, step) : dim;
    size = are_halves() ? kTile : kTile / 2;
    room.resize(size_t(size * dim) + 16);
    if (dim != p.head_dim + p.rope_dim) room.assign(room.size(), 0.0f);
    tile = aligned(room.data());
    row.assign(size_t(dim), 0.0f);
  }

  bool are_halves() const { return rows == Rows::BF16 || rows == Rows::CODES; }
  float* row_of(int64_t t) { return are_halves() ? tile + t * dim / 2 : tile + t * dim; }

  // Positions [begin, end) of a sequence; what is not there as zeros. `coming`: rows of codes to be asked for; NULL:
  // none.
  void read(const AttentionParams& p, const RowTable& ops, const AttendTable& loops, int64_t seq, int64_t begin,
            int64_t end, const TileRows* coming) {
    const int64_t count = end - begin, wide = p.head_dim + p.rope_dim;
    is_whole = true;
    const bool ragged = p.kv.table.format == KVX_BLOCK_TABLE_RAGGED;
    BlockPlace place[2] = {};
    int64_t logical = begin / p.kv.block_size, offset = begin % p.kv.block_size - 1;
    for (int64_t t = 0; t < count; t++) {
      if (++offset == p.kv.block_size) offset = 0, logical++;
      for (int i = 0; i < 2 && (t == 0 || offset == 0 || ragged); i++)
        place[i] = find_block(p.kv, seq, begin + t, logical, i);
      const bool found = place[0].state == BLOCK_FOUND && place[1].state == BLOCK_FOUND;
      there[t] = found ? -1 : 0;
      is_whole &= found;
      char* to = reinterpret_cast<char*>(row_of(t));
      at[t] = raw[t] = to;
      if (!found) {
        memset(to, 0, size_t(are_halves() ? dim * 2 : dim * 4));
      } else if (rows == Rows::BF16) {
        const char* cell[2];
        for (int i = 0; i < 2; i++) cell[i] = place[i].base + offset * p.kv.plane[i].token;
        if (cell[1] == cell[0] + p.head_dim * 2 && dim == wide) at[t] = cell[0];
        else memcpy(to, cell[0], size_t(p.head_dim) * 2), memcpy(to + p.head_dim * 2, cell[1], size_t(p.rope_dim) * 2);
      } else if (rows == Rows::CODES) {
        raw[t] = place[0].base + offset * p.kv.plane[0].token;
        memcpy(to + p.head_dim * 2, place[1].base + offset * p.kv.plane[1].token, size_t(p.rope_dim) * 2);
        for (int64_t g = 0; g < groups; g++)
          scale[g * kTile + t] = read_scale(p.kv.plane[0].scale, ScaleAt{place[0].id, offset, 0, 0}, g);
      } else {
        float* key = rows == Rows::F32 ? row_of(t) : row.data();
        for (int i = 0; i < 2; i++) widen_row(p, ops, loops, i, place[i], offset, key + (i ? p.head_dim : 0));
        if (rows == Rows::TWO_PARTS) loops.split(key, dim, to);
      }
      if (rows == Rows::TWO_PARTS) at[count + t] = to + dim * 2;
    }
    for (int64_t t = rows == Rows::TWO_PARTS ? 2 * count : count; t < kTile + kRoom; t++) at[t] = at[count - 1];
    if (rows != Rows::CODES) return;
    for (int64_t t = count; t < kTile + kRoom; t++) raw[t] = raw[count - 1];
    const PlaneParams& latent = p.kv.plane[0];
    const int64_t bytes = span_bytes(latent.dtype, p.head_dim);
    loops.unpack[latent.dtype](TileRows{raw, count, bytes, 1, 0, true}, 0, bytes, reinterpret_cast<char*>(tile),
                               dim * 2, coming);
    for (int64_t t = 0; t < count && !is_whole; t++)  // a row that is not there was unpacked from zeros
      for (int64_t g = 0; g < groups && !there[t]; g++) scale[g * kTile + t] = 1;
  }

  void find_next(const AttentionParams& p, int64_t seq, int64_t begin, int64_t end) {
    const bool ragged = p.kv.table.format == KVX_BLOCK_TABLE_RAGGED;
    BlockPlace place = {};
    int64_t logical = begin / p.kv.block_size, offset = begin % p.kv.block_size - 1;
    for (int64_t t = 0; t < end - begin; t++) {
      if (++offset == p.kv.block_size) offset = 0, logical++;
      if (t == 0 || offset == 0 || ragged) place = find_block(p.kv, seq, begin + t, logical, 0);
      next[t] = place.state == BLOCK_FOUND ? place.base + offset * p.kv.plane[0].token : p.kv.plane[0].data;
    }
    for (int64_t t = end - begin; t < kTile + kRoom; t++) next[t] = next[end - begin - 1];
  }

  static void widen_row(const AttentionParams& p, const RowTable& ops, const AttendTable& loops, int i,
                        const BlockPlace& place, int64_t offset, float* to) {
    const RowsParams f32{nullptr, 0, 0, 4, KVX_DTYPE_F32, 1};
    const PlaneParams& plane = p.kv.plane[i];
    char* cell = place.base + offset * plane.token;
    const ScaleAt scale{place.id, offset, 0, 0};
    const WidenRow widen = plane.is_dense ? loops.widen[plane.dtype] : nullptr;
    const int64_t size = plane.scale.group_size;
    if (!widen) gather_row(ops, plane, f32, reinterpret_cast<char*>(to), cell, scale);
    for (int64_t g = 0; widen && g < plane.scale.num_groups; g++)
      widen(to + g * size, cell + span_bytes(plane.dtype, g * size), size, read_scale(plane.scale, scale, g));
  }
};

void load_query(const AttentionParams& p, const RowTable& ops, const Unit& u, int64_t row, float* to) {
  const int64_t token = u.first_token + row / p.num_heads, head = row % p.num_heads, dim = p.head_dim + p.rope_dim;
  const char* q = p.q.data + token * p.q.token + head * p.q.head;
  if (p.q.is_dense) ops.decode[p.q.dtype][KVX_DTYPE_F32](reinterpret_cast<char*>(to), q, dim, 1.0f);
  else
    for (int64_t d = 0; d < dim; d++) to[d] = load_float(q + d * p.q.dim, p.q.dtype);
}

// Takes a row's softmax to its end: divides, brings the sink in, stores out and lse.
void finish(const AttentionParams& p, const RowTable& ops, const AttendTable& loops, const Unit& u, int64_t row,
            float most, float sum, const float* values, float* scratch) {
  const int64_t token = u.first_token + row / p.num_heads, head = row % p.num_heads;
  const SoftmaxEnd end = end_softmax(loops, most, sum, p.sinks ? p.sinks + head : nullptr);
  for (int64_t d = 0; d < p.head_dim; d++) scratch[d] = values[d] * end.factor;
  char* out = p.out.data + token * p.out.token + head * p.out.head;
  if (p.out.is_dense) ops.encode[KVX_DTYPE_F32][p.out.dtype](out, reinterpret_cast<char*>(scratch), p.head_dim, 1.0f);
  else
    for (int64_t d = 0; d < p.head_dim; d++) store_float(out + d * p.out.dim, p.out.dtype, scratch[d]);
  if (p.lse) *reinterpret_cast<float*>(p.lse + token * p.lse_token + head * p.lse_head) = end.lse;
}

// Scores of the groups of a row of codes, and of its rotary part, into those of the first.
void add_groups(const AttentionParams& p, const AttendTable& loops, const TileStates& states, Desk& desk,
                int64_t count) {
  const int64_t of_head = states.fours * kTile * kLanes;
  const char* at[kTile + kRoom];
  for (int64_t t = 0; t < kTile + kRoom; t++) at[t] = desk.at[t] + p.head_dim * 2;
  TileStates of_rope = states;
  of_rope.q += states.fours * kLanes * p.head_dim, of_rope.scores += desk.groups * of_head;
  loops.dots(TileRows{at, count, desk.dim - p.head_dim, 1, 0, true}, nullptr, of_rope);
  for (int64_t b = states.first; b < states.last; b++) {
    float* sum = states.scores + b * kTile * kLanes;
    for (int64_t g = 1; g <= desk.groups; g++)
      for (int64_t i = 0; i < count * kLanes; i++) sum[i] += sum[g * of_head + i];
  }
}

void attend(const AttentionParams& p, const RowTable& ops, const AttendTable& loops, const Unit& u, Desk& desk,
            float* partials) {
  const int64_t fours = (u.count + kLanes - 1) / kLanes, k_dim = desk.k_dim, states_of_head = fours * kTile * kLanes;
  const bool by_tiles = desk.rows != Rows::F32, is_twice = desk.rows == Rows::TWO_PARTS;
  const int64_t groups = desk.groups, group = desk.out_dim / groups;  // elements of one
  const bool are_codes = desk.rows == Rows::CODES;
  desk.q.assign(size_t(fours * kLanes * k_dim), 0.0f);
  desk.sums.assign(size_t(fours * kLanes * desk.out_dim) + 16, 0.0f);
  desk.out = aligned(desk.sums.data());
  desk.scores.resize(size_t((groups + are_codes) * states_of_head));
  desk.softmax.resize(size_t(groups * fours));
  for (int64_t i = 0; i < fours * kLanes; i++) {
    Softmax& s = desk.softmax[size_t(i / kLanes)];
    const int64_t row = u.first + least(i, u.count - 1), r = i % kLanes;
    s.most[r] = -INFINITY, s.sum[r] = 0;
    s.low[r] = int32_t(first_seen(p, u, row / p.num_heads)), s.last[r] = int32_t(last_seen(p, u, row / p.num_heads));
    if (i >= u.count) continue;
    float* q = are_codes ? desk.row.data() : desk.q.data() + i * k_dim;
    load_query(p, ops, u, row, q);
    if (is_twice) memcpy(q + desk.dim, q, size_t(desk.dim) * 4);
    for (int64_t g = 0; are_codes && g <= groups; g++) {  // by groups, and the rotary part's
      const int64_t n = g < groups ? group : desk.dim - p.head_dim;
      memcpy(desk.q.data() + g * fours * kLanes * group + i * n, q + g * group,
             size_t(g < groups ? n : p.rope_dim) * 4);
    }
  }
  const int final_rows = int(u.count - (fours - 1) * kLanes), parts = 1 + (p.q.dtype == KVX_DTYPE_F16);
  TileStates states{fours,    0,    fours, final_rows == 3 ? 4 : final_rows, desk.q.data(), desk.scores.data(),
                    desk.out, parts};
  if (by_tiles) {
    desk.packed.resize(desk.q.size() + 16);
    float* packed = aligned(desk.packed.data());
    const int64_t of_group = fours * kLanes * group;
    for (int64_t g = 0; g < groups && are_codes; g++)
      loops.pack_tiles(desk.q.data() + g * of_group, fours, group, parts, packed + g * of_group);
    const int64_t packed_dims = are_codes ? p.head_dim : 0;
    loops.pack_tiles(desk.q.data() + fours * kLanes * packed_dims, fours, k_dim - packed_dims, parts,
                     packed + fours * kLanes * packed_dims);
    states.q = packed;
  }
  for (int64_t pos = u.begin; pos < u.end; pos += desk.size) {
    const int64_t end = least(pos + desk.size, u.end), count = end - pos;
    // Codes are asked for a tile ahead while others become bf16, and rows of bf16 mostly by the sums: scores take the
    // shorter time, so they ask for what the sums do not read.
    const bool asks = desk.are_halves() && end < u.end;
    if (asks) desk.find_next(p, u.seq, end, least(end + desk.size, u.end));
    const TileRows next{desk.next, count, desk.out_dim, 1, 0, true};
    desk.read(p, ops, loops, u.seq, pos, end, asks ? &next : nullptr);
    const int64_t asked = are_codes ? span_bytes(p.kv.plane[0].dtype, p.head_dim) : desk.out_dim * 2;
    for (int64_t t = 0; t < count && asks; t++)
      for (int64_t b = asked; b < asked + (desk.dim - p.head_dim) * 2; b += 64)
        __builtin_prefetch(desk.next[t] + b, 0, 2);
    states.first = 0,
    states.last = fours;  // rows are in the order of their queries, so those that see a tile are next to each other
    while (states.first < fours && desk.softmax[size_t(states.first)].last[kLanes - 1] < pos) states.first++;
    while (states.last > states.first && desk.softmax[size_t(states.last - 1)].low[0] >= end) states.last--;
    const TileRows keys{desk.at,   count, are_codes ? group : k_dim,       groups,
                        group * 2, true,  are_codes ? desk.scale : nullptr};
    (by_tiles ? loops.dots : loops.scores[KVX_DTYPE_F32])(keys, nullptr, states);
    if (are_codes) add_groups(p, loops, states, desk, count);
    for (int64_t b = states.first; b < states.last; b++) {
      Softmax& s = desk.softmax[size_t(b)];
      const bool whole = desk.is_whole && s.low[kLanes - 1] <= pos && s.last[0] >= end - 1;
      const ScoreRule rule{p.soft_cap != 0 ? p.scale : p.scale * kLog2e, p.soft_cap, !whole,
                           desk.is_whole ? nullptr : desk.there};
      float* scores = desk.scores.data() + b * kTile * kLanes;
      loops.weigh(&s, scores, pos, count, rule);
      if (is_twice) memcpy(scores + count * kLanes, scores, size_t(count * kLanes) * 4);
      for (int64_t g = 1; g < groups; g++) {
        memcpy(scores + g * states_of_head, scores, size_t(count * kLanes) * 4);
        desk.softmax[size_t(g * fours + b)] = s;
      }
    }
    if (by_tiles)
      loops.sums[KVX_DTYPE_BF16](
          TileRows{desk.at, is_twice ? 2 * count : count, group, groups, group * 2, true, keys.scale},
          asks && !are_codes ? &next : nullptr, states, desk.softmax.data());
    else
      loops.values[KVX_DTYPE_F32](desk.tile, count, desk.dim, nullptr, nullptr, nullptr, states, desk.softmax.data());
  }
  for (int64_t i = 0; i < u.count; i++) {
    const Softmax& s = desk.softmax[size_t(i / kLanes)];
    const float most = s.most[i % kLanes], sum = s.sum[i % kLanes];
    const float* values = desk.out + i * group;
    if (groups > 1) {  // side by side again
      desk.line.resize(size_t(desk.out_dim));
      for (int64_t g = 0; g < groups; g++)
        memcpy(desk.line.data() + g * group, values + g * fours * kLanes * group, size_t(group) * 4);
      values = desk.line.data();
    }
    if (u.partial < 0) {
      finish(p, ops, loops, u, u.first + i, most, sum, values, desk.row.data());
    } else {
      float* to = partials + (u.partial + i) * partial_floats(p);
      to[0] = most, to[1] = sum;
      memcpy(to + 2, values, size_t(p.head_dim) * 4);
    }
  }
}

// Units [first, last) are spans of the same rows; row: one of them.
struct Spans {
  const Unit *first, *last;
  int64_t row;
};
std::vector<Spans> find_spans(const std::vector<Unit>& units) {
  std::vector<Spans> spans;
  for (const Unit *u = units.data(), *end = u + units.size(); u < end;) {
    const Unit* last = u + 1;
    while (last < end && last->seq == u->seq && last->first == u->first) last++;
    for (int64_t row = 0; row < u->count && u->partial >= 0; row++) spans.push_back(Spans{u, last, row});
    u = last;
  }
  return spans;
}

// Spans of a row into one result.
void merge(const AttentionParams& p, const RowTable& ops, const AttendTable& loops, const Spans& spans,
           const float* partials, Desk& desk) {
  float most = -INFINITY, sum = 0;
  const auto part_of = [&](const Unit* u) { return partials + (u->partial + spans.row) * partial_floats(p); };
  for (const Unit* u = spans.first; u < spans.last; u++) most = fmaxf(most, part_of(u)[0]);
  desk.sums.assign(size_t(p.head_dim), 0.0f);
  float* const sums = desk.sums.data();
  for (const Unit* u = spans.first; u < spans.last; u++) {
    const float* part = part_of(u);
    if (part[1] == 0) continue;  // saw nothing
    const float keep = loops.exp2(part[0] - most);
    sum += part[1] * keep;
    for (int64_t d = 0; d < p.head_dim; d++) sums[d] += part[2 + d] * keep;
  }
  finish(p, ops, loops, *spans.first, spans.first->first + spans.row, most, sum, sums, desk.row.data());
}

}  // namespace

kvx_status_t attention_latent(const AttentionParams& p) {
  std::vector<Unit> groups;
  KVX_TRY(make_groups(p, &groups));
  const RowTable& ops = best_rows();
  const AttendTable& loops = best_attend();
  int64_t work, partial_rows;
  const std::vector<Unit> units = make_units(groups, &work, &partial_rows);
  const std::unique_ptr<float[]> partials(new float[size_t(partial_rows * partial_floats(p))]);  // all are written
  const std::vector<Spans> spans = find_spans(units);
  const int64_t count = int64_t(units.size()), num_spans = int64_t(spans.size());
  Carry carry;
#pragma omp parallel if (work >= kThreadWork)
  {
    static thread_local Desk desk;  // kept: fresh memory at every call would cost page faults
    carry([&] { desk.open(p, loops); });
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++) carry([&] { attend(p, ops, loops, units[size_t(i)], desk, partials.get()); });
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_spans; i++)
      carry([&] { merge(p, ops, loops, spans[size_t(i)], partials.get(), desk); });
  }
  carry.rethrow();
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
