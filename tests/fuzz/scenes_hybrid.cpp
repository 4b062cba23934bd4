// Calls over the rows of a hybrid cache.
#include "scenes.h"

namespace fuzz {
namespace {

enum Code { BF16_ROWS, F8_ROWS, E2M1_ROWS, F32_ROWS };

struct Place {
  int64_t slots, pages, rows, columns, dim, ratio;
};
Place place_of(const Sizes& z) { return Place{z.seqs + 1, z.blocks, z.block_size * 2, 4, z.dim, 4}; }

void add_rows(Scene& s, kvx_rows_t* r, Code code, int64_t pages, int64_t rows, int64_t dim, bool is_output) {
  r->rows = rows, r->dim = dim;
  r->dtype = code == BF16_ROWS   ? KVX_DTYPE_BF16
             : code == F8_ROWS   ? KVX_DTYPE_F8_E4M3
             : code == E2M1_ROWS ? KVX_DTYPE_E2M1
                                 : KVX_DTYPE_F32;
  int64_t data = dim * bits_of(r->dtype) / 8;
  if (code == F8_ROWS)
    r->rope_dim = dim / 2, r->group = 2, r->scale_dtype = KVX_DTYPE_E8M0, r->scale_bytes = dim / 4 + 1,
    data = dim / 2 + dim;
  if (code == E2M1_ROWS) r->group = 4, r->scale_dtype = KVX_DTYPE_F32, r->scale_bytes = dim, r->least_amax = 1e-4f;
  s.array(&r->pages, KVX_DTYPE_U8, {pages, (rows * (data + r->scale_bytes) + 15) / 16 * 16}, is_output);
}

// Three sequences of the slots 2, 0 and one that is skipped.
void add_step(Scene& s, kvx_step_t* step, const Sizes& z, int64_t start) {
  std::vector<int64_t> slots, first = {0}, starts;
  for (int64_t i = 0; i < z.seqs; i++)
    slots.push_back(i == 0   ? 2
                    : i == 1 ? 0
                             : -1),
        starts.push_back(start + i), first.push_back((i + 1) * (z.tokens / z.seqs));
  s.indices(&step->slots, KVX_DTYPE_S32, {z.seqs}, slots);
  s.indices(&step->cu_seqlens, KVX_DTYPE_S32, {z.seqs + 1}, first);
  s.indices(&step->starts, KVX_DTYPE_S32, {z.seqs}, starts);
}

void add_finish(Scene& s, kvx_finish_t* f, int64_t dim, int64_t positions) {
  s.array(&f->weight, KVX_DTYPE_BF16, {dim}), s.array(&f->cos, KVX_DTYPE_F32, {positions, dim / 4}),
      s.array(&f->sin, KVX_DTYPE_F32, {positions, dim / 4});
  f->eps = 1e-5f;
}

template <class Args>
void end_args(Scene& s, Args* a) {
  a->memory = KVX_MEMORY_HOST, a->device = -1;
  s.note_pointer(&a->errors);
}

void add_append_swa(const Sizes& z, Code code, bool has_positions, Scenes* out) {
  auto s = std::make_unique<Scene>("kvx_append_swa");
  kvx_append_swa_args_t* a = s->add_args<kvx_append_swa_args_t>();
  const Place p = place_of(z);
  const int64_t pages = has_positions ? p.slots : (z.tokens + p.rows - 1) / p.rows;
  add_rows(*s, &a->window, code, pages, p.rows, p.dim, true);
  if (has_positions) s->array(&a->positions, KVX_DTYPE_S32, {pages, p.rows}, true);
  s->note_array(&a->positions);
  s->array(&a->x, KVX_DTYPE_BF16, {z.tokens, p.dim});
  add_finish(*s, &a->finish, p.dim, 2 * z.tokens + 64);
  add_step(*s, &a->step, z, 5);
  end_args(*s, a);
  s->call = [a] { return kvx_append_swa(a, nullptr); };
  out->push_back(std::move(s));
}

void add_compress(const Sizes& z, Code code, uint64_t flags, Scenes* out) {
  auto s = std::make_unique<Scene>("kvx_compress");
  kvx_compress_args_t* a = s->add_args<kvx_compress_args_t>();
  const Place p = place_of(z);
  const int64_t parts = flags & KVX_COMPRESS_OVERLAP ? 2 : 1;
  a->flags = flags, a->ratio = p.ratio;
  if (flags & KVX_COMPRESS_RUNNING) s->array(&a->state, KVX_DTYPE_F32, {p.slots, 3, p.dim}, true);
  else s->array(&a->state, KVX_DTYPE_F32, {p.slots, flags & KVX_COMPRESS_OVERLAP ? 3 : 1, p.ratio, 2, p.dim}, true);
  s->array(&a->kv, KVX_DTYPE_BF16, {z.tokens, parts * p.dim}),
      s->array(&a->score, KVX_DTYPE_F32, {z.tokens, parts * p.dim});
  s->array(&a->bias, KVX_DTYPE_F32, {p.ratio, parts * p.dim});
  add_finish(*s, &a->finish, p.dim, 2 * z.tokens + 64);
  add_rows(*s, &a->entries, code, p.pages, p.rows, p.dim, true);
  s->indices(&a->block_table, KVX_DTYPE_S32, {p.slots, p.columns}, {0, 1, 2, 3, 4, -1});
  s->indices(&a->num_shared, KVX_DTYPE_S32, {p.slots}, {0, 0, 4});
  add_step(*s, &a->step, z, 6);
  end_args(*s, a);
  s->call = [a] { return kvx_compress(a, nullptr); };
  out->push_back(std::move(s));
}

void add_index_scores(const Sizes& z, Code code, int q_dtype, Scenes* out) {
  auto s = std::make_unique<Scene>("kvx_index_scores");
  kvx_index_scores_args_t* a = s->add_args<kvx_index_scores_args_t>();
  const Place p = place_of(z);
  s->array(&a->q, q_dtype, {z.tokens, z.heads, p.dim}), s->array(&a->weights, KVX_DTYPE_F32, {z.tokens, z.heads});
  add_rows(*s, &a->keys, code, p.pages, p.rows, p.dim, false);
  s->indices(&a->block_table, KVX_DTYPE_S32, {p.slots, p.columns}, {0, 1, 2, 3, 4, -1});
  s->array(&a->scores, KVX_DTYPE_F32, {z.tokens, 9}, true);
  a->ratio = p.ratio;
  add_step(*s, &a->step, z, 20);
  end_args(*s, a);
  s->call = [a] { return kvx_index_scores(a, nullptr); };
  out->push_back(std::move(s));
}

void add_topk(const Sizes& z, Scenes* out) {
  auto s = std::make_unique<Scene>("kvx_topk");
  kvx_topk_args_t* a = s->add_args<kvx_topk_args_t>();
  s->array(&a->scores, KVX_DTYPE_F32, {z.tokens, 40}), s->array(&a->indices, KVX_DTYPE_S32, {z.tokens, 5}, true);
  s->indices(&a->lengths, KVX_DTYPE_S32, {z.tokens}, {40, 3, 0, 17});
  a->memory = KVX_MEMORY_HOST, a->device = -1;
  s->note_sized(&a->workspace, &a->workspace_bytes);
  s->call = [a] {
    uint64_t bytes;
    const int asked = kvx_topk_workspace(a, &bytes), ran = kvx_topk(a, nullptr);
    return ran == KVX_STATUS_OK && asked == KVX_STATUS_INVALID_ARGUMENT ? 77 : ran;
  };
  out->push_back(std::move(s));
}

void add_sparse(const Sizes& z, Code code, bool has_fresh, bool has_selected, Scenes* out) {
  auto s = std::make_unique<Scene>("kvx_attention_sparse");
  kvx_attention_sparse_args_t* a = s->add_args<kvx_attention_sparse_args_t>();
  const Place p = place_of(z);
  const int64_t t = z.tokens, h = z.heads;
  s->array(&a->q, KVX_DTYPE_F16, {t, h, p.dim}), s->array(&a->out, KVX_DTYPE_F32, {t, h, p.dim}, true),
      s->array(&a->lse, KVX_DTYPE_F32, {t, h}, true), s->array(&a->sinks, KVX_DTYPE_F32, {h});
  add_rows(*s, &a->window, code, p.slots, p.rows, p.dim, false);
  s->indices(&a->positions, KVX_DTYPE_S32, {p.slots, p.rows}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
  if (has_fresh) add_rows(*s, &a->fresh, code, (t + 2) / 3, 3, p.dim, false);
  add_rows(*s, &a->entries, code, p.pages, p.rows, p.dim, false);
  s->indices(&a->block_table, KVX_DTYPE_S32, {p.slots, p.columns}, {0, 1, 2, 3, 4, -1});
  if (has_selected) s->indices(&a->selected, KVX_DTYPE_S32, {t, 3}, {0, 2, -1, 1, 3, 5});
  s->array(&a->cos, KVX_DTYPE_F32, {2 * t + 64, p.dim / 4}), s->array(&a->sin, KVX_DTYPE_F32, {2 * t + 64, p.dim / 4});
  s->note_array(&a->fresh.pages), s->note_array(&a->selected);
  add_step(*s, &a->step, z, 8);
  a->ratio = p.ratio, a->window_tokens = p.rows, a->scale = 0.25f;
  s->note_sized(&a->workspace, &a->workspace_bytes);
  end_args(*s, a);
  s->call = [a] {
    uint64_t bytes;
    const int asked = kvx_attention_sparse_workspace(a, &bytes), ran = kvx_attention_sparse(a, nullptr);
    return ran == KVX_STATUS_OK && asked == KVX_STATUS_INVALID_ARGUMENT ? 77 : ran;
  };
  out->push_back(std::move(s));
}

}  // namespace

void add_hybrid_scenes(const Sizes& z, Scenes* out) {
  for (Code code : {BF16_ROWS, F8_ROWS, E2M1_ROWS, F32_ROWS}) {
    add_append_swa(z, code, true, out), add_append_swa(z, code, false, out);
    add_index_scores(z, code, code == F8_ROWS ? KVX_DTYPE_F8_E4M3 : KVX_DTYPE_F16, out);
    add_sparse(z, code, code != F8_ROWS, code == F8_ROWS || code == F32_ROWS, out);
  }
  add_compress(z, BF16_ROWS, KVX_COMPRESS_OVERLAP, out),
      add_compress(z, F8_ROWS, KVX_COMPRESS_RUNNING | KVX_COMPRESS_HADAMARD, out),
      add_compress(z, E2M1_ROWS, KVX_COMPRESS_HADAMARD, out);
  add_topk(z, out);
}

}  // namespace fuzz
