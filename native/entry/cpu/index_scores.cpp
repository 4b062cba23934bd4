// index_scores and topk on the host. Keys are made f32 a tile at a time and serve all heads of some tokens; products
// are attend.h's.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "attention/cpu/attend.h"
#include "cpu/carry.h"
#include "entry/cpu/hybrid_rows.h"
#include "run.h"

namespace kvx {
namespace cpu {

namespace {

constexpr int64_t kRowsTogether = 256;  // query rows (a token and a head) that a tile of keys serves
constexpr int64_t kSpan = 512;          // entries of a unit: loading its queries is then little
constexpr int64_t kThreadProducts = 1 << 14;

// Tokens [first, first + count) of a sequence on entries [begin, end).
struct Unit {
  int64_t run, first, count, begin, end;
};

class Scorer {
 public:
  Scorer(const IndexScoresParams& p, const RowTable& ops, const AttendTable& loops)
      : p_(p),
        ops_(ops),
        loops_(loops),
        fours_((p.num_heads + kLanes - 1) / kLanes),
        step_(loops.step(KVX_DTYPE_F32)),
        dim_((p.keys.dim + step_ - 1) / step_ * step_),
        tile_(size_t(kTile * dim_)) {
    for (int64_t i = 0; i < kTile + kRoom; i++) at_[i] = reinterpret_cast<const char*>(tile_.data() + i % kTile * dim_);
  }

  void run(const StepRun& run, const Unit& u) {
    load_queries(u);
    const TileStates states{u.count * fours_, 0, u.count * fours_, kLanes, q_.data(), scores_.data(), nullptr};
    for (int64_t begin = u.begin; begin < u.end; begin += kTile) {
      const int64_t count = least(kTile, u.end - begin);
      load_keys(run.slot, begin, count);
      loops_.scores[KVX_DTYPE_F32](TileRows{at_, count, dim_, 1, 0, true}, nullptr, states);
      for (int64_t i = 0; i < u.count; i++) {
        const int64_t seen = least(count, (run.position(u.first + i) + 1) / p_.ratio - begin);
        if (seen > 0) add_heads(u.first + i, i, begin, seen);
      }
    }
  }

 private:
  // Every token's heads are filled up to fours with zeros, whose weight is 0.
  void load_queries(const Unit& u) {
    const int64_t rows = fours_ * kLanes;
    q_.assign(size_t(u.count * rows * dim_), 0.0f);
    weights_.assign(size_t(u.count * rows), 0.0f);
    scores_.resize(size_t(u.count * fours_ * kTile * kLanes));
    for (int64_t i = 0; i < u.count; i++)
      for (int64_t h = 0; h < p_.num_heads; h++) {
        load_row(ops_, p_.q, u.first + i, h, 0, p_.keys.dim, q_.data() + (i * rows + h) * dim_);
        weights_[size_t(i * rows + h)] =
            *reinterpret_cast<const float*>(p_.weights + (u.first + i) * p_.weight_token + h * p_.weight_head);
      }
  }

  void load_keys(int64_t slot, int64_t begin, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
      const int64_t entry = begin + i, page = entry_page(p_.table, slot, entry / p_.keys.rows);
      float* key = tile_.data() + i * dim_;
      is_there_[i] = page >= 0;
      if (page >= 0) decode_row(ops_, p_.keys, row_place(p_.keys, page, entry % p_.keys.rows), key);
      else memset(key, 0, size_t(p_.keys.dim) * 4);
    }
  }

  void add_heads(int64_t token, int64_t i, int64_t begin, int64_t seen) {
    float sums[kTile][kLanes] = {};
    for (int64_t f = i * fours_; f < (i + 1) * fours_; f++) {
      const float* score = scores_.data() + f * kTile * kLanes;
      const float* weight = weights_.data() + f * kLanes;
      for (int64_t j = 0; j < seen; j++)
        for (int l = 0; l < kLanes; l++)
          sums[j][l] += weight[l] * (score[j * kLanes + l] < 0 ? 0.0f : score[j * kLanes + l]);  // NaN stays
    }
    float* to = reinterpret_cast<float*>(reinterpret_cast<char*>(p_.scores) + token * p_.score_token) + begin;
    for (int64_t j = 0; j < seen; j++)
      to[j] = is_there_[j] ? (sums[j][0] + sums[j][1]) + (sums[j][2] + sums[j][3]) : -INFINITY;
  }

  const IndexScoresParams& p_;
  const RowTable& ops_;
  const AttendTable& loops_;
  const int64_t fours_, step_, dim_;
  std::vector<float> tile_, q_, weights_, scores_;
  const char* at_[kTile + kRoom];
  bool is_there_[kTile];
};

kvx_status_t make_units(const IndexScoresParams& p, const std::vector<StepRun>& runs, std::vector<Unit>* units,
                        int64_t* work) {
  const int64_t together = greatest(1, kRowsTogether / p.num_heads);
  for (size_t r = 0; r < runs.size(); r++) {
    const StepRun& run = runs[r];
    KVX_TRY(check_entries(p.table, p.keys, run.slot, 0, least(p.num_entries, (run.last() + 1) / p.ratio)));
    for (int64_t first = run.begin; first < run.end; first += together) {
      const int64_t count = least(together, run.end - first),
                    end = least(p.num_entries, (run.position(first + count - 1) + 1) / p.ratio);
      for (int64_t begin = 0; begin < end; begin += kSpan)
        units->push_back(Unit{int64_t(r), first, count, begin, least(end, begin + kSpan)});
      *work += count * p.num_heads * end;
    }
  }
  return KVX_STATUS_OK;
}

// Higher scores first, then lower indices: larger keys come first. -0 is 0.
uint64_t key_of(float score, int64_t index) {
  const uint32_t b = bits_of(score + 0.0f);
  return uint64_t(b & 0x80000000u ? ~b : b | 0x80000000u) << 32 | (0xffffffffu - uint32_t(index));
}

// Candidates are kept in a room for several k; when it is full, all but the best k go, and what is not above the last
// of those is not looked at again: of equal scores the earlier stay.
void choose(const float* scores, int64_t count, int64_t k, std::vector<uint64_t>& room, int32_t* out) {
  const size_t most = size_t(std::max<int64_t>(4 * k, 256));
  const auto cut = [&] {
    std::nth_element(room.begin(), room.begin() + (k - 1), room.end(), std::greater<uint64_t>()),
        room.resize(size_t(k));
  };
  room.clear();
  float bar = -INFINITY;
  for (int64_t i = 0; i < count; i++) {
    if (!(scores[i] > bar)) continue;  // NaN too
    room.push_back(key_of(scores[i], i));
    if (room.size() < most) continue;
    cut();
    bar = scores[0xffffffffu - uint32_t(room.back())];
  }
  if (int64_t(room.size()) > k) cut();
  std::sort(room.begin(), room.end(), std::greater<uint64_t>());
  for (int64_t i = 0; i < k; i++)
    out[i] = i < int64_t(room.size()) ? int32_t(0xffffffffu - uint32_t(room[size_t(i)])) : -1;
}

}  // namespace

kvx_status_t index_scores(const IndexScoresParams& p) {
  const std::vector<StepRun> runs = step_runs(p.step);
  std::vector<Unit> units;
  int64_t work = 0;
  KVX_TRY(make_units(p, runs, &units, &work));
  const RowTable& ops = best_rows();
  const AttendTable& loops = best_attend();
  const int64_t count = int64_t(units.size());
  Carry carry;
#pragma omp parallel if (work >= kThreadProducts)
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < p.step.num_tokens; t++)
      std::fill_n(reinterpret_cast<float*>(reinterpret_cast<char*>(p.scores) + t * p.score_token), p.num_entries,
                  -INFINITY);
    std::optional<Scorer> scorer;
    carry([&] { scorer.emplace(p, ops, loops); });
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++)
      carry([&] { scorer->run(runs[size_t(units[size_t(i)].run)], units[size_t(i)]); });
  }
  carry.rethrow();
  return KVX_STATUS_OK;
}

kvx_status_t topk(const TopkParams& p) {
  Carry carry;
#pragma omp parallel if (p.num_tokens > 1 && p.num_tokens * p.num_entries >= kThreadProducts)
  {
    std::vector<uint64_t> room;
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < p.num_tokens; t++) {
      const int64_t length = p.lengths ? least(p.num_entries, p.lengths[t]) : p.num_entries;
      carry([&] {
        choose(reinterpret_cast<const float*>(reinterpret_cast<const char*>(p.scores) + t * p.score_token), length, p.k,
               room, reinterpret_cast<int32_t*>(reinterpret_cast<char*>(p.indices) + t * p.index_token));
      });
    }
  }
  carry.rethrow();
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
