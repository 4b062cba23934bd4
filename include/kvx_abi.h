/* KVX: the C ABI for paged KV caches. Copy this header into any project: it needs only <stdint.h>.
 *
 * Two generations stand side by side in one library:
 *   v1.1  kvx_*_desc_t and kvx_write_kv / kvx_gather_kv, frozen: offsets and numbers are the draft's.
 *   v1.2  kvx_array_t, kvx_plane_t, kvx_cache_t and kvx_write / kvx_gather / kvx_amax: everything v1.1 cannot say.
 *
 * Rules for every call
 *   - Structs are read during the call and not retained; the arrays they point to must live until the stream has run.
 *   - Strides and shapes are in elements, never bytes, unless a field says bytes.
 *   - Slots, tables, lengths and scales live where the cache lives (host memory for HOST, device memory for DEVICE).
 *   - Device calls only enqueue on `stream`: they never synchronise and never allocate, and may be captured in a graph.
 *     Conversions and digests may allocate, and say below whether they may be captured.
 *   - Thread-safe as long as two calls do not write the same cache region at once.
 *
 * Normative text: docs/spec.md. */
#ifndef KVX_ABI_H
#define KVX_ABI_H

#include <stdint.h>

#if defined(_WIN32)
#define KVX_API __declspec(dllexport)
#elif defined(__GNUC__)
#define KVX_API __attribute__((visibility("default")))
#else
#define KVX_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define KVX_ABI_VERSION_MAJOR 1u
#define KVX_ABI_VERSION_MINOR 2u
#define KVX_ABI_VERSION_PATCH 0u
#define KVX_ABI_VERSION ((KVX_ABI_VERSION_MAJOR << 16) | KVX_ABI_VERSION_MINOR)
#define KVX_MAX_TENSOR_DIMS 5

/* ------------------------------------------------------------- enums: values are for ever, all are C int (4 bytes) */

typedef enum kvx_status_t {
  KVX_STATUS_OK = 0,
  KVX_STATUS_INVALID_ARGUMENT = 1, /* a malformed or disagreeing field                                   */
  KVX_STATUS_UNSUPPORTED = 2,      /* well formed, but this build or machine cannot do it                */
  KVX_STATUS_OUT_OF_RANGE = 3,     /* a slot, block id, length or row range outside; nothing written (host) */
  KVX_STATUS_INCOMPATIBLE = 4,     /* another major ABI version                                          */
  KVX_STATUS_INTERNAL_ERROR = 5    /* the device runtime failed; kvx_last_error() has its words          */
} kvx_status_t;

typedef enum kvx_dtype_t {
  KVX_DTYPE_INVALID = 0,
  KVX_DTYPE_F16 = 1,
  KVX_DTYPE_BF16 = 2,
  KVX_DTYPE_F32 = 3,
  KVX_DTYPE_F8_E4M3 = 4, /* finite-only e4m3 ("fn"): largest 448, NaN 0x7f                               */
  KVX_DTYPE_F8_E5M2 = 5, /* largest finite 57344                                                         */
  KVX_DTYPE_S32 = 6,
  KVX_DTYPE_S64 = 7,
  KVX_DTYPE_U32 = 8,
  KVX_DTYPE_U64 = 9,
  KVX_DTYPE_U8 = 10,
  /* since 1.2 */
  KVX_DTYPE_S8 = 11,
  KVX_DTYPE_S4 = 12,   /* two's complement nibbles; the even element is the low nibble                   */
  KVX_DTYPE_E2M1 = 13, /* 4-bit float 0 .5 1 1.5 2 3 4 6; the even element is the low nibble             */
  KVX_DTYPE_E8M0 = 14, /* power-of-two scale 2^(b-127); 255 is NaN. Scales only                          */
  KVX_DTYPE_F64 = 15   /* conversions move it bit for bit; no cache, IO or scale of a call is of it      */
} kvx_dtype_t;

typedef enum kvx_memory_type_t {
  KVX_MEMORY_UNKNOWN = 0,
  KVX_MEMORY_HOST = 1,
  KVX_MEMORY_DEVICE = 2,
  KVX_MEMORY_UNIFIED = 3 /* readable and writable by the device; calls run on the device                 */
} kvx_memory_type_t;

typedef enum kvx_layout_t {
  KVX_LAYOUT_INVALID = 0,
  KVX_LAYOUT_BLOCK_NHD = 1,        /* [num_blocks, block_size, num_kv_heads, head_dim]                   */
  KVX_LAYOUT_BLOCK_HND = 2,        /* [num_blocks, num_kv_heads, block_size, head_dim]                   */
  KVX_LAYOUT_BLOCK_HND_PACKED = 3, /* [num_blocks, num_kv_heads, head_dim/pack, block_size, pack]        */
  KVX_LAYOUT_BLOCK_CUSTOM = 15     /* 4-D: axes named as NHD; 5-D: as HND_PACKED; strides say the order  */
} kvx_layout_t;

typedef enum kvx_block_table_format_t {
  KVX_BLOCK_TABLE_INVALID = 0,
  KVX_BLOCK_TABLE_PACKED = 1,     /* [seq_count, max_blocks_per_seq] block ids                           */
  KVX_BLOCK_TABLE_RAGGED = 2,     /* one block id per token, indptr per sequence                         */
  KVX_BLOCK_TABLE_KV_OFFSETS = 3, /* [seq_count, beam_width, 2, max_blocks_per_seq] KVCacheIndex         */
  KVX_BLOCK_TABLE_PAGE_CSR = 4    /* since 1.2: one block id per block, indptr, last_page_len            */
} kvx_block_table_format_t;

typedef enum kvx_block_table_flags_t {
  KVX_BLOCK_TABLE_FLAG_NONE = 0,
  KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX = 1 /* indices carry bit 31 = secondary pool; -1 = no block          */
} kvx_block_table_flags_t;

typedef enum kvx_scale_granularity_t {
  KVX_SCALE_GRANULARITY_NONE = 0,
  KVX_SCALE_GRANULARITY_PER_TENSOR = 1,     /* []                                                        */
  KVX_SCALE_GRANULARITY_PER_BLOCK = 2,      /* [num_blocks]                                              */
  KVX_SCALE_GRANULARITY_PER_HEAD = 3,       /* [num_kv_heads]                                            */
  KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD = 4, /* [num_blocks, num_kv_heads]                                */
  /* since 1.2 */
  KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD = 5, /* [num_blocks, block_size, num_kv_heads]                    */
  KVX_SCALE_GRANULARITY_PER_GROUP = 6       /* [num_blocks, block_size, num_kv_heads, head_dim/group]    */
} kvx_scale_granularity_t;

/* since 1.2: what a block's name is made with */
typedef enum kvx_hash_t {
  KVX_HASH_INVALID = 0,
  KVX_HASH_BLAKE2B = 1, /* BLAKE2b of 16 bytes, without a key                                            */
  KVX_HASH_SHA256 = 2,  /* 32 bytes                                                                      */
  KVX_HASH_XXH3_128 = 3 /* 16 bytes, seed 0, the high half first and both big-endian. The fastest, and
                           not made against those who look for collisions                                */
} kvx_hash_t;

/* ------------------------------------------------------------------ v1.1 structs: neither move nor grow
 * `size` is sizeof at the producer; a smaller value is INVALID_ARGUMENT, a larger one is accepted. */

typedef struct kvx_version_t {
  uint32_t size;      /* bytes of this struct; filled by kvx_get_version                                 */
  uint32_t abi_major; /* another major cannot be used                                                    */
  uint32_t abi_minor; /* additions only                                                                  */
  uint32_t abi_patch; /* no change visible here                                                          */
} kvx_version_t;

typedef struct kvx_tensor_desc_t {
  uint32_t size;                       /* bytes of this struct                                           */
  kvx_dtype_t dtype;                   /* element type                                                   */
  kvx_layout_t layout;                 /* cache tensors: axes of `shape`; IO tensors: ignored            */
  kvx_memory_type_t memory;            /* HOST, DEVICE or UNIFIED; UNKNOWN is refused                    */
  uint32_t ndim;                       /* dimensions used in shape and stride, 1..5                      */
  int64_t shape[KVX_MAX_TENSOR_DIMS];  /* elements                                                       */
  int64_t stride[KVX_MAX_TENSOR_DIMS]; /* elements; honoured as given                                    */
  void* data;                          /* borrowed; NULL only when the tensor has no elements            */
} kvx_tensor_desc_t;

typedef struct kvx_pool_desc_t {
  uint32_t size;            /* bytes of this struct; 0 = no pool                                         */
  kvx_memory_type_t memory; /* where both pools live                                                     */
  uint32_t bytes_per_block; /* one layer's K (or V) block, bytes; KV_OFFSETS only, else 0                */
  void* primary;            /* borrowed; base for indices with bit 31 clear, advanced to the layer       */
  void* secondary;          /* borrowed; base for bit 31 set; NULL = there is none. Must be readable
                               where the call runs (device calls: mapped pinned memory)                  */
} kvx_pool_desc_t;

typedef struct kvx_cache_desc_t {
  uint32_t size;         /* bytes of this struct                                                         */
  uint32_t num_blocks;   /* blocks; KV_OFFSETS: the bound of an index in either pool                     */
  uint32_t block_size;   /* tokens in a block                                                            */
  uint32_t num_kv_heads; /* heads                                                                        */
  uint32_t head_dim;     /* elements of one head, K and V alike                                          */
  kvx_tensor_desc_t k;   /* key cache                                                                    */
  kvx_tensor_desc_t v;   /* value cache; same dtype and layout as k                                      */
  kvx_pool_desc_t pool;  /* KV_OFFSETS only, else zero                                                   */
} kvx_cache_desc_t;

typedef struct kvx_block_table_t {
  uint32_t size;                   /* bytes of this struct                                               */
  kvx_block_table_format_t format; /* PACKED, RAGGED or KV_OFFSETS                                       */
  kvx_dtype_t index_dtype;         /* S32 or S64; KV_OFFSETS: S32                                        */
  kvx_dtype_t indptr_dtype;        /* RAGGED: S32 or S64; otherwise ignored                              */
  uint32_t seq_count;              /* sequences                                                          */
  uint32_t beam_width;             /* KV_OFFSETS: beams per sequence; otherwise 1                        */
  uint32_t max_blocks_per_seq;     /* columns of the table                                               */
  const void* indices;             /* borrowed; block ids or KVCacheIndex                                */
  const void* indptr;              /* borrowed; RAGGED: token offsets [seq_count + 1]; else NULL         */
  uint32_t indices_count;          /* elements behind `indices`                                          */
  uint32_t indptr_count;           /* RAGGED: seq_count + 1; else 0                                      */
  uint32_t flags;                  /* kvx_block_table_flags_t; KV_OFFSETS needs KVCACHEINDEX             */
} kvx_block_table_t;

typedef struct kvx_slot_mapping_t {
  uint32_t size;        /* bytes of this struct                                                         */
  kvx_dtype_t dtype;    /* S32 or S64                                                                   */
  uint32_t token_count; /* slots; equals the number of IO tokens                                        */
  int64_t invalid_slot; /* this slot is skipped, and so is every negative one                           */
  const void* slots;    /* borrowed; block_id * block_size + offset for each token                      */
} kvx_slot_mapping_t;

typedef struct kvx_seq_lens_t {
  uint32_t size;       /* bytes of this struct                                                           */
  kvx_dtype_t dtype;   /* S32 or S64                                                                     */
  uint32_t seq_count;  /* sequences; equals the table's                                                  */
  const void* lengths; /* borrowed; tokens in the cache per sequence                                     */
} kvx_seq_lens_t;

typedef struct kvx_kv_io_desc_t {
  uint32_t size;           /* bytes of this struct                                                       */
  kvx_tensor_desc_t key;   /* write: input; gather: output                                               */
  kvx_tensor_desc_t value; /* write: input; gather: output                                               */
  uint32_t num_tokens;     /* write: tokens; gather: output rows                                         */
  uint32_t num_kv_heads;   /* equals the cache's                                                         */
  uint32_t head_dim;       /* equals the cache's                                                         */
} kvx_kv_io_desc_t;

typedef struct kvx_scale_desc_t {
  uint32_t size;                       /* bytes of this struct; 0 = absent                               */
  kvx_dtype_t dtype;                   /* F32, F16 or BF16                                               */
  kvx_scale_granularity_t granularity; /* axes of `shape`, see the enum                                  */
  uint32_t ndim;                       /* dimensions of `shape`; 0 = one scalar                          */
  int64_t shape[KVX_MAX_TENSOR_DIMS];  /* elements                                                       */
  int64_t stride[KVX_MAX_TENSOR_DIMS]; /* elements                                                       */
  const void* data;                    /* borrowed; NULL = use k_scale / v_scale instead                 */
} kvx_scale_desc_t;

typedef struct kvx_write_desc_t {
  uint32_t size;                 /* bytes of this struct                                                 */
  kvx_kv_io_desc_t io;           /* tokens to write                                                      */
  kvx_slot_mapping_t slots;      /* where each goes                                                      */
  const void* k_scale;           /* borrowed; one F32, or NULL = 1; ignored by F16, BF16, F32 caches     */
  const void* v_scale;           /* the same for V                                                       */
  kvx_scale_desc_t k_scale_desc; /* FP8 caches; data NULL falls back to k_scale                          */
  kvx_scale_desc_t v_scale_desc; /* the same for V                                                       */
} kvx_write_desc_t;

typedef struct kvx_gather_desc_t {
  uint32_t size;                 /* bytes of this struct                                                 */
  kvx_kv_io_desc_t io;           /* outputs: [S*L, H, D] or [S, L, H, D]; rows past a length become 0    */
  kvx_block_table_t block_table; /* which blocks                                                         */
  kvx_seq_lens_t seq_lens;       /* how many tokens of each sequence                                     */
  uint32_t max_seq_len;          /* L: rows per sequence in the output                                   */
} kvx_gather_desc_t;

/* ------------------------------------------------------------------ v1.2 structs
 * `struct_bytes` is sizeof at the producer: it grows, never shrinks, and a smaller one is INVALID_ARGUMENT.
 * Zero-fill a struct before setting fields, so that later additions read as absent. */

/* A strided array, described and not owned. */
typedef struct kvx_array_t {
  void* data;                          /* borrowed; NULL = absent, or an array of no elements            */
  uint64_t data_bytes;                 /* bytes readable from `data` on; 0 = unknown, not checked        */
  int64_t shape[KVX_MAX_TENSOR_DIMS];  /* elements; entries past ndim are ignored                        */
  int64_t stride[KVX_MAX_TENSOR_DIMS]; /* elements (4-bit types: nibbles); never negative                */
  uint32_t ndim;                       /* 0..5; 0 = one scalar                                           */
  int32_t dtype;                       /* kvx_dtype_t                                                    */
} kvx_array_t;

#define KVX_PLANE_FLAG_SCALE_INLINE 1u /* scales stand in the cell: `scale.data` NULL, see scale_offset */

/* K or V of one cache layer, with the scales that give its bytes a meaning. */
typedef struct kvx_plane_t {
  kvx_array_t data;          /* the elements; shape as `layout` says                                   */
  kvx_array_t scale;         /* axes as `granularity` says. Per token-head and per group: written by
                                kvx_write. Coarser: read. data NULL = no scale, or inline              */
  const float* tensor_scale; /* borrowed; one F32 that multiplies every scale (nvfp4's global scale,
                                v1's k_scale); NULL = 1                                                */
  int32_t layout;            /* kvx_layout_t                                                           */
  int32_t granularity;       /* kvx_scale_granularity_t; NONE for F16, BF16, F32                       */
  uint32_t group_size;       /* elements under one scale, PER_GROUP only, else 0; divides head_dim     */
  uint32_t flags;            /* KVX_PLANE_FLAG_*; unknown bits must be 0                               */
  int64_t scale_offset;      /* inline: bytes from a (token, head) row's first byte to its scales      */
  int32_t scale_dtype;       /* inline: kvx_dtype_t of the scales; separate: ignored                   */
  uint32_t reserved32;       /* 0                                                                      */
  uint64_t reserved[2];      /* 0                                                                      */
} kvx_plane_t;

/* One layer's cache. */
typedef struct kvx_cache_t {
  uint32_t version;         /* KVX_ABI_VERSION of the producer; another major is INCOMPATIBLE            */
  uint32_t struct_bytes;    /* sizeof(kvx_cache_t) at the producer                                       */
  uint64_t flags;           /* 0                                                                         */
  int64_t num_blocks;       /* blocks; KV_OFFSETS: bound of an index in the primary pool                 */
  int64_t block_size;       /* tokens in a block                                                         */
  int64_t num_kv_heads;     /* heads                                                                     */
  int64_t k_head_dim;       /* elements of one K head                                                    */
  int64_t v_head_dim;       /* elements of one V head                                                    */
  int32_t memory;           /* kvx_memory_type_t of every pointer in the call                            */
  int32_t device;           /* device ordinal; -1 = the calling thread's current device                  */
  kvx_plane_t k;            /* keys                                                                      */
  kvx_plane_t v;            /* values; layout, dtype and head_dim may differ from k's                    */
  void* pool_primary;       /* KV_OFFSETS only: base of the primary pool, advanced to the layer          */
  void* pool_secondary;     /* base of the secondary pool; NULL = there is none                          */
  uint64_t bytes_per_block; /* KV_OFFSETS only: one layer's K (or V) block, bytes                        */
  int64_t secondary_blocks; /* bound of an index in the secondary pool; 0 = num_blocks                   */
  uint64_t primary_bytes;   /* bytes readable from pool_primary; 0 = unknown                             */
  uint64_t secondary_bytes; /* bytes readable from pool_secondary; 0 = unknown                           */
  uint64_t reserved[4];     /* 0                                                                         */
} kvx_cache_t;

/* Sequence -> blocks, in any of four encodings. */
typedef struct kvx_table_t {
  uint32_t struct_bytes;     /* sizeof(kvx_table_t) at the producer                                      */
  int32_t format;            /* kvx_block_table_format_t                                                 */
  kvx_array_t indices;       /* S32 or S64. PACKED [S, M] strided; RAGGED [tokens]; PAGE_CSR [pages];
                                KV_OFFSETS [S, W, 2, M] or [S*W, 2, M], S32                              */
  kvx_array_t indptr;        /* RAGGED (tokens) and PAGE_CSR (pages): [S + 1]; else absent               */
  kvx_array_t last_page_len; /* PAGE_CSR: tokens in each sequence's last page [S]; else absent           */
  kvx_array_t seq_lens;      /* tokens in the cache [S]; PAGE_CSR: absent, it follows from the pages     */
  int64_t beam_width;        /* KV_OFFSETS: beams per sequence; else 0 or 1                              */
  uint64_t reserved[2];      /* 0                                                                        */
} kvx_table_t;

typedef struct kvx_write_args_t {
  uint32_t version;          /* KVX_ABI_VERSION of the producer                                          */
  uint32_t struct_bytes;     /* sizeof(kvx_write_args_t) at the producer                                 */
  uint64_t flags;            /* 0                                                                        */
  kvx_array_t k;             /* [T, H, Dk], F16, BF16 or F32, any strides                                */
  kvx_array_t v;             /* [T, H, Dv]                                                               */
  kvx_array_t slots;         /* [T], S32 or S64                                                          */
  int64_t invalid_slot;      /* skipped, as every negative slot is; 0-filled structs must set it (-1)    */
  kvx_array_t k_token_scale; /* scales given with the tokens, F32: per token-head [T, H], per group
                                [T, H, G]. Absent = computed from the row                                */
  kvx_array_t v_token_scale; /* the same for V                                                           */
  uint64_t* errors;          /* borrowed, where the cache lives: out-of-range slots are added to it on
                                the device; NULL = not counted. Host calls return OUT_OF_RANGE instead   */
  uint64_t reserved[4];      /* 0                                                                        */
} kvx_write_args_t;

typedef struct kvx_gather_args_t {
  uint32_t version;       /* KVX_ABI_VERSION of the producer                                             */
  uint32_t struct_bytes;  /* sizeof(kvx_gather_args_t) at the producer                                   */
  uint64_t flags;         /* 0                                                                           */
  kvx_array_t k;          /* output, F16, BF16 or F32: [S*L, H, Dk] or [S, L, H, Dk]; with cu_seqlens
                             [tokens, H, Dk]. S counts beams: sequences * beam_width                     */
  kvx_array_t v;          /* the same for V                                                              */
  kvx_table_t table;      /* which blocks, how many tokens                                               */
  kvx_array_t cu_seqlens; /* packed output: row offsets [S + 1], S32 or S64; absent = padded output      */
  int64_t max_seq_len;    /* L: rows per sequence (padded), or the longest sequence (packed)             */
  uint64_t* errors;       /* as in kvx_write_args_t; rows of a bad block id come out as zero             */
  uint64_t reserved[4];   /* 0                                                                           */
} kvx_gather_args_t;

typedef struct kvx_amax_args_t {
  uint32_t version;      /* KVX_ABI_VERSION of the producer                                              */
  uint32_t struct_bytes; /* sizeof(kvx_amax_args_t) at the producer                                      */
  uint64_t flags;        /* 0                                                                            */
  kvx_array_t x;         /* [T, H, D], F16, BF16 or F32, any strides                                     */
  kvx_array_t slots;     /* [T], S32 or S64: names each token's block; absent = granularity has none     */
  int64_t invalid_slot;  /* skipped, as every negative slot is                                           */
  kvx_array_t amax;      /* in and out, F32, axes as `granularity`: each entry becomes the larger of
                            itself and the |x| it covers. NaN and infinities in x do not count           */
  int64_t block_size;    /* tokens in a block; PER_BLOCK and PER_BLOCK_HEAD only                         */
  int32_t granularity;   /* PER_TENSOR, PER_HEAD, PER_BLOCK or PER_BLOCK_HEAD                            */
  int32_t memory;        /* kvx_memory_type_t of every pointer                                           */
  int32_t device;        /* device ordinal; -1 = current                                                 */
  uint32_t reserved32;   /* 0                                                                            */
  uint64_t* errors;      /* as in kvx_write_args_t                                                       */
  uint64_t reserved[2];  /* 0                                                                            */
} kvx_amax_args_t;

#define KVX_ATTENTION_CAUSAL 1u  /* query i of n sees positions up to seq_len - n + i; else all        */
#define KVX_ATTENTION_PLANNED 2u /* the workspace holds kvx_attention_plan's work for these lengths    */
/* MLA: cache.k holds latent rows, cache.v their rotary parts, one KV head of each. q is [T, Hq, Dk + Dv], a key is
 * latent | rotary, a value is the latent again: out is [T, Hq, Dk]. */
#define KVX_ATTENTION_LATENT 4u
/* Queries and softmax weights may be rounded to F8_E4M3 where that is faster: prefill over caches of that type, on
 * devices that have a kernel for it. Others compute as they do without it. */
#define KVX_ATTENTION_FP8_PRODUCTS 8u

/* Attention of queries over cached keys and values, softmax in f32. */
typedef struct kvx_attention_args_t {
  uint32_t version;          /* KVX_ABI_VERSION of the producer                                           */
  uint32_t struct_bytes;     /* sizeof(kvx_attention_args_t) at the producer                              */
  uint64_t flags;            /* KVX_ATTENTION_*; unknown bits must be 0                                   */
  kvx_array_t q;             /* [T, Hq, Dk], F16, BF16 or F32; Hq a multiple of the cache's heads: query
                                head h reads KV head h / (Hq / H)                                         */
  kvx_array_t out;           /* [T, Hq, Dv], F16, BF16 or F32                                             */
  kvx_array_t lse;           /* [T, Hq] F32: natural logarithm of the sum of exponentials, without the
                                sink; -inf where nothing is seen. Absent = not wanted                     */
  kvx_table_t table;         /* which blocks, how many tokens (seq_lens counts after the append)          */
  kvx_array_t cu_seqlens;    /* queries of sequence s are rows [cu[s], cu[s+1]); [S + 1], S32 or S64.
                                Absent = T / S rows each                                                  */
  kvx_array_t sinks;         /* [Hq] F32: a logit that takes part in the sum and has no value; absent = none */
  float softmax_scale;       /* multiplies q.k; never 0                                                   */
  float soft_cap;            /* c > 0: c * tanh(score / c) instead of the score; 0 = none                 */
  int64_t window;            /* positions a query sees back from its last, that one included; 0 = all     */
  int64_t max_query_len;     /* bound of the queries of one sequence; 0 = T                               */
  int64_t max_seq_len;       /* bound of seq_lens: work is shared out for it; 0 = as the table allows     */
  void* workspace;           /* kvx_attention_workspace bytes where the cache lives, 16-byte aligned;
                                host calls need none                                                      */
  uint64_t workspace_bytes;  /* bytes there                                                               */
  uint64_t* errors;          /* as in kvx_write_args_t; positions of a bad block id are not seen          */
  const int64_t* k_pointers; /* [num_blocks], adjacent, where the cache lives: the address of each block of
                               K, as in kvx_append_args_t, or 0: no block. k.data is then NULL. NULL = one buffer */
  const int64_t* v_pointers; /* the same for V; both or neither                                          */
  uint64_t reserved[2];      /* 0                                                                         */
} kvx_attention_args_t;

/* How pairs of elements rotate. */
typedef enum kvx_rope_style_t {
  KVX_ROPE_NONE = 0,
  KVX_ROPE_HALF = 1,       /* pairs (i, i + rotary_dim/2): GPT-NeoX, Llama in Transformers               */
  KVX_ROPE_INTERLEAVED = 2 /* pairs (2i, 2i + 1): GPT-J, Llama in GGUF                                   */
} kvx_rope_style_t;

/* What happens to a row of Q or K on its way: RMSNorm, then a rotation by its position. f32 throughout. */
typedef struct kvx_norm_rope_t {
  uint32_t struct_bytes; /* sizeof(kvx_norm_rope_t) at the producer                                      */
  int32_t style;         /* kvx_rope_style_t                                                             */
  kvx_array_t q_weight;  /* [Dk], F16, BF16 or F32, adjacent; absent = Q is not normed                   */
  kvx_array_t k_weight;  /* the same for K                                                               */
  kvx_array_t cos;       /* [max_positions, rotary_dim/2], F32 or the IO type, rows adjacent inside; the
                            first rotary_dim elements rotate. NONE: absent                               */
  kvx_array_t sin;       /* the same                                                                     */
  kvx_array_t positions; /* [T], S32 or S64: row of cos and sin for each token. NONE: absent             */
  float eps;             /* under the root                                                               */
  float weight_offset;   /* added to every weight: 0, or 1 where a model stores weights less one         */
  uint64_t reserved[2];  /* 0                                                                            */
} kvx_norm_rope_t;

typedef struct kvx_qkv_norm_rope_args_t {
  uint32_t version;          /* KVX_ABI_VERSION of the producer                                          */
  uint32_t struct_bytes;     /* sizeof(kvx_qkv_norm_rope_args_t) at the producer                         */
  uint64_t flags;            /* 0                                                                        */
  kvx_array_t q;             /* [T, Hq, Dk], F16, BF16 or F32, any strides: views of one fused [T, ...]  */
  kvx_array_t k;             /* [T, H, Dk], the same type; ndim 0 = absent                               */
  kvx_array_t v;             /* [T, H, Dv]; ndim 0 = absent. Copied, bit for bit                         */
  kvx_array_t q_out;         /* like q, any strides that do not overlap; may be q itself                 */
  kvx_array_t k_out;         /* like k                                                                   */
  kvx_array_t v_out;         /* like v                                                                   */
  kvx_norm_rope_t norm_rope; /* what happens to Q and K                                                  */
  int32_t memory;            /* kvx_memory_type_t of every pointer                                       */
  int32_t device;            /* device ordinal; -1 = current                                             */
  uint64_t* errors;          /* positions outside the table are added to it on the device; such a token
                                is left out. Host calls return OUT_OF_RANGE instead                      */
  uint64_t reserved[4];      /* 0                                                                        */
} kvx_qkv_norm_rope_args_t;

typedef struct kvx_append_args_t {
  uint32_t version;          /* KVX_ABI_VERSION of the producer                                          */
  uint32_t struct_bytes;     /* sizeof(kvx_append_args_t) at the producer                                */
  uint64_t flags;            /* 0                                                                        */
  kvx_array_t q;             /* [T, Hq, Dk]; ndim 0 = absent, only K and V are appended                  */
  kvx_array_t k;             /* [T, H, Dk], F16, BF16 or F32, q's type; any strides                      */
  kvx_array_t v;             /* [T, H, Dv], the same type                                                */
  kvx_array_t q_out;         /* like q                                                                   */
  kvx_norm_rope_t norm_rope; /* what happens to Q and K                                                  */
  kvx_array_t slots;         /* [T], S32 or S64, as in kvx_write_args_t; positions are independent       */
  int64_t invalid_slot;      /* skipped, as every negative slot is; Q is still written                   */
  kvx_array_t k_token_scale; /* as in kvx_write_args_t                                                   */
  kvx_array_t v_token_scale; /* as in kvx_write_args_t                                                   */
  kvx_array_t k_pointers;    /* [num_blocks] S64, adjacent: the address of each block of K, a multiple of
                                16, where blocks are buffers of their own (one cache a sequence). k.data
                                is then NULL and its strides describe each. ndim 0 = one buffer          */
  kvx_array_t v_pointers;    /* the same for V; both or neither                                          */
  uint64_t* errors;          /* slots and positions outside, as in kvx_write_args_t                      */
  uint64_t reserved[4];      /* 0                                                                        */
} kvx_append_args_t;

typedef struct kvx_merge_args_t {
  uint32_t version;      /* KVX_ABI_VERSION of the producer                                              */
  uint32_t struct_bytes; /* sizeof(kvx_merge_args_t) at the producer                                     */
  uint64_t flags;        /* 0                                                                            */
  kvx_array_t outs;      /* partial results [P, T, H, D], F16, BF16 or F32, any strides                  */
  kvx_array_t lses;      /* their natural-log sums of exponentials [P, T, H], F32; -inf = nothing seen,
                            and that row of outs is not read                                             */
  kvx_array_t out;       /* [T, H, D], F16, BF16 or F32                                                  */
  kvx_array_t lse;       /* of all parts [T, H], F32, without the sink; ndim 0 = not wanted              */
  kvx_array_t sinks;     /* [H], F32: a logit without a value that enters the sum once; ndim 0 = none    */
  int32_t memory;        /* kvx_memory_type_t of every pointer                                           */
  int32_t device;        /* device ordinal; -1 = current                                                 */
  uint64_t reserved[4];  /* 0                                                                            */
} kvx_merge_args_t;

/* ---- rows of a hybrid cache (docs/hybrid.md, docs/spec.md section 23) */

typedef enum kvx_row_flags_t {
  KVX_ROWS_ROUND_FIRST = 1, /* numbers are rounded to BF16 before they are coded                         */
  KVX_ROWS_POWER_SCALE = 2, /* scales are raised to a power of two, whatever their type                  */
  KVX_ROWS_TIES_DOWN = 4    /* E2M1: ties go to the smaller magnitude, and -0 becomes 0                  */
} kvx_row_flags_t;

/* Pages of `rows` rows each: the elements of all rows, then the scales of all rows, then padding. A slot is page * rows
 * + row. */
typedef struct kvx_rows_t {
  kvx_array_t pages;    /* U8 [num_pages, page_bytes], bytes of a page adjacent; ndim 0 = absent         */
  int64_t rows;         /* of a page                                                                     */
  int64_t dim;          /* elements of a row                                                             */
  int64_t rope_dim;     /* the last of them, kept as BF16 behind the coded ones; 0 = all are coded       */
  int64_t group;        /* coded elements under one scale; 0 = there are none                            */
  int64_t scale_bytes;  /* of a row's scales, padding (zeros) included                                   */
  int32_t dtype;        /* of coded elements: F32, BF16, F8_E4M3 or E2M1                                 */
  int32_t scale_dtype;  /* E8M0, F8_E4M3 or F32; INVALID without scales                                  */
  float least_amax;     /* a group's largest magnitude counts as no less                                 */
  float least_scale;    /* and a scale as no less than this                                              */
  uint64_t flags;       /* kvx_row_flags_t, or-ed                                                        */
  uint64_t reserved[2]; /* 0                                                                             */
} kvx_rows_t;

/* The tokens of a step: sequence s has rows [cu_seqlens[s], cu_seqlens[s + 1]) of every [T, ...] array, at positions
 * starts[s] and on, of the request whose slot is slots[s]. A negative slot skips its tokens, and so are tokens behind
 * the last sequence. A slot is in a step once. All S32, adjacent. */
typedef struct kvx_step_t {
  kvx_array_t slots;      /* [S]                                                                         */
  kvx_array_t cu_seqlens; /* [S + 1], not falling                                                        */
  kvx_array_t starts;     /* [S], 0 or more                                                              */
} kvx_step_t;

/* RMSNorm (no weight: none), then rotation of the last 2 * columns elements, pairs (2i, 2i + 1); f32, as
 * kvx_norm_rope_t. */
typedef struct kvx_finish_t {
  kvx_array_t weight;  /* [dim], F16, BF16 or F32, adjacent; ndim 0 = no norm                             */
  kvx_array_t cos;     /* F32 [max_positions, rope_dim / 2], columns adjacent; ndim 0 = no rotation       */
  kvx_array_t sin;     /* the same                                                                        */
  float eps;           /* under the root                                                                  */
  uint32_t reserved32; /* 0                                                                              */
} kvx_finish_t;

typedef struct kvx_append_swa_args_t {
  uint32_t version;      /* KVX_ABI_VERSION of the producer                                              */
  uint32_t struct_bytes; /* sizeof(kvx_append_swa_args_t) at the producer                                */
  uint64_t flags;        /* 0                                                                            */
  kvx_rows_t window;     /* a page a slot: the row of position p is p % rows. With no `positions`: rows of
                            this step alone, row t % rows of page t / rows for token t                   */
  kvx_array_t positions; /* S32 [num_pages, rows]: of each row's token; ndim 0 = absent, see `window`    */
  kvx_array_t x;         /* [T, dim], F16, BF16 or F32                                                   */
  kvx_finish_t finish;   /* what is done to x first                                                      */
  kvx_step_t step;
  uint64_t* errors;     /* slots and positions outside are added to it; NULL = not counted              */
  int32_t memory;       /* kvx_memory_type_t of every pointer                                           */
  int32_t device;       /* device ordinal; -1 = current                                                 */
  uint64_t reserved[4]; /* 0                                                                            */
} kvx_append_swa_args_t;

typedef enum kvx_compress_flags_t {
  KVX_COMPRESS_OVERLAP =
      1, /* rows of kv and score are (ovl, cur): what a token gives to the next entry and to its own */
  KVX_COMPRESS_RUNNING = 2, /* the state is largest score, sum of weights, mean; not with OVERLAP       */
  KVX_COMPRESS_HADAMARD = 4 /* entries are rotated by an orthonormal Walsh-Hadamard matrix; dim is a power of two */
} kvx_compress_flags_t;

typedef struct kvx_compress_args_t {
  uint32_t version;        /* KVX_ABI_VERSION of the producer                                            */
  uint32_t struct_bytes;   /* sizeof(kvx_compress_args_t) at the producer                                */
  uint64_t flags;          /* kvx_compress_flags_t, or-ed                                                */
  kvx_array_t state;       /* F32 adjacent [slots, 3, ratio, 2, dim] (OVERLAP), [slots, 3, dim] (RUNNING) or
                              [slots, 1, ratio, 2, dim]; read and written                                */
  kvx_array_t kv;          /* [T, parts * dim], BF16, F16 or F32; parts is 2 with OVERLAP, else 1        */
  kvx_array_t score;       /* the same                                                                   */
  kvx_array_t bias;        /* F32 [ratio, parts * dim], adjacent: added to scores; ndim 0 = none         */
  kvx_finish_t finish;     /* of entries; entry j is rotated as position j * ratio                       */
  kvx_rows_t entries;      /* where they go                                                              */
  kvx_array_t block_table; /* S32 [slots, columns]: pages of entries; entry j of a slot is row j % rows of page [slot, j
                              / rows] */
  kvx_array_t num_shared;  /* S32 [slots]: entries of tokens before this position are not written; ndim 0 = all are */
  kvx_step_t step;
  int64_t ratio;        /* tokens of an entry                                                         */
  uint64_t* errors;     /* slots, pages and positions outside are added to it; NULL = not counted     */
  int32_t memory;       /* kvx_memory_type_t of every pointer                                         */
  int32_t device;       /* device ordinal; -1 = current                                               */
  uint64_t reserved[4]; /* 0                                                                          */
} kvx_compress_args_t;

typedef struct kvx_index_scores_args_t {
  uint32_t version;        /* KVX_ABI_VERSION of the producer                                            */
  uint32_t struct_bytes;   /* sizeof(kvx_index_scores_args_t) at the producer                            */
  uint64_t flags;          /* 0                                                                          */
  kvx_array_t q;           /* [T, H, dim], F16, BF16, F32 or F8_E4M3 (its scale is in the weights)       */
  kvx_array_t weights;     /* F32 [T, H]                                                                 */
  kvx_rows_t keys;         /* of entries                                                                 */
  kvx_array_t block_table; /* S32 [slots, columns], as in kvx_compress_args_t                            */
  kvx_array_t scores;      /* F32 [T, E], columns adjacent: sum over heads of weight * max(q.key, 0), -inf for entries
                              that a token may not read: those from (position + 1) / ratio on            */
  kvx_step_t step;
  int64_t ratio;        /* tokens of an entry                                                         */
  uint64_t* errors;     /* slots and pages outside are added to it (their scores are -inf); NULL = not counted */
  int32_t memory;       /* kvx_memory_type_t of every pointer                                         */
  int32_t device;       /* device ordinal; -1 = current                                               */
  uint64_t reserved[4]; /* 0                                                                          */
} kvx_index_scores_args_t;

typedef struct kvx_topk_args_t {
  uint32_t version;         /* KVX_ABI_VERSION of the producer                                           */
  uint32_t struct_bytes;    /* sizeof(kvx_topk_args_t) at the producer                                   */
  uint64_t flags;           /* 0                                                                         */
  kvx_array_t scores;       /* F32 [T, E], columns adjacent; NaN counts as -inf                          */
  kvx_array_t lengths;      /* S32 [T]: scores from here on are not read; ndim 0 = all are               */
  kvx_array_t indices;      /* S32 [T, k], columns adjacent: highest scores first, ties to the lower index, -1 where no
                               score above -inf is left                                                  */
  void* workspace;          /* kvx_topk_workspace bytes, 256-aligned; HOST: NULL                         */
  uint64_t workspace_bytes; /* its size                                                                  */
  int32_t memory;           /* kvx_memory_type_t of every pointer                                        */
  int32_t device;           /* device ordinal; -1 = current                                              */
  uint64_t reserved[4];     /* 0                                                                         */
} kvx_topk_args_t;

typedef struct kvx_attention_sparse_args_t {
  uint32_t version;      /* KVX_ABI_VERSION of the producer                                           */
  uint32_t struct_bytes; /* sizeof(kvx_attention_sparse_args_t) at the producer                       */
  uint64_t flags;        /* 0                                                                         */
  kvx_array_t q;         /* [T, H, dim], F16, BF16 or F32                                             */
  kvx_array_t out;       /* [T, H, dim], F16, BF16 or F32                                             */
  kvx_array_t lse;       /* F32 [T, H], natural, without the sink; ndim 0 = not wanted                */
  kvx_array_t sinks;     /* F32 [H]; ndim 0 = none                                                    */
  kvx_rows_t window;     /* as in kvx_append_swa_args_t: keys, which are values too                   */
  kvx_array_t positions; /* S32 [num_pages, rows] of the window's rows                                */
  kvx_rows_t
      fresh; /* rows of this step's tokens: they are read here and not in the window; absent = they are in the window */
  kvx_rows_t entries;      /* absent = none                                                             */
  kvx_array_t block_table; /* S32 [slots, columns] of entries                                           */
  kvx_array_t
      selected;    /* S32 [T, k]: entries that a token reads, negative = none, none twice; ndim 0 = all up to its own */
  kvx_array_t cos; /* F32 [max_positions, rope_dim / 2], columns adjacent: out is turned back by its token's position;
                      ndim 0 = it is not                                                        */
  kvx_array_t sin; /* the same                                                                  */
  kvx_step_t step;
  int64_t ratio;            /* tokens of an entry                                                        */
  int64_t window_tokens;    /* a token sees so many positions, its own included                          */
  int64_t max_entries;      /* no token has more; 0 = as the block table allows                          */
  float scale;              /* multiplies q.k                                                            */
  uint32_t reserved32;      /* 0                                                                         */
  void* workspace;          /* kvx_attention_sparse_workspace bytes, 256-aligned; HOST: NULL             */
  uint64_t workspace_bytes; /* its size                                                                  */
  uint64_t* errors;         /* slots, pages and positions outside are added to it; NULL = not counted    */
  int32_t memory;           /* kvx_memory_type_t of every pointer                                        */
  int32_t device;           /* device ordinal; -1 = current                                              */
  uint64_t reserved[4];     /* 0                                                                         */
} kvx_attention_sparse_args_t;

typedef struct kvx_copy_blocks_args_t {
  uint32_t version;      /* KVX_ABI_VERSION of the producer                                              */
  uint32_t struct_bytes; /* sizeof(kvx_copy_blocks_args_t) at the producer                               */
  uint64_t flags;        /* 0                                                                            */
  kvx_array_t pairs;     /* [n, 2] block ids, S32 or S64: source, destination. A negative id skips the
                            pair. No block is a destination twice, or a source and a destination         */
  uint64_t* errors;      /* pairs outside the cache are added to it on the device; host calls return
                            OUT_OF_RANGE instead                                                         */
  uint64_t reserved[4];  /* 0                                                                            */
} kvx_copy_blocks_args_t;

/* What this library was built with and found on this machine. Strings live as long as the library. */
typedef struct kvx_build_info_t {
  uint32_t struct_bytes;  /* in: sizeof at the caller                                                   */
  uint32_t has_cuda;      /* 1 = device code is in the library                                          */
  const char* cuda_archs; /* "80,90a,120+PTX"; "" without CUDA                                          */
  const char* simd;       /* the widest instructions used: "amx", "avx512bf16", "avx512vnni", "avx512",
                             "avx2", "neon-dotprod", "neon" or "plain"                                  */
  int32_t max_threads;    /* OpenMP threads a host call may use; 1 without OpenMP                       */
  int32_t cuda_devices;   /* devices usable now; 0 without a driver                                     */
  int32_t cuda_runtime;   /* CUDA runtime version, 1000 * major + 10 * minor; 0 without CUDA            */
  int32_t cuda_driver;    /* the same for the driver; 0 = no driver                                     */
} kvx_build_info_t;

/* ------------------------------------------------------------------ conversion (v1.2)
 * A plan says how the bytes of one cache become those of another. It holds no address, so one plan serves many runs.
 * As bytes it is flat and little-endian: one kvx_plan_header_t, num_boxes times kvx_plan_box_t, num_cells times
 * kvx_plan_cell_t, then num_src_sizes and num_dst_sizes pairs (uint64_t count, uint64_t bytes): so many buffers in a
 * row have so many bytes. kvx.plan() makes one in Python; kvx_plan_load reads it.
 *
 * A box is a rectangle of elements through which both sides step evenly. For one unit of tokens in block `b`, it moves
 *   run_bytes from  src_buffers[src.buffer + b*src.block_step + sum(i*src_step)]
 *                   + src.offset + b*src.block + t(src) + sum(i*src)
 *   to the same of dst, over all i of its digits,
 *   where t(side) = (u / token_split) * token_outer + (u % token_split) * token_inner
 * and u is the token of the block at which the unit starts (0 where both sides have one block size).
 * Where elements change their format, the box has a cell: its digits then are layers, heads and tokens, and each of
 * their indices names one row of head_dim elements, read by the source's format and written by the destination's. */
#define KVX_PLAN_MAGIC 0x5058564bu /* the bytes "KVXP" */
#define KVX_PLAN_VERSION 1
#define KVX_PLAN_MAX_DIGITS 12

typedef struct kvx_plan_header_t {
  uint32_t magic;           /* KVX_PLAN_MAGIC                                                            */
  uint32_t version;         /* KVX_PLAN_VERSION                                                          */
  uint64_t plan_bytes;      /* of everything, header included                                            */
  uint32_t num_boxes;       /* 0 = nothing to move                                                       */
  uint32_t num_src_buffers; /* allocations of the source, all shards                                     */
  uint32_t num_dst_buffers; /* allocations of the destination, all shards                                */
  uint32_t unit_tokens;     /* tokens moved for one pair of blocks; divides both block sizes              */
  int64_t src_block_size;   /* tokens in a block                                                         */
  int64_t dst_block_size;   /* tokens in a block                                                         */
  int64_t src_num_blocks;   /* block ids are under this                                                  */
  int64_t dst_num_blocks;   /* block ids are under this                                                  */
  uint32_t num_src_sizes;   /* pairs of the source at the end of the plan                                */
  uint32_t num_dst_sizes;   /* pairs of the destination after them                                       */
  uint32_t num_cells;       /* 0 = no format changes                                                     */
  uint32_t content;         /* for kvx_digest: a number of what rows hold, part of their keys; 0 = unsaid */
} kvx_plan_header_t;

typedef struct kvx_plan_digit_t {
  int64_t size;      /* 1 or more                                                                         */
  int64_t src;       /* bytes from one to the next at the source                                          */
  int64_t dst;       /* bytes from one to the next at the destination                                     */
  int32_t src_step;  /* buffers from one to the next at the source; 0 = the same buffer                   */
  int32_t dst_step;  /* the same of the destination                                                       */
  int64_t token;     /* tokens from one to the next; 0 = not an axis of tokens                            */
  int64_t layer;     /* layers from one to the next; 0 = not an axis of layers                            */
  int64_t src_scale; /* cells: bytes from one to the next among the source's scales                      */
  int64_t dst_scale; /* cells: the same of the destination                                               */
} kvx_plan_digit_t;

typedef struct kvx_plan_side_t {
  int64_t offset;      /* bytes into the buffer                                                          */
  int64_t block;       /* bytes from block to block; 0 where blocks have buffers of their own            */
  int64_t token_split; /* tokens inside one outer step; the block size where tokens are not split        */
  int64_t token_outer; /* bytes of an outer step                                                         */
  int64_t token_inner; /* bytes of an inner step                                                         */
  int32_t buffer;      /* first buffer                                                                   */
  int32_t block_step;  /* buffers from block to block; 0 = blocks share one                              */
} kvx_plan_side_t;

typedef struct kvx_plan_box_t {
  kvx_plan_side_t src;
  kvx_plan_side_t dst;
  int64_t run_bytes;                           /* adjacent on both sides                                */
  uint32_t num_digits;                         /* 0 to KVX_PLAN_MAX_DIGITS                              */
  uint32_t cell;                               /* 0 = bytes move as they are; n = cell n-1 of the plan  */
  kvx_plan_digit_t digit[KVX_PLAN_MAX_DIGITS]; /* in any order; past num_digits unread                  */
  uint64_t reserved[2];                        /* 0                                                     */
} kvx_plan_box_t;

/* One side of a row: docs/spec.md sections 9 and 11 have the arithmetic. */
typedef struct kvx_plan_format_t {
  int32_t dtype;               /* kvx_dtype_t of the elements                                            */
  int32_t granularity;         /* kvx_scale_granularity_t                                                */
  int32_t scale_dtype;         /* kvx_dtype_t of the scales; unread without                              */
  uint32_t group_size;         /* elements under one scale; head_dim where one serves a row or more      */
  uint32_t pack;               /* elements of the inner part of dim; head_dim where it is whole          */
  uint32_t is_inline;          /* 1 = scales stand in the row, at scale_offset from its start            */
  int64_t dim_outer;           /* bytes from pack to pack                                                */
  int64_t dim_inner;           /* bytes from element to element of a pack; 4-bit types have two a byte   */
  int64_t scale_offset;        /* bytes into the row, or into the scale buffer                           */
  int64_t scale_block;         /* bytes from block to block among the scales; 0 = shared or inline       */
  int64_t scale_token;         /* bytes from token to token, for units that start inside a block         */
  int64_t scale_group;         /* bytes from group to group                                              */
  int32_t scale_buffer;        /* which buffer holds the scales; -1 = none                               */
  int32_t tensor_scale_buffer; /* f32, one a layer, multiplies every scale; -1 = none                    */
  int64_t first_layer;         /* the layer index 0 stands for in that buffer                            */
} kvx_plan_format_t;

typedef struct kvx_plan_cell_t {
  kvx_plan_format_t src;
  kvx_plan_format_t dst; /* per token-head and per group: scales are found and written; per block and
                          * per block-head: found in a pass of their own; otherwise they are read      */
  uint32_t head_dim;     /* elements of a row                                                           */
  uint32_t reserved32;   /* 0                                                                           */
} kvx_plan_cell_t;

/* Addresses for a plan. Where either side is DEVICE or UNIFIED the call runs on the device, and the other may be HOST
 * if it is pinned. Block ids: [n] and [n], or [num_seqs, columns] tables on both sides. A negative
 * id skips its blocks. */
typedef struct kvx_convert_args_t {
  uint32_t version;               /* KVX_ABI_VERSION                                                   */
  uint32_t struct_bytes;          /* sizeof(kvx_convert_args_t)                                        */
  uint64_t flags;                 /* 0                                                                 */
  kvx_memory_type_t src_memory;   /* HOST, DEVICE or UNIFIED                                           */
  kvx_memory_type_t dst_memory;   /* HOST, DEVICE or UNIFIED                                           */
  kvx_memory_type_t table_memory; /* of src_blocks, dst_blocks and seq_lens                            */
  int32_t device;                 /* -1 = the current one                                              */
  const void* const* src_buffers; /* host array of num_src_buffers addresses; read during the call     */
  void* const* dst_buffers;       /* host array of num_dst_buffers addresses; read during the call     */
  const uint64_t* src_bytes;      /* host array, size of each; NULL = trust the plan                   */
  const uint64_t* dst_bytes;      /* host array, size of each; NULL = trust the plan                   */
  kvx_array_t src_blocks;         /* S32 or S64, [n] or [num_seqs, columns]                            */
  kvx_array_t dst_blocks;         /* S32 or S64, [n] or [num_seqs, columns]                            */
  kvx_array_t seq_lens;           /* S32 or S64, [num_seqs]; data NULL = every block is full           */
  void* errors;                   /* device uint64_t: bad ids are added to it; NULL = not counted      */
  uint64_t reserved[4];           /* 0                                                                 */
} kvx_convert_args_t;

typedef struct kvx_plan kvx_plan_t;   /* a loaded plan                          */
typedef struct kvx_bound kvx_bound_t; /* a plan with addresses, ready to run    */

/* ------------------------------------------------------------------ calls
 * `stream` is a cudaStream_t (NULL = the default stream); host calls ignore it. */

/* Fill `version`, including its size. */
KVX_API kvx_status_t kvx_get_version(kvx_version_t* version);
/* INCOMPATIBLE when `major` is not this library's, OK otherwise. A newer minor is accepted. */
KVX_API kvx_status_t kvx_check_version(uint32_t major, uint32_t minor);
/* The name of a status: "OK", "INVALID_ARGUMENT", ... Never NULL. */
KVX_API const char* kvx_status_text(kvx_status_t status);
/* The sentence of the last failed call on this thread; "" when none failed. Valid until the next
 * call on this thread. */
KVX_API const char* kvx_last_error(void);
KVX_API kvx_status_t kvx_build_info(kvx_build_info_t* info);

/* v1.1. kvx_gather_kv has no scales: FP8 elements come out as they are; kvx_gather dequantises. */
KVX_API kvx_status_t kvx_validate_cache_desc(const kvx_cache_desc_t* cache);
KVX_API kvx_status_t kvx_write_kv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write, void* stream);
KVX_API kvx_status_t kvx_gather_kv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather, void* stream);

/* v1.1, the draft's kernel names: they do the same. The typed ones also require that IO type; tokens_per_seq must
 * divide T. */
KVX_API kvx_status_t kvx_launch_write_kv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write, void* stream);
KVX_API kvx_status_t kvx_launch_write_kv_f32(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                                             void* stream);
KVX_API kvx_status_t kvx_launch_write_kv_f16(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                                             void* stream);
KVX_API kvx_status_t kvx_launch_write_kv_bf16(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                                              void* stream);
KVX_API kvx_status_t kvx_launch_write_kv_prefill(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                                                 int32_t tokens_per_seq, void* stream);
KVX_API kvx_status_t kvx_launch_write_kv_prefill_f32(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                                                     int32_t tokens_per_seq, void* stream);
KVX_API kvx_status_t kvx_launch_write_kv_prefill_f16(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                                                     int32_t tokens_per_seq, void* stream);
KVX_API kvx_status_t kvx_launch_write_kv_prefill_bf16(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                                                      int32_t tokens_per_seq, void* stream);
KVX_API kvx_status_t kvx_launch_gather_kv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather, void* stream);
KVX_API kvx_status_t kvx_launch_gather_kv_f32(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                                              void* stream);
KVX_API kvx_status_t kvx_launch_gather_kv_f16(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                                              void* stream);
KVX_API kvx_status_t kvx_launch_gather_kv_bf16(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                                               void* stream);

/* v1.2. The validate calls run every check of the call that reads descriptors alone (no slots, tables or lengths). */
KVX_API kvx_status_t kvx_validate_cache(const kvx_cache_t* cache);
KVX_API kvx_status_t kvx_validate_write(const kvx_cache_t* cache, const kvx_write_args_t* args);
KVX_API kvx_status_t kvx_validate_gather(const kvx_cache_t* cache, const kvx_gather_args_t* args);
/* Put each token's K and V into its slot. Two tokens with one slot: unspecified, and it need not
 * be all of one token. */
KVX_API kvx_status_t kvx_write(const kvx_cache_t* cache, const kvx_write_args_t* args, void* stream);
/* Read sequences out of the cache, dequantised, in order. */
KVX_API kvx_status_t kvx_gather(const kvx_cache_t* cache, const kvx_gather_args_t* args, void* stream);
/* The largest |x| per tensor, head, block or block-head: what a scale is made from. */
KVX_API kvx_status_t kvx_amax(const kvx_amax_args_t* args, void* stream);

/* Bytes of workspace these arguments need, from shapes alone: sequences, heads and max_query_len, not lengths. */
KVX_API kvx_status_t kvx_attention_workspace(const kvx_cache_t* cache, const kvx_attention_args_t* args,
                                             uint64_t* bytes);
/* Shares out the work of a step into the workspace, by the lengths on the device; every layer's
 * call then says PLANNED. */
KVX_API kvx_status_t kvx_attention_plan(const kvx_cache_t* cache, const kvx_attention_args_t* args, void* stream);
KVX_API kvx_status_t kvx_attention(const kvx_cache_t* cache, const kvx_attention_args_t* args, void* stream);

/* RMSNorm and rotation of Q and K rows; V is copied. K and V may be absent. docs/spec.md section
 * 19 has the arithmetic. */
KVX_API kvx_status_t kvx_qkv_norm_rope(const kvx_qkv_norm_rope_args_t* args, void* stream);
/* The same in one launch with kvx_write: Q to q_out, K and V rounded to the IO type and put into their slots. */
KVX_API kvx_status_t kvx_qkv_norm_rope_append(const kvx_cache_t* cache, const kvx_append_args_t* args, void* stream);

/* Partial attention results into one, by their log-sum-exps. */
KVX_API kvx_status_t kvx_merge_attention(const kvx_merge_args_t* args, void* stream);
/* Copy whole blocks inside one cache, scales with a block axis included. */
KVX_API kvx_status_t kvx_copy_blocks(const kvx_cache_t* cache, const kvx_copy_blocks_args_t* args, void* stream);

/* Hybrid caches (docs/spec.md section 23). Rows of tokens into each request's window: of more tokens than it has rows,
 * the last. */
KVX_API kvx_status_t kvx_append_swa(const kvx_append_swa_args_t* args, void* stream);
/* Tokens into the sums of their entries; entries that they complete are normed, rotated, coded and put into their
 * pages. */
KVX_API kvx_status_t kvx_compress(const kvx_compress_args_t* args, void* stream);
KVX_API kvx_status_t kvx_index_scores(const kvx_index_scores_args_t* args, void* stream);
/* Bytes of workspace these arguments need, from shapes alone. */
KVX_API kvx_status_t kvx_topk_workspace(const kvx_topk_args_t* args, uint64_t* bytes);
KVX_API kvx_status_t kvx_topk(const kvx_topk_args_t* args, void* stream);
KVX_API kvx_status_t kvx_attention_sparse_workspace(const kvx_attention_sparse_args_t* args, uint64_t* bytes);
KVX_API kvx_status_t kvx_attention_sparse(const kvx_attention_sparse_args_t* args, void* stream);

/* Names of blocks by their content: names[i] = H(names[i - 1] | tokens of block i as little-endian int32), and of the
 * first H(parent | ...). `hash` is a kvx_hash_t; parent and each name have its bytes, tokens are [num_blocks,
 * block_size]. Host memory. */
KVX_API kvx_status_t kvx_hash_blocks(int32_t hash, const void* parent, const int32_t* tokens, int64_t num_blocks,
                                     int64_t block_size, void* names);

/* Read a plan. Everything in it is checked here, so that running it cannot leave the buffers it names. */
KVX_API kvx_status_t kvx_plan_load(const void* bytes, uint64_t num_bytes, kvx_plan_t** plan);
KVX_API void kvx_plan_free(kvx_plan_t* plan); /* NULL is fine; bound plans live on */
/* Bind, run, let go. What runs often costs less when it is bound once: addresses are checked and prepared then. */
KVX_API kvx_status_t kvx_convert(const kvx_plan_t* plan, const kvx_convert_args_t* args, void* stream);
/* Add the content digest of the source's blocks to digest[0] and digest[1], which lie where the call runs. `plan` goes
 * from the cache to coordinates (Python makes it); of `args`, what says source, source blocks, lengths and memory is
 * read. */
KVX_API kvx_status_t kvx_digest(const kvx_plan_t* plan, const kvx_convert_args_t* args, uint64_t* digest, void* stream);
/* Check addresses and host tables, and prepare. Device tables are read anew by every run. Not
 * inside a graph capture. */
KVX_API kvx_status_t kvx_bind(const kvx_plan_t* plan, const kvx_convert_args_t* args, kvx_bound_t** bound);
KVX_API kvx_status_t kvx_run(const kvx_bound_t* bound, void* stream);
/* The same for blocks that change while buffers stay. Of `args`, kvx_bind_buffers does not read src_blocks, dst_blocks,
 * seq_lens, table_memory and errors, and kvx_run_blocks reads nothing but these and the head (version, struct_bytes,
 * flags). Ids and lengths of the host are checked and copied by each run; they reach a device in stream order, and a
 * run may be captured: the graph keeps its copy. */
KVX_API kvx_status_t kvx_bind_buffers(const kvx_plan_t* plan, const kvx_convert_args_t* args, kvx_bound_t** bound);
KVX_API kvx_status_t kvx_run_blocks(const kvx_bound_t* bound, const kvx_convert_args_t* args, void* stream);
/* NULL is fine. No call may be in it; what calls have enqueued on a stream goes on. */
KVX_API void kvx_bound_free(kvx_bound_t* bound);

#ifdef __cplusplus
}
#endif
#endif /* KVX_ABI_H */
