// copy_blocks: descriptors to runs of bytes, then run where the cache is.
#include "move/copy_blocks.h"

#include <string.h>

#include "array.h"
#include "format.h"
#include "lower.h"

namespace kvx {
using namespace common;

namespace {

struct Axis {
  int64_t size, step;
};

// Axes that continue the run become part of it; the others stay, shortest step first.
BlockBox fold(char* data, int64_t block, int64_t run, const Axis* axes, int count) {
  BlockBox box{data, block, run, {1, 1, 1, 1}, {0, 0, 0, 0}};
  Axis sorted[BlockBox::kAxes];
  int n = 0;
  for (int i = 0; i < count; i++) {
    if (axes[i].size == 1) continue;
    int j = n++;
    for (; j > 0 && sorted[j - 1].step > axes[i].step; j--) sorted[j] = sorted[j - 1];
    sorted[j] = axes[i];
  }
  int kept = 0;
  for (int i = 0; i < n; i++) {
    if (kept == 0 && sorted[i].step == box.run) box.run *= sorted[i].size;
    else if (kept > 0 && sorted[i].step == box.step[kept - 1] * box.size[kept - 1])
      box.size[kept - 1] *= sorted[i].size;
    else box.size[kept] = sorted[i].size, box.step[kept] = sorted[i].step, kept++;
  }
  return box;
}

bool has_block_axis(int granularity) {
  return granularity == KVX_SCALE_GRANULARITY_PER_BLOCK || granularity == KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD ||
         granularity >= KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD;
}

kvx_status_t lower_copy_blocks(const kvx_cache_t& c, const kvx_copy_blocks_args_t& a, CopyBlocksParams* out) {
  memset(static_cast<void*>(out), 0, sizeof *out);
  PlaneParams plane[2];
  KVX_TRY(lower_cache(c, plane));
  KVX_TRY(check_header("args", a.version, a.struct_bytes, sizeof a));
  KVX_NEED(a.flags == 0, "args.flags is %llu; no flag is known.", (unsigned long long)a.flags);
  for (uint64_t word : a.reserved) KVX_NEED(word == 0, "args.reserved is not 0.");
  KVX_NEED(c.k.data.data && c.v.data.data,
           "the cache has no data pointers; blocks are copied in k.data and v.data, not in pools.");
  const kvx_array_t& pairs = a.pairs;
  KVX_NEED(pairs.dtype == KVX_DTYPE_S32 || pairs.dtype == KVX_DTYPE_S64, "pairs is %s; it must be int32 or int64.",
           dtype_name(pairs.dtype));
  KVX_NEED(pairs.ndim == 2 && pairs.shape[1] == 2,
           "pairs has %u dimensions; it must be [num_pairs, 2]: source, destination.", pairs.ndim);
  KVX_TRY(check_array("pairs", "array", pairs, pairs.shape[0] > 0));
  KVX_NEED(!overlaps_itself(pairs), "pairs strides make two ids share an address.");
  KVX_TRY(check_apart_from_cache(c, {{"pairs", pairs}}));
  for (int i = 0; i < 2; i++) {
    const PlaneParams& p = plane[i];
    const int bits = dtype_bits(p.dtype);
    const bool dense = bits == 4 || p.dim_lo == bits / 8;
    // Without adjacent elements a row is an axis of its own.
    const Axis axes[] = {{c.block_size, p.token},
                         {c.num_kv_heads, p.head},
                         {p.head_dim / p.pack, p.dim_hi},
                         {dense ? 1 : p.pack, p.dim_lo}};
    out->box[out->num_boxes++] = fold(p.data, p.block, dense ? int64_t(p.pack) * bits / 8 : bits / 8, axes, 4);
    const kvx_plane_t& described = i ? c.v : c.k;
    if (p.scale.data == nullptr || !has_block_axis(described.granularity)) continue;
    const ScaleParams& s = p.scale;
    const bool fine = described.granularity >= KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD,
               by_head = described.granularity != KVX_SCALE_GRANULARITY_PER_BLOCK;
    const Axis scale_axes[] = {
        {fine ? c.block_size : 1, s.token}, {by_head ? c.num_kv_heads : 1, s.head}, {fine ? s.num_groups : 1, s.group}};
    out->box[out->num_boxes++] = fold(s.data, s.block, dtype_bits(s.dtype) / 8, scale_axes, 3);
  }
  out->index_bytes = pairs.dtype == KVX_DTYPE_S64 ? 8 : 4;
  out->pairs = pairs.data;
  out->pair_stride = pairs.stride[0] * out->index_bytes, out->side_stride = pairs.stride[1] * out->index_bytes;
  out->num_pairs = pairs.shape[0], out->num_blocks = c.num_blocks;
  out->device = c.device;
  out->errors = reinterpret_cast<unsigned long long*>(a.errors);
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t run_copy_blocks(const kvx_cache_t& cache, const kvx_copy_blocks_args_t& args, void* stream) {
  CopyBlocksParams p;
  bool on_device;
  KVX_TRY(lower_copy_blocks(cache, args, &p));
  KVX_TRY(check_memory(cache.memory, &on_device));
  return on_device ? cuda::copy_blocks(p, stream) : cpu::copy_blocks(p);
}

}  // namespace kvx

extern "C" kvx_status_t kvx_copy_blocks(const kvx_cache_t* cache, const kvx_copy_blocks_args_t* args, void* stream) {
  return kvx::entry("copy_blocks()", [&]() -> kvx_status_t {
    KVX_NEED(cache != nullptr && args != nullptr, "cache or args is NULL.");
    return kvx::run_copy_blocks(*cache, *args, stream);
  });
}
