// The content digest on a device. A warp takes 32 rows: each lane finds one's address and key, then all lanes read
// words of all of them, so that neither is worked out more than once a row. Sums stay in registers; one atomic add a
// block of threads.
#include "move/digest.h"

#include <string.h>

#include "move/cuda/convert.cuh"

namespace kvx {
namespace cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kAhead = 4;

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
  uint32_t content;      // what the rows hold
  uint32_t rows;         // of a unit
  FastDivider per_unit;  // blocks of threads
  FastDivider words;     // of a row
  FastDivider piece;     // words of a piece of it
  int64_t piece_stride;
  uint32_t run_bytes;  // of a piece
  int32_t align;
  int32_t num_digits;
  DigestDigit digit[KVX_PLAN_MAX_DIGITS];
  unsigned long long* out;
};

// What a row's words are multiplied with. Read anew for every word, so in as few loads as can be, and only once the
// word itself is there: words are asked for by the row's address alone, and no register holds a key while they are on
// their way. 48 bytes apart, rows that lanes read side by side lie in different banks; 32 apart they do not, and rows
// in pieces take 13 % longer.
struct alignas(16) DigestRow {
  ulonglong2 k01_k23;
  ulonglong2 k45;  // the first of them
  uint32_t word;   // number of its first word here
};
static_assert(sizeof(DigestRow) == 48, "banks");

// How a warp's lanes lie over its rows: along them where they are whole, one row a lane where they come in pieces
// (those of neighbouring rows stand side by side); AT_ANY_ADDRESS takes rows of any length and alignment.
enum Reading { WHOLE_ROWS, PIECES, AT_ANY_ADDRESS };

// One word at any address; past the row's end it is zero.
__device__ __forceinline__ uint4 load_word(const char* p, uint32_t bytes, int align) {
  uint32_t x[4] = {0, 0, 0, 0};
  if (bytes >= kWordBytes && align >= 4) {
    for (int i = 0; i < 4; i++) x[i] = load_once<uint32_t>(p + 4 * i);
  } else {
    for (uint32_t i = 0; i < bytes && i < kWordBytes; i++)
      x[i / 4] |= uint32_t(load_once<uint8_t>(p + i)) << (8 * (i % 4));
  }
  return make_uint4(x[0], x[1], x[2], x[3]);
}

template <Reading kReading>
__global__ void __launch_bounds__(kThreads) digest_rows(const __grid_constant__ DigestArgs a) {
  __shared__ DigestRow found[kWarps][32];
  __shared__ const char* places[kWarps][32];  // of rows; NULL: not there
  const uint32_t unit = a.per_unit.divide(blockIdx.x), chunk = blockIdx.x - unit * a.per_unit.d;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Here here = find_unit(a.tables, a.place, unit, ALL_UNITS, threadIdx.x == 0 && chunk == 0);
  uint64_t first = 0, second = 0;
  if (here.tokens) {
    const uint32_t seq = a.tables.units_per_seq.divide(unit),
                   position = (unit - seq * a.tables.units_per_seq.d) * a.tables.unit_tokens;
    const uint32_t mine = (chunk * kWarps + warp) * 32 + lane;
    DigestRow row = {};
    const char* place = nullptr;
    if (mine < a.rows) {
      uint32_t index = mine, token = 0;
      int32_t steps = 0;
      int64_t byte = 0, coordinate = a.coordinate;
      for (int i = 0; i < a.num_digits; i++) {
        const DigestDigit& d = a.digit[i];
        const uint32_t q = d.size.divide(index), n = index - q * d.size.d;
        index = q;
        token += n * d.token, steps += int32_t(n) * d.step;
        byte += n * d.stride, coordinate += n * d.coordinate;
      }
      if (token < here.tokens) {
        Here at = here;
        move_on_source(a.tables, a.place, byte, steps, &at);
        const RowKey key = row_key(row_seed(uint64_t(coordinate), seq, position + token, a.content));
        place = at.at[0];
        row.k01_k23 = make_ulonglong2(key.k01, key.k23), row.k45.x = key.k45,
        row.word = first_word(uint64_t(coordinate));
      }
    }
    found[warp][lane] = row, places[warp][lane] = place;
    __syncwarp();
    const uint32_t steps = a.words.d;  // 32 rows of so many words, 32 at a time
    const auto row_of = [&](uint32_t n) { return kReading == PIECES ? lane : a.words.divide(n * 32 + lane); };
    const auto word_of = [&](uint32_t n, uint32_t r) { return kReading == PIECES ? n : n * 32 + lane - r * a.words.d; };
    for (uint32_t j = 0; j < steps; j += kAhead) {
      uint4 data[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; k++) {
        const uint32_t r = row_of(j + k), word = word_of(j + k, r);
        data[k] = make_uint4(0, 0, 0, 0);
        if (j + k >= steps) break;
        const char* at = places[warp][r];
        if (!at) continue;
        if constexpr (kReading == WHOLE_ROWS) {
          data[k] = load_once<uint4>(at + word * kWordBytes);
        } else {
          const uint32_t p = a.piece.divide(word), inside = (word - p * a.piece.d) * kWordBytes;
          const char* here_at = at + p * a.piece_stride + inside;
          data[k] = kReading == PIECES ? load_once<uint4>(here_at) : load_word(here_at, a.run_bytes - inside, a.align);
        }
      }
      asm volatile("" ::: "memory");  // keys are read below this line, not above
#pragma unroll
      for (int k = 0; k < kAhead; k++) {
        if (j + k >= steps) break;
        const uint32_t r = row_of(j + k), word = word_of(j + k, r);
        if (!places[warp][r]) continue;
        const DigestRow& from = found[warp][r];
        const ulonglong2 low = from.k01_k23;
        const uint32_t numbers[4] = {data[k].x, data[k].y, data[k].z, data[k].w};
        add_word(numbers, RowKey{low.x, low.y, from.k45.x}, from.word + word, &first, &second);
      }
    }
  }
  for (int hop = 16; hop > 0; hop /= 2)
    first += __shfl_xor_sync(0xffffffffu, first, hop), second += __shfl_xor_sync(0xffffffffu, second, hop);
  __shared__ uint64_t sums[2][kWarps];
  if (threadIdx.x % 32 == 0) sums[0][threadIdx.x / 32] = first, sums[1][threadIdx.x / 32] = second;
  __syncthreads();
  if (threadIdx.x < 2) {
    uint64_t sum = 0;
    for (int i = 0; i < kWarps; i++) sum += sums[threadIdx.x][i];
    if (sum) atomicAdd(a.out + threadIdx.x, static_cast<unsigned long long>(sum));
  }
}

kvx_status_t launch_all(const Bound& bound, const BlockTables& blocks, const DeviceTables& tables, uint64_t* out,
                        void* stream) {
  auto args = std::make_unique<DigestArgs>();
  const int64_t units = blocks.num_units();
  for (Job job : bound.jobs) {
    memset(static_cast<void*>(args.get()), 0, sizeof *args);
    args->tables = tables;
    const bool is_aligned = job.run % kWordBytes == 0 && job.align >= 16;
    const Digit pieces = take_pieces(&job);
    args->place = make_place(job);
    args->coordinate = job.offset[DST], args->content = bound.content;
    int64_t rows = 1;
    for (int i = 0; i < job.num_digits; i++) {
      const Digit& d = job.digit[i];
      args->digit[i] =
          DigestDigit{make_fast_divider(d.size), uint32_t(d.token), d.step[SRC], d.stride[SRC], d.stride[DST]};
      rows *= d.size;
    }
    args->num_digits = job.num_digits;
    const int64_t piece = (job.run + kWordBytes - 1) / kWordBytes, words = piece * pieces.size;
    args->words = make_fast_divider(words), args->piece = make_fast_divider(piece),
    args->piece_stride = pieces.stride[SRC];
    args->run_bytes = uint32_t(job.run), args->align = job.align;
    const int64_t per_unit = (rows + kThreads - 1) / kThreads;
    int64_t all;
    if (rows > kMaxCount || words * 32 > kMaxCount || !mul_fits(per_unit, units, &all) || all > kMaxCount)
      return fail(KVX_STATUS_UNSUPPORTED, "%lld units of %lld rows are more than one launch takes.", (long long)units,
                  (long long)rows);
    args->rows = uint32_t(rows), args->per_unit = make_fast_divider(per_unit);
    args->out = reinterpret_cast<unsigned long long*>(out);
    if (all == 0) continue;
    const dim3 grid{unsigned(all)}, block(kThreads);
    auto* kernel = !is_aligned       ? &digest_rows<AT_ANY_ADDRESS>
                   : pieces.size > 1 ? &digest_rows<PIECES>
                                     : &digest_rows<WHOLE_ROWS>;
    KVX_TRY(launch("digest_rows", kernel, grid, block, stream, *args));
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t digest(const Bound& bound, const BlockTables& blocks, uint64_t* out, void* stream) {
  DeviceGuard guard(bound.device);
  KVX_TRY(guard.status());
  auto tables = std::make_unique<DeviceTables>();
  memset(static_cast<void*>(tables.get()), 0, sizeof *tables);
  Ahead buffers;
  SlotRef ids;
  size_t bytes;
  KVX_TRY(place_buffers(bound, tables.get(), &buffers));
  KVX_TRY(place_blocks(blocks, tables.get(), &ids, &bytes));
  KVX_TRY(buffers.put_before(stream));
  if (ids) KVX_TRY(send(*ids, bytes, stream));
  const kvx_status_t status = launch_all(bound, blocks, *tables, out, stream);
  std::vector<SlotRef> read;
  for (const SlotRef& slot : {buffers.slot(), ids})
    if (slot) read.push_back(slot);
  const kvx_status_t held = read.empty() ? KVX_STATUS_OK : hold_until_passed(std::move(read), stream);
  return status == KVX_STATUS_OK ? held : status;
}

}  // namespace cuda
}  // namespace kvx
