// Prefill that multiplies e4m3 by e4m3, for caches of e4m3 whose callers allow it. Queries and weights are rounded to
// e4m3; K goes to the tensor cores as it lies.
//
// Multiplications of bytes take both operands K-major: of V, rows of one dim with its keys side by side. The warps that
// load turn each tile of V. The tensor cores keep about 14 bits of a sum, so a tile's values are added up from nothing,
// and then to the results in f32: errors do not grow with the number of keys. There are registers for half of a tile's
// values at a time, which are multiplied while exponentials are computed. Below the values stand rows of ones: sums of
// weights, as rounded as the weights that values are multiplied by, come with the products.
#pragma once
#include "attention/prefill/prefill.cuh"

namespace kvx {
namespace cuda {

// kCaps: scores are capped. A question asked while it runs would take 10 % of its speed.
template <bool kCaps_>
struct ProductsConfig : PrefillConfig<tiles::E4m3Products, PrefillTile<128, 128, 128>, ONE_SCALE> {
  using Base = PrefillConfig<tiles::E4m3Products, PrefillTile<128, 128, 128>, ONE_SCALE>;
  static constexpr bool kCaps = kCaps_;
  using Rings = typename Base::Rings;
  static constexpr int kOnes = 8;  // rows of them: as few as multiplications take
  using Turned = tiles::Ring<Base::kStages, (Base::kValueDims + kOnes) * Base::kKeys>;
  static constexpr int kSmallQueriesAt = (Base::kRawAt + 1023) / 1024 * 1024,
                       kTurnedAt = kSmallQueriesAt + Base::kRows * Base::kKeyDims,
                       kTurnedBarriersAt = kTurnedAt + Base::kStages * Turned::kTileBytes,
                       kSharedBytes = kTurnedBarriersAt + Turned::kBarrierBytes + 1024;
  static_assert(kSharedBytes <= 227 * 1024, "shared memory of a block of threads");
};

// Warps that turn tiles of V, 128 keys by 128 dims, half of the dims each.
//
// A matrix of 8 keys by 16 dims, loaded turned in pairs of bytes, leaves lane 4 g + t with keys 2 t and 2 t + 1 of dims
// 2 g and 2 g + 1. Of two such matrices, picked apart, it has four keys of either dim: {2 t, 2 t + 1, 8 + 2 t, 9 + 2
// t}. They are the four of a row of weights that lane t has after its scores were multiplied: weights need no exchange
// either. So of every 16 keys byte 4 t + j is key 8 (j / 2) + 2 t + j % 2, for both operands alike. Of every 16 dims
// row g is dim 2 g, and row 8 + g the one after, which all banks take at once.
template <class Rings, class Turned> struct ValueTurner {
  static constexpr int kWarps = 2;
  uint32_t warp;
  typename Rings::ValueRing values;  // as they lie in the cache
  Turned turned;

  __device__ __forceinline__ void turn() const {
    const uint32_t lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, mix = lane % 8;
    const uint32_t from = values.tile() + lane * 128, to = turned.tile() + row * 128;
#pragma unroll 1
    for (uint32_t dims = warp * 4; dims < warp * 4 + 4; dims++) {  // 16 of them
      const uint32_t of_dims = from + ((dims ^ mix) << 4), of_rows = to + dims * 16 * 128;
      uint32_t r[4][4];
#pragma unroll
      for (int k = 0; k < 4; k++) tiles::load_matrices_turned(r[k], of_dims + k * 32 * 128);
#pragma unroll
      for (int k = 0; k < 4; k++) {  // 32 keys
        const uint32_t x[4] = {__byte_perm(r[k][0], r[k][1], 0x6420), __byte_perm(r[k][2], r[k][3], 0x6420),
                               __byte_perm(r[k][0], r[k][1], 0x7531), __byte_perm(r[k][2], r[k][3], 0x7531)};
        tiles::store_matrices(of_rows + (((2 * k + lane / 8 % 2) ^ mix) << 4), x);
      }
    }
  }

  __device__ __forceinline__ void turn_next() {
    values.wait_full();
    turned.wait_free();
    turn();
    tiles::show_to_multiplications();
    __syncwarp();
    const bool arrives = threadIdx.x % 32 == 0;
    values.give_back(arrives);
    tiles::arrive_for_all(turned.full(), arrives);
    turned.next();
  }
};

template <class C> struct PrefillProducts : Prefill<C> {
  using Base = Prefill<C>;
  using Rings = typename C::Rings;
  using Queries = typename Base::Queries;
  using Base::a, Base::shared, Base::at, Base::items, Base::num_items;
  static constexpr int kOut = Base::kOut;

  __device__ __forceinline__ typename C::Turned turned() const {
    return typename C::Turned{at + C::kTurnedAt, at + C::kTurnedBarriersAt};
  }

  // Rows of ones, once for all tiles, by 128 threads.
  __device__ __forceinline__ void put_ones(uint32_t thread) const {
    constexpr int kChunks = C::kOnes * C::kKeys / 16;
    static_assert(C::kStages * kChunks == 128, "a chunk a thread");
    const uint32_t of_tile = C::kValueDims * C::kKeys + thread % kChunks * 16, one = 0x38383838u;
    tiles::store_shared_16(at + C::kTurnedAt + thread / kChunks * C::Turned::kTileBytes + of_tile,
                           make_uint4(one, one, one, one));
    tiles::show_to_multiplications();
  }

  // Queries as e4m3, by the threads that multiply. A row is divided by the power of two that brings its largest element
  // between 224 and 448, e4m3's largest, which is left beside. `flips`: K's scale is negative; scores are compared
  // before they are multiplied by it. A row with an infinity is NaN. A thread has the chunks that it copied itself.
  template <bool kIsBf16> __device__ __forceinline__ void round_queries(bool flips) const {
    const uint32_t chunk = Queries::chunk(), mask = 0x7fff7fffu;
    const auto widen = [](uint32_t bits) {  // one element, in the low half
      return kIsBf16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(uint16_t(bits)));
    };
    const auto power_of_two = [](int e) { return __uint_as_float(uint32_t(e + 127) << 23); };
#pragma unroll 4
    for (int j = 0; j < Queries::kMine; j++) {
      const uint32_t r = Queries::row(j);
      const uint4 four = tiles::load_shared_16(at + Base::query_at(r, chunk));
      // Magnitudes are in the order of their bits, infinity and then NaN the largest.
      uint32_t most = __vmaxu2(__vmaxu2(four.x & mask, four.y & mask), __vmaxu2(four.z & mask, four.w & mask));
#pragma unroll
      for (int hop = 1; hop < Queries::kLanes; hop *= 2) most = __vmaxu2(most, __shfl_xor_sync(0xffffffffu, most, hop));
      const uint32_t bits = __float_as_uint(widen(max(most & 0xffffu, most >> 16)));
      const int exponent = max(int(bits >> 23) - 127 - 8 + ((bits & 0x7fffffu) > 0x600000u), -100);  // 448: 1.75 * 2^8
      float shrink = power_of_two(-exponent);
      if (bits >= 0x7f800000u) shrink = __uint_as_float(0x7fffffffu);
      if (flips) shrink = -shrink;
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
      uint32_t packed[2];
#pragma unroll
      for (int i = 0; i < 2; i++)
        packed[i] = tiles::E4m3Numbers::pack(widen(words[2 * i] & 0xffffu) * shrink, widen(words[2 * i] >> 16) * shrink,
                                             widen(words[2 * i + 1] & 0xffffu) * shrink,
                                             widen(words[2 * i + 1] >> 16) * shrink);
      tiles::store_shared_8(at + C::kSmallQueriesAt + r * 128 + (((chunk / 2) ^ (r % 8)) << 4) + chunk % 2 * 8,
                            packed[0], packed[1]);
      if (chunk == 0) reinterpret_cast<float*>(shared + C::kGrowAt)[r] = power_of_two(exponent);
    }
  }
  __device__ __forceinline__ float scale_of_keys(const PrefillItem& item) const {
    return scale_of(a.scales[0], item.head, true);
  }
  __device__ __forceinline__ void finish_queries(const PrefillItem& item, int group, uint32_t index) const {
    if (a.has_query_map) tiles::wait(Base::query_barrier(group), index & 1);
    else tiles::wait_copies<0>();
    const bool flips = scale_of_keys(item) < 0.f;
    if (a.q.dtype == KVX_DTYPE_BF16) round_queries<true>(flips);
    else round_queries<false>(flips);
    tiles::show_to_multiplications();
    tiles::meet(5 + group, 128);
  }

  // Two warps ask for tiles of K and of V, two turn V's. One warp that did both would wait for its tiles to arrive.
  __device__ __forceinline__ void load() const {
    using Filler = tiles::MapFiller<Rings>;
    using Turner = ValueTurner<Rings, typename C::Turned>;
    static_assert(Filler::kWarps + Turner::kWarps == 4, "a warpgroup");
    const uint32_t warp = threadIdx.x / 32;
    if (warp < Filler::kWarps) {
      Filler filler{a.maps,
                    a.rows,
                    a.data,
                    uint32_t(a.box),
                    {uint32_t(a.row_chunks[0]), uint32_t(a.row_chunks[1])},
                    Base::rings(),
                    at + C::kRingsAt,
                    warp};
      Base::fill(filler);
      return;
    }
    Turner turner{warp - Filler::kWarps, Rings::values(at + C::kRingsAt), turned()};
    for (uint32_t item = 0; item < num_items; item++)
      for (int i = 0; i < items[item].num_tiles; i++) turner.turn_next();
  }

  // Of every 16 dims, as ValueTurner leaves them, a thread has four, one after the other.
  __device__ __forceinline__ void store_results(const PrefillItem& w, const float (&out)[kOut],
                                                const float (&inverse)[2], int32_t first_row) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int32_t row = first_row + 8 * h, token = int32_t(a.group.divide(row)),
                    head = w.head * int32_t(a.group.d) + row - token * int32_t(a.group.d);
      if (row >= w.rows) continue;
      char* to = a.out.data + (w.first_query + token) * a.out.token + int64_t(head) * a.out.head;
#pragma unroll
      for (int n = 0; n < C::kOutDims / 16; n++) {
        if (16 * n >= a.dims[1]) break;
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = out[8 * n + i % 2 * 4 + i / 2 + 2 * h] * inverse[h];
        const int dim = 16 * n + 4 * t;
        if (a.out.dtype == KVX_DTYPE_F32) {
#pragma unroll
          for (int i = 0; i < 4; i++) reinterpret_cast<float*>(to)[dim + i] = x[i];
          continue;
        }
        uint32_t* two = reinterpret_cast<uint32_t*>(to + dim * 2);
        const uint2 four = a.out.dtype == KVX_DTYPE_BF16
                               ? make_uint2(tiles::Bf16Numbers::pack(x[0], x[1]), tiles::Bf16Numbers::pack(x[2], x[3]))
                               : make_uint2(tiles::F16Numbers::pack(x[0], x[1]), tiles::F16Numbers::pack(x[2], x[3]));
        if (a.stores_16) *reinterpret_cast<uint2*>(two) = four;
        else two[0] = four.x, two[1] = four.y;
      }
    }
  }

  // As Prefill::multiply: items are one stream of tiles, and keys are a tile ahead of values.
  __device__ __forceinline__ void multiply() const {
    constexpr int kSteps = C::kKeyDims / 32, kKeySteps = C::kKeys / 32, kHalf = kOut / 2;
    using Scores = tiles::Warpgroup<tiles::E4m3Numbers, C::kKeys>;
    using Low = tiles::Warpgroup<tiles::E4m3Numbers, 64>;
    using High = tiles::Warpgroup<tiles::E4m3Numbers, 64 + C::kOnes>;
    // A row's largest weight is 2^kTop when its base is set; past 2^kMost the base moves. e4m3 ends at 448.
    constexpr float kNoBase = Base::Softened::kNoBase, kTop = 7.f, kMost = 8.8f;
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0);  // so that it is not found anew each time
    const int rows_from = group * 64, row_from = rows_from + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const PrefillItem* w = items;        // whose scores are softened
    uint32_t num_later = num_items - 1;  // items after it

    typename Base::Limits sight;
    float scale[2], base[2], factor[2];
    bool is_fresh;  // a row of this warp's has seen nothing yet
    const auto begin_item = [&](const PrefillItem& item) {
      sight = Base::find_limits(item, rows_from, row_from);
      is_fresh = true;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        scale[h] = a.scale * fabsf(scale_of_keys(item)) *
                   reinterpret_cast<const float*>(shared + C::kGrowAt)[row_from + 8 * h];
        factor[h] = C::kCaps ? 1.44269504f : scale[h] * 1.44269504f;
        if (factor[h] == 0.f) factor[h] = 1e-37f;  // a head of zeros: not 0 * infinity
        base[h] = kNoBase;
      }
    };
    // part: half of a tile's values, and sums of weights in its last four. fall: what `out` and `sum` are multiplied by
    // before a tile is added to them.
    float out[kOut], sum[2] = {0.f, 0.f}, s[C::kKeys / 2], part[kHalf + C::kOnes / 2], fall[2] = {1.f, 1.f};
    uint32_t p[kKeySteps][4];
#pragma unroll
    for (int i = 0; i < kOut; i++) out[i] = 0.f;
    uint32_t query = uint32_t(tiles::matrix_descriptor(at + C::kSmallQueriesAt + rows_from * 128, 16, 1024));
    typename Rings::Ring keys = Rings::keys(at + C::kRingsAt);
    typename C::Turned values = turned();
    bool has_keys = false, has_values = false;  // was the next tile there when it was asked for last?
    const bool arrives = threadIdx.x % 128 == 0;

    const auto multiply_keys = [&]() {
      asm volatile("" : "+r"(query));  // all of its steps would be kept in registers
      const uint64_t from = tiles::matrix_descriptor(keys.stages, 16, 1024) + keys.stage() * (Rings::kTileBytes >> 4),
                     of_queries = tiles::matrix_descriptor(0, 16, 1024) | query;
#pragma unroll
      for (int k = 0; k < kSteps; k++) Scores::multiply(s, of_queries + k * 2, from + k * 2, k > 0);
      tiles::commit_multiplications();
    };
    const auto value_matrix = [&]() {
      return tiles::matrix_descriptor(values.stages, 16, 1024) + values.stage() * (C::Turned::kTileBytes >> 4);
    };
    const auto multiply_low = [&]() {
      const uint64_t from = value_matrix();
      float(&d)[kHalf] = reinterpret_cast<float(&)[kHalf]>(part);
#pragma unroll
      for (int k = 0; k < kKeySteps; k++) Low::multiply(d, p[k], from + k * 2, k > 0);
      tiles::commit_multiplications();
    };
    const auto add_low = [&]() {
      tiles::wait_multiplications<0>();
      tiles::hold(part);
#pragma unroll
      for (int k = 0; k < kHalf; k++) out[k] = __fmaf_rn(out[k], fall[k / 2 % 2], part[k]);
    };
    const auto multiply_high = [&]() {
      const uint64_t from = value_matrix() + (64 * 128 >> 4);
      tiles::hold(part);
      tiles::begin_multiplications();
#pragma unroll
      for (int k = 0; k < kKeySteps; k++) High::multiply(part, p[k], from + k * 2, k > 0);
      tiles::commit_multiplications();
    };
    const auto add_high = [&]() {
      tiles::wait_multiplications<0>();
      tiles::hold(part);
#pragma unroll
      for (int k = 0; k < kHalf; k++) out[kHalf + k] = __fmaf_rn(out[kHalf + k], fall[k / 2 % 2], part[k]);
#pragma unroll
      for (int h = 0; h < 2; h++) sum[h] = __fmaf_rn(sum[h], fall[h], part[kHalf + 2 * h]);
    };

    // Scores of the tile whose keys were given back last to weights, and `shrink`: what sums of earlier tiles have to
    // be multiplied by. `meanwhile`: called before each quarter of the weights but the first, with bits of all so far.
    const auto soften = [&](bool is_whole, float(&shrink)[2], auto& weights, auto meanwhile) {
      shrink[0] = shrink[1] = 1.f;
      // One branch for all that most tiles have not; it is known before the scores are.
      const bool is_plain = !is_fresh && is_whole && sight.first >= sight.most_low &&
                            sight.first + C::kKeys <= sight.least_limit && sight.left > 1;
      if constexpr (C::kCaps) {
#pragma unroll
        for (int k = 0; k < C::kKeys / 2; k++) s[k] = a.soft_cap * tanhf(s[k] * (scale[k / 2 % 2] / a.soft_cap));
      }
      if (!is_plain) {
        if (sight.left == 1 && num_later) Base::ask_queries(w[1], num_items - num_later);
        Base::hide(*w, sight, keys.step - 1, is_whole, s);
      }
      if (!is_plain && is_fresh) {  // of the first tile, mostly
        bool is_none = false;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float top = s[2 * h];
#pragma unroll
          for (int n = 0; n < C::kKeys / 8; n++) top = fmaxf(top, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
          top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
          top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
          const float now = fmaxf(__fmaf_rn(top, factor[h], -kTop), base[h]);
          shrink[h] = tiles::exp2_fast(base[h] - now), base[h] = now;
          is_none |= now == kNoBase && sight.limit[h] > 0;
        }
        is_fresh = __any_sync(0xffffffffu, is_none);
      }
      // What weights are powers of two of. The largest are positive, if any is near the base, and are as large as their
      // bits: whole numbers have an instruction that takes the largest of three. In place, or the compiler would move
      // half of them after the branch below.
      int32_t tops[2][2];
#pragma unroll
      for (int n = 0; n < C::kKeys / 8; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float *y = s + 4 * n + 2 * h, *z = y + 1;
          asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(*y) : "f"(factor[h]), "f"(-base[h]));
          asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(*z) : "f"(factor[h]), "f"(-base[h]));
          int32_t& top = tops[h][n % 2];
          top = n < 2 ? max(__float_as_int(*y), __float_as_int(*z))
                      : __vimax3_s32(top, __float_as_int(*y), __float_as_int(*z));
        }
      float top[2];
#pragma unroll
      for (int h = 0; h < 2; h++) top[h] = __int_as_float(max(tops[h][0], tops[h][1]));
      if (__any_sync(0xffffffffu, top[0] > kMost || top[1] > kMost)) {  // seldom
#pragma unroll
        for (int h = 0; h < 2; h++) {
          top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], 1));
          top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], 2));
          const float more = top[h] > kMost ? top[h] - kTop : 0.f;
          base[h] += more, shrink[h] *= tiles::exp2_fast(-more);
#pragma unroll
          for (int n = 0; n < C::kKeys / 8; n++) {
            asm volatile("sub.f32 %0, %0, %1;" : "+f"(s[4 * n + 2 * h]) : "f"(more));
            asm volatile("sub.f32 %0, %0, %1;" : "+f"(s[4 * n + 2 * h + 1]) : "f"(more));
          }
        }
      }
      uint32_t all = 0;
#pragma unroll
      for (int k = 0; k < kKeySteps; k++) {
        if (k > 0) meanwhile(k, all);
#pragma unroll
        for (int i = 0; i < 16; i++) s[16 * k + i] = tiles::exp2_fast(s[16 * k + i]);
#pragma unroll
        for (int i = 0; i < 4; i++) {  // rows r0 and r0 + 8, keys of two eights, then of the next two
          const float* of = s + 16 * k + i / 2 * 8 + i % 2 * 2;
          weights[k][i] = tiles::E4m3Numbers::pack(of[0], of[1], of[4], of[5]);
          all |= weights[k][i];
        }
      }
    };

    Base::ask_queries(*w, 0);
    finish_queries(*w, group, 0);
    begin_item(*w);
    keys.wait_full();
    tiles::begin_multiplications();
    multiply_keys();
    tiles::wait_multiplications<0>();
    tiles::hold(s);
    bool is_whole = Rings::is_full(*Rings::valid(Base::rings(), keys.step));
    keys.give_back(arrives);
    float shrink[2];
    soften(is_whole, shrink, p, [](int, uint32_t) {});
    if (group == 1) tiles::pass(3, 256);
    for (;;) {
      const bool ends = sight.left == 1;
      if (ends) {
        if (num_later == 0) break;
        finish_queries(w[1], group, num_items - num_later);
      }
      if (!has_keys) keys.wait_full();
      tiles::hold(s), tiles::hold(part);
      tiles::meet(3 + group, 256);  // the two take turns: one multiplies while the other softens
      tiles::begin_multiplications();
      multiply_keys();
      if (!has_values) values.wait_full();
      multiply_low();
      tiles::pass(4 - group, 256);
      is_whole = Rings::is_full(*Rings::valid(Base::rings(), keys.step));
      const float last_base[2] = {base[0], base[1]};
      if (ends) num_later--, begin_item(*++w);
      else sight.left--, sight.first += C::kKeys;
      tiles::wait_multiplications<1>();
      tiles::hold(s);
      keys.give_back(arrives);
      uint32_t next[kKeySteps][4];  // weights, while the last ones are multiplied
      soften(is_whole, shrink, next, [&](int quarter, uint32_t all) {
        if (quarter == 2) return;
        // Weights are not negative; the assembler does not know, and computes them before it waits.
        tiles::store_if_negative(at + C::kWorkAt, __uint_as_float(all));
        if (quarter == 1) {
          add_low();
          multiply_high();
        } else {
          add_high();
          values.give_back(arrives);
          has_keys = keys.is_full(), has_values = values.is_full();
        }
      });
#pragma unroll
      for (int h = 0; h < 2; h++) fall[h] = shrink[h];
      if (ends) {
        float inverse[2];
        Base::finish_rows(w[-1], last_base, sum, w[-1].first_row + row_from, 0, inverse);
        store_results(w[-1], out, inverse, w[-1].first_row + row_from);
#pragma unroll
        for (int k = 0; k < kOut; k++) out[k] = 0.f;
        sum[0] = sum[1] = 0.f;
      }
      // Moved here, not earlier: the compiler would put it between multiplications, and have these wait for each other.
#pragma unroll
      for (int k = 0; k < kKeySteps * 4; k++)
        asm volatile("mov.b32 %0, %1;" : "=r"(p[k / 4][k % 4]) : "r"(next[k / 4][k % 4]));
    }
    if (group == 0) tiles::meet(3, 256);  // the other's last word
    values.wait_full();
    tiles::hold(part);
    tiles::begin_multiplications();
    multiply_low();
    add_low();
    multiply_high();
    add_high();
    float inverse[2];
    Base::finish_rows(*w, base, sum, w->first_row + row_from, 0, inverse);
    store_results(*w, out, inverse, w->first_row + row_from);
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) prefill_products(const __grid_constant__ PrefillArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char raw[];
  char* shared = raw + (1024 - (tiles::shared_address(raw) & 1023)) % 1024;
  const uint32_t at = tiles::shared_address(shared);
  wait_for_previous();
  PrefillItem* items = reinterpret_cast<PrefillItem*>(shared + C::kItemsAt);
  __shared__ uint32_t num_items;
  if (threadIdx.x < 32) {
    const uint32_t found = find_items<C::kRows, C::kKeys>(a, items);
    if (threadIdx.x == 0) num_items = found;
  }
  PrefillProducts<C> p{{a, shared, at, items, 0}};
  if (threadIdx.x == 32) {
    using Rings = typename C::Rings;
    const int fills = tiles::MapFiller<Rings>::kArrivals, reads = 2 * tiles::arrivals_of(128),
              turns = ValueTurner<Rings, typename C::Turned>::kWarps * tiles::arrivals_of(32);
    Rings::keys(at + C::kRingsAt).init(fills, reads);
    Rings::values(at + C::kRingsAt).init(fills, turns);
    p.turned().init(turns, reads);
    for (int group = 0; group < 2; group++) tiles::init_barrier(at + C::kQueryBarriersAt + group * 8, 1);
    tiles::show_barriers();
  }
  if (threadIdx.x >= 128 && threadIdx.x < 256) p.put_ones(threadIdx.x - 128);
  __syncthreads();
  if (num_items == 0) return;
  p.num_items = num_items;
  if (threadIdx.x < 128) {
    tiles::give_registers<C::kLoadRegisters>();
    p.load();
  } else {
    tiles::take_registers<C::kMultiplyRegisters>();
    p.multiply();
  }
#endif
}

}  // namespace cuda
}  // namespace kvx
