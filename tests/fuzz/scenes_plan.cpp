// Plans: their bytes, and the conversions and digests they make. A plan says how long its buffers are, so all of it may
// lie; what is run is given the lengths that are true.
#include <stddef.h>

#include "scenes.h"

namespace fuzz {
namespace {

constexpr int kBoxes = 2, kCells = 1, kPairs = 4;

struct PlanBytes {  // as in a file
  kvx_plan_header_t header;
  kvx_plan_box_t box[kBoxes];
  kvx_plan_cell_t cell[kCells];
  uint64_t size[kPairs][2];
};

enum Which { COPY, TURN, CELLS, SPLIT, DIGEST, PLANS };

kvx_plan_digit_t digit(int64_t size, int64_t src, int64_t dst, int64_t token = 0) {
  kvx_plan_digit_t d = {};
  d.size = size, d.src = src, d.dst = dst, d.token = token;
  return d;
}

// Tokens, heads and runs of 2 * dim bytes; the second box is the second half of each row.
void fill(PlanBytes* p, const Sizes& z, Which kind) {
  const int64_t row = 2 * z.dim, tokens = z.block_size, block = tokens * z.heads * row;
  kvx_plan_header_t& h = p->header;
  h.magic = KVX_PLAN_MAGIC, h.version = KVX_PLAN_VERSION, h.plan_bytes = sizeof *p, h.num_boxes = kBoxes,
  h.num_src_buffers = h.num_dst_buffers = 2;
  h.unit_tokens = uint32_t(kind == SPLIT ? tokens / 2 : tokens), h.src_block_size = h.dst_block_size = tokens,
  h.src_num_blocks = h.dst_num_blocks = z.blocks;
  h.num_src_sizes = h.num_dst_sizes = 2, h.num_cells = kCells;
  for (int i = 0; i < kBoxes; i++) {
    kvx_plan_box_t& b = p->box[i];
    b.run_bytes = kind == TURN ? 2 : row / 2;
    for (kvx_plan_side_t* side : {&b.src, &b.dst})
      side->block = block, side->token_split = tokens, side->offset = i * row / 2;
    b.src.token_inner = z.heads * row, b.dst.token_inner = kind == TURN ? 2 : row;
    b.num_digits = 3;
    b.digit[0] = digit(kind == SPLIT ? tokens / 2 : tokens, z.heads * row, kind == TURN ? 2 : row, 1),
    b.digit[1] = digit(z.heads, row, tokens * row), b.digit[2] = digit(1, 0, 0);
    if (kind == TURN) b.dst.offset = i * (row / 2) * tokens, b.digit[2] = digit(row / 4, 2, 2 * tokens);
    if (kind == DIGEST) b.dst.block = 0, b.digit[0].dst = 0, b.digit[1].dst = 1 << 24, b.dst.token_inner = 0;
    if (kind == CELLS && i == 0) b.cell = 1, b.num_digits = 2, b.src.offset = b.dst.offset = 0;
    if (kind == CELLS && i == 1)
      b.src.buffer = b.dst.buffer = 1, b.src.block = b.dst.block = 4 * z.heads, b.src.offset = b.dst.offset = 0,
      b.src.token_inner = b.dst.token_inner = 0, b.num_digits = 1, b.run_bytes = 4, b.digit[0] = digit(z.heads, 4, 4);
  }
  kvx_plan_cell_t& c = p->cell[0];
  c.head_dim = uint32_t(z.dim);
  for (kvx_plan_format_t* f : {&c.src, &c.dst}) {
    f->dtype = KVX_DTYPE_BF16, f->group_size = f->pack = uint32_t(z.dim), f->dim_inner = 2,
    f->scale_buffer = f->tensor_scale_buffer = -1;
  }
  c.dst.dtype = KVX_DTYPE_F8_E4M3, c.dst.dim_inner = 1, c.dst.granularity = KVX_SCALE_GRANULARITY_PER_BLOCK,
  c.dst.scale_dtype = KVX_DTYPE_F32, c.dst.scale_buffer = 1, c.dst.scale_block = 4;
  const uint64_t sizes[kPairs][2] = {{1, uint64_t(z.blocks * block)},
                                     {1, uint64_t(4 * z.heads * z.blocks)},
                                     {1, uint64_t(z.blocks * block)},
                                     {1, uint64_t(4 * z.heads * z.blocks)}};
  memcpy(p->size, sizes, sizeof sizes);
  if (kind == DIGEST) p->size[2][1] = uint64_t(1) << 57, h.num_cells = 0, h.plan_bytes -= sizeof p->cell;
}

// As it is loaded: a digest's plan has no cells.
size_t bytes_of(const PlanBytes& p, Which kind, char* to) {
  const size_t before = offsetof(PlanBytes, cell), after = sizeof p - offsetof(PlanBytes, size),
               cells = kind == DIGEST ? 0 : sizeof p.cell;
  memcpy(to, &p, before), memcpy(to + before, p.cell, cells), memcpy(to + before + cells, p.size, after);
  return before + cells + after;
}

struct Buffers {
  void* at[4];
  uint64_t bytes[4];
};

void add_plan(const Sizes& z, Which kind, Scenes* out) {
  static const char* const names[PLANS] = {"plan: copy", "plan: turn", "plan: cells", "plan: split", "plan: digest"};
  auto s = std::make_unique<Scene>(names[kind]);
  PlanBytes* p = s->add<PlanBytes>();
  fill(p, z, kind);
  kvx_convert_args_t* a = s->add_args<kvx_convert_args_t>();
  Buffers* b = s->add<Buffers>();
  s->parts.pop_back();  // where buffers are is true
  for (int i = 0; i < 4; i++) {
    Buffer& made = s->new_buffer(size_t(i == 2 && kind == DIGEST ? 16 : p->size[i][1]), i >= 2);
    b->at[i] = made.data, b->bytes[i] = made.bytes;
  }
  a->src_memory = a->dst_memory = a->table_memory = KVX_MEMORY_HOST, a->device = -1;
  a->src_buffers = b->at, a->dst_buffers = b->at + 2, a->src_bytes = b->bytes, a->dst_bytes = b->bytes + 2;
  s->indices(&a->src_blocks, KVX_DTYPE_S32, {2, 2}, {0, 1, 2, 0}),
      s->indices(&a->dst_blocks, KVX_DTYPE_S64, {2, 2}, {3, -1, 1, 0});
  s->indices(&a->seq_lens, KVX_DTYPE_S64, {2}, {2 * z.block_size, z.block_size + 1});
  for (void* field :
       {(void*)&a->src_buffers, (void*)&a->dst_buffers, (void*)&a->src_bytes, (void*)&a->dst_bytes, (void*)&a->errors})
    s->note_pointer(field);
  uint64_t* sums = reinterpret_cast<uint64_t*>(s->new_buffer(16, true).data);
  s->truth = [p, a, b] {
    // Without lengths the plan is trusted, and so it must be true; and there are two addresses a side, no more.
    const kvx_plan_header_t& h = p->header;
    a->src_bytes = b->bytes, a->dst_bytes = b->bytes + 2;
    if (h.num_src_buffers > 2) a->src_buffers = nullptr;
    if (h.num_dst_buffers > 2) a->dst_buffers = nullptr;
  };
  s->call = [p, a, sums, kind] {
    kvx_plan_t* plan = nullptr;
    char bytes[sizeof *p];
    int status = kvx_plan_load(bytes, bytes_of(*p, kind, bytes), &plan);
    if (status != KVX_STATUS_OK) return status;
    // What it says it needs must be there: a digest's destination is numbers, and its plan may claim any.
    const bool reads_only = kind == DIGEST;
    if (reads_only || p->header.num_boxes % 2 == 0) status = kvx_digest(plan, a, sums, nullptr);
    kvx_bound_t* bound = nullptr;
    if (!reads_only && kvx_bind(plan, a, &bound) == KVX_STATUS_OK) {
      kvx_plan_free(plan), plan = nullptr;
      status = kvx_run(bound, nullptr);
      if (status == KVX_STATUS_OK) status = kvx_run_blocks(bound, a, nullptr);
      kvx_bound_free(bound);
    } else if (!reads_only) {
      status = kvx_convert(plan, a, nullptr);
    }
    kvx_plan_free(plan);
    return status;
  };
  out->push_back(std::move(s));
}

}  // namespace

void add_plan_scenes(const Sizes& z, Scenes* out) {
  for (int kind = 0; kind < PLANS; kind++) add_plan(z, Which(kind), out);
}

}  // namespace fuzz
