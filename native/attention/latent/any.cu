// Attention over a latent cache (MLA) for any shape, layout, format and table: a block of threads for each query row,
// right and not fast. As attention/any/any.cu, with a key in two planes and the latent read twice, for the score and as
// the value.
#include "attention/cuda/attention.cuh"
#include "cuda/generic.cuh"
#include "table.h"

namespace kvx {
namespace cuda {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

__device__ __forceinline__ float read_element(const PlaneParams& p, const char* cell, int64_t block, int64_t inside,
                                              int64_t d) {
  const int bits = dtype_bits(p.dtype);
  const char* from = element_at(p, const_cast<char*>(cell), d, bits);
  if (bits > 8) return load_float(from, p.dtype);
  uint8_t code = *reinterpret_cast<const uint8_t*>(from);
  if (bits == 4) code = d % p.pack & 1 ? code >> 4 : code & 15;
  return decode8(code, p.dtype) * read_scale(p.scale, block, inside, 0, d / p.scale.group_size);
}

// Warps take every fourth position, each with its own running softmax; shared memory holds
// the query row and the warps' sums.
__global__ void __launch_bounds__(kThreads) attend_latent_any(const __grid_constant__ AttentionParams p) {
  extern __shared__ float
      shared[];  // query [head_dim + rope_dim], then sums [kWarps][head_dim], then (largest, total) [kWarps]
  float* query = shared;
  float* sums = shared + p.head_dim + p.rope_dim;
  float* stats = sums + kWarps * p.head_dim;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t head = blockIdx.x % p.num_heads, token = blockIdx.x / p.num_heads;
  wait_for_previous();
  int64_t seq, first, queries;
  if (p.cu_seqlens) {
    int64_t low = 0, high = p.num_seqs;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (read_index(p.cu_seqlens, middle * p.cu_bytes, p.cu_bytes) <= token) low = middle;
      else high = middle;
    }
    seq = low, first = read_index(p.cu_seqlens, seq * p.cu_bytes, p.cu_bytes);
    queries = read_index(p.cu_seqlens, (seq + 1) * p.cu_bytes, p.cu_bytes) - first;
  } else {
    seq = token / p.query_len, first = seq * p.query_len, queries = p.query_len;
  }
  if (token < first || token >= first + queries) return;  // a row of no sequence is left alone
  int64_t length = sequence_length(p.kv.table, seq, p.kv.block_size);
  if (length < 0) length = 0;
  if (length > p.max_seq_len) length = p.max_seq_len;
  int64_t end = length, begin = 0;
  if (p.is_causal) end = length - queries + 1 + (token - first);
  if (end < 0) end = 0;
  if (p.window > 0 && end - p.window > 0) begin = end - p.window;
  const bool counts = p.kv.errors && head == 0 && token == first + queries - 1;
  const char* row = p.q.data + token * p.q.token + head * p.q.head;
  for (int64_t d = threadIdx.x; d < p.head_dim + p.rope_dim; d += kThreads)
    query[d] = load_float(row + d * p.q.dim, p.q.dtype) * p.scale * 1.44269504f;
  for (int64_t d = threadIdx.x; d < kWarps * p.head_dim; d += kThreads) sums[d] = 0.f;
  __syncthreads();
  float largest = -INFINITY, total = 0.f;
  float* mine = sums + warp * p.head_dim;
  for (int64_t at = begin + warp; at < end; at += kWarps) {
    const int64_t logical = at / p.kv.block_size, inside = at % p.kv.block_size;
    const BlockPlace k = find_block(p.kv, seq, at, logical, 0), r = find_block(p.kv, seq, at, logical, 1);
    if (k.state != BLOCK_FOUND || r.state != BLOCK_FOUND) {
      if (counts && lane == 0 && (k.state == BLOCK_BAD || r.state == BLOCK_BAD)) atomicAdd(p.kv.errors, 1ull);
      continue;
    }
    const PlaneParams &pk = p.kv.plane[0], &pr = p.kv.plane[1];
    const char *latent = k.base + inside * pk.token, *rope = r.base + inside * pr.token;
    float score = 0.f;
    for (int64_t d = lane; d < p.head_dim; d += 32) score += query[d] * read_element(pk, latent, k.id, inside, d);
    for (int64_t d = lane; d < p.rope_dim; d += 32)
      score += query[p.head_dim + d] * read_element(pr, rope, r.id, inside, d);
    for (int hop = 16; hop > 0; hop /= 2) score += __shfl_xor_sync(0xffffffffu, score, hop);
    if (p.soft_cap > 0.f) score = p.soft_cap * 1.44269504f * tanhf(score / (p.soft_cap * 1.44269504f));
    const float now = fmaxf(largest, score), base = now == -INFINITY ? 0.f : now;
    const float old = exp2f(largest - base), fresh = exp2f(score - base);
    total = total * old + fresh;
    for (int64_t d = lane; d < p.head_dim; d += 32)
      mine[d] = mine[d] * old + fresh * read_element(pk, latent, k.id, inside, d);
    largest = now;
  }
  if (lane == 0) stats[2 * warp] = largest, stats[2 * warp + 1] = total;
  __syncthreads();
  float top = -INFINITY, all = 0.f, weight[kWarps];
  for (int w = 0; w < kWarps; w++) top = fmaxf(top, stats[2 * w]);
  for (int w = 0; w < kWarps; w++) {
    weight[w] = exp2f(stats[2 * w] - (top == -INFINITY ? 0.f : top));
    all += stats[2 * w + 1] * weight[w];
  }
  if (threadIdx.x == 0 && p.lse)
    *reinterpret_cast<float*>(p.lse + token * p.lse_token + head * p.lse_head) =
        all != 0.f ? (top + log2f(all)) * 0.69314718f : -INFINITY;  // NaN stays
  if (p.sinks && all != 0.f) all += exp2f(p.sinks[head] * 1.44269504f - top);
  const float inverse = all != 0.f ? 1.f / all : 0.f;
  char* out = p.out.data + token * p.out.token + head * p.out.head;
  for (int64_t d = threadIdx.x; d < p.head_dim; d += kThreads) {
    float x = 0.f;
    for (int w = 0; w < kWarps; w++) x += weight[w] > 0.f ? sums[w * p.head_dim + d] * weight[w] : 0.f;
    store_float(out + d * p.out.dim, p.out.dtype, x * inverse);
  }
}

}  // namespace

kvx_status_t run_latent_any(const AttentionParams& p, void* stream) {
  int64_t blocks;
  if (!mul_fits(p.num_tokens, p.num_heads, &blocks) || blocks > kMaxCount)
    return fail(KVX_STATUS_UNSUPPORTED, "%lld tokens of %lld heads are more than one launch takes.",
                (long long)p.num_tokens, (long long)p.num_heads);
  const int64_t bytes = (p.head_dim + p.rope_dim + kWarps * p.head_dim + 2 * kWarps) * 4;
  if (bytes > 200 * 1024)
    return fail(KVX_STATUS_UNSUPPORTED,
                "a latent of %lld and a rotary part of %lld need %lld bytes of shared memory; 5 times the first and "
                "the second are 50000 at most.",
                (long long)p.head_dim, (long long)p.rope_dim, (long long)bytes);
  if (bytes > 48 * 1024) KVX_TRY(allow_shared_memory(reinterpret_cast<const void*>(&attend_latent_any), 200 * 1024));
  return launch_early_with("attend_latent_any", attend_latent_any, dim3(unsigned(blocks)), dim3(kThreads), int(bytes),
                           stream, p);
}

}  // namespace cuda
}  // namespace kvx
