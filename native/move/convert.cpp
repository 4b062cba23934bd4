// Loaded plans (plan.cpp) are given addresses (bind) and run. Nothing here touches KV bytes.
#include "move/convert.h"

#include <string.h>

#include <algorithm>

#include "array.h"
#include "move/digest.h"
#include "move/plan.h"
#include "run.h"
#include "table.h"

namespace kvx {

using namespace common;

namespace {

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
    axes[i].delta = axes[i].size > 1
                        ? int64_t(uintptr_t(buffers[size_t(job->buffer[which] + axes[i].step)]) - uintptr_t(first))
                        : 0;
    points *= axes[i].size;
  }
  for (int64_t p = 0; p < points; p++) {
    int64_t rest = p, index = job->buffer[which];
    uintptr_t byte =
        0;  // modulo 2^64: heap and mapped memory are far apart, and a few steps of such a distance would overflow
    for (int i = 0; i < n; i++) {
      const int64_t digit = rest % axes[i].size;
      rest /= axes[i].size;
      index += digit * axes[i].step;
      byte += uintptr_t(digit) * uintptr_t(axes[i].delta);
    }
    if (uintptr_t(buffers[size_t(index)]) != uintptr_t(first) + byte) return;
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
    bits |= uint64_t(job.block[w]) | uint64_t(job.outer[w]) | uint64_t(job.inner[w]) * uint64_t(unit_tokens) |
            uint64_t(job.offset[w]);
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
    const int element = dtype_bits(f.dtype) < 16 ? 1 : dtype_bits(f.dtype) / 8,
              scale = f.granularity ? dtype_bits(f.scale_dtype) / 8 : 1;
    const uintptr_t need = uintptr_t(std::max({element, scale, f.tensor_scale_buffer >= 0 ? 4 : 1}));
    for (size_t i = 0; i < bound.buffers[w].size(); i++)
      KVX_NEED(uintptr_t(bound.buffers[w][i]) % need == 0,
               "%s buffer %zu is not aligned to the %zu bytes of its elements or scales.", name_of(w), i, size_t(need));
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

// Floats without scales are elements, and their rows any axis: the one that lies side by side on both sides, or on the
// destination's, and what goes on after it on both.
void choose_row(CellJob* job) {
  kvx_plan_format_t* format[2] = {&job->side[SRC].format, &job->side[DST].format};
  int64_t bytes[2];
  for (int w = 0; w < 2; w++) {
    if (format[w]->granularity || is_quantised(format[w]->dtype) || format[w]->pack != job->head_dim) return;
    bytes[w] = dtype_bits(format[w]->dtype) / 8;
  }
  CellDigit row = {job->head_dim, {format[SRC]->dim_inner, format[DST]->dim_inner}, {0, 0}, 0, 0, {0, 0}};
  const auto is_dense = [&](const CellDigit& d, int w) { return d.stride[w] == bytes[w]; };
  constexpr int64_t kMostElements = 4096, kFewElements = 256;  // of a row that others are joined to
  const auto may_be_row = [](const CellDigit& d) {
    return !d.token && !d.step[SRC] && !d.step[DST] && d.size <= 8 * kMostElements;
  };
  const auto worth = [&](const CellDigit& d) { return d.size == 1 ? -1 : 2 * is_dense(d, DST) + is_dense(d, SRC); };
  for (int i = 0; i < job->num_digits; i++)
    if (may_be_row(job->digit[i]) && worth(job->digit[i]) > worth(row)) std::swap(row, job->digit[i]);
  for (int i = 0; i < job->num_digits; i++) {
    CellDigit& d = job->digit[i];
    const bool goes_on = d.stride[SRC] == row.size * row.stride[SRC] && d.stride[DST] == row.size * row.stride[DST];
    if (d.token || d.step[SRC] || d.step[DST] || !goes_on) continue;
    // All of it, or as much as makes a row of some thousands: the rest stays a digit, and there are rows for all
    // threads.
    int64_t joined = d.size;
    if (row.size * joined > kMostElements) {
      joined = std::max<int64_t>(1, kMostElements / row.size);
      while (d.size % joined) joined--;
      if (row.size * joined < kFewElements && row.size * d.size <= 8 * kMostElements) joined = d.size;
    }
    row.size *= joined;
    if (joined < d.size) {
      d.size /= joined, d.stride[SRC] *= joined, d.stride[DST] *= joined;
      break;
    }
    std::move(job->digit + i + 1, job->digit + job->num_digits, job->digit + i);
    job->num_digits--, i = -1;  // another may go on after it
  }
  job->head_dim = row.size;
  for (int w = 0; w < 2; w++)
    format[w]->dim_inner = row.stride[w], format[w]->dim_outer = 0, format[w]->pack = uint32_t(row.size),
    format[w]->group_size = uint32_t(row.size);
}

CellJob make_cell_job(const kvx_plan_box_t& box, const Plan& plan, const Bound& bound) {
  CellJob job = {};
  const kvx_plan_cell_t& cell = plan.cells[box.cell - 1];
  job.head_dim = cell.head_dim;
  for (uint32_t i = 0; i < box.num_digits; i++) {
    const kvx_plan_digit_t& d = box.digit[i];
    if (d.size > 1)
      job.digit[job.num_digits++] =
          CellDigit{d.size, {d.src, d.dst}, {d.src_scale, d.dst_scale}, d.token, d.layer, {d.src_step, d.dst_step}};
  }
  for (int w = 0; w < 2; w++) {
    const kvx_plan_side_t& s = side_of(box, w);
    job.buffer[w] = s.buffer, job.block_step[w] = s.block_step, job.offset[w] = s.offset, job.block[w] = s.block;
    job.split[w] = s.token_split, job.outer[w] = s.token_outer, job.inner[w] = s.token_inner;
    RowSide& row = job.side[w];
    row.format = format_of(cell, w);
    const bool stand_apart = row.format.granularity && !row.format.is_inline;
    if (stand_apart) row.scales = bound.buffers[w][size_t(row.format.scale_buffer)] + row.format.scale_offset;
    for (int i = 0; i < job.num_digits && !stand_apart; i++)
      job.digit[i].scale[w] = 0;  // not read, and so not checked at load
    if (row.format.tensor_scale_buffer >= 0)
      row.tensor = reinterpret_cast<const float*>(bound.buffers[w][size_t(row.format.tensor_scale_buffer)]) +
                   row.format.first_layer;
  }
  choose_row(&job);
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
    job.split[w] = s.token_split, job.outer[w] = starts_inside ? s.token_outer : 0,
    job.inner[w] = starts_inside ? s.token_inner : 0;
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
      KVX_NEED(sizes == nullptr || sizes[i] >= plan.bytes[w][i], "%s buffer %zu has %llu bytes; the plan needs %llu.",
               name_of(w), i, (unsigned long long)sizes[i], (unsigned long long)plan.bytes[w][i]);
      out->buffers[w][i] = const_cast<char*>(static_cast<const char*>(given[i]));
      const uintptr_t begin = uintptr_t(given[i]);
      KVX_NEED(plan.bytes[w][i] <= UINTPTR_MAX - begin,
               "%s buffer %zu is at %p; its %llu bytes are past the last address.", name_of(w), i, given[i],
               (unsigned long long)plan.bytes[w][i]);
      spans.push_back({begin, begin + uintptr_t(plan.bytes[w][i]), w});
    }
  }
  // Reading what was already overwritten: refused, whatever the blocks.
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  uintptr_t end[2] = {0, 0};
  for (const Span& s : spans) {
    KVX_NEED(s.begin >= end[1 - s.which],
             "a source buffer and a destination buffer overlap. Convert into memory of its own.");
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
      (*out)[size_t(r * columns + c)] =
          read_index(a.data, ((a.ndim == 2 ? r * a.stride[0] : 0) + c * a.stride[a.ndim - 1]) * bytes, int32_t(bytes));
}

kvx_status_t bind_tables(const Plan& plan, const kvx_convert_args_t& args, bool has_destination, Bound* out) {
  const kvx_plan_header_t& h = plan.header;
  BlockTables& t = out->tables;
  const kvx_array_t* arrays[2] = {&args.src_blocks, &args.dst_blocks};
  const char* names[2] = {"src_blocks", "dst_blocks"};
  const int64_t num_blocks[2] = {h.src_num_blocks, h.dst_num_blocks},
                block_size[2] = {h.src_block_size, h.dst_block_size};
  int64_t seqs[2], tokens[2];
  for (int w = 0; w < 2; w++) {
    const kvx_array_t& a = *arrays[w];
    KVX_NEED(a.ndim == 1 || a.ndim == 2, "%s has %u dimensions; it must be [n] or [num_seqs, columns].", names[w],
             a.ndim);
    KVX_NEED(a.dtype == KVX_DTYPE_S32 || a.dtype == KVX_DTYPE_S64, "%s is %s; it must be S32 or S64.", names[w],
             dtype_name(a.dtype));
    KVX_TRY(check_array("", names[w], a, true));
    // Each id is some work, and is copied. Sequences may share a row of the source.
    KVX_NEED(a.shape[a.ndim - 1] <= 1 || a.stride[a.ndim - 1] > 0,
             "%s has %lld ids of stride 0 in a row; the ids of a row must not be one. Call .contiguous().", names[w],
             (long long)a.shape[a.ndim - 1]);
    KVX_NEED(w == SRC || !has_destination || !overlaps_itself(a), "%s strides make two ids share an address.",
             names[w]);
    seqs[w] = a.ndim == 2 ? a.shape[0] : 1;
    t.columns[w] = a.shape[a.ndim - 1];
    t.num_blocks[w] = num_blocks[w], t.block_size[w] = block_size[w];
    KVX_NEED(mul_fits(t.columns[w], block_size[w], &tokens[w]), "%s is too long.", names[w]);
  }
  KVX_NEED(seqs[0] == seqs[1], "src_blocks has %lld sequences and dst_blocks %lld.", (long long)seqs[0],
           (long long)seqs[1]);
  const bool has_lens = args.seq_lens.data != nullptr;
  if (!has_lens)
    KVX_NEED(tokens[0] == tokens[1],
             "src_blocks holds %lld tokens a sequence and dst_blocks %lld. Give seq_lens, or lists of equal length.",
             (long long)tokens[0], (long long)tokens[1]);
  if (has_lens) {
    const kvx_array_t& a = args.seq_lens;
    KVX_NEED(a.ndim == 1 && a.shape[0] == seqs[0] && (a.dtype == KVX_DTYPE_S32 || a.dtype == KVX_DTYPE_S64),
             "seq_lens is [%lld] S32 or S64.", (long long)seqs[0]);
    KVX_TRY(check_array("", "seq_lens", a, true));
  }
  t.num_seqs = seqs[0];
  t.unit_tokens = h.unit_tokens;
  const int64_t most = std::min(tokens[0], tokens[1]);
  t.units_per_seq = (most + t.unit_tokens - 1) / t.unit_tokens;
  int64_t units;
  KVX_NEED(mul_fits(t.num_seqs, t.units_per_seq, &units), "%lld sequences of %lld units are too many.",
           (long long)t.num_seqs, (long long)t.units_per_seq);
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
        return fail(KVX_STATUS_OUT_OF_RANGE,
                    "seq_lens[%zu] is %lld; the tables hold %lld tokens. Nothing was converted.", s,
                    (long long)out->lens[s], (long long)most);
  }
  for (int w = 0; w < 2; w++) {
    copy_indices(*arrays[w], &out->ids[w]);
    std::vector<int64_t> named;
    for (int64_t s = 0; s < seqs[w]; s++) {
      const int64_t used = has_lens ? (out->lens[size_t(s)] + block_size[w] - 1) / block_size[w] : t.columns[w];
      for (int64_t c = 0; c < used; c++) {
        const int64_t id = out->ids[w][size_t(s * t.columns[w] + c)];
        if (id >= num_blocks[w])
          return fail(KVX_STATUS_OUT_OF_RANGE, "%s[%lld] is %lld; the %s has %lld blocks. Nothing was converted.",
                      names[w], (long long)(s * t.columns[w] + c), (long long)id, name_of(w), (long long)num_blocks[w]);
        if (w == DST && has_destination && id >= 0) named.push_back(id);
      }
    }
    std::sort(named.begin(), named.end());
    const auto twice = std::adjacent_find(named.begin(), named.end());
    if (twice != named.end())
      return fail(KVX_STATUS_INVALID_ARGUMENT, "dst_blocks names block %lld twice. Nothing was converted.",
                  (long long)*twice);
    t.ids[w] = out->ids[w].data(), t.index_bytes[w] = 8, t.index_stride[w] = 8, t.row_stride[w] = 8 * t.columns[w];
  }
  t.seq_lens = has_lens ? out->lens.data() : nullptr;
  t.len_bytes = 8, t.len_stride = 8;
  return KVX_STATUS_OK;
}

kvx_status_t check_memory(const kvx_convert_args_t& args, Bound* out) {
  if (args.version >> 16 != KVX_ABI_VERSION_MAJOR)
    return fail(KVX_STATUS_INCOMPATIBLE, "args has version 0x%x; this library speaks %d.%d.", args.version,
                KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR);
  KVX_NEED(args.struct_bytes >= sizeof args && args.flags == 0, "args has %u bytes and flags %llu.", args.struct_bytes,
           (unsigned long long)args.flags);
  bool device[3];
  const int32_t memory[3] = {args.src_memory, args.dst_memory, args.table_memory};
  const char* names[3] = {"src_memory", "dst_memory", "table_memory"};
  for (int i = 0; i < 3; i++) {
    device[i] = memory[i] == KVX_MEMORY_DEVICE || memory[i] == KVX_MEMORY_UNIFIED;
    KVX_NEED(device[i] || memory[i] == KVX_MEMORY_HOST, "%s is %d; say HOST (1), DEVICE (2) or UNIFIED (3).", names[i],
             memory[i]);
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
  out->content = plan.header.content;
  KVX_NEED(
      plan.header.src_block_size == plan.header.unit_tokens && plan.header.dst_block_size == plan.header.unit_tokens,
      "the plan has units of %u tokens in blocks of %lld and %lld; a digest is made of whole blocks.",
      plan.header.unit_tokens, (long long)plan.header.src_block_size, (long long)plan.header.dst_block_size);
  for (size_t i = 0; i < plan.boxes.size(); i++)
    KVX_NEED(!moves_too_much(plan, plan.boxes[i], SRC),
             "the plan's box %zu reads more than %lld times the %llu bytes of the source.", i, (long long)kMostTimes,
             (unsigned long long)plan.all_bytes[SRC]);
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

kvx_status_t run(const Bound& bound, void* stream) {
  return bound.on_device ? cuda::convert(bound, stream) : cpu::convert(bound);
}

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

extern "C" {

kvx_status_t kvx_plan_load(const void* bytes, uint64_t num_bytes, kvx_plan_t** plan) {
  return entry("kvx_plan_load()", [&]() -> kvx_status_t {
    KVX_NEED(bytes != nullptr && plan != nullptr, "bytes or plan is NULL.");
    auto loaded = std::make_unique<Plan>();
    KVX_TRY(load(bytes, num_bytes, loaded.get()));
    *plan = reinterpret_cast<kvx_plan_t*>(loaded.release());
    return KVX_STATUS_OK;
  });
}

void kvx_plan_free(kvx_plan_t* plan) { delete reinterpret_cast<Plan*>(plan); }

kvx_status_t kvx_bind(const kvx_plan_t* plan, const kvx_convert_args_t* args, kvx_bound_t** bound) {
  return entry("kvx_bind()", [&]() -> kvx_status_t {
    KVX_NEED(plan != nullptr && args != nullptr && bound != nullptr, "plan, args or bound is NULL.");
    auto made = std::make_unique<Bound>();
    KVX_TRY(bind(*reinterpret_cast<const Plan*>(plan), *args, made.get()));
    *bound = reinterpret_cast<kvx_bound_t*>(made.release());
    return KVX_STATUS_OK;
  });
}

kvx_status_t kvx_run(const kvx_bound_t* bound, void* stream) {
  return entry("kvx_run()", [&]() -> kvx_status_t {
    KVX_NEED(bound != nullptr, "bound is NULL.");
    return run(*reinterpret_cast<const Bound*>(bound), stream);
  });
}

void kvx_bound_free(kvx_bound_t* bound) { delete reinterpret_cast<Bound*>(bound); }

kvx_status_t kvx_digest(const kvx_plan_t* plan, const kvx_convert_args_t* args, uint64_t* digest, void* stream) {
  return entry("kvx_digest()", [&]() -> kvx_status_t {
    KVX_NEED(plan != nullptr && args != nullptr && digest != nullptr, "plan, args or digest is NULL.");
    Bound bound;
    KVX_TRY(bind_digest(*reinterpret_cast<const Plan*>(plan), *args, &bound));
    if (bound.on_device) return cuda::digest(&bound, digest, stream);
    cpu::digest(bound, digest);
    return KVX_STATUS_OK;
  });
}

kvx_status_t kvx_convert(const kvx_plan_t* plan, const kvx_convert_args_t* args, void* stream) {
  return entry("kvx_convert()", [&]() -> kvx_status_t {
    KVX_NEED(plan != nullptr && args != nullptr, "plan or args is NULL.");
    Bound bound;
    KVX_TRY(bind(*reinterpret_cast<const Plan*>(plan), *args, &bound));
    return run(bound, stream);
  });
}

}  // extern "C"
