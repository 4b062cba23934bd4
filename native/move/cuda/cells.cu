// Rows that change their format, on a device. Chunks of 16 elements where both sides keep rows whole and the usual
// scales; one warp a row, through shared memory, for everything else.
#include <string.h>

#include <algorithm>

#include "move/cuda/codes.cuh"
#include "move/cuda/floats.cuh"

namespace kvx {
namespace cuda {

namespace {

// ---- one warp a row

__device__ __forceinline__ PlaneParams plane_of(const DeviceRow& row, int head_dim, char* scale, uint32_t layer) {
  PlaneParams p = {};
  p.dim_hi = row.dim_outer, p.dim_lo = row.dim_inner, p.pack = row.pack, p.head_dim = head_dim, p.dtype = row.dtype;
  p.scale = row.scale;
  p.scale.data = scale;
  p.scale.tensor_scale = row.tensor ? row.tensor + layer : nullptr;
  return p;
}

constexpr uint32_t kMark = 0x80000000u;  // a scale that still holds the largest magnitude: no scale is negative

__global__ void __launch_bounds__(kThreads) convert_cell_rows(const __grid_constant__ CellArgs a) {
  extern __shared__ float values[];
  const DeviceCell& job = find_job(a);
  wait_for_previous();
  const uint32_t warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t index = (blockIdx.x - job.first) * warps + warp, unit = job.per_unit.divide(index);
  if (unit >= a.tables.units_per_seq.d * job.all_columns) return;  // all_columns: sequences here
  Here here =
      find_unit(a.tables, job.place, unit, ALL_UNITS, lane == 0 && index == unit * job.per_unit.d && a.pass == WRITE);
  if (here.tokens == 0) return;
  Sum sum = {};
  add_digits(job, 0, job.num_digits, index - unit * job.per_unit.d, &sum);
  if (sum.token >= here.tokens) return;
  move_on(a.tables, job.place, sum.byte, sum.step, &here);
  char* scale[2];
#pragma unroll
  for (int w = 0; w < 2; w++) scale[w] = scale_of(job.row[w], here, w, here.at[w], sum.scale[w]);
  uint32_t* bits = reinterpret_cast<uint32_t*>(scale[DST]);
  if (a.pass == CLEAR) {
    if (lane == 0) *bits = kMark;
    return;
  }
  if (a.pass == FINISH) {
    const uint32_t seen = *bits;
    if (lane == 0 && (seen & kMark)) {
      float made = __fdiv_rn(__uint_as_float(seen & ~kMark), dtype_qmax(job.row[DST].dtype));
      const float floor = scale_floor(KVX_DTYPE_F32);
      made = made > floor ? made : floor;
      atomicCAS(bits, seen, __float_as_uint(made));
    }
    return;
  }
  const PlaneParams src = plane_of(job.row[SRC], job.head_dim, scale[SRC], sum.layer),
                    dst = plane_of(job.row[DST], job.head_dim, scale[DST], sum.layer);
  float* mine = values + warp * job.head_dim;
  RowsParams rows = {};
  rows.dim = 4, rows.dtype = KVX_DTYPE_F32, rows.is_dense = 1;
  gather_row(src, rows, reinterpret_cast<char*>(mine), here.at[SRC], 0, 0, 0);
  __syncwarp();
  if (a.pass == LARGEST) {
    uint32_t most = 0;
    for (int d = lane; d < job.head_dim; d += 32) {
      const uint32_t m = __float_as_uint(mine[d]) & 0x7fffffffu;
      most = max(most, m < kInfinity ? m : 0u);
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (lane == 0) atomicMax(bits, most | kMark);
    return;
  }
  write_row(dst, rows, here.at[DST], reinterpret_cast<const char*>(mine), 0, 0, 0, 0);
}

// ---- preparing

using RunCells = kvx_status_t (*)(const CellArgs& args, unsigned grid, unsigned threads, size_t shared, void* stream);

kvx_status_t run_rows(const CellArgs& args, unsigned grid, unsigned threads, size_t shared, void* stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared,
  config.stream = static_cast<cudaStream_t>(stream);
  if (shared > 48 * 1024)
    cudaFuncSetAttribute(convert_cell_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
  const cudaError_t error = cudaLaunchKernelEx(&config, convert_cell_rows, args);
  return error == cudaSuccess ? KVX_STATUS_OK : launch_failed("convert_cell_rows", error);
}

template <int IO, int C, bool Encode, Found Scale>
kvx_status_t run_chunks(const CellArgs& args, unsigned grid, unsigned threads, size_t, void* stream) {
  return launch_early("convert_cell_chunks", convert_cell_chunks<IO, C, Encode, Scale>, dim3(grid), dim3(threads),
                      stream, args);
}

template <int S, int D>
kvx_status_t run_floats(const CellArgs& args, unsigned grid, unsigned threads, size_t, void* stream) {
  return launch_early("convert_float_chunks", convert_float_chunks<S, D>, dim3(grid), dim3(threads), stream, args);
}

template <int S, int D>
kvx_status_t run_tiles(const CellArgs& args, unsigned grid, unsigned threads, size_t, void* stream) {
  return launch_early("convert_float_tiles", convert_float_tiles<S, D>, dim3(grid), dim3(threads), stream, args);
}

// Jobs of one kernel.
struct CellLaunch : LaunchBase {
  RunCells run;
  Pass pass;
  unsigned threads;
  size_t shared = 0;
  int num_jobs = 0;
  DeviceCell job[kCellJobs];
  int64_t per_unit[kCellJobs];  // rows: of these, a warp each; otherwise blocks of threads

  bool has_rows() const { return run == &run_rows; }

  kvx_status_t check(const BlockTables& blocks) const override {
    for (int i = 0; i < num_jobs; i++) {
      int64_t all;
      if (mul_fits(per_unit[i], blocks.num_units(), &all) && all <= kMaxCount) continue;
      return fail(KVX_STATUS_UNSUPPORTED, "%lld units of %lld %s are more than one launch takes.",
                  (long long)blocks.num_units(), (long long)per_unit[i], has_rows() ? "rows" : "blocks of threads");
    }
    return KVX_STATUS_OK;
  }

  kvx_status_t start(const Run& given) const override {
    CellArgs args;
    args.tables = given.tables, args.pass = pass, args.num_jobs = 0;
    int64_t grid = 0;
    for (int i = 0; i < num_jobs; i++) {
      int64_t all = per_unit[i] * given.blocks.num_units();
      if (has_rows()) all = (all + threads / 32 - 1) / (threads / 32);
      if (grid + all > kMaxCount) {
        KVX_TRY(run(args, unsigned(grid), threads, shared, given.stream));
        args.num_jobs = 0, grid = 0;
      }
      DeviceCell& placed = args.job[args.num_jobs++];
      placed = job[i];
      placed.first = uint32_t(grid);
      if (has_rows()) placed.all_columns = uint32_t(given.blocks.num_seqs);
      grid += all;
    }
    return run(args, unsigned(grid), threads, shared, given.stream);
  }
};

// By chunks, or by tiles where rows lie across.
RunCells find_floats(int src, int dst, bool across) {
#define KVX_PAIR(s, d) \
  if (src == s && dst == d) return across ? &run_tiles<s, d> : &run_floats<s, d>;
  KVX_PAIR(KVX_DTYPE_F32, KVX_DTYPE_BF16)
  KVX_PAIR(KVX_DTYPE_F32, KVX_DTYPE_F16)
  KVX_PAIR(KVX_DTYPE_BF16, KVX_DTYPE_F32)
  KVX_PAIR(KVX_DTYPE_BF16, KVX_DTYPE_F16)
  KVX_PAIR(KVX_DTYPE_F16, KVX_DTYPE_F32)
  KVX_PAIR(KVX_DTYPE_F16, KVX_DTYPE_BF16)
#undef KVX_PAIR
  return nullptr;
}

// The table of fast instantiations: floats and the 8-bit codes under f32 scales.
RunCells find_chunks(int io, int code, bool encode, bool computed) {
#define KVX_PAIR(io_, c)                                    \
  if (io == io_ && code == c)                               \
    return !encode    ? &run_chunks<io_, c, false, READ>    \
           : computed ? &run_chunks<io_, c, true, COMPUTED> \
                      : &run_chunks<io_, c, true, READ>;
  KVX_PAIR(KVX_DTYPE_BF16, KVX_DTYPE_F8_E4M3)
  KVX_PAIR(KVX_DTYPE_BF16, KVX_DTYPE_F8_E5M2)
  KVX_PAIR(KVX_DTYPE_BF16, KVX_DTYPE_S8)
  KVX_PAIR(KVX_DTYPE_F16, KVX_DTYPE_F8_E4M3)
  KVX_PAIR(KVX_DTYPE_F16, KVX_DTYPE_F8_E5M2)
  KVX_PAIR(KVX_DTYPE_F16, KVX_DTYPE_S8)
  KVX_PAIR(KVX_DTYPE_F32, KVX_DTYPE_F8_E4M3)
  KVX_PAIR(KVX_DTYPE_F32, KVX_DTYPE_S8)
#undef KVX_PAIR
  return nullptr;
}

// Floats and codes under any scales.
RunCells find_codes(int io, int code, bool encode) {
#define KVX_CODE(io_, c) \
  if (io == io_ && code == c) return encode ? &run_chunks<io_, c, true, ANY> : &run_chunks<io_, c, false, ANY>;
#define KVX_CODES(io_)             \
  KVX_CODE(io_, KVX_DTYPE_F8_E4M3) \
  KVX_CODE(io_, KVX_DTYPE_S8)      \
  KVX_CODE(io_, KVX_DTYPE_S4)      \
  KVX_CODE(io_, KVX_DTYPE_E2M1)
  KVX_CODES(KVX_DTYPE_BF16)
  KVX_CODES(KVX_DTYPE_F16)
  KVX_CODES(KVX_DTYPE_F32)
  KVX_CODE(KVX_DTYPE_F32, KVX_DTYPE_F8_E5M2)
#undef KVX_CODES
#undef KVX_CODE
  return nullptr;
}

bool is_by_block(int granularity) {
  return granularity == KVX_SCALE_GRANULARITY_PER_BLOCK || granularity == KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD;
}
bool is_found(int granularity) {
  return granularity == KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD || granularity == KVX_SCALE_GRANULARITY_PER_GROUP;
}

CellDeviceDigit to_device(const CellDigit& d) {
  return CellDeviceDigit{make_fast_divider(d.size),  uint32_t(d.token),        uint32_t(d.layer),
                         {d.stride[0], d.stride[1]}, {d.scale[0], d.scale[1]}, {d.step[0], d.step[1]}};
}

DeviceCell start_cell(const CellJob& job) {
  DeviceCell out = {};
  out.head_dim = int32_t(job.head_dim);
  for (int w = 0; w < 2; w++) {
    DevicePlace& p = out.place;
    p.offset[w] = job.offset[w], p.block[w] = job.block[w], p.outer[w] = job.outer[w], p.inner[w] = job.inner[w];
    p.split[w] = uint32_t(job.split[w]), p.buffer[w] = job.buffer[w], p.block_step[w] = job.block_step[w];
    const kvx_plan_format_t& f = job.side[w].format;
    DeviceRow& r = out.row[w];
    r.scales = job.side[w].scales, r.tensor = job.side[w].tensor;
    r.scale_block = f.scale_block, r.scale_token = f.scale_token, r.scale_offset = f.scale_offset;
    r.dim_outer = f.dim_outer, r.dim_inner = f.dim_inner, r.dtype = f.dtype, r.pack = int32_t(f.pack),
    r.is_inline = int32_t(f.is_inline);
    r.scale.dtype = f.scale_dtype, r.scale.group = f.scale_group, r.scale.group_size = int32_t(f.group_size),
    r.scale.num_groups = int32_t(job.head_dim / f.group_size);
    r.scale.mode = !f.granularity ? SCALE_NONE : w == DST && is_found(f.granularity) ? SCALE_COMPUTED : SCALE_READ;
  }
  return out;
}

// Addresses and strides of a side as bits: what they are all multiples of is what an access may have. `but` is the
// digit along which accesses go.
int access_width(const CellJob& job, const Bound& bound, int w, int but = -1) {
  uint64_t bits = uint64_t(job.offset[w]) | uint64_t(job.block[w]) | uint64_t(job.outer[w]) | uint64_t(job.inner[w]);
  for (char* b : bound.buffers[w]) bits |= uint64_t(uintptr_t(b));
  for (int i = 0; i < job.num_digits; i++)
    if (i != but) bits |= uint64_t(job.digit[i].stride[w]);
  return common_alignment(bits);
}

// Whether a row's elements follow each other.
bool is_whole(const kvx_plan_format_t& f, int64_t head_dim) {
  return f.pack == head_dim && (dtype_bits(f.dtype) == 4 || f.dim_inner == dtype_bits(f.dtype) / 8);
}

// Whether chunks can do it, and the job for them. One unsplit axis of tokens at most; rows whole and aligned on both
// sides.
RunCells make_chunks(const CellJob& job, const Bound& bound, DeviceCell* out, int64_t* blocks_per_unit) {
  const kvx_plan_format_t &src = job.side[SRC].format, &dst = job.side[DST].format;
  const bool encode = is_quantised(dst.dtype), decode = is_quantised(src.dtype);
  const bool floats = !src.granularity && !dst.granularity && !encode && !decode;
  if (encode == decode && !floats) return nullptr;
  const kvx_plan_format_t &coded = encode ? dst : src, &plain = encode ? src : dst;
  const bool computes = encode && is_found(coded.granularity), has_tensor = coded.tensor_scale_buffer >= 0;
  RunCells run = floats ? find_floats(src.dtype, dst.dtype, false) : nullptr;
  if (!floats && coded.scale_dtype == KVX_DTYPE_F32 && !has_tensor)
    run = find_chunks(plain.dtype, coded.dtype, encode, computes);
  if (!floats && !run) run = find_codes(plain.dtype, coded.dtype, encode);
  // Lanes find a computed scale by shuffles, a power of two of them: other rows have lanes that stand by.
  const int64_t chunks = job.head_dim / kChunk;
  int64_t lanes = floats ? 1 : coded.group_size / kChunk, all_chunks = chunks;
  if (computes && lanes == chunks) {
    while (lanes & (lanes - 1)) lanes++;
    all_chunks = lanes;
  }
  const bool is_coded = floats || (coded.group_size % kChunk == 0 && coded.granularity &&
                                   (!computes || ((lanes & (lanes - 1)) == 0 && lanes <= 32)));
  const bool fits =
      run && is_coded && job.head_dim % kChunk == 0 && is_whole(src, job.head_dim) && is_whole(dst, job.head_dim);
  if (!fits) return nullptr;
  *out = start_cell(job);
  for (int w = 0; w < 2; w++) out->width[w] = access_width(job, bound, w);
  if (out->width[encode ? SRC : DST] < 16 || out->width[encode ? DST : SRC] < (floats ? 16 : 4)) return nullptr;
  CellDigit columns[kMaxColumns], rest[KVX_PLAN_MAX_DIGITS], token{1, {0, 0}, {0, 0}, 0, 0, {0, 0}};
  int num_columns = 0, num_rest = 0, tokens = 0;
  const int64_t step[2] = {kChunk * dtype_bits(src.dtype) / 8, kChunk * dtype_bits(dst.dtype) / 8};
  columns[num_columns++] = CellDigit{all_chunks, {step[0], step[1]}, {0, 0}, 0, 0, {0, 0}};
  int64_t all = all_chunks, items = 1;
  for (int i = 0; i < job.num_digits; i++) {
    const CellDigit& d = job.digit[i];
    if (d.token && ++tokens == 1) token = d;
    else if (!d.token && !d.step[0] && !d.step[1] && num_columns < kMaxColumns && all * d.size <= kThreads)
      columns[num_columns++] = d, all *= d.size;
    else rest[num_rest++] = d, items *= d.size;
  }
  if (!tokens) {  // states have none: a thread walks the longest of the other digits
    int longest = -1;
    for (int i = 0; i < num_rest; i++)
      if (!rest[i].step[0] && !rest[i].step[1] && (longest < 0 || rest[i].size > rest[longest].size)) longest = i;
    if (longest >= 0) {
      token = rest[longest], items /= token.size;
      std::move(rest + longest + 1, rest + num_rest, rest + longest);
      num_rest--;
    }
  }
  int n = 0;
  for (int i = 0; i < num_columns; i++) out->digit[n++] = to_device(columns[i]);
  out->num_columns = n;
  for (int i = 0; i < num_rest; i++) out->digit[n++] = to_device(rest[i]);
  out->num_digits = n;
  out->token = to_device(token);
  if (has_tensor && token.layer) return nullptr;  // a thread has one layer's
  // Where nothing is shuffled, lanes may end anywhere in a warp.
  Tile tile = make_tile(all);
  const bool fits_warps = tile.columns % unsigned(lanes) == 0 && tile.columns * tile.lanes % 32 == 0;
  if (!computes && (floats || !fits_warps) && all < kThreads) tile = Tile{unsigned(all), kThreads / unsigned(all)};
  if ((computes && !fits_warps) || tile.columns * tile.lanes > kThreads) return nullptr;
  out->columns = make_fast_divider(tile.columns), out->tokens_each = tile.lanes, out->all_columns = uint32_t(all);
  const int64_t column_tiles = (all + tile.columns - 1) / tile.columns;
  out->column_tiles = make_fast_divider(column_tiles);
  for (int w = 0; w < 2; w++) {
    if (token.stride[w] > kMaxStride || token.scale[w] > kMaxStride) return nullptr;
    out->token_stride[w] = uint32_t(token.stride[w]), out->token_scale[w] = uint32_t(token.scale[w]);
  }
  out->group = make_fast_divider(lanes), out->chunks = uint32_t(chunks);
  *blocks_per_unit = items * column_tiles;
  if (*blocks_per_unit > kMaxCount) return nullptr;
  out->per_unit = make_fast_divider(*blocks_per_unit);
  return run;
}

// Whether rows lie across, and the job for their tiles.
RunCells make_tiles(const CellJob& job, const Bound& bound, DeviceCell* out, int64_t* blocks_per_unit) {
  const kvx_plan_format_t &src = job.side[SRC].format, &dst = job.side[DST].format;
  const bool floats = !src.granularity && !dst.granularity && !is_quantised(src.dtype) && !is_quantised(dst.dtype);
  if (!floats || src.pack != job.head_dim || dst.pack != job.head_dim || dst.dim_inner != dtype_bits(dst.dtype) / 8)
    return nullptr;
  int across = -1;
  for (int i = 0; i < job.num_digits; i++) {
    const CellDigit& d = job.digit[i];
    if (!d.token && !d.step[0] && !d.step[1] && d.stride[SRC] == dtype_bits(src.dtype) / 8 &&
        d.stride[DST] <= kMaxStride)
      across = i;
  }
  if (across < 0) return nullptr;
  *out = start_cell(job);
  int64_t items = 1;
  for (int i = 0; i < job.num_digits; i++)
    if (i != across) out->digit[out->num_digits++] = to_device(job.digit[i]), items *= job.digit[i].size;
  const CellDigit& rows = job.digit[across];
  out->token = to_device(rows), out->token_stride[DST] = uint32_t(rows.stride[DST]);
  out->width[DST] = access_width(job, bound, DST);
  out->width[SRC] = std::min(access_width(job, bound, SRC, across), common_alignment(uint64_t(src.dim_inner)));
  const int64_t along = (job.head_dim + kTileSide - 1) / kTileSide,
                tiles = (rows.size + kTileSide - 1) / kTileSide * along;
  out->columns = make_fast_divider(along), out->column_tiles = make_fast_divider(tiles);
  *blocks_per_unit = items * tiles;
  if (*blocks_per_unit > kMaxCount) return nullptr;
  out->per_unit = make_fast_divider(*blocks_per_unit);
  return find_floats(src.dtype, dst.dtype, true);
}

kvx_status_t make_rows(const CellJob& job, DeviceCell* out, int64_t* rows_per_unit) {
  *out = start_cell(job);
  int64_t rows = 1;
  for (int i = 0; i < job.num_digits; i++) out->digit[i] = to_device(job.digit[i]), rows *= job.digit[i].size;
  out->num_digits = job.num_digits;
  if (rows > kMaxCount)
    return fail(KVX_STATUS_UNSUPPORTED, "one unit has %lld rows; more than one launch takes.", (long long)rows);
  out->per_unit = make_fast_divider(rows);
  *rows_per_unit = rows;
  return KVX_STATUS_OK;
}

// One launch for each run of jobs that share a kernel.
class Builder {
 public:
  explicit Builder(Residue* residue) : residue_(residue) {}
  void add(const DeviceCell& cell, RunCells run, int64_t per_unit, Pass pass, unsigned threads, size_t shared) {
    if (!open_ || open_->run != run || open_->pass != pass || open_->threads != threads || run != &run_rows ||
        open_->num_jobs == kCellJobs) {
      auto fresh = std::make_unique<CellLaunch>();
      open_ = fresh.get();
      open_->run = run, open_->pass = pass, open_->threads = threads;
      residue_->launches.push_back(std::move(fresh));
    }
    open_->shared = std::max(open_->shared, shared);
    open_->job[open_->num_jobs] = cell, open_->per_unit[open_->num_jobs] = per_unit;
    open_->num_jobs++;
  }

 private:
  Residue* residue_;
  CellLaunch* open_ = nullptr;
};

}  // namespace

kvx_status_t add_cell_launches(const Bound& bound, Residue* residue) {
  Builder builder(residue);
  // A row lies in shared memory as f32: fewer warps for longer rows.
  auto add_rows = [&](const CellJob& job, Pass pass) -> kvx_status_t {
    DeviceCell cell;
    int64_t rows;
    KVX_TRY(make_rows(job, &cell, &rows));
    int64_t warps = 8;
    while (warps > 1 && warps * job.head_dim * 4 > 48 * 1024) warps /= 2;
    if (warps * job.head_dim * 4 > 160 * 1024)
      return fail(KVX_STATUS_UNSUPPORTED,
                  "head_dim %lld is more than a device converts between formats; 40960 at most.",
                  (long long)job.head_dim);
    builder.add(cell, &run_rows, rows, pass, unsigned(warps) * 32, size_t(warps) * size_t(job.head_dim) * 4);
    return KVX_STATUS_OK;
  };
  for (Pass pass : {CLEAR, LARGEST, FINISH})
    for (const CellJob& job : bound.cell_jobs)
      if (is_by_block(job.side[DST].format.granularity)) KVX_TRY(add_rows(job, pass));
  for (const CellJob& job : bound.cell_jobs) {
    DeviceCell cell;
    int64_t per_unit;
    RunCells run = make_chunks(job, bound, &cell, &per_unit);
    if (!run) run = make_tiles(job, bound, &cell, &per_unit);
    if (run) builder.add(cell, run, per_unit, WRITE, kThreads, 0);
    else KVX_TRY(add_rows(job, WRITE));
  }
  return KVX_STATUS_OK;
}

}  // namespace cuda
}  // namespace kvx
