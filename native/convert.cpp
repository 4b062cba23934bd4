// Plans: read and checked once (load), given addresses (bind), run. Nothing here touches KV bytes.
#include "convert.h"

#include <string.h>

#include <algorithm>
#include <exception>

#include "array.h"
#include "digest.h"
#include "run.h"
#include "table.h"

namespace kvx {

using namespace common;

struct Plan {
  kvx_plan_header_t header;
  std::vector<kvx_plan_box_t> boxes;
  std::vector<kvx_plan_cell_t> cells;
  std::vector<uint64_t> bytes[2];  // of every buffer
};

namespace {

constexpr uint32_t kMaxBuffers = 1u << 22;
constexpr int64_t kMaxBlockSize = int64_t(1) << 30, kMaxBlocks = int64_t(1) << 40, kMaxIndex = int64_t(1) << 40;

const kvx_plan_side_t& side_of(const kvx_plan_box_t& box, int which) { return which == SRC ? box.src : box.dst; }
int64_t stride_of(const kvx_plan_digit_t& d, int which) { return which == SRC ? d.src : d.dst; }
int32_t step_of(const kvx_plan_digit_t& d, int which) { return which == SRC ? d.src_step : d.dst_step; }
const char* name_of(int which) { return which == SRC ? "source" : "destination"; }

// Adds count*stride to *sum. Strides of plans are 0 or more, so sums only grow and one bound at the end holds for all.
bool add_extent(int64_t count, int64_t stride, int64_t* sum) {
  int64_t product;
  if (stride < 0 || !mul_fits(count, stride, &product)) return false;
  *sum += product;
  return *sum <= kMaxBytes;
}

const kvx_plan_format_t& format_of(const kvx_plan_cell_t& cell, int which) { return which == SRC ? cell.src : cell.dst; }

// Bytes from the start of a row to its end, inline scales included; negative when the format makes no sense.
int64_t row_extent(const kvx_plan_format_t& f, int64_t head_dim) {
  const int64_t bits = dtype_bits(f.dtype), pack = f.pack;
  if (bits == 0 || head_dim <= 0 || pack <= 0 || head_dim % pack || f.group_size == 0 || head_dim % f.group_size || pack * bits % 8 || int64_t(f.group_size) * bits % 8) return -1;
  if ((pack > 1 && f.dim_inner <= 0) || (pack < head_dim && f.dim_outer <= 0)) return -1;  // a row takes the memory of its elements
  int64_t last = 0;
  const int64_t inner = bits == 4 ? pack / 2 - 1 : pack - 1;
  if (!add_extent(head_dim / pack - 1, f.dim_outer, &last) || !add_extent(inner, bits == 4 ? 1 : f.dim_inner, &last) || !add_extent(1, bits < 8 ? 1 : bits / 8, &last)) return -1;
  if (!f.is_inline) return last;
  int64_t scales = 0;
  const int64_t groups = head_dim / f.group_size;
  if (!add_extent(1, f.scale_offset, &scales) || !add_extent(groups - 1, f.scale_group, &scales) || !add_extent(1, dtype_bits(f.scale_dtype) / 8, &scales)) return -1;
  return std::max(last, scales);
}

// Elements and scales at addresses of their own size, wherever the buffers are: a device, and an atomic, ask for that.
kvx_status_t check_alignment(const kvx_plan_box_t& box, const kvx_plan_cell_t& cell, int n, int which) {
  const kvx_plan_format_t& f = format_of(cell, which);
  const kvx_plan_side_t& s = side_of(box, which);
  const int64_t scale = f.granularity ? dtype_bits(f.scale_dtype) / 8 : 1, element = dtype_bits(f.dtype) < 16 ? 1 : dtype_bits(f.dtype) / 8;
  int64_t rows = s.offset | s.block | s.token_outer | s.token_inner, scales = f.scale_offset | f.scale_block | f.scale_token | f.scale_group;
  for (uint32_t i = 0; i < box.num_digits; i++) rows |= stride_of(box.digit[i], which), scales |= which == SRC ? box.digit[i].src_scale : box.digit[i].dst_scale;
  if (f.is_inline) scales |= rows;
  rows |= f.dim_outer | (dtype_bits(f.dtype) == 4 ? 0 : f.dim_inner);
  KVX_NEED(rows % element == 0, "the plan's box %d puts %s elements of %lld bytes at addresses that are no multiple of it.", n, name_of(which), (long long)element);
  KVX_NEED(scales % scale == 0, "the plan's box %d puts %s scales of %lld bytes at addresses that are no multiple of it.", n, name_of(which), (long long)scale);
  return KVX_STATUS_OK;
}

// What a cell adds to a box: types that exist, scales that lie inside their buffers.
kvx_status_t check_row(const Plan& plan, const kvx_plan_box_t& box, int n, int which) {
  const kvx_plan_cell_t& cell = plan.cells[box.cell - 1];
  const kvx_plan_format_t& f = format_of(cell, which);
  const bool is_float = f.dtype == KVX_DTYPE_F16 || f.dtype == KVX_DTYPE_BF16 || f.dtype == KVX_DTYPE_F32;
  const bool is_code = f.dtype == KVX_DTYPE_F8_E4M3 || f.dtype == KVX_DTYPE_F8_E5M2 || f.dtype == KVX_DTYPE_S8 || f.dtype == KVX_DTYPE_S4 || f.dtype == KVX_DTYPE_E2M1;
  KVX_NEED((is_float || is_code) && row_extent(f, cell.head_dim) > 0 && cell.head_dim < (1u << 30) && f.is_inline <= 1, "the plan's box %d has a %s format that makes no sense.", n, name_of(which));
  KVX_NEED(f.granularity >= 0 && f.granularity <= KVX_SCALE_GRANULARITY_PER_GROUP && (is_code || f.granularity == 0), "the plan's box %d has scale granularity %d for %s.", n, f.granularity,
           dtype_name(f.dtype));
  const std::vector<uint64_t>& bytes = plan.bytes[which];
  const int64_t block_size = which == SRC ? plan.header.src_block_size : plan.header.dst_block_size;
  const int64_t num_blocks = which == SRC ? plan.header.src_num_blocks : plan.header.dst_num_blocks;
  KVX_NEED(f.first_layer >= 0 && f.first_layer <= kMaxIndex, "the plan's box %d begins at layer %lld.", n, (long long)f.first_layer);
  int64_t layer = f.first_layer;
  for (uint32_t i = 0; i < box.num_digits; i++)
    KVX_NEED(box.digit[i].layer >= 0 && add_extent(box.digit[i].size - 1, box.digit[i].layer, &layer), "the plan's box %d has a negative layer step.", n);
  if (f.granularity != 0) {
    const bool scale_type = f.scale_dtype == KVX_DTYPE_F32 || f.scale_dtype == KVX_DTYPE_F16 || f.scale_dtype == KVX_DTYPE_BF16 || f.scale_dtype == KVX_DTYPE_F8_E4M3 || f.scale_dtype == KVX_DTYPE_E8M0;
    const bool by_block = f.granularity == KVX_SCALE_GRANULARITY_PER_BLOCK || f.granularity == KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD;
    KVX_NEED(!by_block || (f.scale_dtype == KVX_DTYPE_F32 && !f.is_inline && f.tensor_scale_buffer < 0), "the plan's box %d has scales per block that are not plain F32.", n);
    KVX_NEED(scale_type && (f.is_inline || f.scale_buffer >= 0), "the plan's box %d has scales of %s in no buffer.", n, dtype_name(f.scale_dtype));
  }
  if (f.granularity != 0 && !f.is_inline) {
    KVX_NEED(f.scale_buffer < int64_t(bytes.size()), "the plan's box %d reaches %s buffer %d for scales; there are %zu.", n, name_of(which), f.scale_buffer, bytes.size());
    int64_t last = 0;
    bool ok = add_extent(1, f.scale_offset, &last) && add_extent(num_blocks - 1, f.scale_block, &last) && add_extent(block_size - plan.header.unit_tokens, f.scale_token, &last) &&
              add_extent(cell.head_dim / f.group_size - 1, f.scale_group, &last) && add_extent(1, dtype_bits(f.scale_dtype) / 8, &last);
    for (uint32_t i = 0; ok && i < box.num_digits; i++) ok = add_extent(box.digit[i].size - 1, which == SRC ? box.digit[i].src_scale : box.digit[i].dst_scale, &last);
    KVX_NEED(ok && uint64_t(last) <= bytes[size_t(f.scale_buffer)], "the plan's box %d reaches past the scales at the %s.", n, name_of(which));
  }
  KVX_TRY(check_alignment(box, cell, n, which));
  if (f.tensor_scale_buffer >= 0)
    KVX_NEED(f.tensor_scale_buffer < int64_t(bytes.size()) && f.first_layer >= 0 && uint64_t(layer + 1) * 4 <= bytes[size_t(f.tensor_scale_buffer)],
             "the plan's box %d reaches past the tensor scales at the %s.", n, name_of(which));
  return KVX_STATUS_OK;
}

// The box stays inside buffers that exist, for every block and every digit.
kvx_status_t check_side(const Plan& plan, const kvx_plan_box_t& box, int n, int which) {
  const kvx_plan_side_t& s = side_of(box, which);
  const int64_t block_size = which == SRC ? plan.header.src_block_size : plan.header.dst_block_size;
  const int64_t num_blocks = which == SRC ? plan.header.src_num_blocks : plan.header.dst_num_blocks;
  int64_t last = 0, buffer = 0, unit = plan.header.unit_tokens;
  bool ok = s.offset >= 0 && s.buffer >= 0 && s.block_step >= 0 && s.token_split >= 1 && add_extent(1, s.offset, &last) && add_extent(num_blocks - 1, s.block, &last);
  if (!ok) return fail(KVX_STATUS_INVALID_ARGUMENT, "the plan's box %d has a negative or overflowing stride at the %s.", n, name_of(which));
  const int64_t inside = std::min(s.token_split, block_size) - 1, outside = (block_size - unit) / s.token_split;
  // A unit either fills whole splits or stays inside one; its start then moves by whole steps.
  ok = ok && (unit % s.token_split == 0 || s.token_split % unit == 0);
  ok = ok && add_extent(outside, s.token_outer, &last) && add_extent(block_size > unit ? inside / unit * unit : 0, s.token_inner, &last);
  ok = ok && add_extent(1, s.buffer, &buffer) && add_extent(num_blocks - 1, s.block_step, &buffer);
  for (uint32_t i = 0; ok && i < box.num_digits; i++) {
    const kvx_plan_digit_t& d = box.digit[i];
    ok = add_extent(d.size - 1, stride_of(d, which), &last) && add_extent(d.size - 1, step_of(d, which), &buffer);
  }
  ok = ok && add_extent(1, box.cell ? row_extent(format_of(plan.cells[box.cell - 1], which), plan.cells[box.cell - 1].head_dim) : box.run_bytes, &last);
  KVX_NEED(ok, "the plan's box %d has a negative or overflowing stride at the %s.", n, name_of(which));
  const std::vector<uint64_t>& bytes = plan.bytes[which];
  KVX_NEED(buffer < int64_t(bytes.size()), "the plan's box %d reaches %s buffer %lld; there are %zu.", n, name_of(which), (long long)buffer, bytes.size());
  // Every buffer some index reaches. Along one axis, b is reached when one that was lies a whole number of steps behind it.
  std::vector<bool> reached(bytes.size());
  reached[size_t(s.buffer)] = true;
  std::vector<int64_t> behind(bytes.size());
  auto walk = [&](int64_t count, int64_t step) {
    if (step == 0 || count == 1) return;
    for (size_t b = 0; b < bytes.size(); b++) behind[b] = reached[b] ? 0 : b >= size_t(step) ? behind[b - size_t(step)] + 1 : count;
    for (size_t b = 0; b < bytes.size(); b++) reached[b] = behind[b] < count;
  };
  walk(num_blocks, s.block_step);
  for (uint32_t i = 0; i < box.num_digits; i++) walk(box.digit[i].size, step_of(box.digit[i], which));
  for (size_t b = 0; b < bytes.size(); b++)
    KVX_NEED(!reached[b] || uint64_t(last) <= bytes[b], "the plan's box %d ends at byte %lld of %s buffer %zu, which has %llu.", n, (long long)last, name_of(which), b,
             (unsigned long long)bytes[b]);
  return KVX_STATUS_OK;
}

kvx_status_t load(const void* data, uint64_t num_bytes, Plan* plan) {
  KVX_NEED(num_bytes >= sizeof(kvx_plan_header_t), "a plan has at least %zu bytes; this has %llu.", sizeof(kvx_plan_header_t), (unsigned long long)num_bytes);
  const char* p = static_cast<const char*>(data);
  kvx_plan_header_t& h = plan->header;
  memcpy(&h, p, sizeof h);
  KVX_NEED(h.magic == KVX_PLAN_MAGIC, "these bytes are not a plan: they begin with 0x%08x.", h.magic);
  if (h.version != KVX_PLAN_VERSION) return fail(KVX_STATUS_INCOMPATIBLE, "the plan has version %u; this library reads %d.", h.version, KVX_PLAN_VERSION);
  const uint64_t want = sizeof h + uint64_t(h.num_boxes) * sizeof(kvx_plan_box_t) + uint64_t(h.num_cells) * sizeof(kvx_plan_cell_t) +
                        (uint64_t(h.num_src_sizes) + h.num_dst_sizes) * 2 * sizeof(uint64_t);
  KVX_NEED(h.plan_bytes == num_bytes && want == num_bytes, "the plan's counts make %llu bytes, its header says %llu, and %llu were given.",
           (unsigned long long)want, (unsigned long long)h.plan_bytes, (unsigned long long)num_bytes);
  KVX_NEED(h.src_block_size > 0 && h.dst_block_size > 0 && h.src_num_blocks > 0 && h.dst_num_blocks > 0 && h.unit_tokens > 0, "the plan has an empty block or cache.");
  KVX_NEED(h.src_block_size < kMaxBlockSize && h.dst_block_size < kMaxBlockSize && h.src_num_blocks < kMaxBlocks && h.dst_num_blocks < kMaxBlocks,
           "the plan has blocks of %lld and %lld tokens, %lld and %lld of them; blocks stay under 2^30 tokens and caches under 2^40 blocks.", (long long)h.src_block_size,
           (long long)h.dst_block_size, (long long)h.src_num_blocks, (long long)h.dst_num_blocks);
  KVX_NEED(h.src_block_size % h.unit_tokens == 0 && h.dst_block_size % h.unit_tokens == 0, "unit_tokens %u does not divide the block sizes %lld and %lld.",
           h.unit_tokens, (long long)h.src_block_size, (long long)h.dst_block_size);
  p += sizeof h;
  plan->boxes.resize(h.num_boxes);
  if (h.num_boxes) memcpy(plan->boxes.data(), p, h.num_boxes * sizeof(kvx_plan_box_t));
  p += h.num_boxes * sizeof(kvx_plan_box_t);
  plan->cells.resize(h.num_cells);
  if (h.num_cells) memcpy(plan->cells.data(), p, h.num_cells * sizeof(kvx_plan_cell_t));
  p += h.num_cells * sizeof(kvx_plan_cell_t);
  const uint32_t counts[2] = {h.num_src_buffers, h.num_dst_buffers}, sizes[2] = {h.num_src_sizes, h.num_dst_sizes};
  for (int which = 0; which < 2; which++) {
    KVX_NEED(counts[which] <= kMaxBuffers, "the plan has %u %s buffers; at most %u.", counts[which], name_of(which), kMaxBuffers);
    for (uint32_t i = 0; i < sizes[which]; i++, p += 16) {
      uint64_t pair[2];
      memcpy(pair, p, sizeof pair);
      KVX_NEED(pair[0] <= counts[which] - plan->bytes[which].size() && pair[1] <= uint64_t(kMaxBytes), "the plan's %s sizes do not fit its %u buffers.", name_of(which),
               counts[which]);
      plan->bytes[which].insert(plan->bytes[which].end(), size_t(pair[0]), pair[1]);
    }
    KVX_NEED(plan->bytes[which].size() == counts[which], "the plan gives the sizes of %zu of its %u %s buffers.", plan->bytes[which].size(), counts[which],
             name_of(which));
  }
  for (uint32_t i = 0; i < h.num_boxes; i++) {
    const kvx_plan_box_t& box = plan->boxes[i];
    KVX_NEED(box.num_digits <= KVX_PLAN_MAX_DIGITS && box.run_bytes > 0, "the plan's box %u has %u digits and runs of %lld bytes.", i, box.num_digits, (long long)box.run_bytes);
    KVX_NEED(box.cell <= h.num_cells, "the plan's box %u names cell %u; there are %u.", i, box.cell, h.num_cells);
    int64_t tokens = 1, all = 1;
    for (uint32_t d = 0; d < box.num_digits; d++) {
      KVX_NEED(box.digit[d].size > 0, "digit %u of the plan's box %u has size %lld.", d, i, (long long)box.digit[d].size);
      KVX_NEED(box.digit[d].token >= 0 && box.digit[d].token <= int64_t(h.unit_tokens), "digit %u of the plan's box %u steps %lld tokens.", d, i, (long long)box.digit[d].token);
      KVX_NEED(mul_fits(all, box.digit[d].size, &all) && all <= kMaxIndex, "the plan's box %u moves more than 2^40 runs a unit.", i);
      if (box.digit[d].token) KVX_NEED(mul_fits(tokens, box.digit[d].size, &tokens) && tokens <= h.unit_tokens, "box %u has more tokens than a unit.", i);
    }
    for (int which = 0; which < 2; which++) KVX_TRY(check_side(*plan, box, int(i), which));
    for (int which = 0; which < 2 && box.cell; which++) KVX_TRY(check_row(*plan, box, int(i), which));
  }
  return KVX_STATUS_OK;
}

// ---- binding

// Buffers that stand at equal distances need no lookup: their steps become strides.
void straighten(const std::vector<char*>& buffers, int64_t num_blocks, Which which, Job* job) {
  struct Stepping {
    int64_t size;
    int32_t step;
    int64_t delta;
  } axes[KVX_PLAN_MAX_DIGITS + 1];
  int n = 0;
  if (job->block_step[which]) axes[n++] = {num_blocks, job->block_step[which], 0};
  for (int i = 0; i < job->num_digits; i++)
    if (job->digit[i].step[which]) axes[n++] = {job->digit[i].size, job->digit[i].step[which], 0};
  char* first = buffers[size_t(job->buffer[which])];
  int64_t points = 1;
  for (int i = 0; i < n; i++) {
    axes[i].delta = axes[i].size > 1 ? buffers[size_t(job->buffer[which] + axes[i].step)] - first : 0;
    points *= axes[i].size;
  }
  for (int64_t p = 0; p < points; p++) {
    int64_t rest = p, index = job->buffer[which], byte = 0;
    for (int i = 0; i < n; i++) {
      const int64_t digit = rest % axes[i].size;
      rest /= axes[i].size;
      index += digit * axes[i].step;
      byte += digit * axes[i].delta;
    }
    if (buffers[size_t(index)] != first + byte) return;
  }
  int at = 0;
  if (job->block_step[which]) job->block[which] = axes[at++].delta, job->block_step[which] = 0;
  for (int i = 0; i < job->num_digits; i++)
    if (job->digit[i].step[which]) job->digit[i].stride[which] = axes[at++].delta, job->digit[i].step[which] = 0;
  job->base[which] = first + job->offset[which];
}

int alignment_of(const Job& job, const std::vector<char*> buffers[2], int64_t unit_tokens) {
  uint64_t bits = uint64_t(job.run);
  for (int w = 0; w < 2; w++) {
    bits |= uint64_t(job.block[w]) | uint64_t(job.outer[w]) | uint64_t(job.inner[w]) * uint64_t(unit_tokens) | uint64_t(job.offset[w]);
    if (job.base[w]) bits |= uint64_t(uintptr_t(job.base[w]));
    else
      for (char* b : buffers[w]) bits |= uint64_t(uintptr_t(b));
    for (int i = 0; i < job.num_digits; i++) bits |= uint64_t(job.digit[i].stride[w]);
  }
  const uint64_t low = bits & (~bits + 1);
  return low == 0 || low > 16 ? 16 : int(low);
}

// Buffers that a cell reads or writes begin at multiples of its elements and scales.
kvx_status_t check_buffer_alignment(const kvx_plan_cell_t& cell, const Bound& bound) {
  for (int w = 0; w < 2; w++) {
    const kvx_plan_format_t& f = format_of(cell, w);
    const int element = dtype_bits(f.dtype) < 16 ? 1 : dtype_bits(f.dtype) / 8, scale = f.granularity ? dtype_bits(f.scale_dtype) / 8 : 1;
    const uintptr_t need = uintptr_t(std::max({element, scale, f.tensor_scale_buffer >= 0 ? 4 : 1}));
    for (size_t i = 0; i < bound.buffers[w].size(); i++)
      KVX_NEED(uintptr_t(bound.buffers[w][i]) % need == 0, "%s buffer %zu is not aligned to the %zu bytes of its elements or scales.", name_of(w), i, size_t(need));
  }
  return KVX_STATUS_OK;
}

int alignment_of_source(const Job& job, const Bound& bound) {
  uint64_t bits = uint64_t(job.block[SRC]) | uint64_t(job.offset[SRC]) | uint64_t(uintptr_t(job.base[SRC]));
  if (!job.base[SRC])
    for (char* b : bound.buffers[SRC]) bits |= uint64_t(uintptr_t(b));
  for (int i = 0; i < job.num_digits; i++) bits |= uint64_t(job.digit[i].stride[SRC]);
  const uint64_t low = bits & (~bits + 1);
  return low == 0 || low > 16 ? 16 : int(low);
}

CellJob make_cell_job(const kvx_plan_box_t& box, const Plan& plan, const Bound& bound) {
  CellJob job = {};
  const kvx_plan_cell_t& cell = plan.cells[box.cell - 1];
  job.head_dim = cell.head_dim;
  for (uint32_t i = 0; i < box.num_digits; i++) {
    const kvx_plan_digit_t& d = box.digit[i];
    if (d.size > 1) job.digit[job.num_digits++] = CellDigit{d.size, {d.src, d.dst}, {d.src_scale, d.dst_scale}, d.token, d.layer, {d.src_step, d.dst_step}};
  }
  for (int w = 0; w < 2; w++) {
    const kvx_plan_side_t& s = side_of(box, w);
    job.buffer[w] = s.buffer, job.block_step[w] = s.block_step, job.offset[w] = s.offset, job.block[w] = s.block;
    job.split[w] = s.token_split, job.outer[w] = s.token_outer, job.inner[w] = s.token_inner;
    RowSide& row = job.side[w];
    row.format = format_of(cell, w);
    if (row.format.granularity && !row.format.is_inline) row.scales = bound.buffers[w][size_t(row.format.scale_buffer)] + row.format.scale_offset;
    if (row.format.tensor_scale_buffer >= 0) row.tensor = reinterpret_cast<const float*>(bound.buffers[w][size_t(row.format.tensor_scale_buffer)]) + row.format.first_layer;
  }
  return job;
}

Job make_job(const kvx_plan_box_t& box, const Plan& plan, const Bound& bound, bool counts_tokens) {
  Job job = {};
  job.run = box.run_bytes;
  job.num_digits = int(box.num_digits);
  for (int i = 0; i < job.num_digits; i++) {
    const kvx_plan_digit_t& d = box.digit[i];
    job.digit[i] = Digit{d.size, {d.src, d.dst}, counts_tokens ? d.token : 0, {d.src_step, d.dst_step}};
  }
  const int64_t num_blocks[2] = {plan.header.src_num_blocks, plan.header.dst_num_blocks};
  for (int w = 0; w < 2; w++) {
    const kvx_plan_side_t& s = side_of(box, w);
    job.buffer[w] = s.buffer, job.block_step[w] = s.block_step, job.offset[w] = s.offset, job.block[w] = s.block;
    const int64_t block_size = w == SRC ? plan.header.src_block_size : plan.header.dst_block_size;
    const bool starts_inside = block_size != int64_t(plan.header.unit_tokens);  // units begin elsewhere than at token 0
    job.split[w] = s.token_split, job.outer[w] = starts_inside ? s.token_outer : 0, job.inner[w] = starts_inside ? s.token_inner : 0;
    straighten(bound.buffers[w], num_blocks[w], Which(w), &job);
  }
  fold(&job, bound.on_device ? DST : SRC);
  job.align = alignment_of(job, bound.buffers, bound.tables.unit_tokens);
  return job;
}

kvx_status_t check_buffers(const Plan& plan, const kvx_convert_args_t& args, bool has_destination, Bound* out) {
  struct Span {
    uintptr_t begin, end;
    int which;
  };
  std::vector<Span> spans;
  if (!has_destination) out->buffers[DST].assign(plan.bytes[DST].size(), nullptr);
  for (int w = 0; w < (has_destination ? 2 : 1); w++) {
    const size_t count = plan.bytes[w].size();
    const void* const* given = w == SRC ? args.src_buffers : const_cast<const void* const*>(args.dst_buffers);
    const uint64_t* sizes = w == SRC ? args.src_bytes : args.dst_bytes;
    KVX_NEED(given != nullptr || count == 0, "%s_buffers is NULL.", w == SRC ? "src" : "dst");
    out->buffers[w].resize(count);
    for (size_t i = 0; i < count; i++) {
      KVX_NEED(given[i] != nullptr, "%s buffer %zu is NULL.", name_of(w), i);
      KVX_NEED(sizes == nullptr || sizes[i] >= plan.bytes[w][i], "%s buffer %zu has %llu bytes; the plan needs %llu.", name_of(w), i, (unsigned long long)sizes[i],
               (unsigned long long)plan.bytes[w][i]);
      out->buffers[w][i] = const_cast<char*>(static_cast<const char*>(given[i]));
      const uintptr_t begin = uintptr_t(given[i]);
      spans.push_back({begin, begin + uintptr_t(plan.bytes[w][i]), w});
    }
  }
  // Reading what was already overwritten: refused, whatever the blocks.
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  uintptr_t end[2] = {0, 0};
  for (const Span& s : spans) {
    KVX_NEED(s.begin >= end[1 - s.which], "a source buffer and a destination buffer overlap. Convert into memory of its own.");
    if (s.which == DST) KVX_NEED(s.begin >= end[DST], "two destination buffers overlap.");
    end[s.which] = std::max(end[s.which], s.end);
  }
  return KVX_STATUS_OK;
}

void copy_indices(const kvx_array_t& a, std::vector<int64_t>* out) {
  const int64_t rows = a.ndim == 2 ? a.shape[0] : 1, columns = a.ndim == 2 ? a.shape[1] : a.shape[0];
  const int64_t bytes = a.dtype == KVX_DTYPE_S32 ? 4 : 8;
  out->resize(size_t(rows * columns));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++)
      (*out)[size_t(r * columns + c)] = read_index(a.data, ((a.ndim == 2 ? r * a.stride[0] : 0) + c * a.stride[a.ndim - 1]) * bytes, int32_t(bytes));
}

kvx_status_t bind_tables(const Plan& plan, const kvx_convert_args_t& args, bool has_destination, Bound* out) {
  const kvx_plan_header_t& h = plan.header;
  BlockTables& t = out->tables;
  const kvx_array_t* arrays[2] = {&args.src_blocks, &args.dst_blocks};
  const char* names[2] = {"src_blocks", "dst_blocks"};
  const int64_t num_blocks[2] = {h.src_num_blocks, h.dst_num_blocks}, block_size[2] = {h.src_block_size, h.dst_block_size};
  int64_t seqs[2], tokens[2];
  for (int w = 0; w < 2; w++) {
    const kvx_array_t& a = *arrays[w];
    KVX_NEED(a.ndim == 1 || a.ndim == 2, "%s has %u dimensions; it is [n] or [num_seqs, columns].", names[w], a.ndim);
    KVX_NEED(a.dtype == KVX_DTYPE_S32 || a.dtype == KVX_DTYPE_S64, "%s is %s; it is S32 or S64.", names[w], dtype_name(a.dtype));
    KVX_TRY(check_array("", names[w], a, true));
    seqs[w] = a.ndim == 2 ? a.shape[0] : 1;
    t.columns[w] = a.shape[a.ndim - 1];
    t.num_blocks[w] = num_blocks[w], t.block_size[w] = block_size[w];
    KVX_NEED(mul_fits(t.columns[w], block_size[w], &tokens[w]), "%s is too long.", names[w]);
  }
  KVX_NEED(seqs[0] == seqs[1], "src_blocks has %lld sequences and dst_blocks %lld.", (long long)seqs[0], (long long)seqs[1]);
  const bool has_lens = args.seq_lens.data != nullptr;
  if (!has_lens)
    KVX_NEED(tokens[0] == tokens[1], "src_blocks holds %lld tokens a sequence and dst_blocks %lld. Give seq_lens, or lists of equal length.", (long long)tokens[0],
             (long long)tokens[1]);
  if (has_lens) {
    const kvx_array_t& a = args.seq_lens;
    KVX_NEED(a.ndim == 1 && a.shape[0] == seqs[0] && (a.dtype == KVX_DTYPE_S32 || a.dtype == KVX_DTYPE_S64), "seq_lens is [%lld] S32 or S64.", (long long)seqs[0]);
    KVX_TRY(check_array("", "seq_lens", a, true));
  }
  t.num_seqs = seqs[0];
  t.unit_tokens = h.unit_tokens;
  const int64_t most = std::min(tokens[0], tokens[1]);
  t.units_per_seq = (most + t.unit_tokens - 1) / t.unit_tokens;
  if (out->tables_on_device) {
    for (int w = 0; w < 2; w++) {
      const kvx_array_t& a = *arrays[w];
      t.ids[w] = a.data, t.index_bytes[w] = a.dtype == KVX_DTYPE_S32 ? 4 : 8;
      t.index_stride[w] = a.stride[a.ndim - 1] * t.index_bytes[w];
      t.row_stride[w] = a.ndim == 2 ? a.stride[0] * t.index_bytes[w] : 0;
    }
    t.seq_lens = has_lens ? args.seq_lens.data : nullptr;
    t.len_bytes = args.seq_lens.dtype == KVX_DTYPE_S32 ? 4 : 8;
    t.len_stride = has_lens ? args.seq_lens.stride[0] * t.len_bytes : 0;
    return KVX_STATUS_OK;
  }
  if (has_lens) {
    copy_indices(args.seq_lens, &out->lens);
    for (size_t s = 0; s < out->lens.size(); s++)
      if (out->lens[s] < 0 || out->lens[s] > most)
        return fail(KVX_STATUS_OUT_OF_RANGE, "seq_lens[%zu] is %lld; the tables hold %lld tokens. Nothing was converted.", s, (long long)out->lens[s], (long long)most);
  }
  for (int w = 0; w < 2; w++) {
    copy_indices(*arrays[w], &out->ids[w]);
    std::vector<int64_t> named;
    for (int64_t s = 0; s < seqs[w]; s++) {
      const int64_t used = has_lens ? (out->lens[size_t(s)] + block_size[w] - 1) / block_size[w] : t.columns[w];
      for (int64_t c = 0; c < used; c++) {
        const int64_t id = out->ids[w][size_t(s * t.columns[w] + c)];
        if (id >= num_blocks[w])
          return fail(KVX_STATUS_OUT_OF_RANGE, "%s[%lld] is %lld; the %s has %lld blocks. Nothing was converted.", names[w], (long long)(s * t.columns[w] + c),
                      (long long)id, name_of(w), (long long)num_blocks[w]);
        if (w == DST && has_destination && id >= 0) named.push_back(id);
      }
    }
    std::sort(named.begin(), named.end());
    const auto twice = std::adjacent_find(named.begin(), named.end());
    if (twice != named.end()) return fail(KVX_STATUS_INVALID_ARGUMENT, "dst_blocks names block %lld twice. Nothing was converted.", (long long)*twice);
    t.ids[w] = out->ids[w].data(), t.index_bytes[w] = 8, t.index_stride[w] = 8, t.row_stride[w] = 8 * t.columns[w];
  }
  t.seq_lens = has_lens ? out->lens.data() : nullptr;
  t.len_bytes = 8, t.len_stride = 8;
  return KVX_STATUS_OK;
}

kvx_status_t check_memory(const kvx_convert_args_t& args, Bound* out) {
  if (args.version >> 16 != KVX_ABI_VERSION_MAJOR)
    return fail(KVX_STATUS_INCOMPATIBLE, "args has version 0x%x; this library speaks %d.%d.", args.version, KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR);
  KVX_NEED(args.struct_bytes >= sizeof args && args.flags == 0, "args has %u bytes and flags %llu.", args.struct_bytes, (unsigned long long)args.flags);
  bool device[3];
  const int32_t memory[3] = {args.src_memory, args.dst_memory, args.table_memory};
  const char* names[3] = {"src_memory", "dst_memory", "table_memory"};
  for (int i = 0; i < 3; i++) {
    device[i] = memory[i] == KVX_MEMORY_DEVICE || memory[i] == KVX_MEMORY_UNIFIED;
    KVX_NEED(device[i] || memory[i] == KVX_MEMORY_HOST, "%s is %d; say HOST (1), DEVICE (2) or UNIFIED (3).", names[i], memory[i]);
  }
  out->on_device = device[0] || device[1];
  out->tables_on_device = device[2];
  out->device = args.device;
  out->errors = static_cast<unsigned long long*>(args.errors);
  KVX_NEED(out->on_device || !device[2], "both caches are in host memory and the tables are not.");
  return KVX_STATUS_OK;
}

kvx_status_t bind(const Plan& plan, const kvx_convert_args_t& args, Bound* out) {
  KVX_TRY(check_memory(args, out));
  KVX_TRY(check_buffers(plan, args, true, out));
  KVX_TRY(bind_tables(plan, args, true, out));
  for (const kvx_plan_box_t& box : plan.boxes) {
    if (box.cell) {
      KVX_TRY(check_buffer_alignment(plan.cells[box.cell - 1], *out));
      out->cell_jobs.push_back(make_cell_job(box, plan, *out));
      continue;
    }
    out->jobs.push_back(make_job(box, plan, *out, false));
    if (out->tables.seq_lens) out->cut_jobs.push_back(make_job(box, plan, *out, true));
  }
  return out->on_device ? cuda::prepare_convert(out) : KVX_STATUS_OK;
}

// A plan to coordinates: the destination is numbers, so it has no buffers and the source's tables.
kvx_status_t bind_digest(const Plan& plan, kvx_convert_args_t args, Bound* out) {
  args.dst_memory = args.src_memory;
  args.dst_blocks = args.src_blocks;
  KVX_TRY(check_memory(args, out));
  KVX_NEED(plan.cells.empty(), "a plan that changes formats has no digest.");
  KVX_TRY(check_buffers(plan, args, false, out));
  KVX_TRY(bind_tables(plan, args, false, out));
  for (const kvx_plan_box_t& box : plan.boxes) {
    Job job = make_job(box, plan, *out, true);
    job.offset[DST] = box.dst.offset;
    job.align = alignment_of_source(job, *out);
    out->jobs.push_back(job);
  }
  return KVX_STATUS_OK;
}

kvx_status_t run(const Bound& bound, void* stream) { return bound.on_device ? cuda::convert(bound, stream) : cpu::convert(bound); }

}  // namespace

Digit take_pieces(Job* job) {
  for (int i = 0; i < job->num_digits; i++) {
    const Digit d = job->digit[i];
    if (d.token || d.step[SRC] || d.stride[DST] != job->run || job->run % kWordBytes) continue;
    for (int k = i + 1; k < job->num_digits; k++) job->digit[k - 1] = job->digit[k];
    job->num_digits--;
    return d;
  }
  return Digit{1, {0, 0}, 0, {0, 0}};
}

void fold(Job* job, Which by) {
  Digit* d = job->digit;
  int n = 0;
  for (int i = 0; i < job->num_digits; i++)
    if (d[i].size > 1) d[n++] = d[i];
  const int other = 1 - by;
  auto steps = [](const Digit& x) { return x.step[0] != 0 || x.step[1] != 0; };
  std::sort(d, d + n, [&](const Digit& a, const Digit& b) {
    if (steps(a) != steps(b)) return steps(b);
    return a.stride[by] != b.stride[by] ? a.stride[by] < b.stride[by] : a.stride[other] < b.stride[other];
  });
  auto continues = [](const Digit& a, const Digit& b) {
    bool ok = b.token == a.token * a.size;
    for (int w = 0; w < 2; w++) ok = ok && b.stride[w] == a.stride[w] * a.size && b.step[w] == a.step[w] * a.size;
    return ok;
  };
  auto with_size = [](Digit a, int64_t size) {
    a.size = size;
    return a;
  };
  // One pass joins whatever continues the run or another digit, wherever it stands in the order.
  for (bool changed = true; changed;) {
    changed = false;
    for (int i = 0; i < n && !changed; i++) {
      const bool runs_on = !steps(d[i]) && d[i].stride[0] == job->run && d[i].stride[1] == job->run && d[i].token == 0;
      if (runs_on) job->run *= d[i].size;
      for (int j = 0; j < n && !runs_on && !changed; j++)
        if (i != j && continues(d[i], d[j])) d[j] = with_size(d[i], d[i].size * d[j].size), changed = true;
      if (runs_on || changed) {
        std::move(d + i + 1, d + n, d + i);
        n--, changed = true;
      }
    }
  }
  std::sort(d, d + n, [&](const Digit& a, const Digit& b) {
    if (steps(a) != steps(b)) return steps(b);
    return a.stride[by] != b.stride[by] ? a.stride[by] < b.stride[by] : a.stride[other] < b.stride[other];
  });
  job->num_digits = n;
}

}  // namespace kvx

using namespace kvx;

namespace {

// No exception crosses the C edge. What throws here is memory that could not be had.
template <class Call>
kvx_status_t guarded(Call&& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    return fail(KVX_STATUS_INTERNAL_ERROR, "it could not get the memory it needs (%s).", error.what());
  }
}

}  // namespace

extern "C" {

kvx_status_t kvx_plan_load(const void* bytes, uint64_t num_bytes, kvx_plan_t** plan) {
  begin_call("kvx_plan_load()");
  KVX_NEED(bytes != nullptr && plan != nullptr, "bytes or plan is NULL.");
  return guarded([&] {
    auto loaded = std::make_unique<Plan>();
    KVX_TRY(load(bytes, num_bytes, loaded.get()));
    *plan = reinterpret_cast<kvx_plan_t*>(loaded.release());
    return KVX_STATUS_OK;
  });
}

void kvx_plan_free(kvx_plan_t* plan) { delete reinterpret_cast<Plan*>(plan); }

kvx_status_t kvx_bind(const kvx_plan_t* plan, const kvx_convert_args_t* args, kvx_bound_t** bound) {
  begin_call("kvx_bind()");
  KVX_NEED(plan != nullptr && args != nullptr && bound != nullptr, "plan, args or bound is NULL.");
  return guarded([&] {
    auto made = std::make_unique<Bound>();
    KVX_TRY(bind(*reinterpret_cast<const Plan*>(plan), *args, made.get()));
    *bound = reinterpret_cast<kvx_bound_t*>(made.release());
    return KVX_STATUS_OK;
  });
}

kvx_status_t kvx_run(const kvx_bound_t* bound, void* stream) {
  begin_call("kvx_run()");
  KVX_NEED(bound != nullptr, "bound is NULL.");
  return guarded([&] { return run(*reinterpret_cast<const Bound*>(bound), stream); });
}

void kvx_bound_free(kvx_bound_t* bound) { delete reinterpret_cast<Bound*>(bound); }

kvx_status_t kvx_digest(const kvx_plan_t* plan, const kvx_convert_args_t* args, uint64_t* digest, void* stream) {
  begin_call("kvx_digest()");
  KVX_NEED(plan != nullptr && args != nullptr && digest != nullptr, "plan, args or digest is NULL.");
  return guarded([&] {
    Bound bound;
    KVX_TRY(bind_digest(*reinterpret_cast<const Plan*>(plan), *args, &bound));
    if (bound.on_device) return cuda::digest(&bound, digest, stream);
    cpu::digest(bound, digest);
    return KVX_STATUS_OK;
  });
}

kvx_status_t kvx_convert(const kvx_plan_t* plan, const kvx_convert_args_t* args, void* stream) {
  begin_call("kvx_convert()");
  KVX_NEED(plan != nullptr && args != nullptr, "plan or args is NULL.");
  return guarded([&] {
    Bound bound;
    KVX_TRY(bind(*reinterpret_cast<const Plan*>(plan), *args, &bound));
    return run(bound, stream);
  });
}

}  // extern "C"
