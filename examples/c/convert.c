/* One cache's blocks as another's, in plain C and host memory.
 * The plan comes from a file that Python wrote: open(path, "wb").write(kvx.plan(src, dst).to_bytes()).
 *
 *   convert PLAN OUT    fills the source with numbers, converts all blocks, writes the destination's buffers to OUT */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvx_abi.h"

/* One side of a plan: as many buffers as it names, of the sizes it states. The library owns none of them. */
typedef struct side_t {
  uint32_t count;
  void** buffers;
  uint64_t* bytes;
} side_t;

static int failed(const char* call, kvx_status_t status) {
  if (status != KVX_STATUS_OK)
    fprintf(stderr, "%s returned %s\n  %s\n", call, kvx_status_text(status), kvx_last_error());
  return status != KVX_STATUS_OK;
}

static void* need(void* memory) {
  if (memory == NULL) {
    fprintf(stderr, "no memory\n");
    exit(1);
  }
  return memory;
}

static unsigned char* read_file(const char* path, uint64_t* num_bytes) {
  FILE* file = fopen(path, "rb");
  unsigned char* bytes = NULL;
  size_t have = 0, got = 1;
  if (file == NULL) {
    fprintf(stderr, "cannot read %s\n", path);
    exit(1);
  }
  while (got > 0) {
    bytes = need(realloc(bytes, have + 65536));
    got = fread(bytes + have, 1, 65536, file);
    have += got;
  }
  fclose(file);
  *num_bytes = have;
  return bytes;
}

/* `pairs` points at (count, bytes) pairs: so many buffers in a row have so many bytes. */
static side_t allocate_side(uint32_t num_buffers, const unsigned char* pairs, uint32_t num_pairs) {
  side_t side;
  uint64_t pair[2];
  side.count = 0;
  side.buffers = need(calloc(num_buffers + 1u, sizeof *side.buffers));
  side.bytes = need(calloc(num_buffers + 1u, sizeof *side.bytes));
  for (uint32_t i = 0; i < num_pairs; i++) {
    memcpy(pair, pairs + i * sizeof pair, sizeof pair); /* a plan's bytes need not be aligned */
    for (uint64_t n = 0; n < pair[0]; n++, side.count++) {
      side.bytes[side.count] = pair[1];
      side.buffers[side.count] = need(calloc(pair[1] ? (size_t)pair[1] : 1, 1));
    }
  }
  return side;
}

static void free_side(side_t* side) {
  for (uint32_t i = 0; i < side->count; i++) free(side->buffers[i]);
  free(side->buffers);
  free(side->bytes);
}

static kvx_array_t list_of(int64_t* ids, int64_t count) {
  kvx_array_t a;
  memset(&a, 0, sizeof a); /* zero first, so that fields of later versions read as absent */
  a.data = ids;
  a.data_bytes = (uint64_t)count * sizeof *ids;
  a.dtype = KVX_DTYPE_S64;
  a.ndim = 1;
  a.shape[0] = count;
  a.stride[0] = 1;
  return a;
}

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: convert PLAN OUT\n");
    return 2;
  }
  uint64_t num_bytes;
  unsigned char* bytes = read_file(argv[1], &num_bytes);
  kvx_plan_t* plan;
  if (failed("kvx_check_version", kvx_check_version(KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR))) return 1;
  if (failed("kvx_plan_load", kvx_plan_load(bytes, num_bytes, &plan))) return 1;

  /* The library has checked the counts, so they can be trusted from here on. */
  kvx_plan_header_t header;
  memcpy(&header, bytes, sizeof header);
  const unsigned char* pairs =
      bytes + sizeof header + header.num_boxes * sizeof(kvx_plan_box_t) + header.num_cells * sizeof(kvx_plan_cell_t);
  side_t src = allocate_side(header.num_src_buffers, pairs, header.num_src_sizes);
  side_t dst = allocate_side(header.num_dst_buffers, pairs + 16u * header.num_src_sizes, header.num_dst_sizes);
  free(bytes); /* a loaded plan keeps its own copy */

  uint32_t at = 0; /* of all source bytes, buffer after buffer */
  for (uint32_t i = 0; i < src.count; i++)
    for (uint64_t b = 0; b < src.bytes[i]; b++, at++)
      ((unsigned char*)src.buffers[i])[b] = (unsigned char)(at * 2654435761u >> 24);

  /* As many tokens as fill whole blocks on both sides. The source's blocks are taken from the end, the destination's
   * from 0. */
  int64_t tokens = header.src_num_blocks * header.src_block_size;
  if (tokens > header.dst_num_blocks * header.dst_block_size) tokens = header.dst_num_blocks * header.dst_block_size;
  while (tokens % header.src_block_size || tokens % header.dst_block_size) tokens--;
  const int64_t num_src = tokens / header.src_block_size, num_dst = tokens / header.dst_block_size;
  int64_t* src_ids = need(calloc((size_t)num_src + 1, sizeof *src_ids));
  int64_t* dst_ids = need(calloc((size_t)num_dst + 1, sizeof *dst_ids));
  for (int64_t i = 0; i < num_src; i++) src_ids[i] = header.src_num_blocks - 1 - i;
  for (int64_t i = 0; i < num_dst; i++) dst_ids[i] = i;

  kvx_convert_args_t args;
  memset(&args, 0, sizeof args);
  args.version = KVX_ABI_VERSION;
  args.struct_bytes = sizeof args;
  args.src_memory = args.dst_memory = args.table_memory = KVX_MEMORY_HOST;
  args.device = -1;
  args.src_buffers = (const void* const*)src.buffers;
  args.dst_buffers = dst.buffers;
  args.src_bytes = src.bytes;
  args.dst_bytes = dst.bytes;
  args.src_blocks = list_of(src_ids, num_src);
  args.dst_blocks = list_of(dst_ids, num_dst);
  if (failed("kvx_convert", kvx_convert(plan, &args, NULL))) return 1;

  FILE* out = fopen(argv[2], "wb");
  if (out == NULL) {
    fprintf(stderr, "cannot write %s\n", argv[2]);
    return 1;
  }
  void** first = need(calloc(dst.count + 1u, sizeof *first)); /* what kvx_convert made, to compare with */
  for (uint32_t i = 0; i < dst.count; i++) {
    fwrite(dst.buffers[i], 1, (size_t)dst.bytes[i], out);
    first[i] = need(malloc(dst.bytes[i] ? (size_t)dst.bytes[i] : 1));
    memcpy(first[i], dst.buffers[i], (size_t)dst.bytes[i]);
    memset(dst.buffers[i], 0, (size_t)dst.bytes[i]);
  }
  fclose(out);

  /* The same in two steps: what is run often is checked and prepared once. The ids were copied and the plan is not
   * needed any more. */
  kvx_bound_t* bound;
  if (failed("kvx_bind", kvx_bind(plan, &args, &bound))) return 1;
  kvx_plan_free(plan);
  free(src_ids);
  free(dst_ids);
  if (failed("kvx_run", kvx_run(bound, NULL))) return 1;
  kvx_bound_free(bound);

  int same = 1;
  for (uint32_t i = 0; i < dst.count; i++) {
    same = same && memcmp(first[i], dst.buffers[i], (size_t)dst.bytes[i]) == 0;
    free(first[i]);
  }
  free(first);
  printf("converted %lld blocks of %lld tokens in %u buffers into %lld blocks of %lld in %u; kvx_run made %s\n",
         (long long)num_src, (long long)header.src_block_size, src.count, (long long)num_dst,
         (long long)header.dst_block_size, dst.count, same ? "the same bytes" : "DIFFERENT bytes");
  free_side(&src);
  free_side(&dst);
  return same ? 0 : 1;
}
