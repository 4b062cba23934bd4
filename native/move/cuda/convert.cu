// convert on a device: what a bound plan keeps, and a run of it. Kernels are in boxes.cu and cells.cu.
#include <string.h>

#include <algorithm>

#include "move/cuda/convert.cuh"

namespace kvx {
namespace cuda {

DevicePlace make_place(const Job& job) {
  DevicePlace p = {};
  for (int w = 0; w < 2; w++) {
    p.base[w] = job.base[w], p.offset[w] = job.offset[w], p.block[w] = job.block[w], p.outer[w] = job.outer[w],
    p.inner[w] = job.inner[w];
    p.split[w] = uint32_t(job.split[w]), p.buffer[w] = job.buffer[w], p.block_step[w] = job.block_step[w];
  }
  return p;
}

kvx_status_t place_buffers(const Bound& bound, DeviceTables* out, Ahead* ahead) {
  bool is_sent[2];
  size_t at[2], bytes = 0;
  for (int w = 0; w < 2; w++) {
    const std::vector<char*>& buffers = bound.buffers[w];
    const bool looks_up = !bound.cell_jobs.empty() || std::any_of(bound.jobs.begin(), bound.jobs.end(),
                                                                  [&](const Job& job) { return !job.base[w]; });
    is_sent[w] = looks_up && buffers.size() > kSmallBuffers;
    at[w] = bytes;
    if (is_sent[w]) bytes += buffers.size() * sizeof(char*);
    else if (looks_up) std::copy(buffers.begin(), buffers.end(), out->small_buffers[w]);
    out->buffers[w] = nullptr;
  }
  if (!bytes) return KVX_STATUS_OK;
  SlotRef slot;
  KVX_TRY(take_slot(bytes, &slot));
  for (int w = 0; w < 2; w++) {
    if (!is_sent[w]) continue;
    memcpy(slot->host + at[w], bound.buffers[w].data(), bound.buffers[w].size() * sizeof(char*));
    out->buffers[w] = reinterpret_cast<char* const*>(slot->device + at[w]);
  }
  return ahead->send(std::move(slot), bytes);
}

// A negative id of any size skips its blocks, also as a narrower number.
template <class T>
void narrow(const std::vector<int64_t>& ids, void* out) {
  std::transform(ids.begin(), ids.end(), static_cast<T*>(out), [](int64_t id) { return T(std::max<int64_t>(id, -1)); });
}

kvx_status_t place_blocks(const BlockTables& t, DeviceTables* out, SlotRef* slot, size_t* bytes) {
  out->units_per_seq = make_fast_divider(std::max<int64_t>(1, t.units_per_seq));
  out->unit_tokens = uint32_t(t.unit_tokens);
  out->errors = t.errors;
  out->seq_lens = t.seq_lens, out->len_stride = t.len_stride, out->len_bytes = t.len_bytes;
  for (int w = 0; w < 2; w++) {
    out->num_blocks[w] = t.num_blocks[w];
    out->units_per_block[w] = make_fast_divider(t.block_size[w] / t.unit_tokens);
    out->ids[w] = t.ids[w], out->row_stride[w] = t.row_stride[w], out->index_stride[w] = t.index_stride[w],
    out->index_bytes[w] = t.index_bytes[w];
  }
  *bytes = 0;
  if (t.on_device) return KVX_STATUS_OK;
  const bool is_narrow = std::max(t.num_blocks[0], t.num_blocks[1]) <= 0x7fffffff;
  const bool is_small = is_narrow && std::max(t.host_ids[0].size(), t.host_ids[1].size()) <= kSmallIds;
  const int32_t width = is_narrow ? 4 : 8;
  size_t at[2] = {}, lens_at = 0;
  const auto put = [&](size_t size) {
    const size_t begin = *bytes;
    *bytes += (size + 15) / 16 * 16;
    return begin;
  };
  for (int w = 0; w < 2; w++) {
    out->index_bytes[w] = width, out->index_stride[w] = width;
    out->row_stride[w] = is_small ? t.columns[w] : t.columns[w] * width;
    if (is_small) out->ids[w] = nullptr, narrow<int32_t>(t.host_ids[w], out->small_ids[w]);
    else at[w] = put(t.host_ids[w].size() * size_t(width));
  }
  if (t.seq_lens) lens_at = put(t.host_lens.size() * sizeof(int64_t));
  if (!*bytes) return KVX_STATUS_OK;
  KVX_TRY(take_slot(*bytes, slot));
  for (int w = 0; w < 2 && !is_small; w++) {
    out->ids[w] = (*slot)->device + at[w];
    if (is_narrow) narrow<int32_t>(t.host_ids[w], (*slot)->host + at[w]);
    else narrow<int64_t>(t.host_ids[w], (*slot)->host + at[w]);
  }
  if (t.seq_lens) {
    out->seq_lens = (*slot)->device + lens_at;
    memcpy((*slot)->host + lens_at, t.host_lens.data(), t.host_lens.size() * sizeof(int64_t));
  }
  return KVX_STATUS_OK;
}

namespace {

// Host memory must be pinned: the device reads and writes it in place.
kvx_status_t check_pinned(const Bound& bound) {
  for (int w = 0; w < 2; w++)
    for (size_t i = 0; i < bound.buffers[w].size(); i++) {
      cudaPointerAttributes attributes = {};
      const cudaError_t error = cudaPointerGetAttributes(&attributes, bound.buffers[w][i]);
      if (error != cudaSuccess) cudaGetLastError();
      if (error != cudaSuccess || attributes.type == cudaMemoryTypeUnregistered)
        return fail(
            KVX_STATUS_INVALID_ARGUMENT,
            "%s buffer %zu is host memory that is not pinned. Pin it (tensor.pin_memory()), or convert on the host.",
            w == SRC ? "source" : "destination", i);
      if (i >= 4) break;  // the first few stand for all: asking for thousands takes milliseconds
    }
  return KVX_STATUS_OK;
}

kvx_status_t check_units(const Residue& residue, const BlockTables& blocks) {
  if (blocks.num_units() > kMaxCount)
    return fail(KVX_STATUS_UNSUPPORTED, "%lld units are more than one launch takes.", (long long)blocks.num_units());
  for (const auto& l : residue.launches) KVX_TRY(l->check(blocks));
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t prepare_convert(Bound* bound) {
  DeviceGuard guard(bound->device);
  KVX_TRY(guard.status());
  const RelaxedCapture relaxed;
  SlotRef any;
  take_slot(1,
            &any);  // the pool has memory from now on: a run does not ask the driver. Where it has none, most need none
  KVX_TRY(check_pinned(*bound));
  auto residue = std::make_unique<Residue>();
  memset(static_cast<void*>(&residue->tables), 0, sizeof residue->tables);
  KVX_TRY(add_box_launches(*bound, residue.get()));
  KVX_TRY(add_cell_launches(*bound, residue.get()));
  KVX_TRY(place_buffers(*bound, &residue->tables, &residue->buffers));
  if (bound->blocks) {
    KVX_TRY(check_units(*residue, *bound->blocks));
    SlotRef ids;
    size_t bytes;
    KVX_TRY(place_blocks(*bound->blocks, &residue->tables, &ids, &bytes));
    if (ids) KVX_TRY(residue->blocks.send(std::move(ids), bytes));
  }
  bound->resident = std::move(residue);
  return KVX_STATUS_OK;
}

kvx_status_t convert(const Bound& bound, const BlockTables& blocks, void* stream) {
  DeviceGuard guard(bound.device);
  KVX_TRY(guard.status());
  const Residue& residue = *static_cast<const Residue*>(bound.resident.get());
  const bool is_own = &blocks == bound.blocks.get();
  if (!is_own) KVX_TRY(check_units(residue, blocks));
  if (blocks.num_units() == 0) return KVX_STATUS_OK;
  DeviceTables given;
  std::vector<SlotRef> read;  // by what is launched here
  for (const Ahead* ahead : {&residue.buffers, is_own ? &residue.blocks : nullptr}) {
    if (!ahead || !ahead->slot()) continue;
    KVX_TRY(ahead->put_before(stream));
    read.push_back(ahead->slot());
  }
  if (!is_own) {
    given = residue.tables;
    SlotRef slot;
    size_t bytes;
    KVX_TRY(place_blocks(blocks, &given, &slot, &bytes));
    if (slot) {
      KVX_TRY(send(*slot, bytes, stream));
      read.push_back(std::move(slot));
    }
  }
  const Run run{bound, blocks, is_own ? residue.tables : given, stream};
  kvx_status_t status = KVX_STATUS_OK;
  for (size_t i = 0; i < residue.launches.size() && status == KVX_STATUS_OK; i++)
    status = residue.launches[i]->start(run);
  // Also where one failed: those before it are under way.
  const kvx_status_t held = read.empty() ? KVX_STATUS_OK : hold_until_passed(std::move(read), stream);
  return status == KVX_STATUS_OK ? held : status;
}

}  // namespace cuda
}  // namespace kvx
