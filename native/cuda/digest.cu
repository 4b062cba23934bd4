// The content digest on a device: a vector a thread at a time, sums in registers, one atomic add a block of threads.
#include "../digest.h"

#include <string.h>

#include "convert.cuh"

namespace kvx {
namespace cuda {

namespace {

constexpr int kThreads = 256, kVectors = 8;

struct DigestDigit {
  FastDivider size;
  uint32_t token;
  int32_t step;
  int64_t stride, coordinate;
};

struct DigestArgs {
  DeviceTables tables;
  DevicePlace place;
  int64_t coordinate;
  uint64_t vectors;       // of a unit
  FastDivider per_unit;   // blocks of threads
  FastDivider run;        // vectors of a run
  uint32_t run_bytes;
  int32_t align;
  int32_t num_digits;
  DigestDigit digit[KVX_PLAN_MAX_DIGITS];
  unsigned long long* out;
};

// One word of a run at any address; past the run's end it is zero.
__device__ __forceinline__ uint64_t load_word(const char* p, uint32_t bytes, int align) {
  if (bytes >= 8 && align >= 8) return load_once<uint64_t>(p);
  if (bytes >= 8 && align >= 4) return load_once<uint32_t>(p) | uint64_t(load_once<uint32_t>(p + 4)) << 32;
  uint64_t word = 0;
  for (uint32_t i = 0; i < bytes && i < 8; i++) word |= uint64_t(load_once<uint8_t>(p + i)) << (8 * i);
  return word;
}

// Two words a load where runs and addresses allow (W = 16), one word otherwise (W = 8).
template <int W>
__global__ void __launch_bounds__(kThreads) digest_runs(const __grid_constant__ DigestArgs a) {
  const uint32_t unit = a.per_unit.divide(blockIdx.x), chunk = blockIdx.x - unit * a.per_unit.d;
  const Here here = find_unit(a.tables, a.place, unit, ALL_UNITS, threadIdx.x == 0 && chunk == 0);
  uint64_t first = 0, second = 0;
  const uint32_t seq = a.tables.units_per_seq.divide(unit), position = (unit - seq * a.tables.units_per_seq.d) * a.tables.unit_tokens;
  if (here.tokens) {
#pragma unroll 4
    for (int j = 0; j < kVectors; j++) {
      const uint32_t v = (chunk * kVectors + j) * kThreads + threadIdx.x;
      if (v >= a.vectors) break;
      uint32_t index = a.run.divide(v), token = 0;
      const uint32_t inside = (v - index * a.run.d) * W;
      int32_t steps[2] = {0, 0};
      int64_t byte[2] = {inside, 0}, coordinate = a.coordinate + inside;
      for (int i = 0; i < a.num_digits; i++) {
        const DigestDigit& d = a.digit[i];
        const uint32_t q = d.size.divide(index), n = index - q * d.size.d;
        index = q;
        token += n * d.token, steps[0] += int32_t(n) * d.step;
        byte[0] += n * d.stride, coordinate += n * d.coordinate;
      }
      if (token >= here.tokens) continue;
      Here mine = here;
      move_on_source(a.tables, a.place, byte[0], steps[0], &mine);
      const RowKey key = row_key(uint64_t(coordinate), seq, position + token);
      const uint64_t start = (uint64_t(coordinate) & ((1ull << kRowBits) - 1)) / 8 * kGolden;
      uint64_t word[W / 8];
      if constexpr (W == 16) {
        const uint4 data = load_once<uint4>(mine.at[0]);
        word[0] = data.x | uint64_t(data.y) << 32, word[1] = data.z | uint64_t(data.w) << 32;
      } else {
        word[0] = load_word(mine.at[0], a.run_bytes - inside, a.align);
      }
#pragma unroll
      for (int k = 0; k < W / 8; k++) {
        first += word_term(word[k], key.first + start + k * kGolden);
        second += word_term(word[k], key.second + start + k * kGolden);
      }
    }
  }
  for (int hop = 16; hop > 0; hop /= 2) first += __shfl_xor_sync(0xffffffffu, first, hop), second += __shfl_xor_sync(0xffffffffu, second, hop);
  __shared__ uint64_t sums[2][kThreads / 32];
  if (threadIdx.x % 32 == 0) sums[0][threadIdx.x / 32] = first, sums[1][threadIdx.x / 32] = second;
  __syncthreads();
  if (threadIdx.x < 2) {
    uint64_t sum = 0;
    for (int i = 0; i < kThreads / 32; i++) sum += sums[threadIdx.x][i];
    if (sum) atomicAdd(a.out + threadIdx.x, static_cast<unsigned long long>(sum));
  }
}

}  // namespace

kvx_status_t digest(Bound* bound, uint64_t* out, void* stream) {
  DeviceGuard guard(bound->device);
  KVX_TRY(guard.status());
  Residue residue;
  auto tables = std::make_unique<DeviceTables>();
  memset(static_cast<void*>(tables.get()), 0, sizeof *tables);
  KVX_TRY(place_tables(bound, &residue, tables.get()));
  auto args = std::make_unique<DigestArgs>();
  const int64_t units = bound->tables.num_seqs * bound->tables.units_per_seq;
  for (const Job& job : bound->jobs) {
    memset(static_cast<void*>(args.get()), 0, sizeof *args);
    args->tables = *tables;
    const int width = job.run % 16 == 0 && job.align >= 16 ? 16 : 8;
    const int64_t per_run = (job.run + width - 1) / width;
    args->place = make_place(job);
    args->coordinate = job.offset[DST];
    int64_t runs = 1;
    for (int i = 0; i < job.num_digits; i++) {
      const Digit& d = job.digit[i];
      args->digit[i] = DigestDigit{make_fast_divider(d.size), uint32_t(d.token), d.step[SRC], d.stride[SRC], d.stride[DST]};
      runs *= d.size;
    }
    args->num_digits = job.num_digits;
    args->run = make_fast_divider(per_run), args->run_bytes = uint32_t(job.run), args->align = job.align;
    args->vectors = uint64_t(runs * per_run);
    const int64_t per_unit = (int64_t(args->vectors) + kThreads * kVectors - 1) / (kThreads * kVectors);
    int64_t blocks;
    if (runs * per_run > kMaxCount || !mul_fits(per_unit, units, &blocks) || blocks > kMaxCount)
      return fail(KVX_STATUS_UNSUPPORTED, "%lld units of %lld vectors are more than one launch takes.", (long long)units, (long long)args->vectors);
    args->per_unit = make_fast_divider(per_unit);
    args->out = reinterpret_cast<unsigned long long*>(out);
    if (blocks == 0) continue;
    const dim3 grid{unsigned(blocks)}, block(kThreads);
    KVX_TRY(width == 16 ? launch("digest_runs", digest_runs<16>, grid, block, stream, *args) : launch("digest_runs", digest_runs<8>, grid, block, stream, *args));
  }
  // Tables that did not fit the launches are let go with this call, so its kernels must have read them.
  if (residue.device_memory && cudaStreamSynchronize(static_cast<cudaStream_t>(stream)) != cudaSuccess)
    return fail(KVX_STATUS_INTERNAL_ERROR, "waiting for the digest failed.");
  return KVX_STATUS_OK;
}

}  // namespace cuda
}  // namespace kvx
