// Attention on the host. Work is cut into units: some queries of one sequence, some of its KV heads, a span of positions; a
// unit walks its positions in tiles, keeps a running softmax for every query row, and the spans of one result are merged after.
#include "../attention.h"

#include <math.h>
#include <string.h>

#include <vector>

#include "../run.h"
#include "../table.h"
#include "attend.h"
#include "row.h"

namespace kvx {
namespace cpu {

namespace {

constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
constexpr int64_t kThreadBytes = 256 << 10;  // of K and V read: below, waking threads costs more than they bring
constexpr int64_t kRowsTogether = 64;        // query rows of a KV head in a unit: so often is a K and V row used once it is f32
constexpr int64_t kFewRows = 16;             // up to here a unit takes every head: it is a read of whole tokens, front to back
constexpr int64_t kTileBytes = 128 << 10;    // K and V of a tile: with what is asked for, they stay in the second level
constexpr int64_t kLeastSpan = 256;          // positions worth a unit of their own

// Queries [first, first + count) of a sequence see positions [begin, end) among them.
struct Queries {
  int64_t seq, length;
  int64_t first_row, num_queries;  // of the sequence, in q
  int64_t first, count;            // in this group
  int64_t begin, end;
};

struct Unit {
  int64_t queries;             // index of its Queries
  int64_t head, num_heads;     // KV heads
  int64_t begin, end;          // positions
  int64_t partial;             // index of its first partial row; -1: the result is whole
};

int64_t last_seen(const AttentionParams& p, const Queries& g, int64_t query) { return p.is_causal ? g.length - g.num_queries + query : g.length - 1; }
int64_t first_seen(const AttentionParams& p, const Queries& g, int64_t query) {
  return p.window ? greatest(0, last_seen(p, g, query) - p.window + 1) : 0;
}

kvx_status_t check_blocks(const AttentionParams& p, const Queries& g) {
  const GatherParams& kv = p.kv;
  const bool ragged = kv.table.format == KVX_BLOCK_TABLE_RAGGED;
  for (int64_t pos = g.begin; pos < g.end; pos = ragged ? pos + 1 : (pos / kv.block_size + 1) * kv.block_size)
    for (int plane = 0; plane < (kv.table.format == KVX_BLOCK_TABLE_KV_OFFSETS || kv.bases[0] ? 2 : 1); plane++)
      if (find_any_block(kv, g.seq, pos, pos / kv.block_size, plane).state == BLOCK_BAD)
        return fail(KVX_STATUS_OUT_OF_RANGE, "block_table of sequence %lld has no block inside the cache (num_blocks %lld%s) for position %lld of %lld, which a query sees.",
                    (long long)g.seq, (long long)kv.num_blocks, kv.bases[0] ? ", each with an address" : "", (long long)pos, (long long)g.length);
  return KVX_STATUS_OK;
}

// Groups of queries, after every length, range and block id has been looked at.
kvx_status_t make_queries(const AttentionParams& p, std::vector<Queries>* out) {
  const int64_t together = greatest(1, kRowsTogether / p.group);
  for (int64_t s = 0; s < p.num_seqs; s++) {
    const int64_t first = p.cu_seqlens ? read_index(p.cu_seqlens, s * p.cu_bytes, p.cu_bytes) : s * p.query_len;
    const int64_t end = p.cu_seqlens ? read_index(p.cu_seqlens, (s + 1) * p.cu_bytes, p.cu_bytes) : first + p.query_len;
    if (first < 0 || end < first || end > p.num_tokens || end - first > p.max_query_len)
      return fail(KVX_STATUS_OUT_OF_RANGE, "cu_seqlens[%lld..%lld] is not a range of at most max_query_len %lld rows inside the %lld of q.", (long long)s, (long long)s + 1,
                  (long long)p.max_query_len, (long long)p.num_tokens);
    const int64_t length = sequence_length(p.kv.table, s, p.kv.block_size);
    if (length < 0) return fail(KVX_STATUS_OUT_OF_RANGE, "sequence %lld has a negative or impossible length.", (long long)s);
    if (length > p.max_seq_len)
      return fail(KVX_STATUS_OUT_OF_RANGE, "sequence %lld has %lld tokens; max_seq_len, or what the table holds, is %lld.", (long long)s, (long long)length, (long long)p.max_seq_len);
    if (first == end) continue;
    Queries whole{s, length, first, end - first, 0, end - first, 0, 0};
    whole.begin = first_seen(p, whole, 0), whole.end = greatest(whole.begin, last_seen(p, whole, end - first - 1) + 1);
    KVX_TRY(check_blocks(p, whole));
    for (int64_t i = 0; i < whole.num_queries; i += together) {
      Queries g = whole;
      g.first = i, g.count = least(together, whole.num_queries - i);
      g.begin = first_seen(p, g, i), g.end = greatest(g.begin, last_seen(p, g, i + g.count - 1) + 1);
      out->push_back(g);
    }
  }
  return KVX_STATUS_OK;
}

// Units of about the same work, several a thread. `partials` becomes the number of partial rows.
std::vector<Unit> make_units(const AttentionParams& p, const std::vector<Queries>& queries, int64_t* partials) {
  int64_t positions = 0, work = 0;
  for (const Queries& g : queries) positions += g.end - g.begin, work += (g.end - g.begin) * g.count;
  const int64_t wanted = 8 * max_threads(), share = greatest(1, work * p.num_kv_heads / wanted);
  const bool few = int64_t(queries.size()) + positions / kLeastSpan < 2 * max_threads();
  std::vector<Unit> units;
  *partials = 0;
  for (size_t i = 0; i < queries.size(); i++) {
    const Queries& g = queries[i];
    const int64_t heads = few || g.count * p.group > kFewRows ? 1 : p.num_kv_heads, length = g.end - g.begin;
    const int64_t most = greatest(1, length / kLeastSpan);
    const int64_t spans = least(most, (length * g.count * heads + share - 1) / share);
    const int64_t span = ((length + greatest(1, spans) - 1) / greatest(1, spans) + kTile - 1) / kTile * kTile;
    for (int64_t h = 0; h < p.num_kv_heads; h += heads) {
      int64_t begin = g.begin;
      do {
        const int64_t end = least(g.end, begin + span);
        const bool whole = begin == g.begin && end == g.end;
        units.push_back(Unit{int64_t(i), h, heads, begin, end, whole ? -1 : *partials});
        if (!whole) *partials += heads * g.count * p.group;
        begin = end;
      } while (begin < g.end);
    }
  }
  return units;
}

// Where the positions of a tile lie.
struct Tile {
  int64_t first, count;
  char* base[2][kTile];    // head 0 of K and of V; NULL: not there
  int64_t id[2][kTile];    // block ids, for scales
  int64_t offset[kTile];   // in the block
  int32_t there[kTile];    // -1, or 0 where K or V has no block
  bool is_whole;

  void find(const GatherParams& kv, int64_t seq, int64_t begin, int64_t end) {
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
      for (int i = 0; i < 2; i++) base[i][t] = there[t] ? place[i].base + offset_now * kv.plane[i].token : nullptr, id[i][t] = place[i].id;
      if (++offset_now == kv.block_size) offset_now = 0, logical++;
    }
  }
};

int64_t padded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// How rows of K or V reach the inner loops. K in a type they know is taken as it lies, every head of the tile at once; anything
// else, and V always, is made f32 first, a head at a time.
struct Reader {
  const PlaneParams* plane;
  int index;
  bool is_direct;
  int dtype;         // of the rows the loops see
  int64_t dim;       // of those rows
  WidenRow widen;    // NULL: by row.h
  std::vector<float> made[2];  // [kTile, dim]: of a head, and of the one after it
  std::vector<char> nothing;  // a row of zeros for each head
  std::vector<const char*> asked;
  const char* at[kTile + kLanes];

  void open(const AttentionParams& p, const AttendTable& loops, int i, int64_t rows) {
    plane = &p.kv.plane[i], index = i;
    const int d = plane->dtype;
    // Above two fours of rows, turning a row into f32 once is cheaper than each time it is used.
    is_direct = i == 0 && d <= KVX_DTYPE_F32 && plane->is_dense && plane->head_dim % loops.step(d) == 0 && loops.scores[d] && (d == KVX_DTYPE_F32 || rows <= 2 * kLanes);
    dtype = is_direct ? d : KVX_DTYPE_F32;
    dim = padded(plane->head_dim, loops.step(dtype));
    widen = plane->is_dense && plane->scale.num_groups <= 1 ? loops.widen[d] : nullptr;
    for (int j = 0; j < 2 && !is_direct; j++) made[j].assign(size_t(kTile * dim), 0.0f);
    if (p.kv.table.format == KVX_BLOCK_TABLE_KV_OFFSETS) nothing.assign(size_t((p.num_kv_heads - 1) * plane->head + dim * 4), 0);
  }

  // Heads of a unit, as they lie.
  TileRows lie(const Tile& tile, int64_t head, int64_t num_heads) {
    for (int64_t t = 0; t < padded(tile.count, kLanes); t++) {
      const char* base = tile.base[index][least(t, tile.count - 1)];
      at[t] = (base ? base : nothing.data()) + head * plane->head;
    }
    return TileRows{at, tile.count, dim, num_heads, plane->head, plane->head > plane->token};
  }

  // Rows of a tile in the order they have in memory, with room at the end for loops that take four at a time. (A core that reads
  // the rows of many tokens a line each gets half of what memory can give: every line is then in another page.)
  const char* const* next(const Tile* tile, int64_t head, int64_t num_heads) {
    if (!tile || !tile->is_whole || !plane->is_dense) return nullptr;
    const bool by_head = plane->head > plane->token;
    const int64_t outer = by_head ? num_heads : tile->count, inner = by_head ? tile->count : num_heads;
    asked.resize(size_t(num_heads * kTile + kLanes));
    const char** to = asked.data();
    for (int64_t a = 0; a < outer; a++)
      for (int64_t b = 0; b < inner; b++) *to++ = tile->base[index][by_head ? b : a] + (head + (by_head ? a : b)) * plane->head;
    while (to < asked.data() + asked.size()) *to++ = asked[0];
    return asked.data();
  }

  // One head, made f32.
  TileRows make(const RowTable& ops, const Tile& tile, int64_t head, int which = 0) {
    const int64_t from = head * plane->head;
    const RowsParams f32{nullptr, 0, 0, 4, KVX_DTYPE_F32, 1};
    for (int64_t t = 0; t < tile.count; t++) {
      float* row = made[which].data() + t * dim;
      char* cell = tile.base[index][t] + from;
      const ScaleAt scale{tile.id[index][t], tile.offset[t], head, 0};
      if (!tile.base[index][t]) memset(row, 0, size_t(plane->head_dim) * 4);
      else if (widen) widen(row, cell, plane->head_dim, read_scale(plane->scale, scale, 0));
      else gather_row(ops, *plane, f32, reinterpret_cast<char*>(row), cell, scale);
      at[t] = reinterpret_cast<char*>(row);
    }
    for (int64_t t = tile.count; t % kLanes != 0; t++) at[t] = at[tile.count - 1];
    return TileRows{at, tile.count, dim, 1, 0, true};
  }
};

// What a thread works in.
struct Desk {
  Reader reader[2];
  Tile tile[2];
  std::vector<float> q, out, scores, row;
  std::vector<Softmax> softmax;
};

// A query row: its head and its place in the batch.
struct QueryRow {
  int64_t token, head;
};
QueryRow row_of(const AttentionParams& p, const Queries& g, int64_t kv_head, int64_t row) {
  return QueryRow{g.first_row + g.first + row / p.group, kv_head * p.group + row % p.group};
}

// Takes the softmax to its end: divides, brings the sink in, stores out and lse.
void finish(const AttentionParams& p, const RowTable& ops, const AttendTable& loops, QueryRow at, float most, float sum, const float* values, float* row) {
  float total = sum, shrink = 1;
  if (p.sinks && sum > 0) {
    const float sink = p.sinks[at.head] * kLog2e, top = most > sink ? most : sink;
    shrink = loops.exp2(most - top);
    total = sum * shrink + loops.exp2(sink - top);
  }
  const float factor = sum == 0 ? 0 : shrink / total;  // nothing seen: 0, as the values are. NaN stays
  for (int64_t d = 0; d < p.v_head_dim; d++) row[d] = values[d] * factor;
  char* out = p.out.data + at.token * p.out.token + at.head * p.out.head;
  if (p.out.is_dense) ops.encode[KVX_DTYPE_F32][p.out.dtype](out, reinterpret_cast<char*>(row), p.v_head_dim, 1.0f);
  else
    for (int64_t d = 0; d < p.v_head_dim; d++) store_float(out + d * p.out.dim, p.out.dtype, row[d]);
  if (p.lse) *reinterpret_cast<float*>(p.lse + at.token * p.lse_token + at.head * p.lse_head) = sum == 0 ? -INFINITY : most * kLn2 + logf(sum);
}

void load_query(const AttentionParams& p, const RowTable& ops, QueryRow at, float* to) {
  const char* q = p.q.data + at.token * p.q.token + at.head * p.q.head;
  if (p.q.is_dense) ops.decode[p.q.dtype][KVX_DTYPE_F32](reinterpret_cast<char*>(to), q, p.head_dim, 1.0f);
  else
    for (int64_t d = 0; d < p.head_dim; d++) to[d] = load_float(q + d * p.q.dim, p.q.dtype);
}

// A partial row: most, sum, and the values so far.
int64_t partial_floats(const AttentionParams& p) { return p.v_head_dim + 2; }

void attend(const AttentionParams& p, const RowTable& ops, const AttendTable& loops, const Queries& g, const Unit& u, Desk& desk, float* partials) {
  const int64_t rows = g.count * p.group, fours = (rows + kLanes - 1) / kLanes, states = u.num_heads * fours;
  Reader &k = desk.reader[0], &v = desk.reader[1];
  k.open(p, loops, 0, rows), v.open(p, loops, 1, rows);
  desk.q.assign(size_t(states * kLanes * k.dim), 0.0f);
  desk.out.assign(size_t(states * kLanes * v.dim), 0.0f);
  desk.scores.resize(size_t(states * kTile * kLanes));
  desk.softmax.resize(size_t(states));
  desk.row.resize(size_t(p.v_head_dim));
  for (int64_t s = 0; s < states; s++)
    for (int64_t r = 0; r < kLanes; r++) {
      const int64_t i = s % fours * kLanes + r, query = g.first + least(i, rows - 1) / p.group;
      desk.softmax[s].most[r] = -INFINITY, desk.softmax[s].sum[r] = 0;
      desk.softmax[s].low[r] = int32_t(first_seen(p, g, query)), desk.softmax[s].last[r] = int32_t(last_seen(p, g, query));
      if (i < rows) load_query(p, ops, row_of(p, g, u.head + s / fours, i), desk.q.data() + (s * kLanes + r) * k.dim);
    }
  const int final_rows = int(rows - (fours - 1) * kLanes);
  const TileStates all{fours, 0, fours, final_rows == 3 ? 4 : final_rows, desk.q.data(), desk.scores.data(), desk.out.data()};

  // A tile's K and V, of all heads, stay in the second level together with what is asked for.
  const int64_t token_bytes = u.num_heads * greatest(1, span_bytes(k.plane->dtype, p.head_dim) + span_bytes(v.plane->dtype, p.v_head_dim));
  const int64_t size = greatest(16, least(kTile, kTileBytes / token_bytes / 16 * 16));
  const bool loops_make = v.plane->is_dense && v.plane->dtype <= KVX_DTYPE_F32 && loops.values[v.plane->dtype] && v.plane->head_dim % loops.made_step == 0;
  Tile *tile = &desk.tile[0], *after = &desk.tile[1];
  if (u.begin < u.end) tile->find(p.kv, g.seq, u.begin, least(u.begin + size, u.end));
  for (int64_t pos = u.begin; pos < u.end; pos += size) {
    const int64_t end = least(pos + size, u.end);
    const Tile* next = end < u.end ? after : nullptr;
    if (next) after->find(p.kv, g.seq, end, least(end + size, u.end));
    TileStates seeing = all;  // rows are in the order of their queries, so those that see a tile are next to each other
    while (seeing.first < fours && desk.softmax[size_t(seeing.first)].last[kLanes - 1] < pos) seeing.first++;
    while (seeing.last > seeing.first && desk.softmax[size_t(seeing.last - 1)].low[0] >= end) seeing.last--;
    const auto states_of = [&](int64_t h) {
      TileStates one = seeing;
      one.q += h * fours * kLanes * k.dim, one.scores += h * fours * kTile * kLanes, one.out += h * fours * kLanes * v.dim;
      return one;
    };
    // While K is read V is asked for, and while V is, the next K.
    const char* const* v_next = v.next(tile, u.head, u.num_heads);
    if (k.is_direct) loops.scores[k.dtype](k.lie(*tile, u.head, u.num_heads), v_next, seeing);
    else
      for (int64_t h = 0; h < u.num_heads; h++) loops.scores[k.dtype](k.make(ops, *tile, u.head + h), v_next ? v_next + h * tile->count : nullptr, states_of(h));
    for (int64_t h = 0; h < u.num_heads; h++)
      for (int64_t b = seeing.first; b < seeing.last; b++) {
        Softmax& s = desk.softmax[size_t(h * fours + b)];
        const bool whole = tile->is_whole && s.low[kLanes - 1] <= pos && s.last[0] >= end - 1;
        const ScoreRule rule{p.soft_cap != 0 ? p.scale : p.scale * kLog2e, p.soft_cap, !whole, tile->is_whole ? nullptr : tile->there};
        loops.weigh(&s, desk.scores.data() + (h * fours + b) * kTile * kLanes, pos, tile->count, rule);
      }
    const char* const* k_next = k.next(next, u.head, u.num_heads);
    for (int64_t h = 0; h < u.num_heads; h++) {
      const bool makes = loops_make && h + 1 < u.num_heads;
      if (h == 0 || !loops_make) v.make(ops, *tile, u.head + h, int(h & 1));
      if (makes) v.lie(*tile, u.head + h + 1, 1);
      const int64_t first = k_next ? least(h * tile->count, next->count * u.num_heads) : 0;
      loops.values[makes ? v.plane->dtype : KVX_DTYPE_F32](v.made[h & 1].data(), tile->count, v.dim, makes ? v.at : nullptr, v.made[(h + 1) & 1].data(), k_next ? k_next + first : nullptr,
                                                           states_of(h), desk.softmax.data() + h * fours);
    }
    Tile* swap = tile;
    tile = after, after = swap;
  }

  for (int64_t h = 0; h < u.num_heads; h++)
    for (int64_t i = 0; i < rows; i++) {
      const Softmax& s = desk.softmax[size_t(h * fours + i / kLanes)];
      const float most = s.most[i % kLanes], sum = s.sum[i % kLanes];
      const float* values = desk.out.data() + (h * fours * kLanes + i) * v.dim;
      if (u.partial < 0) {
        finish(p, ops, loops, row_of(p, g, u.head + h, i), most, sum, values, desk.row.data());
      } else {
        float* to = partials + (u.partial + h * rows + i) * partial_floats(p);
        to[0] = most, to[1] = sum;
        memcpy(to + 2, values, size_t(p.v_head_dim) * 4);
      }
    }
}

// Spans [first, last) of the same queries and heads into one result, row by row.
void merge(const AttentionParams& p, const RowTable& ops, const AttendTable& loops, const Queries& g, const Unit* first, const Unit* last, int64_t h, const float* partials, Desk& desk) {
  const int64_t rows = g.count * p.group, floats = partial_floats(p);
  desk.row.resize(size_t(p.v_head_dim));
  for (int64_t i = 0; i < rows; i++) {
    float most = -INFINITY, sum = 0;
    for (const Unit* u = first; u < last; u++) most = fmaxf(most, partials[(u->partial + h * rows + i) * floats]);
    desk.out.assign(size_t(p.v_head_dim), 0.0f);
    for (const Unit* u = first; u < last; u++) {
      const float* part = partials + (u->partial + h * rows + i) * floats;
      if (part[1] == 0) continue;  // saw nothing
      const float keep = loops.exp2(part[0] - most);
      sum += part[1] * keep;
      for (int64_t d = 0; d < p.v_head_dim; d++) desk.out[size_t(d)] += part[2 + d] * keep;
    }
    finish(p, ops, loops, row_of(p, g, first->head + h, i), most, sum, desk.out.data(), desk.row.data());
  }
}

}  // namespace

kvx_status_t attention(const AttentionParams& p) {
  if (p.is_latent) return attention_latent(p);
  std::vector<Queries> queries;
  KVX_TRY(make_queries(p, &queries));
  const RowTable& ops = best_rows();
  const AttendTable& loops = best_attend();
  int64_t partial_rows, bytes = 0;
  const std::vector<Unit> units = make_units(p, queries, &partial_rows);
  std::vector<float> partials(size_t(partial_rows * partial_floats(p)));
  for (const Queries& g : queries)
    bytes += (g.end - g.begin) * p.num_kv_heads * g.count * (span_bytes(p.kv.plane[0].dtype, p.head_dim) + span_bytes(p.kv.plane[1].dtype, p.v_head_dim));
  const int64_t count = int64_t(units.size());
#pragma omp parallel if (bytes >= kThreadBytes)
  {
    Desk desk;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++) attend(p, ops, loops, queries[size_t(units[size_t(i)].queries)], units[size_t(i)], desk, partials.data());
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++) {
      const Unit& u = units[size_t(i)];
      const Queries& g = queries[size_t(u.queries)];
      if (u.partial < 0 || u.begin != g.begin) continue;  // whole already, or not the first of its spans
      int64_t end = i + 1;
      while (end < count && units[size_t(end)].queries == u.queries && units[size_t(end)].head == u.head) end++;
      for (int64_t h = 0; h < u.num_heads; h++) merge(p, ops, loops, g, &units[size_t(i)], units.data() + end, h, partials.data(), desk);
    }
  }
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
