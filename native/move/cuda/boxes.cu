// Conversions that leave bytes as they are, on a device. Rows: every thread moves a few vectors, found by
// multiplications from one index. Tiles: where elements change their order, a rectangle goes through shared memory, 16
// bytes at a time on both sides. What is long enough between host and device the copy engine does.
#include <algorithm>

#include "move/cuda/convert.cuh"
#include "move/cuda/engine_copies.h"

namespace kvx {
namespace cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 4;  // of one thread
constexpr int kJobs = 8;     // of one launch
constexpr int kMaxInner = 5;

struct DeviceDigit {
  FastDivider size;
  uint32_t token;
  int64_t stride[2];
  int32_t step[2];
};

struct DeviceJob {
  DevicePlace place;
  int32_t num_inner, num_digits;  // the first num_inner by each thread, the rest by the block
  DeviceDigit digit[KVX_PLAN_MAX_DIGITS + 2];
  uint32_t inner_vectors;  // rows: of one item; tiles: tiles of one unit
  FastDivider per_item;    // rows: blocks of threads an item takes (BY_BLOCK), or vectors
  uint32_t num_items;      // rows: of a unit
  FastDivider per_unit;    // blocks of threads a unit takes in one pass over the units
  FastDivider per_pass;    // ... and all units do
  uint32_t first;          // block of threads this job begins with
  // tiles
  uint32_t rows, columns;  // of a tile: elements along the destination's and along the source's adjacent axis
  FastDivider row_vectors, column_vectors,
      tile_vectors;  // 16-byte vectors of a row at the source, of a column at the destination, of a tile
  int64_t row_stride, column_stride;  // bytes: between rows at the source, between columns at the destination
  uint32_t tiles;                     // a block of threads takes
};

struct ConvertArgs {
  DeviceTables tables;
  int32_t num_jobs;
  Take take;
  DeviceJob job[kJobs];
};

// Adds the digits the block of threads stands at. Returns the tokens they amount to.
__device__ __forceinline__ uint32_t add_outer(const ConvertArgs& a, const DeviceJob& job, uint32_t index, Here* here) {
  uint32_t token = 0;
  int32_t buffer[2] = {0, 0};
  int64_t byte[2] = {0, 0};
  for (int i = job.num_inner; i < job.num_digits; i++) {
    const DeviceDigit& d = job.digit[i];
    const uint32_t q = d.size.divide(index), n = index - q * d.size.d;
    index = q;
    token += n * d.token;
#pragma unroll
    for (int w = 0; w < 2; w++) byte[w] += n * d.stride[w], buffer[w] += int32_t(n) * d.step[w];
  }
  move_on(a.tables, job.place, byte, buffer, here);
  return token;
}

__device__ __forceinline__ const DeviceJob& find_job(const ConvertArgs& a) {
  int n = 0;
  while (n + 1 < a.num_jobs && blockIdx.x >= a.job[n + 1].first) n++;
  return a.job[n];
}

// The unit a block of threads works on, and which of the unit's blocks it is.
struct Turn {
  uint32_t unit, rest;
};
__device__ __forceinline__ Turn find_turn(const DeviceJob& job) {
  const uint32_t index = blockIdx.x - job.first, pass = job.per_pass.divide(index),
                 inside = index - pass * job.per_pass.d, unit = job.per_unit.divide(inside);
  return Turn{unit, pass * job.per_unit.d + inside - unit * job.per_unit.d};
}

// Who shares an item, and with it the look-up of digits and buffers: all threads; a warp, where items are smaller than
// a block's work; nobody, where they are smaller than a warp's.
enum Share { BY_BLOCK, BY_WARP, BY_VECTOR };
constexpr int kWarpVectors = 32 * kVectors, kBlockVectors = kThreads * kVectors;

template <int W, bool Cut, Share S>
__global__ void __launch_bounds__(kThreads) convert_rows(const __grid_constant__ ConvertArgs a) {
  using T = typename Vec<W>::T;
  const DeviceJob& job = find_job(a);
  wait_for_previous();
  const auto [unit, rest] = find_turn(job);
  const Here whole = find_unit(a.tables, job.place, unit, a.take, threadIdx.x == 0 && rest == 0);
  if (whole.tokens == 0) return;
  Here here = whole;
  uint32_t token = 0, first, between = S == BY_BLOCK ? kThreads : 32;
  if constexpr (S == BY_BLOCK) {
    const uint32_t item = job.per_item.divide(rest);
    token = add_outer(a, job, item, &here);
    first = (rest - item * job.per_item.d) * kBlockVectors + threadIdx.x;
  } else {
    first = rest * kBlockVectors + threadIdx.x / 32 * kWarpVectors;
    if constexpr (S == BY_WARP) {
      const uint32_t item = job.per_item.divide(first);
      if (item >= job.num_items) return;
      token = add_outer(a, job, item, &here);
      first -= item * job.inner_vectors;
    }
    first += threadIdx.x % 32;
  }
  if (Cut && token >= whole.tokens) return;
  T data[kVectors];
  char* to[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; j++) {
    uint32_t v = first + j * between;
    to[j] = nullptr;
    if constexpr (S == BY_VECTOR) {
      const uint32_t item = job.per_item.divide(v);
      if (item >= job.num_items) continue;
      here = whole;
      token = add_outer(a, job, item, &here);
      v -= item * job.inner_vectors;
    } else if (v >= job.inner_vectors) {
      continue;
    }
    int64_t byte[2] = {0, 0};
    uint32_t t = token;
#pragma unroll
    for (int i = 0; i < kMaxInner; i++) {
      if (i >= job.num_inner) break;
      const DeviceDigit& d = job.digit[i];
      const uint32_t q = d.size.divide(v), n = v - q * d.size.d;
      v = q;
      if (Cut) t += n * d.token;
      byte[0] += n * d.stride[0], byte[1] += n * d.stride[1];
    }
    if (Cut && t >= whole.tokens) continue;
    data[j] = load_once<T>(here.at[0] + byte[0]);
    to[j] = here.at[1] + byte[1];
  }
#pragma unroll
  for (int j = 0; j < kVectors; j++)
    if (to[j]) store_once(to[j], data[j]);
}

// ---- tiles
//
// A tile has `columns` elements that are adjacent at the source and `rows` that are adjacent at the destination. It
// stands in shared memory with its longer side along a line. Lines come in groups of 16/E, one for each element of a
// vector; a group is moved on by 16 bytes, so that the lanes of a warp, which are at the same line of several groups,
// meet different banks.

constexpr int kLineBytes = 256, kPitch = kLineBytes + 16, kMaxTiles = 8;
template <int E> constexpr int kLines = E == 1 ? 128 : 64;

template <int E> __device__ __forceinline__ uint32_t line_at(uint32_t line) {
  return line * kPitch + line / (16 / E) * 16;
}

// `Wide`: the longer side is the source's.
template <int E, bool Wide>
__global__ void __launch_bounds__(kThreads) convert_tiles(const __grid_constant__ ConvertArgs a) {
  using T = typename Vec<E>::T;
  constexpr int kLanes = 16 / E, kEach = kLines<E> * (kLineBytes / 16) / kThreads;
  __shared__ alignas(16) char tile[kLines<E> * kPitch + kLines<E> / kLanes * 16];
  __shared__ char* at[kMaxTiles][2];
  union Vector {
    uint4 whole;
    T part[kLanes];
  };
  const DeviceJob& job = find_job(a);
  wait_for_previous();
  const auto [unit, rest] = find_turn(job);
  const Here here = find_unit(a.tables, job.place, unit, a.take, threadIdx.x == 0 && rest == 0);
  if (here.tokens == 0) return;
  const uint32_t first = rest * job.tiles, count = min(job.tiles, job.inner_vectors - first);
  if (threadIdx.x < count) {
    Here mine = here;
    add_outer(a, job, first + threadIdx.x, &mine);
    at[threadIdx.x][0] = mine.at[0], at[threadIdx.x][1] = mine.at[1];
  }
  __syncthreads();
  const uint32_t lines = Wide ? job.rows : job.columns, vectors = count * job.tile_vectors.d;
  Vector in[kEach];  // all loads are under way before the first is waited for
#pragma unroll
  for (int j = 0; j < kEach; j++) {
    const uint32_t i = j * kThreads + threadIdx.x;
    if (i >= vectors) break;
    const uint32_t n = job.tile_vectors.divide(i), inside = i - n * job.tile_vectors.d;
    const uint32_t row = job.row_vectors.divide(inside), v = inside - row * job.row_vectors.d;
    in[j].whole = load_once<uint4>(at[n][0] + row * job.row_stride + v * 16);
  }
#pragma unroll
  for (int j = 0; j < kEach; j++) {
    const uint32_t i = j * kThreads + threadIdx.x;
    if (i >= vectors) break;
    const uint32_t n = job.tile_vectors.divide(i), inside = i - n * job.tile_vectors.d;
    const uint32_t row = job.row_vectors.divide(inside), v = inside - row * job.row_vectors.d;
    if (Wide) {
      *reinterpret_cast<uint4*>(tile + line_at<E>(n * lines + row) + v * 16) = in[j].whole;
    } else {
#pragma unroll
      for (int k = 0; k < kLanes; k++)
        *reinterpret_cast<T*>(tile + line_at<E>(n * lines + v * kLanes + k) + row * E) = in[j].part[k];
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < vectors; i += kThreads) {
    const uint32_t n = job.tile_vectors.divide(i), inside = i - n * job.tile_vectors.d;
    const uint32_t column = job.column_vectors.divide(inside), v = inside - column * job.column_vectors.d;
    Vector out;
    if (Wide) {
#pragma unroll
      for (int k = 0; k < kLanes; k++)
        out.part[k] = *reinterpret_cast<const T*>(tile + line_at<E>(n * lines + v * kLanes + k) + column * E);
    } else {
      out.whole = *reinterpret_cast<const uint4*>(tile + line_at<E>(n * lines + column) + v * 16);
    }
    store_once(at[n][1] + column * job.column_stride + v * 16, out.whole);
  }
}

// ---- preparing

DeviceDigit to_device(const Digit& d) {
  return DeviceDigit{make_fast_divider(d.size), uint32_t(d.token), {d.stride[0], d.stride[1]}, {d.step[0], d.step[1]}};
}

DeviceJob start_job(const Job& job) {
  DeviceJob out = {};
  out.place = make_place(job);
  return out;
}

bool has_step(const Digit& d) { return d.step[0] || d.step[1]; }

// Layers of large caches: one after the other over all units, so that what is read and written at a time lies in few
// pages of memory. A side whose blocks have their layers together is better read as it lies.
bool is_far(const Digit& d) {
  constexpr int64_t kFar = int64_t(32) << 20;
  return (d.step[SRC] || d.stride[SRC] >= kFar) && (d.step[DST] || d.stride[DST] >= kFar);
}

// Digits in the order threads take them: first along the run, then so that both sides stay in long stretches of memory.
kvx_status_t make_rows(const Job& job, int width, DeviceJob* out, int64_t* blocks_per_unit, int* share) {
  *out = start_job(job);
  std::vector<Digit> inner, outer;
  if (job.run > width) inner.push_back(Digit{job.run / width, {width, width}, 0, {0, 0}});
  std::vector<Digit> rest(job.digit, job.digit + job.num_digits);
  if (job.run == width) {
    // One vector a run: four neighbours at the source, then neighbours at the
    // destination, so that both see whole sectors.
    auto a = std::find_if(rest.begin(), rest.end(), [&](const Digit& d) {
      return !has_step(d) && d.stride[SRC] == width && d.size % 4 == 0 && d.size > 4;
    });
    if (a != rest.end()) {
      Digit low = *a;
      low.size = 4;
      a->size /= 4;
      for (int w = 0; w < 2; w++) a->stride[w] *= 4;
      a->token *= 4;
      inner.push_back(low);
    }
  }
  auto weight = [](const Digit& d) {
    double w = has_step(d) ? 1e30 : 1;
    for (int i = 0; i < 2; i++) w *= double(d.stride[i] < 0 ? -d.stride[i] : d.stride[i]) + 1;
    return w;
  };
  std::stable_sort(rest.begin(), rest.end(), [&](const Digit& a, const Digit& b) { return weight(a) < weight(b); });
  int64_t vectors = inner.empty() ? 1 : inner[0].size;
  std::vector<Digit> chosen;
  for (const Digit& d : rest) {
    if (!has_step(d) && vectors < kThreads * kVectors && int(inner.size() + chosen.size()) < kMaxInner)
      chosen.push_back(d), vectors *= d.size;
    else outer.push_back(d);
  }
  std::stable_sort(chosen.begin(), chosen.end(),
                   [](const Digit& a, const Digit& b) { return a.stride[DST] < b.stride[DST]; });
  inner.insert(inner.end(), chosen.begin(), chosen.end());
  if (inner.empty()) inner.push_back(Digit{1, {0, 0}, 0, {0, 0}});
  int n = 0;
  for (const Digit& d : inner) out->digit[n++] = to_device(d);
  out->num_inner = n;
  int64_t items = 1;
  for (const Digit& d : outer) out->digit[n++] = to_device(d), items *= d.size;
  int64_t passes = 1;
  for (auto d = outer.rbegin(); d != outer.rend() && is_far(*d); ++d) passes *= d->size;
  out->num_digits = n;
  *share = vectors >= kBlockVectors || items == 1 ? BY_BLOCK : vectors % kWarpVectors == 0 ? BY_WARP : BY_VECTOR;
  const int64_t per_item = (vectors + kBlockVectors - 1) / kBlockVectors;
  *blocks_per_unit = *share == BY_BLOCK ? items * per_item : (items * vectors + kBlockVectors - 1) / kBlockVectors;
  if (vectors > kMaxCount || *blocks_per_unit > kMaxCount)
    return fail(KVX_STATUS_UNSUPPORTED, "one unit has %lld vectors of %d bytes; more than one launch takes.",
                (long long)(items * vectors), width);
  out->inner_vectors = uint32_t(vectors);
  out->num_items = uint32_t(items);
  out->per_item = make_fast_divider(*share == BY_BLOCK ? per_item : vectors);
  if (*share != BY_BLOCK && items / passes * vectors % kBlockVectors) passes = 1;  // a block's work would be of two
  out->per_unit = make_fast_divider(*blocks_per_unit / passes);
  return KVX_STATUS_OK;
}

// True when the job is a turn of two axes that 16-byte accesses can do.
bool make_tiles(const Job& job, const Bound& bound, DeviceJob* out, int64_t* blocks_per_unit, int* wide) {
  const int64_t e = job.run;
  if (e > 8 || (e & (e - 1))) return false;
  int across = -1, down = -1;
  for (int i = 0; i < job.num_digits; i++) {
    const Digit& d = job.digit[i];
    if (has_step(d) || d.token || d.size * e % 16) continue;
    if (d.stride[SRC] == e) across = i;
    else if (d.stride[DST] == e) down = i;
  }
  if (across < 0 || down < 0) return false;
  // Everything but the element steps must keep 16-byte accesses aligned.
  uint64_t bits = 0;
  for (int w = 0; w < 2; w++) {
    bits |= uint64_t(job.block[w]) | uint64_t(job.outer[w]) | uint64_t(job.inner[w] * bound.sizes.unit_tokens) |
            uint64_t(job.offset[w]) | uint64_t(uintptr_t(job.base[w]));
    if (!job.base[w])
      for (char* b : bound.buffers[w]) bits |= uint64_t(uintptr_t(b));
  }
  for (int i = 0; i < job.num_digits; i++) {
    if (i != across) bits |= uint64_t(job.digit[i].stride[SRC]);
    if (i != down) bits |= uint64_t(job.digit[i].stride[DST]);
  }
  if (bits % 16) return false;
  *out = start_job(job);
  const Digit &a = job.digit[across], &d = job.digit[down];
  auto largest = [&](int64_t size, int64_t bytes) {  // divisor of the axis: tiles are all alike
    int64_t best = 16 / e;
    for (int64_t n = 16 / e; n * e <= bytes; n += 16 / e)
      if (size % n == 0) best = n;
    return best;
  };
  const int64_t most_lines = e == 1 ? kLines<1> : kLines<2>;
  *wide = a.size >= d.size;
  const int64_t columns = largest(a.size, *wide ? kLineBytes : most_lines * e),
                rows = largest(d.size, *wide ? most_lines * e : kLineBytes);
  out->rows = uint32_t(rows), out->columns = uint32_t(columns);
  out->row_vectors = make_fast_divider(columns * e / 16), out->column_vectors = make_fast_divider(rows * e / 16);
  out->tile_vectors = make_fast_divider(columns * rows * e / 16);
  out->row_stride = d.stride[SRC], out->column_stride = a.stride[DST];
  std::vector<Digit> outer;
  outer.push_back(Digit{a.size / columns, {columns * e, columns * a.stride[DST]}, 0, {0, 0}});
  outer.push_back(Digit{d.size / rows, {rows * d.stride[SRC], rows * e}, 0, {0, 0}});
  for (int i = 0; i < job.num_digits; i++)
    if (i != across && i != down) outer.push_back(job.digit[i]);
  int n = 0;
  int64_t tiles = 1;
  for (const Digit& x : outer)
    if (x.size > 1) out->digit[n++] = to_device(x), tiles *= x.size;
  out->num_digits = n;
  const int64_t stacked = std::min<int64_t>(kMaxTiles, std::max<int64_t>(1, most_lines / (*wide ? rows : columns)));
  out->tiles = uint32_t(stacked);
  *blocks_per_unit = (tiles + stacked - 1) / stacked;
  if (tiles > kMaxCount) return false;
  out->inner_vectors = uint32_t(tiles);
  out->per_unit = make_fast_divider(*blocks_per_unit);
  return true;
}

// Jobs of one kernel. A job that copies do for the blocks at hand is left out.
struct Launch : LaunchBase {
  Take take;
  int width;  // rows: bytes of a vector; tiles: bytes of an element
  bool is_tile;
  int variant;  // rows: Share; tiles: Wide
  int num_jobs = 0;
  DeviceJob job[kJobs];
  int64_t per_unit[kJobs];  // blocks of threads
  std::unique_ptr<EngineCopies> copies[kJobs];

  bool is_copied(int i, const BlockTables& blocks) const { return copies[i] && copies[i]->takes(blocks); }
  bool is_idle(const BlockTables& blocks) const { return take == CUT_UNITS && !blocks.seq_lens; }
  kvx_status_t check(const BlockTables& blocks) const override;
  kvx_status_t start(const Run& run) const override;
  kvx_status_t launch(const ConvertArgs& args, unsigned grid, void* stream) const;
};

kvx_status_t Launch::check(const BlockTables& blocks) const {
  for (int i = 0; i < num_jobs && !is_idle(blocks); i++) {
    int64_t all;
    if (!is_copied(i, blocks) && (!mul_fits(per_unit[i], blocks.num_units(), &all) || all > kMaxCount))
      return fail(KVX_STATUS_UNSUPPORTED, "%lld units of %lld blocks of threads are more than one launch takes.",
                  (long long)blocks.num_units(), (long long)per_unit[i]);
  }
  return KVX_STATUS_OK;
}

kvx_status_t Launch::start(const Run& run) const {
  if (is_idle(run.blocks)) return KVX_STATUS_OK;
  ConvertArgs args;
  args.tables = run.tables, args.take = take, args.num_jobs = 0;
  int64_t grid = 0;
  for (int i = 0; i < num_jobs; i++) {
    if (is_copied(i, run.blocks)) {
      KVX_TRY(copies[i]->start(run));
      continue;
    }
    const int64_t all = per_unit[i] * run.blocks.num_units();
    if (grid + all > kMaxCount) {
      KVX_TRY(launch(args, unsigned(grid), run.stream));
      args.num_jobs = 0, grid = 0;
    }
    DeviceJob& placed = args.job[args.num_jobs++];
    placed = job[i];
    placed.first = uint32_t(grid),
    placed.per_pass = make_fast_divider(std::max<int64_t>(all, 1) / (per_unit[i] / placed.per_unit.d));
    grid += all;
  }
  return args.num_jobs ? launch(args, unsigned(grid), run.stream) : KVX_STATUS_OK;
}

kvx_status_t add_jobs(const Bound& bound, const std::vector<Job>& jobs, Take take, bool crosses, Residue* residue) {
  std::vector<Launch*> open;
  for (const Job& job : jobs) {
    DeviceJob made;
    int64_t per_unit;
    int width = std::min(job.align, 16), variant;
    const bool is_tile = take == WHOLE_UNITS && make_tiles(job, bound, &made, &per_unit, &variant);
    if (is_tile) width = int(job.run);
    else KVX_TRY(make_rows(job, width, &made, &per_unit, &variant));
    Launch* launch = nullptr;
    for (Launch* l : open)
      if (l->is_tile == is_tile && l->variant == variant && l->width == width && l->num_jobs < kJobs) launch = l;
    if (!launch) {
      auto fresh = std::make_unique<Launch>();
      launch = fresh.get();
      launch->take = take, launch->width = width, launch->is_tile = is_tile, launch->variant = variant;
      open.push_back(launch);
      residue->launches.push_back(std::move(fresh));
    }
    const int at = launch->num_jobs++;
    launch->job[at] = made, launch->per_unit[at] = per_unit;
    if (take == WHOLE_UNITS) launch->copies[at] = EngineCopies::make(job, bound, crosses);
  }
  return KVX_STATUS_OK;
}

kvx_status_t Launch::launch(const ConvertArgs& args, unsigned grid, void* stream) const {
  const dim3 blocks(grid), block(kThreads);
#define KVX_TILES(e)                                                                                    \
  case e:                                                                                               \
    return variant ? launch_early("convert_tiles", convert_tiles<e, true>, blocks, block, stream, args) \
                   : launch_early("convert_tiles", convert_tiles<e, false>, blocks, block, stream, args);
#define KVX_ROWS_AS(w, cut)                                                                                         \
  (variant == BY_BLOCK  ? launch_early("convert_rows", convert_rows<w, cut, BY_BLOCK>, blocks, block, stream, args) \
   : variant == BY_WARP ? launch_early("convert_rows", convert_rows<w, cut, BY_WARP>, blocks, block, stream, args)  \
                        : launch_early("convert_rows", convert_rows<w, cut, BY_VECTOR>, blocks, block, stream, args))
#define KVX_ROWS(w) \
  case w: return args.take == CUT_UNITS ? KVX_ROWS_AS(w, true) : KVX_ROWS_AS(w, false);
  if (is_tile) {
    switch (width) {
      KVX_TILES(1)
      KVX_TILES(2)
      KVX_TILES(4)
      default: KVX_TILES(8)
    }
  }
  switch (width) {
    KVX_ROWS(16)
    KVX_ROWS(8)
    KVX_ROWS(4)
    KVX_ROWS(2)
    default: KVX_ROWS(1)
  }
#undef KVX_ROWS
#undef KVX_ROWS_AS
#undef KVX_TILES
  return KVX_STATUS_INTERNAL_ERROR;
}

}  // namespace

kvx_status_t add_box_launches(const Bound& bound, Residue* residue) {
  const bool crosses = EngineCopies::cross(bound);
  KVX_TRY(add_jobs(bound, bound.jobs, WHOLE_UNITS, crosses, residue));
  return add_jobs(bound, bound.cut_jobs, CUT_UNITS, crosses, residue);
}

}  // namespace cuda
}  // namespace kvx
