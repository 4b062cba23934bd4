// Plans from bytes that may lie: read, and checked once, so that nothing after has to.
#include "move/plan.h"

#include <string.h>

#include <algorithm>

#include "format.h"

namespace kvx {

using namespace common;

namespace {

constexpr uint32_t kMaxBuffers = 1u << 22;  // 32 MB of sizes
constexpr int64_t kMostSteps = int64_t(1)
                               << 25;  // from buffer to buffer, of all boxes that reach buffers of several sizes
constexpr int64_t kMaxBlockSize = int64_t(1) << 30, kMaxBlocks = int64_t(1) << 40, kMaxIndex = int64_t(1) << 40;

int64_t stride_of(const kvx_plan_digit_t& d, int which) { return which == SRC ? d.src : d.dst; }
int32_t step_of(const kvx_plan_digit_t& d, int which) { return which == SRC ? d.src_step : d.dst_step; }

// Adds count*stride to *sum. Strides of plans are 0 or more, so sums only grow and one bound at the end holds for all.
bool add_extent(int64_t count, int64_t stride, int64_t* sum) {
  int64_t product;
  if (stride < 0 || !mul_fits(count, stride, &product)) return false;
  *sum += product;
  return *sum <= kMaxBytes;
}

// Bytes from the start of a row to its end, inline scales included; negative when the format makes no sense.
int64_t row_extent(const kvx_plan_format_t& f, int64_t head_dim) {
  const int64_t bits = dtype_bits(f.dtype), pack = f.pack;
  if (bits == 0 || head_dim <= 0 || pack <= 0 || head_dim % pack || f.group_size == 0 || head_dim % f.group_size ||
      pack * bits % 8 || int64_t(f.group_size) * bits % 8)
    return -1;
  if ((pack > 1 && f.dim_inner <= 0) || (pack < head_dim && f.dim_outer <= 0))
    return -1;  // a row takes the memory of its elements
  int64_t last = 0;
  const int64_t inner = bits == 4 ? pack / 2 - 1 : pack - 1;
  if (!add_extent(head_dim / pack - 1, f.dim_outer, &last) || !add_extent(inner, bits == 4 ? 1 : f.dim_inner, &last) ||
      !add_extent(1, bits < 8 ? 1 : bits / 8, &last))
    return -1;
  if (!f.is_inline) return last;
  int64_t scales = 0;
  const int64_t groups = head_dim / f.group_size;
  if (!add_extent(1, f.scale_offset, &scales) || !add_extent(groups - 1, f.scale_group, &scales) ||
      !add_extent(1, dtype_bits(f.scale_dtype) / 8, &scales))
    return -1;
  return std::max(last, scales);
}

// Elements and scales at addresses of their own size, wherever the buffers are: a device, and an atomic, ask for that.
kvx_status_t check_alignment(const kvx_plan_box_t& box, const kvx_plan_cell_t& cell, int n, int which) {
  const kvx_plan_format_t& f = format_of(cell, which);
  const kvx_plan_side_t& s = side_of(box, which);
  const int64_t scale = f.granularity ? dtype_bits(f.scale_dtype) / 8 : 1,
                element = dtype_bits(f.dtype) < 16 ? 1 : dtype_bits(f.dtype) / 8;
  int64_t rows = s.offset | s.block | s.token_outer | s.token_inner,
          scales = f.scale_offset | f.scale_block | f.scale_token | f.scale_group;
  for (uint32_t i = 0; i < box.num_digits; i++)
    rows |= stride_of(box.digit[i], which), scales |= which == SRC ? box.digit[i].src_scale : box.digit[i].dst_scale;
  if (f.is_inline) scales |= rows;
  rows |= f.dim_outer | (dtype_bits(f.dtype) == 4 ? 0 : f.dim_inner);
  KVX_NEED(rows % element == 0,
           "the plan's box %d puts %s elements of %lld bytes at addresses that are no multiple of it.", n,
           name_of(which), (long long)element);
  KVX_NEED(scales % scale == 0,
           "the plan's box %d puts %s scales of %lld bytes at addresses that are no multiple of it.", n, name_of(which),
           (long long)scale);
  return KVX_STATUS_OK;
}

// What a cell adds to a box: types that exist, scales that lie inside their buffers.
kvx_status_t check_row(const Plan& plan, const kvx_plan_box_t& box, int n, int which) {
  const kvx_plan_cell_t& cell = plan.cells[box.cell - 1];
  const kvx_plan_format_t& f = format_of(cell, which);
  const bool is_float = f.dtype == KVX_DTYPE_F16 || f.dtype == KVX_DTYPE_BF16 || f.dtype == KVX_DTYPE_F32;
  const bool is_code = f.dtype == KVX_DTYPE_F8_E4M3 || f.dtype == KVX_DTYPE_F8_E5M2 || f.dtype == KVX_DTYPE_S8 ||
                       f.dtype == KVX_DTYPE_S4 || f.dtype == KVX_DTYPE_E2M1;
  KVX_NEED((is_float || is_code) && row_extent(f, cell.head_dim) > 0 && cell.head_dim < (1u << 30) && f.is_inline <= 1,
           "the plan's box %d has a %s format that makes no sense.", n, name_of(which));
  KVX_NEED(f.granularity >= 0 && f.granularity <= KVX_SCALE_GRANULARITY_PER_GROUP && (is_code || f.granularity == 0),
           "the plan's box %d has scale granularity %d for %s.", n, f.granularity, dtype_name(f.dtype));
  const std::vector<uint64_t>& bytes = plan.bytes[which];
  const int64_t block_size = which == SRC ? plan.header.src_block_size : plan.header.dst_block_size;
  const int64_t num_blocks = which == SRC ? plan.header.src_num_blocks : plan.header.dst_num_blocks;
  KVX_NEED(f.first_layer >= 0 && f.first_layer <= kMaxIndex, "the plan's box %d begins at layer %lld.", n,
           (long long)f.first_layer);
  int64_t layer = f.first_layer;
  for (uint32_t i = 0; i < box.num_digits; i++)
    KVX_NEED(box.digit[i].layer >= 0 && add_extent(box.digit[i].size - 1, box.digit[i].layer, &layer),
             "the plan's box %d has a negative layer step.", n);
  if (f.granularity != 0) {
    const bool scale_type = f.scale_dtype == KVX_DTYPE_F32 || f.scale_dtype == KVX_DTYPE_F16 ||
                            f.scale_dtype == KVX_DTYPE_BF16 || f.scale_dtype == KVX_DTYPE_F8_E4M3 ||
                            f.scale_dtype == KVX_DTYPE_E8M0;
    const bool by_block =
        f.granularity == KVX_SCALE_GRANULARITY_PER_BLOCK || f.granularity == KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD;
    KVX_NEED(!by_block || (f.scale_dtype == KVX_DTYPE_F32 && !f.is_inline && f.tensor_scale_buffer < 0),
             "the plan's box %d has scales per block that are not plain F32.", n);
    KVX_NEED(scale_type && (f.is_inline || f.scale_buffer >= 0), "the plan's box %d has scales of %s in no buffer.", n,
             dtype_name(f.scale_dtype));
  }
  if (f.granularity != 0 && !f.is_inline) {
    KVX_NEED(f.scale_buffer < int64_t(bytes.size()),
             "the plan's box %d reaches %s buffer %d for scales; there are %zu.", n, name_of(which), f.scale_buffer,
             bytes.size());
    int64_t last = 0;
    bool ok = add_extent(1, f.scale_offset, &last) && add_extent(num_blocks - 1, f.scale_block, &last) &&
              add_extent(block_size - plan.header.unit_tokens, f.scale_token, &last) &&
              add_extent(cell.head_dim / f.group_size - 1, f.scale_group, &last) &&
              add_extent(1, dtype_bits(f.scale_dtype) / 8, &last);
    for (uint32_t i = 0; ok && i < box.num_digits; i++)
      ok = add_extent(box.digit[i].size - 1, which == SRC ? box.digit[i].src_scale : box.digit[i].dst_scale, &last);
    KVX_NEED(ok && uint64_t(last) <= bytes[size_t(f.scale_buffer)],
             "the plan's box %d reaches past the scales at the %s.", n, name_of(which));
  }
  KVX_TRY(check_alignment(box, cell, n, which));
  if (f.tensor_scale_buffer >= 0)
    KVX_NEED(f.tensor_scale_buffer < int64_t(bytes.size()) && f.first_layer >= 0 &&
                 uint64_t(layer + 1) * 4 <= bytes[size_t(f.tensor_scale_buffer)],
             "the plan's box %d reaches past the tensor scales at the %s.", n, name_of(which));
  return KVX_STATUS_OK;
}

// The box stays inside buffers that exist, for every block and every digit.
kvx_status_t check_side(const Plan& plan, const kvx_plan_box_t& box, int n, int which, int64_t* steps) {
  const kvx_plan_side_t& s = side_of(box, which);
  const int64_t block_size = which == SRC ? plan.header.src_block_size : plan.header.dst_block_size;
  const int64_t num_blocks = which == SRC ? plan.header.src_num_blocks : plan.header.dst_num_blocks;
  int64_t last = 0, buffer = 0, unit = plan.header.unit_tokens;
  bool ok = s.offset >= 0 && s.buffer >= 0 && s.block_step >= 0 && s.token_split >= 1 &&
            add_extent(1, s.offset, &last) && add_extent(num_blocks - 1, s.block, &last);
  if (!ok)
    return fail(KVX_STATUS_INVALID_ARGUMENT, "the plan's box %d has a negative or overflowing stride at the %s.", n,
                name_of(which));
  const int64_t inside = std::min(s.token_split, block_size) - 1, outside = (block_size - unit) / s.token_split;
  // A unit either fills whole splits or stays inside one; its start then moves by whole steps.
  ok = ok && (unit % s.token_split == 0 || s.token_split % unit == 0);
  ok = ok && add_extent(outside, s.token_outer, &last) &&
       add_extent(block_size > unit ? inside / unit * unit : 0, s.token_inner, &last);
  ok = ok && add_extent(1, s.buffer, &buffer) && add_extent(num_blocks - 1, s.block_step, &buffer);
  for (uint32_t i = 0; ok && i < box.num_digits; i++) {
    const kvx_plan_digit_t& d = box.digit[i];
    ok = add_extent(d.size - 1, stride_of(d, which), &last) && add_extent(d.size - 1, step_of(d, which), &buffer);
  }
  ok = ok &&
       add_extent(1,
                  box.cell ? row_extent(format_of(plan.cells[box.cell - 1], which), plan.cells[box.cell - 1].head_dim)
                           : box.run_bytes,
                  &last);
  KVX_NEED(ok, "the plan's box %d has a negative or overflowing stride at the %s.", n, name_of(which));
  const std::vector<uint64_t>& bytes = plan.bytes[which];
  KVX_NEED(buffer < int64_t(bytes.size()), "the plan's box %d reaches %s buffer %lld; there are %zu.", n,
           name_of(which), (long long)buffer, bytes.size());
  // Every buffer some index reaches: indices that step through buffers, each through others.
  struct Axis {
    int64_t size, step;
  } axes[KVX_PLAN_MAX_DIGITS + 1];
  int num_axes = 0;
  int64_t reached = 1;
  const auto add_axis = [&](int64_t size, int64_t step) {
    if (step == 0 || size == 1) return true;
    axes[num_axes++] = {size, step};
    return mul_fits(reached, size, &reached) && reached <= int64_t(bytes.size());
  };
  ok = add_axis(num_blocks, s.block_step);
  for (uint32_t i = 0; ok && i < box.num_digits; i++) ok = add_axis(box.digit[i].size, step_of(box.digit[i], which));
  KVX_NEED(ok, "the plan's box %d steps through more %s buffers than the %zu there are; some would be reached twice.",
           n, name_of(which), bytes.size());
  if (uint64_t(last) <= plan.least_bytes[which]) return KVX_STATUS_OK;  // whichever they are
  KVX_NEED((*steps += reached) <= kMostSteps,
           "the plan's boxes take over 2^25 steps through buffers of several sizes.");
  int64_t index[KVX_PLAN_MAX_DIGITS + 1] = {};
  for (int64_t b = s.buffer;;) {
    KVX_NEED(uint64_t(last) <= bytes[size_t(b)],
             "the plan's box %d ends at byte %lld of %s buffer %lld, which has %llu.", n, (long long)last,
             name_of(which), (long long)b, (unsigned long long)bytes[size_t(b)]);
    int i = 0;
    for (; i < num_axes && index[i] == axes[i].size - 1; i++) b -= index[i] * axes[i].step, index[i] = 0;
    if (i == num_axes) return KVX_STATUS_OK;
    index[i]++, b += axes[i].step;
  }
}

}  // namespace

bool moves_too_much(const Plan& plan, const kvx_plan_box_t& box, Which which) {
  const kvx_plan_header_t& h = plan.header;
  int64_t all = which == SRC ? h.src_num_blocks : h.dst_num_blocks, run = box.run_bytes;
  if (box.cell) {
    const kvx_plan_cell_t& cell = plan.cells[box.cell - 1];
    run = (int64_t(cell.head_dim) * dtype_bits(format_of(cell, which).dtype) + 7) / 8;
  }
  bool fits = mul_fits(all, (which == SRC ? h.src_block_size : h.dst_block_size) / h.unit_tokens, &all) &&
              mul_fits(all, run, &all);
  for (uint32_t i = 0; fits && i < box.num_digits; i++) fits = mul_fits(all, box.digit[i].size, &all);
  return !fits || uint64_t(all / kMostTimes) > plan.all_bytes[which];
}

kvx_status_t load(const void* data, uint64_t num_bytes, Plan* plan) {
  KVX_NEED(num_bytes >= sizeof(kvx_plan_header_t), "a plan has at least %zu bytes; this has %llu.",
           sizeof(kvx_plan_header_t), (unsigned long long)num_bytes);
  const char* p = static_cast<const char*>(data);
  kvx_plan_header_t& h = plan->header;
  memcpy(&h, p, sizeof h);
  KVX_NEED(h.magic == KVX_PLAN_MAGIC, "these bytes are not a plan: they begin with 0x%08x.", h.magic);
  if (h.version != KVX_PLAN_VERSION)
    return fail(KVX_STATUS_INCOMPATIBLE, "the plan has version %u; this library reads %d.", h.version,
                KVX_PLAN_VERSION);
  const uint64_t want = sizeof h + uint64_t(h.num_boxes) * sizeof(kvx_plan_box_t) +
                        uint64_t(h.num_cells) * sizeof(kvx_plan_cell_t) +
                        (uint64_t(h.num_src_sizes) + h.num_dst_sizes) * 2 * sizeof(uint64_t);
  KVX_NEED(h.plan_bytes == num_bytes && want == num_bytes,
           "the plan's counts make %llu bytes, its header says %llu, and %llu were given.", (unsigned long long)want,
           (unsigned long long)h.plan_bytes, (unsigned long long)num_bytes);
  KVX_NEED(
      h.src_block_size > 0 && h.dst_block_size > 0 && h.src_num_blocks > 0 && h.dst_num_blocks > 0 && h.unit_tokens > 0,
      "the plan has an empty block or cache.");
  KVX_NEED(h.src_block_size < kMaxBlockSize && h.dst_block_size < kMaxBlockSize && h.src_num_blocks < kMaxBlocks &&
               h.dst_num_blocks < kMaxBlocks,
           "the plan has blocks of %lld and %lld tokens, %lld and %lld of them; blocks stay under 2^30 tokens and "
           "caches under 2^40 blocks.",
           (long long)h.src_block_size, (long long)h.dst_block_size, (long long)h.src_num_blocks,
           (long long)h.dst_num_blocks);
  KVX_NEED(h.src_block_size % h.unit_tokens == 0 && h.dst_block_size % h.unit_tokens == 0,
           "unit_tokens %u does not divide the block sizes %lld and %lld.", h.unit_tokens, (long long)h.src_block_size,
           (long long)h.dst_block_size);
  p += sizeof h;
  plan->boxes.resize(h.num_boxes);
  if (h.num_boxes) memcpy(plan->boxes.data(), p, h.num_boxes * sizeof(kvx_plan_box_t));
  p += h.num_boxes * sizeof(kvx_plan_box_t);
  plan->cells.resize(h.num_cells);
  if (h.num_cells) memcpy(plan->cells.data(), p, h.num_cells * sizeof(kvx_plan_cell_t));
  p += h.num_cells * sizeof(kvx_plan_cell_t);
  const uint32_t counts[2] = {h.num_src_buffers, h.num_dst_buffers}, sizes[2] = {h.num_src_sizes, h.num_dst_sizes};
  for (int which = 0; which < 2; which++) {
    KVX_NEED(counts[which] <= kMaxBuffers, "the plan has %u %s buffers; at most %u.", counts[which], name_of(which),
             kMaxBuffers);
    for (uint32_t i = 0; i < sizes[which]; i++, p += 16) {
      uint64_t pair[2];
      memcpy(pair, p, sizeof pair);
      KVX_NEED(pair[0] <= counts[which] - plan->bytes[which].size() && pair[1] <= uint64_t(kMaxBytes),
               "the plan's %s sizes do not fit its %u buffers.", name_of(which), counts[which]);
      plan->bytes[which].insert(plan->bytes[which].end(), size_t(pair[0]), pair[1]);
    }
    KVX_NEED(plan->bytes[which].size() == counts[which], "the plan gives the sizes of %zu of its %u %s buffers.",
             plan->bytes[which].size(), counts[which], name_of(which));
    plan->least_bytes[which] = uint64_t(kMaxBytes), plan->all_bytes[which] = 0;
    for (uint64_t size : plan->bytes[which]) {
      plan->least_bytes[which] = std::min(plan->least_bytes[which], size);
      plan->all_bytes[which] = std::min(plan->all_bytes[which] + size, uint64_t(kMaxBytes));
    }
  }
  int64_t steps = 0;
  for (uint32_t i = 0; i < h.num_boxes; i++) {
    const kvx_plan_box_t& box = plan->boxes[i];
    KVX_NEED(box.num_digits <= KVX_PLAN_MAX_DIGITS && box.run_bytes > 0,
             "the plan's box %u has %u digits and runs of %lld bytes.", i, box.num_digits, (long long)box.run_bytes);
    KVX_NEED(box.cell <= h.num_cells, "the plan's box %u names cell %u; there are %u.", i, box.cell, h.num_cells);
    int64_t tokens = 1, all = 1;
    for (uint32_t d = 0; d < box.num_digits; d++) {
      KVX_NEED(box.digit[d].size > 0, "digit %u of the plan's box %u has size %lld.", d, i,
               (long long)box.digit[d].size);
      KVX_NEED(box.digit[d].token >= 0 && box.digit[d].token <= int64_t(h.unit_tokens),
               "digit %u of the plan's box %u steps %lld tokens.", d, i, (long long)box.digit[d].token);
      KVX_NEED(mul_fits(all, box.digit[d].size, &all) && all <= kMaxIndex,
               "the plan's box %u moves more than 2^40 runs a unit.", i);
      if (box.digit[d].token)
        KVX_NEED(mul_fits(tokens, box.digit[d].size, &tokens) && tokens <= h.unit_tokens,
                 "box %u has more tokens than a unit.", i);
    }
    for (int which = 0; which < 2; which++) KVX_TRY(check_side(*plan, box, int(i), which, &steps));
    for (int which = 0; which < 2 && box.cell; which++) KVX_TRY(check_row(*plan, box, int(i), which));
    KVX_NEED(!moves_too_much(*plan, box, DST),
             "the plan's box %u moves more than %lld times the %llu bytes of the destination: it would write the same "
             "ones again and again.",
             i, (long long)kMostTimes, (unsigned long long)plan->all_bytes[DST]);
  }
  return KVX_STATUS_OK;
}

}  // namespace kvx
