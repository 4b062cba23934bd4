// Loaded plans (plan.cpp) are given addresses (bind) and run. Nothing here touches KV bytes.
#include "move/convert.h"

#include <string.h>

#include <algorithm>

#include "move/digest.h"
#include "move/plan.h"
#include "run.h"

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

// One box with addresses; its digits are as the plan has them, tokens counted.
Job make_job(const kvx_plan_box_t& box, const Bound& bound) {
  Job job = {};
  job.run = box.run_bytes;
  job.num_digits = int(box.num_digits);
  for (int i = 0; i < job.num_digits; i++) {
    const kvx_plan_digit_t& d = box.digit[i];
    job.digit[i] = Digit{d.size, {d.src, d.dst}, d.token, {d.src_step, d.dst_step}};
  }
  for (int w = 0; w < 2; w++) {
    const kvx_plan_side_t& s = side_of(box, w);
    job.buffer[w] = s.buffer, job.block_step[w] = s.block_step, job.offset[w] = s.offset, job.block[w] = s.block;
    // Units begin elsewhere than at token 0.
    const bool starts_inside = bound.sizes.block_size[w] != bound.sizes.unit_tokens;
    job.split[w] = s.token_split, job.outer[w] = starts_inside ? s.token_outer : 0,
    job.inner[w] = starts_inside ? s.token_inner : 0;
    straighten(bound.buffers[w], bound.sizes.num_blocks[w], Which(w), &job);
  }
  return job;
}

Job folded(Job job, const Bound& bound, bool counts_tokens) {
  for (int i = 0; i < job.num_digits && !counts_tokens; i++) job.digit[i].token = 0;
  fold(&job, bound.on_device ? DST : SRC);
  job.align = alignment_of(job, bound.buffers, bound.sizes.unit_tokens);
  return job;
}

int64_t bytes_of(const kvx_plan_box_t& box, const Plan& plan) {
  int64_t bytes = box.run_bytes;
  if (box.cell) {
    const kvx_plan_cell_t& cell = plan.cells[box.cell - 1];
    bytes = int64_t(cell.head_dim) * dtype_bits(cell.src.dtype) / 8;
  }
  for (uint32_t i = 0; i < box.num_digits; i++) bytes = mul_most(bytes, box.digit[i].size);
  return bytes;
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

kvx_status_t check_args(const kvx_convert_args_t& args) {
  if (args.version >> 16 != KVX_ABI_VERSION_MAJOR)
    return fail(KVX_STATUS_INCOMPATIBLE, "args has version 0x%x; this library speaks %d.%d.", args.version,
                KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR);
  KVX_NEED(args.struct_bytes >= sizeof args && args.flags == 0, "args has %u bytes and flags %llu.", args.struct_bytes,
           (unsigned long long)args.flags);
  return KVX_STATUS_OK;
}

kvx_status_t check_memory(const char* name, int32_t memory, bool* is_device) {
  *is_device = memory == KVX_MEMORY_DEVICE || memory == KVX_MEMORY_UNIFIED;
  KVX_NEED(*is_device || memory == KVX_MEMORY_HOST, "%s is %d; say HOST (1), DEVICE (2) or UNIFIED (3).", name, memory);
  return KVX_STATUS_OK;
}

kvx_status_t check_table_memory(const kvx_convert_args_t& args, const Bound& bound) {
  bool is_device;
  KVX_TRY(check_memory("table_memory", args.table_memory, &is_device));
  KVX_NEED(bound.on_device || !is_device, "both caches are in host memory and the tables are not.");
  return KVX_STATUS_OK;
}

// What says where the call runs, and the sizes of blocks.
kvx_status_t begin_bound(const Plan& plan, const kvx_convert_args_t& args, Bound* out) {
  KVX_TRY(check_args(args));
  bool device[2];
  KVX_TRY(check_memory("src_memory", args.src_memory, &device[SRC]));
  KVX_TRY(check_memory("dst_memory", args.dst_memory, &device[DST]));
  out->on_device = device[SRC] || device[DST];
  out->device = args.device;
  const kvx_plan_header_t& h = plan.header;
  out->sizes = {{h.src_num_blocks, h.dst_num_blocks}, {h.src_block_size, h.dst_block_size}, h.unit_tokens};
  return KVX_STATUS_OK;
}

enum Blocks { OF_EACH_RUN, OWN };

kvx_status_t bind(const Plan& plan, const kvx_convert_args_t& args, Blocks blocks, Bound* out) {
  KVX_TRY(begin_bound(plan, args, out));
  if (blocks == OWN) KVX_TRY(check_table_memory(args, *out));
  KVX_TRY(check_buffers(plan, args, true, out));
  if (blocks == OWN) {
    out->blocks = std::make_unique<BlockTables>();
    KVX_TRY(read_block_tables(out->sizes, args, true, out->blocks.get()));
  }
  out->unit_bytes = 0;
  for (const kvx_plan_box_t& box : plan.boxes) {
    out->unit_bytes = std::min(kMaxBytes, out->unit_bytes + bytes_of(box, plan));
    if (box.cell) {
      KVX_TRY(check_buffer_alignment(plan.cells[box.cell - 1], *out));
      out->cell_jobs.push_back(make_cell_job(box, plan, *out));
      continue;
    }
    const Job job = make_job(box, *out);
    out->jobs.push_back(folded(job, *out, false));
    out->cut_jobs.push_back(folded(job, *out, true));
  }
  return out->on_device ? cuda::prepare_convert(out) : KVX_STATUS_OK;
}

// A plan to coordinates: the destination is numbers, so it has no buffers and the source's tables.
kvx_status_t bind_digest(const Plan& plan, kvx_convert_args_t args, Bound* out, BlockTables* blocks) {
  args.dst_memory = args.src_memory;
  args.dst_blocks = args.src_blocks;
  KVX_TRY(begin_bound(plan, args, out));
  KVX_TRY(check_table_memory(args, *out));
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
  KVX_TRY(read_block_tables(out->sizes, args, false, blocks));
  for (const kvx_plan_box_t& box : plan.boxes) {
    Job job = folded(make_job(box, *out), *out, true);
    job.offset[DST] = box.dst.offset;
    job.align = alignment_of_source(job, *out);
    out->jobs.push_back(job);
  }
  return KVX_STATUS_OK;
}

kvx_status_t run(const Bound& bound, const BlockTables& blocks, void* stream) {
  return bound.on_device ? cuda::convert(bound, blocks, stream) : cpu::convert(bound, blocks);
}

}  // namespace

kvx_status_t run_blocks(const Bound& bound, const kvx_convert_args_t& args, void* stream) {
  KVX_TRY(check_args(args));
  KVX_TRY(check_table_memory(args, bound));
  thread_local BlockTables blocks;  // its room for ids is kept: a call with as many allocates nothing
  KVX_TRY(read_block_tables(bound.sizes, args, true, &blocks));
  return run(bound, blocks, stream);
}

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

static kvx_status_t bind_for(const kvx_plan_t* plan, const kvx_convert_args_t* args, Blocks blocks,
                             kvx_bound_t** bound) {
  KVX_NEED(plan != nullptr && args != nullptr && bound != nullptr, "plan, args or bound is NULL.");
  auto made = std::make_unique<Bound>();
  KVX_TRY(bind(*reinterpret_cast<const Plan*>(plan), *args, blocks, made.get()));
  *bound = reinterpret_cast<kvx_bound_t*>(made.release());
  return KVX_STATUS_OK;
}

kvx_status_t kvx_bind(const kvx_plan_t* plan, const kvx_convert_args_t* args, kvx_bound_t** bound) {
  return entry("kvx_bind()", [&] { return bind_for(plan, args, OWN, bound); });
}

kvx_status_t kvx_bind_buffers(const kvx_plan_t* plan, const kvx_convert_args_t* args, kvx_bound_t** bound) {
  return entry("kvx_bind_buffers()", [&] { return bind_for(plan, args, OF_EACH_RUN, bound); });
}

kvx_status_t kvx_run(const kvx_bound_t* bound, void* stream) {
  return entry("kvx_run()", [&]() -> kvx_status_t {
    KVX_NEED(bound != nullptr, "bound is NULL.");
    const Bound& b = *reinterpret_cast<const Bound*>(bound);
    KVX_NEED(b.blocks != nullptr, "the plan was bound without block ids. Give them with each run: kvx_run_blocks().");
    return run(b, *b.blocks, stream);
  });
}

kvx_status_t kvx_run_blocks(const kvx_bound_t* bound, const kvx_convert_args_t* args, void* stream) {
  return entry("kvx_run_blocks()", [&]() -> kvx_status_t {
    KVX_NEED(bound != nullptr && args != nullptr, "bound or args is NULL.");
    return run_blocks(*reinterpret_cast<const Bound*>(bound), *args, stream);
  });
}

void kvx_bound_free(kvx_bound_t* bound) { delete reinterpret_cast<Bound*>(bound); }

kvx_status_t kvx_digest(const kvx_plan_t* plan, const kvx_convert_args_t* args, uint64_t* digest, void* stream) {
  return entry("kvx_digest()", [&]() -> kvx_status_t {
    KVX_NEED(plan != nullptr && args != nullptr && digest != nullptr, "plan, args or digest is NULL.");
    Bound bound;
    BlockTables blocks;
    KVX_TRY(bind_digest(*reinterpret_cast<const Plan*>(plan), *args, &bound, &blocks));
    if (bound.on_device) return cuda::digest(bound, blocks, digest, stream);
    cpu::digest(bound, blocks, digest);
    return KVX_STATUS_OK;
  });
}

kvx_status_t kvx_convert(const kvx_plan_t* plan, const kvx_convert_args_t* args, void* stream) {
  return entry("kvx_convert()", [&]() -> kvx_status_t {
    KVX_NEED(plan != nullptr && args != nullptr, "plan or args is NULL.");
    Bound bound;
    KVX_TRY(bind(*reinterpret_cast<const Plan*>(plan), *args, OF_EACH_RUN, &bound));
    return run_blocks(bound, *args, stream);
  });
}

}  // extern "C"
