// Runs of bytes between host and device by the copy engine.
#pragma once
#include <memory>

#include "move/cuda/convert.cuh"

namespace kvx {
namespace cuda {

// A job as long plain copies between host and device: the copy engine does them while the SMs do something else.
class EngineCopies {
 public:
  // Whether one side is the host's.
  static bool cross(const Bound& bound) { return is_host(bound.buffers[SRC]) != is_host(bound.buffers[DST]); }

  // NULL where it does not cross between the two in pieces worth a copy's few microseconds.
  static std::unique_ptr<EngineCopies> make(const Job& job, const Bound& bound, bool crosses) {
    constexpr int64_t kLeastBytes = 256 << 10;
    if (!crosses || job.run < kLeastBytes) return nullptr;
    bool joins = true;
    for (int w = 0; w < 2; w++) {
      if (bound.buffers[w].size() == 1) continue;
      if (job.base[w]) return nullptr;  // buffers taken as one by their spacing: a run may cross from one to the next
      joins = false;
    }
    return std::unique_ptr<EngineCopies>(new EngineCopies(job, joins));
  }

  // Whether it is for these blocks: their ids are known here, and the copies are not too many.
  bool takes(const BlockTables& blocks) const {
    constexpr int64_t kMostCopies = 4096;
    return !blocks.on_device && !blocks.seq_lens && mul_most(blocks.num_units(), pieces_) <= kMostCopies;
  }

  kvx_status_t start(const Run& run) const {
    const BlockTables& t = run.blocks;
    Piece last = {nullptr, nullptr, 0};
    for (int64_t u = 0; u < t.num_units(); u++) {
      const int64_t seq = u / t.units_per_seq, token = u % t.units_per_seq * t.unit_tokens;
      int64_t block[2], start[2];
      for (int w = 0; w < 2; w++) {
        block[w] = t.host_ids[w][size_t(seq * t.columns[w] + token / t.block_size[w])];
        const int64_t inside = token % t.block_size[w];
        start[w] =
            block[w] * job_.block[w] + inside / job_.split[w] * job_.outer[w] + inside % job_.split[w] * job_.inner[w];
      }
      if (block[0] < 0 || block[1] < 0) continue;
      for (int64_t piece = 0; piece < pieces_; piece++) {
        const Piece next = find(run.bound, block, start, piece);
        if (joins_ && last.bytes && last.dst + last.bytes == next.dst && last.src + last.bytes == next.src) {
          last.bytes += next.bytes;
          continue;
        }
        KVX_TRY(copy(last, run.stream));
        last = next;
      }
    }
    return copy(last, run.stream);
  }

 private:
  static bool is_host(const std::vector<char*>& buffers) {
    cudaPointerAttributes attributes = {};
    if (buffers.empty() || cudaPointerGetAttributes(&attributes, buffers[0]) != cudaSuccess) cudaGetLastError();
    return attributes.type == cudaMemoryTypeHost;
  }

  struct Piece {
    char *dst, *src;
    int64_t bytes;
  };

  EngineCopies(const Job& job, bool joins) : job_(job), joins_(joins) {
    for (int i = 0; i < job.num_digits; i++) pieces_ = mul_most(pieces_, job.digit[i].size);
  }

  Piece find(const Bound& bound, const int64_t (&block)[2], const int64_t (&start)[2], int64_t index) const {
    char* at[2] = {job_.base[0] + start[0], job_.base[1] + start[1]};
    int64_t step[2] = {0, 0};
    for (int i = 0; i < job_.num_digits; i++) {
      const Digit& d = job_.digit[i];
      for (int w = 0; w < 2; w++) at[w] += index % d.size * d.stride[w], step[w] += index % d.size * d.step[w];
      index /= d.size;
    }
    for (int w = 0; w < 2; w++)
      if (!job_.base[w])
        at[w] += uintptr_t(bound.buffers[w][size_t(job_.buffer[w] + block[w] * job_.block_step[w] + step[w])]) +
                 job_.offset[w];
    return Piece{at[DST], at[SRC], job_.run};
  }

  static kvx_status_t copy(const Piece& p, void* stream) {
    if (!p.bytes) return KVX_STATUS_OK;
    const cudaError_t error =
        cudaMemcpyAsync(p.dst, p.src, size_t(p.bytes), cudaMemcpyDefault, static_cast<cudaStream_t>(stream));
    return error == cudaSuccess ? KVX_STATUS_OK
                                : fail(KVX_STATUS_INTERNAL_ERROR, "a copy of %lld bytes failed: %s.",
                                       (long long)p.bytes, cudaGetErrorString(error));
  }

  const Job job_;
  const bool joins_;  // one buffer on either side: what follows on there may be one copy. Two allocations may not, even
                      // side by side
  int64_t pieces_ = 1;  // of a unit
};

}  // namespace cuda
}  // namespace kvx
