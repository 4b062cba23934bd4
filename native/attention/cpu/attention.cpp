// Attention on the host. Work is cut into units: some queries of one sequence, some of its KV heads, a span of
// positions; a unit walks its positions in tiles, keeps a running softmax for every query row, and the spans of one
// result are merged after.
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

constexpr int64_t kThreadBytes = 256 << 10;  // of K and V read: below, waking threads costs more than they bring
constexpr int64_t kRowsTogether =
    64;                           // query rows of a KV head in a unit: so often is a K and V row used once it is f32
constexpr int64_t kFewRows = 16;  // up to here a unit takes every head: it is a read of whole tokens, front to back
constexpr int64_t kTileBytes = 128 << 10;  // K and V of a tile: with what is asked for, they stay in the second level
constexpr int64_t kLeastSpan = 256;        // positions worth a unit of their own

// Queries [first, first + count) of a sequence see positions [begin, end) among them.
struct Queries {
  int64_t seq, length;
  int64_t first_row, num_queries;  // of the sequence, in q
  int64_t first, count;            // in this group
  int64_t begin, end;
};

struct Unit {
  int64_t queries;          // index of its Queries
  int64_t head, num_heads;  // KV heads
  int64_t begin, end;       // positions
  int64_t partial;          // index of its first partial row; -1: the result is whole
};

int64_t last_seen(const AttentionParams& p, const Queries& g, int64_t query) {
  return p.is_causal ? g.length - g.num_queries + query : g.length - 1;
}
int64_t first_seen(const AttentionParams& p, const Queries& g, int64_t query) {
  return p.window ? greatest(0, last_seen(p, g, query) - p.window + 1) : 0;
}

kvx_status_t check_blocks(const AttentionParams& p, const Queries& g) {
  const GatherParams& kv = p.kv;
  const bool ragged = kv.table.format == KVX_BLOCK_TABLE_RAGGED;
  for (int64_t pos = g.begin; pos < g.end; pos = ragged ? pos + 1 : (pos / kv.block_size + 1) * kv.block_size)
    for (int plane = 0; plane < (kv.table.format == KVX_BLOCK_TABLE_KV_OFFSETS || kv.bases[0] ? 2 : 1); plane++)
      if (find_any_block(kv, g.seq, pos, pos / kv.block_size, plane).state == BLOCK_BAD)
        return fail(KVX_STATUS_OUT_OF_RANGE,
                    "block_table of sequence %lld has no block inside the cache (num_blocks %lld%s) for position %lld "
                    "of %lld, which a query sees.",
                    (long long)g.seq, (long long)kv.num_blocks, kv.bases[0] ? ", each with an address" : "",
                    (long long)pos, (long long)g.length);
  return KVX_STATUS_OK;
}

// Groups of queries, after every length, range and block id has been looked at.
kvx_status_t make_queries(const AttentionParams& p, std::vector<Queries>* out) {
  const int64_t together = greatest(1, kRowsTogether / p.group);
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

// The loops read bytes as subnormal numbers, which a caller may have told this thread to take for zero.
struct Subnormals {
#if defined(__aarch64__)
  static constexpr unsigned kFlush = 1u << 24;  // FPCR.FZ
  const unsigned before = __builtin_aarch64_get_fpcr();
  Subnormals() { __builtin_aarch64_set_fpcr(before & ~kFlush); }
  ~Subnormals() { __builtin_aarch64_set_fpcr(before); }
#endif
};

// What a thread works in.
struct Desk {
  Reader reader[2];
  Tile tile[2];
  std::vector<char> zeros;  // a row for each head, of K or of V
  std::vector<float> q, packed, out, scores, row;
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
void finish(const AttentionParams& p, const RowTable& ops, const AttendTable& loops, QueryRow at, float most, float sum,
            const float* values, float* row) {
  const SoftmaxEnd end = end_softmax(loops, most, sum, p.sinks ? p.sinks + at.head : nullptr);
  for (int64_t d = 0; d < p.v_head_dim; d++) row[d] = values[d] * end.factor;
  char* out = p.out.data + at.token * p.out.token + at.head * p.out.head;
  if (p.out.is_dense) ops.encode[KVX_DTYPE_F32][p.out.dtype](out, reinterpret_cast<char*>(row), p.v_head_dim, 1.0f);
  else
    for (int64_t d = 0; d < p.v_head_dim; d++) store_float(out + d * p.out.dim, p.out.dtype, row[d]);
  if (p.lse) *reinterpret_cast<float*>(p.lse + at.token * p.lse_token + at.head * p.lse_head) = end.lse;
}

void load_query(const AttentionParams& p, const RowTable& ops, QueryRow at, float* to) {
  const char* q = p.q.data + at.token * p.q.token + at.head * p.q.head;
  if (p.q.is_dense) ops.decode[p.q.dtype][KVX_DTYPE_F32](reinterpret_cast<char*>(to), q, p.head_dim, 1.0f);
  else
    for (int64_t d = 0; d < p.head_dim; d++) to[d] = load_float(q + d * p.q.dim, p.q.dtype);
}

// A partial row: most, sum, and the values so far.
int64_t partial_floats(const AttentionParams& p) { return p.v_head_dim + 2; }

void attend(const AttentionParams& p, const RowTable& ops, const AttendTable& loops, const Queries& g, const Unit& u,
            Desk& desk, float* partials) {
  const int64_t rows = g.count * p.group, fours = (rows + kLanes - 1) / kLanes, states = u.num_heads * fours;
  Reader &k = desk.reader[0], &v = desk.reader[1];
  k.open(p, loops, 0, rows, u.num_heads), v.open(p, loops, 1, rows, u.num_heads);
  if (p.kv.table.format == KVX_BLOCK_TABLE_KV_OFFSETS)
    desk.zeros.assign(size_t((u.num_heads - 1) * greatest(k.plane->head, v.plane->head) + 4 * greatest(k.dim, v.dim)),
                      0);
  desk.q.assign(size_t(states * kLanes * k.dim), 0.0f);
  desk.out.assign(size_t(states * kLanes * v.dim) + 16, 0.0f);
  float* const out = aligned(desk.out.data());
  desk.scores.resize(size_t(states * kTile * kLanes));
  desk.softmax.resize(size_t(states));
  desk.row.resize(size_t(p.v_head_dim));
  const bool is_packed = k.few || (loops.dots && k.dtype == KVX_DTYPE_BF16 && p.q.dtype != KVX_DTYPE_F32);
  const auto pack = k.few                     ? nullptr  // its own pack, of all rows
                    : is_packed               ? loops.pack
                    : k.dtype == KVX_DTYPE_S8 ? loops.pack_s8
                                              : nullptr;
  const auto pack_tiles = k.few ? k.few->pack : is_packed ? loops.pack_tiles : nullptr;
  const auto scores = k.few ? k.few->dots : is_packed ? loops.dots : loops.scores[k.dtype];
  const auto sums = v.few ? v.few->sums : loops.sums[v.dtype];
  // A query of bf16 is one number of bf16 and one of f16 is two. Of int8's digits, two are as exact as 16-bit numbers.
  const int parts = is_packed ? 1 + (p.q.dtype == KVX_DTYPE_F16) : 2 + (p.q.dtype == KVX_DTYPE_F32);
  const float scale = (p.soft_cap != 0 ? p.scale : p.scale * kLog2e) * k.lift_in;
  const float scale_before = is_packed ? 1 : scale,
              scale_after = is_packed ? scale : 1;  // of scores: a scaled query would be bf16 no longer

  // A tile's K and V, of all heads, stay in the second level together with what is asked for.
  const int64_t k_bytes = span_bytes(k.plane->dtype, p.head_dim), v_bytes = span_bytes(v.plane->dtype, p.v_head_dim);
  const int64_t tile_bytes = loops.pack_tiles ? 2 * kTileBytes : kTileBytes;  // CPUs with tiles have 2 MB of it
  const int64_t size =
      greatest(16, least(kTile, tile_bytes / greatest(1, u.num_heads * (k_bytes + v_bytes)) / 16 * 16));
  Tile *tile = &desk.tile[0], *after = &desk.tile[1];
  tile->head = after->head = u.head;
  const bool sees = u.begin < u.end;
  if (sees) tile->find(p.kv, g.seq, u.begin, least(u.begin + size, u.end), desk.zeros.data());

  // While queries are read the first K is asked for.
  const TileRows k_first = k.lie(*tile, u.num_heads);
  for (int64_t h = 0; h < u.num_heads; h++) {
    AskAhead ahead(sees ? &k_first : nullptr, h, k_bytes);
    for (int64_t i = 0; i < fours * kLanes; i++) {
      ahead.ask(k_first.count * k_bytes / (fours * kLanes));
      const int64_t s = h * fours + i / kLanes, r = i % kLanes, query = g.first + least(i, rows - 1) / p.group;
      desk.softmax[s].most[r] = -INFINITY, desk.softmax[s].sum[r] = 0;
      desk.softmax[s].low[r] = int32_t(first_seen(p, g, query)),
      desk.softmax[s].last[r] = int32_t(last_seen(p, g, query));
      if (i >= rows) continue;
      float* q = desk.q.data() + (s * kLanes + r) * k.dim;
      load_query(p, ops, row_of(p, g, u.head + h, i), q);
      for (int64_t d = 0; d < p.head_dim && scale_before != 1; d++) q[d] *= scale_before;
      if (pack) pack(q, k.dim, parts);
    }
  }
  const float* queries = desk.q.data();
  if (pack_tiles) {
    desk.packed.resize(desk.q.size() + 16);
    float* to = aligned(desk.packed.data());
    for (int64_t h = 0; h < u.num_heads; h++)
      pack_tiles(queries + h * fours * kLanes * k.dim, fours, k.dim, parts, to + h * fours * kLanes * k.dim);
    queries = to;
  }
  const int final_rows = int(rows - (fours - 1) * kLanes);
  const TileStates all{fours, 0, fours, final_rows == 3 ? 4 : final_rows, queries, desk.scores.data(), out, parts};

  for (int64_t pos = u.begin; pos < u.end; pos += size) {
    const int64_t end = least(pos + size, u.end);
    const bool is_last = end == u.end;
    if (!is_last) {
      after->find(p.kv, g.seq, end, least(end + size, u.end), desk.zeros.data());
      k.ask_scales(*after), v.ask_scales(*after);
    }
    TileStates seeing = all;  // rows are in the order of their queries, so those that see a tile are next to each other
    while (seeing.first < fours && desk.softmax[size_t(seeing.first)].last[kLanes - 1] < pos) seeing.first++;
    while (seeing.last > seeing.first && desk.softmax[size_t(seeing.last - 1)].low[0] >= end) seeing.last--;
    const auto states_of = [&](int64_t h) {
      TileStates one = seeing;
      one.q += h * fours * kLanes * k.dim, one.scores += h * fours * kTile * kLanes,
          one.out += h * fours * kLanes * v.dim;
      return one;
    };
    // While K is read V is asked for, and while V is, the next K.
    const TileRows v_rows = v.lie(*tile, u.num_heads), k_next = k.lie(*after, u.num_heads);
    if (k.read(loops, *tile, u.num_heads)) scores(k.lie(*tile, u.num_heads), &v_rows, seeing);
    else
      for (int64_t h = 0; h < u.num_heads; h++)
        if (k.copy(loops, *tile, h, &v_rows)) scores(k.rows_of(*tile, h), nullptr, states_of(h));
        else loops.scores[KVX_DTYPE_F32](k.make(ops, *tile, h, &v_rows), nullptr, states_of(h));
    for (int64_t h = 0; h < u.num_heads; h++)
      for (int64_t b = seeing.first; b < seeing.last; b++) {
        Softmax& s = desk.softmax[size_t(h * fours + b)];
        const bool whole = tile->is_whole && s.low[kLanes - 1] <= pos && s.last[0] >= end - 1;
        const ScoreRule rule{scale_after, p.soft_cap, !whole, tile->is_whole ? nullptr : tile->there};
        loops.weigh(&s, desk.scores.data() + (h * fours + b) * kTile * kLanes, pos, tile->count, rule);
      }
    if (v.read(loops, *tile, u.num_heads)) sums(v_rows, is_last ? nullptr : &k_next, seeing, desk.softmax.data());
    else
      for (int64_t h = 0; h < u.num_heads; h++) {
        const Softmax* softmax = desk.softmax.data() + h * fours;
        if (v.copy(loops, *tile, h, is_last ? nullptr : &k_next)) {
          sums(v.rows_of(*tile, h), nullptr, states_of(h), softmax);
          continue;
        }
        const TileRows made = v.make(ops, *tile, h, is_last ? nullptr : &k_next);
        if (made.scale) loops.sums[KVX_DTYPE_F32](made, nullptr, states_of(h), softmax);
        else loops.values[KVX_DTYPE_F32](v.made, tile->count, v.dim, nullptr, nullptr, nullptr, states_of(h), softmax);
      }
    Tile* swap = tile;
    tile = after, after = swap;
  }
  if (v.lift_out != 1)
    for (float& x : desk.out) x *= v.lift_out;

  for (int64_t h = 0; h < u.num_heads; h++)
    for (int64_t i = 0; i < rows; i++) {
      const Softmax& s = desk.softmax[size_t(h * fours + i / kLanes)];
      const float most = s.most[i % kLanes], sum = s.sum[i % kLanes];
      const float* values = out + (h * fours * kLanes + i) * v.dim;
      if (u.partial < 0) {
        finish(p, ops, loops, row_of(p, g, u.head + h, i), most, sum, values, desk.row.data());
      } else {
        float* to = partials + (u.partial + h * rows + i) * partial_floats(p);
        to[0] = most, to[1] = sum;
        memcpy(to + 2, values, size_t(p.v_head_dim) * 4);
      }
    }
}

// Units [first, last) are spans of the same queries; h: one of their heads.
struct Spans {
  const Unit *first, *last;
  int64_t h;
};
std::vector<Spans> find_spans(const std::vector<Unit>& units) {
  std::vector<Spans> spans;
  for (const Unit *u = units.data(), *end = u + units.size(); u < end;) {
    const Unit* last = u + 1;
    while (last < end && last->queries == u->queries && last->head == u->head) last++;
    for (int64_t h = 0; h < u->num_heads && u->partial >= 0; h++) spans.push_back(Spans{u, last, h});
    u = last;
  }
  return spans;
}

// Spans of the same queries and head into one result, row by row.
void merge(const AttentionParams& p, const RowTable& ops, const AttendTable& loops, const Queries& g,
           const Spans& spans, const float* partials, Desk& desk) {
  const Unit *first = spans.first, *last = spans.last;
  const int64_t h = spans.h;
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
  const std::unique_ptr<float[]> partials(new float[size_t(partial_rows * partial_floats(p))]);  // all are written
  for (const Queries& g : queries)
    bytes += (g.end - g.begin) * p.num_kv_heads * g.count *
             (span_bytes(p.kv.plane[0].dtype, p.head_dim) + span_bytes(p.kv.plane[1].dtype, p.v_head_dim));
  const std::vector<Spans> spans = find_spans(units);
  const int64_t count = int64_t(units.size()), num_spans = int64_t(spans.size());
  Carry carry;
#pragma omp parallel if (bytes >= kThreadBytes)
  {
    [[maybe_unused]] const Subnormals kept;
    static thread_local Desk desk;  // kept: fresh memory at every call would cost page faults
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++)
      carry([&] {
        attend(p, ops, loops, queries[size_t(units[size_t(i)].queries)], units[size_t(i)], desk, partials.get());
      });
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_spans; i++) {
      const Spans& s = spans[size_t(i)];
      carry([&] { merge(p, ops, loops, queries[size_t(s.first->queries)], s, partials.get(), desk); });
    }
  }
  carry.rethrow();
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
