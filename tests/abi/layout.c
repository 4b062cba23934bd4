/* Freezes the bytes of the ABI: compiling this file is the test. It is C11 and C++17 at once, since both kinds of
 * client share one binary interface. A number here changes only together with the major version. */
#include <stddef.h>

#include "kvx_abi.h"

#ifdef __cplusplus
#define FREEZE(condition, text) static_assert(condition, text)
#else
#define FREEZE(condition, text) _Static_assert(condition, text)
#endif

#define VALUE(name, number) FREEZE((name) == (number), #name " is " #number)
#define ENUM(type) FREEZE(sizeof(type) == 4, #type " is 4 bytes")
#define STRUCT(type, bytes) FREEZE(sizeof(type) == (bytes), #type " has " #bytes " bytes")
/* The width too: two fields that swap sizes can keep every later offset. */
#define FIELD(type, field, offset, bytes)                                        \
  FREEZE(offsetof(type, field) == (offset), #type "." #field " is at " #offset); \
  FREEZE(sizeof(((type*)0)->field) == (bytes), #type "." #field " has " #bytes " bytes")

/* The numbers below are those of 64-bit machines. */
FREEZE(sizeof(void*) == 8, "pointers have 8 bytes");

/* ------------------------------------------------------------------ enums and constants */

VALUE(KVX_ABI_VERSION_MAJOR, 1u);
VALUE(KVX_ABI_VERSION, (KVX_ABI_VERSION_MAJOR << 16 | KVX_ABI_VERSION_MINOR));
FREEZE(KVX_ABI_VERSION_MINOR >= 2u, "the structs of 1.2 are in this header");
VALUE(KVX_MAX_TENSOR_DIMS, 5);
VALUE(KVX_PLANE_FLAG_SCALE_INLINE, 1u);

ENUM(kvx_status_t);
VALUE(KVX_STATUS_OK, 0);
VALUE(KVX_STATUS_INVALID_ARGUMENT, 1);
VALUE(KVX_STATUS_UNSUPPORTED, 2);
VALUE(KVX_STATUS_OUT_OF_RANGE, 3);
VALUE(KVX_STATUS_INCOMPATIBLE, 4);
VALUE(KVX_STATUS_INTERNAL_ERROR, 5);

ENUM(kvx_rope_style_t);
VALUE(KVX_ROPE_NONE, 0);
VALUE(KVX_ROPE_HALF, 1);
VALUE(KVX_ROPE_INTERLEAVED, 2);

ENUM(kvx_dtype_t);
VALUE(KVX_DTYPE_INVALID, 0);
VALUE(KVX_DTYPE_F16, 1);
VALUE(KVX_DTYPE_BF16, 2);
VALUE(KVX_DTYPE_F32, 3);
VALUE(KVX_DTYPE_F8_E4M3, 4);
VALUE(KVX_DTYPE_F8_E5M2, 5);
VALUE(KVX_DTYPE_S32, 6);
VALUE(KVX_DTYPE_S64, 7);
VALUE(KVX_DTYPE_U32, 8);
VALUE(KVX_DTYPE_U64, 9);
VALUE(KVX_DTYPE_U8, 10);
VALUE(KVX_DTYPE_S8, 11);
VALUE(KVX_DTYPE_S4, 12);
VALUE(KVX_DTYPE_E2M1, 13);
VALUE(KVX_DTYPE_E8M0, 14);
VALUE(KVX_DTYPE_F64, 15);

ENUM(kvx_memory_type_t);
VALUE(KVX_MEMORY_UNKNOWN, 0);
VALUE(KVX_MEMORY_HOST, 1);
VALUE(KVX_MEMORY_DEVICE, 2);
VALUE(KVX_MEMORY_UNIFIED, 3);

ENUM(kvx_layout_t);
VALUE(KVX_LAYOUT_INVALID, 0);
VALUE(KVX_LAYOUT_BLOCK_NHD, 1);
VALUE(KVX_LAYOUT_BLOCK_HND, 2);
VALUE(KVX_LAYOUT_BLOCK_HND_PACKED, 3);
VALUE(KVX_LAYOUT_BLOCK_CUSTOM, 15);

ENUM(kvx_block_table_format_t);
VALUE(KVX_BLOCK_TABLE_INVALID, 0);
VALUE(KVX_BLOCK_TABLE_PACKED, 1);
VALUE(KVX_BLOCK_TABLE_RAGGED, 2);
VALUE(KVX_BLOCK_TABLE_KV_OFFSETS, 3);
VALUE(KVX_BLOCK_TABLE_PAGE_CSR, 4);

ENUM(kvx_block_table_flags_t);
VALUE(KVX_BLOCK_TABLE_FLAG_NONE, 0);
VALUE(KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX, 1);

ENUM(kvx_scale_granularity_t);
VALUE(KVX_SCALE_GRANULARITY_NONE, 0);
VALUE(KVX_SCALE_GRANULARITY_PER_TENSOR, 1);
VALUE(KVX_SCALE_GRANULARITY_PER_BLOCK, 2);
VALUE(KVX_SCALE_GRANULARITY_PER_HEAD, 3);
VALUE(KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD, 4);
VALUE(KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD, 5);
VALUE(KVX_SCALE_GRANULARITY_PER_GROUP, 6);

ENUM(kvx_row_flags_t);
VALUE(KVX_ROWS_ROUND_FIRST, 1);
VALUE(KVX_ROWS_POWER_SCALE, 2);
VALUE(KVX_ROWS_TIES_DOWN, 4);

ENUM(kvx_compress_flags_t);
VALUE(KVX_COMPRESS_OVERLAP, 1);
VALUE(KVX_COMPRESS_RUNNING, 2);
VALUE(KVX_COMPRESS_HADAMARD, 4);

ENUM(kvx_hash_t);
VALUE(KVX_HASH_INVALID, 0);
VALUE(KVX_HASH_BLAKE2B, 1);
VALUE(KVX_HASH_SHA256, 2);
VALUE(KVX_HASH_XXH3_128, 3);

/* ------------------------------------------------------------------ v1.1: offsets measured on the
 * draft's own header */

STRUCT(kvx_version_t, 16);
FIELD(kvx_version_t, size, 0, 4);
FIELD(kvx_version_t, abi_major, 4, 4);
FIELD(kvx_version_t, abi_minor, 8, 4);
FIELD(kvx_version_t, abi_patch, 12, 4);

STRUCT(kvx_tensor_desc_t, 112);
FIELD(kvx_tensor_desc_t, size, 0, 4);
FIELD(kvx_tensor_desc_t, dtype, 4, 4);
FIELD(kvx_tensor_desc_t, layout, 8, 4);
FIELD(kvx_tensor_desc_t, memory, 12, 4);
FIELD(kvx_tensor_desc_t, ndim, 16, 4);
FIELD(kvx_tensor_desc_t, shape, 24, 40);
FIELD(kvx_tensor_desc_t, stride, 64, 40);
FIELD(kvx_tensor_desc_t, data, 104, 8);

STRUCT(kvx_pool_desc_t, 32);
FIELD(kvx_pool_desc_t, size, 0, 4);
FIELD(kvx_pool_desc_t, memory, 4, 4);
FIELD(kvx_pool_desc_t, bytes_per_block, 8, 4);
FIELD(kvx_pool_desc_t, primary, 16, 8);
FIELD(kvx_pool_desc_t, secondary, 24, 8);

STRUCT(kvx_cache_desc_t, 280);
FIELD(kvx_cache_desc_t, size, 0, 4);
FIELD(kvx_cache_desc_t, num_blocks, 4, 4);
FIELD(kvx_cache_desc_t, block_size, 8, 4);
FIELD(kvx_cache_desc_t, num_kv_heads, 12, 4);
FIELD(kvx_cache_desc_t, head_dim, 16, 4);
FIELD(kvx_cache_desc_t, k, 24, 112);
FIELD(kvx_cache_desc_t, v, 136, 112);
FIELD(kvx_cache_desc_t, pool, 248, 32);

STRUCT(kvx_block_table_t, 64);
FIELD(kvx_block_table_t, size, 0, 4);
FIELD(kvx_block_table_t, format, 4, 4);
FIELD(kvx_block_table_t, index_dtype, 8, 4);
FIELD(kvx_block_table_t, indptr_dtype, 12, 4);
FIELD(kvx_block_table_t, seq_count, 16, 4);
FIELD(kvx_block_table_t, beam_width, 20, 4);
FIELD(kvx_block_table_t, max_blocks_per_seq, 24, 4);
FIELD(kvx_block_table_t, indices, 32, 8);
FIELD(kvx_block_table_t, indptr, 40, 8);
FIELD(kvx_block_table_t, indices_count, 48, 4);
FIELD(kvx_block_table_t, indptr_count, 52, 4);
FIELD(kvx_block_table_t, flags, 56, 4);

STRUCT(kvx_slot_mapping_t, 32);
FIELD(kvx_slot_mapping_t, size, 0, 4);
FIELD(kvx_slot_mapping_t, dtype, 4, 4);
FIELD(kvx_slot_mapping_t, token_count, 8, 4);
FIELD(kvx_slot_mapping_t, invalid_slot, 16, 8);
FIELD(kvx_slot_mapping_t, slots, 24, 8);

STRUCT(kvx_seq_lens_t, 24);
FIELD(kvx_seq_lens_t, size, 0, 4);
FIELD(kvx_seq_lens_t, dtype, 4, 4);
FIELD(kvx_seq_lens_t, seq_count, 8, 4);
FIELD(kvx_seq_lens_t, lengths, 16, 8);

STRUCT(kvx_kv_io_desc_t, 248);
FIELD(kvx_kv_io_desc_t, size, 0, 4);
FIELD(kvx_kv_io_desc_t, key, 8, 112);
FIELD(kvx_kv_io_desc_t, value, 120, 112);
FIELD(kvx_kv_io_desc_t, num_tokens, 232, 4);
FIELD(kvx_kv_io_desc_t, num_kv_heads, 236, 4);
FIELD(kvx_kv_io_desc_t, head_dim, 240, 4);

STRUCT(kvx_scale_desc_t, 104);
FIELD(kvx_scale_desc_t, size, 0, 4);
FIELD(kvx_scale_desc_t, dtype, 4, 4);
FIELD(kvx_scale_desc_t, granularity, 8, 4);
FIELD(kvx_scale_desc_t, ndim, 12, 4);
FIELD(kvx_scale_desc_t, shape, 16, 40);
FIELD(kvx_scale_desc_t, stride, 56, 40);
FIELD(kvx_scale_desc_t, data, 96, 8);

STRUCT(kvx_write_desc_t, 512);
FIELD(kvx_write_desc_t, size, 0, 4);
FIELD(kvx_write_desc_t, io, 8, 248);
FIELD(kvx_write_desc_t, slots, 256, 32);
FIELD(kvx_write_desc_t, k_scale, 288, 8);
FIELD(kvx_write_desc_t, v_scale, 296, 8);
FIELD(kvx_write_desc_t, k_scale_desc, 304, 104);
FIELD(kvx_write_desc_t, v_scale_desc, 408, 104);

STRUCT(kvx_gather_desc_t, 352);
FIELD(kvx_gather_desc_t, size, 0, 4);
FIELD(kvx_gather_desc_t, io, 8, 248);
FIELD(kvx_gather_desc_t, block_table, 256, 64);
FIELD(kvx_gather_desc_t, seq_lens, 320, 24);
FIELD(kvx_gather_desc_t, max_seq_len, 344, 4);

/* ------------------------------------------------------------------ v1.2: structs may grow at the end, and this file
 * with them */

STRUCT(kvx_array_t, 104);
FIELD(kvx_array_t, data, 0, 8);
FIELD(kvx_array_t, data_bytes, 8, 8);
FIELD(kvx_array_t, shape, 16, 40);
FIELD(kvx_array_t, stride, 56, 40);
FIELD(kvx_array_t, ndim, 96, 4);
FIELD(kvx_array_t, dtype, 100, 4);

STRUCT(kvx_plane_t, 264);
FIELD(kvx_plane_t, data, 0, 104);
FIELD(kvx_plane_t, scale, 104, 104);
FIELD(kvx_plane_t, tensor_scale, 208, 8);
FIELD(kvx_plane_t, layout, 216, 4);
FIELD(kvx_plane_t, granularity, 220, 4);
FIELD(kvx_plane_t, group_size, 224, 4);
FIELD(kvx_plane_t, flags, 228, 4);
FIELD(kvx_plane_t, scale_offset, 232, 8);
FIELD(kvx_plane_t, scale_dtype, 240, 4);
FIELD(kvx_plane_t, reserved32, 244, 4);
FIELD(kvx_plane_t, reserved, 248, 16);

STRUCT(kvx_cache_t, 672);
FIELD(kvx_cache_t, version, 0, 4);
FIELD(kvx_cache_t, struct_bytes, 4, 4);
FIELD(kvx_cache_t, flags, 8, 8);
FIELD(kvx_cache_t, num_blocks, 16, 8);
FIELD(kvx_cache_t, block_size, 24, 8);
FIELD(kvx_cache_t, num_kv_heads, 32, 8);
FIELD(kvx_cache_t, k_head_dim, 40, 8);
FIELD(kvx_cache_t, v_head_dim, 48, 8);
FIELD(kvx_cache_t, memory, 56, 4);
FIELD(kvx_cache_t, device, 60, 4);
FIELD(kvx_cache_t, k, 64, 264);
FIELD(kvx_cache_t, v, 328, 264);
FIELD(kvx_cache_t, pool_primary, 592, 8);
FIELD(kvx_cache_t, pool_secondary, 600, 8);
FIELD(kvx_cache_t, bytes_per_block, 608, 8);
FIELD(kvx_cache_t, secondary_blocks, 616, 8);
FIELD(kvx_cache_t, primary_bytes, 624, 8);
FIELD(kvx_cache_t, secondary_bytes, 632, 8);
FIELD(kvx_cache_t, reserved, 640, 32);

STRUCT(kvx_table_t, 448);
FIELD(kvx_table_t, struct_bytes, 0, 4);
FIELD(kvx_table_t, format, 4, 4);
FIELD(kvx_table_t, indices, 8, 104);
FIELD(kvx_table_t, indptr, 112, 104);
FIELD(kvx_table_t, last_page_len, 216, 104);
FIELD(kvx_table_t, seq_lens, 320, 104);
FIELD(kvx_table_t, beam_width, 424, 8);
FIELD(kvx_table_t, reserved, 432, 16);

STRUCT(kvx_write_args_t, 584);
FIELD(kvx_write_args_t, version, 0, 4);
FIELD(kvx_write_args_t, struct_bytes, 4, 4);
FIELD(kvx_write_args_t, flags, 8, 8);
FIELD(kvx_write_args_t, k, 16, 104);
FIELD(kvx_write_args_t, v, 120, 104);
FIELD(kvx_write_args_t, slots, 224, 104);
FIELD(kvx_write_args_t, invalid_slot, 328, 8);
FIELD(kvx_write_args_t, k_token_scale, 336, 104);
FIELD(kvx_write_args_t, v_token_scale, 440, 104);
FIELD(kvx_write_args_t, errors, 544, 8);
FIELD(kvx_write_args_t, reserved, 552, 32);

STRUCT(kvx_gather_args_t, 824);
FIELD(kvx_gather_args_t, version, 0, 4);
FIELD(kvx_gather_args_t, struct_bytes, 4, 4);
FIELD(kvx_gather_args_t, flags, 8, 8);
FIELD(kvx_gather_args_t, k, 16, 104);
FIELD(kvx_gather_args_t, v, 120, 104);
FIELD(kvx_gather_args_t, table, 224, 448);
FIELD(kvx_gather_args_t, cu_seqlens, 672, 104);
FIELD(kvx_gather_args_t, max_seq_len, 776, 8);
FIELD(kvx_gather_args_t, errors, 784, 8);
FIELD(kvx_gather_args_t, reserved, 792, 32);

STRUCT(kvx_amax_args_t, 384);
FIELD(kvx_amax_args_t, version, 0, 4);
FIELD(kvx_amax_args_t, struct_bytes, 4, 4);
FIELD(kvx_amax_args_t, flags, 8, 8);
FIELD(kvx_amax_args_t, x, 16, 104);
FIELD(kvx_amax_args_t, slots, 120, 104);
FIELD(kvx_amax_args_t, invalid_slot, 224, 8);
FIELD(kvx_amax_args_t, amax, 232, 104);
FIELD(kvx_amax_args_t, block_size, 336, 8);
FIELD(kvx_amax_args_t, granularity, 344, 4);
FIELD(kvx_amax_args_t, memory, 348, 4);
FIELD(kvx_amax_args_t, device, 352, 4);
FIELD(kvx_amax_args_t, reserved32, 356, 4);
FIELD(kvx_amax_args_t, errors, 360, 8);
FIELD(kvx_amax_args_t, reserved, 368, 16);

VALUE(KVX_ATTENTION_CAUSAL, 1u);
VALUE(KVX_ATTENTION_PLANNED, 2u);
VALUE(KVX_ATTENTION_LATENT, 4u);
VALUE(KVX_ATTENTION_FP8_PRODUCTS, 8u);

STRUCT(kvx_attention_args_t, 1072);
FIELD(kvx_attention_args_t, version, 0, 4);
FIELD(kvx_attention_args_t, struct_bytes, 4, 4);
FIELD(kvx_attention_args_t, flags, 8, 8);
FIELD(kvx_attention_args_t, q, 16, 104);
FIELD(kvx_attention_args_t, out, 120, 104);
FIELD(kvx_attention_args_t, lse, 224, 104);
FIELD(kvx_attention_args_t, table, 328, 448);
FIELD(kvx_attention_args_t, cu_seqlens, 776, 104);
FIELD(kvx_attention_args_t, sinks, 880, 104);
FIELD(kvx_attention_args_t, softmax_scale, 984, 4);
FIELD(kvx_attention_args_t, soft_cap, 988, 4);
FIELD(kvx_attention_args_t, window, 992, 8);
FIELD(kvx_attention_args_t, max_query_len, 1000, 8);
FIELD(kvx_attention_args_t, max_seq_len, 1008, 8);
FIELD(kvx_attention_args_t, workspace, 1016, 8);
FIELD(kvx_attention_args_t, workspace_bytes, 1024, 8);
FIELD(kvx_attention_args_t, errors, 1032, 8);
FIELD(kvx_attention_args_t, k_pointers, 1040, 8);
FIELD(kvx_attention_args_t, v_pointers, 1048, 8);
FIELD(kvx_attention_args_t, reserved, 1056, 16);

STRUCT(kvx_build_info_t, 40);
FIELD(kvx_build_info_t, struct_bytes, 0, 4);
FIELD(kvx_build_info_t, has_cuda, 4, 4);
FIELD(kvx_build_info_t, cuda_archs, 8, 8);
FIELD(kvx_build_info_t, simd, 16, 8);
FIELD(kvx_build_info_t, max_threads, 24, 4);
FIELD(kvx_build_info_t, cuda_devices, 28, 4);
FIELD(kvx_build_info_t, cuda_runtime, 32, 4);
FIELD(kvx_build_info_t, cuda_driver, 36, 4);

STRUCT(kvx_convert_args_t, 416);
FIELD(kvx_convert_args_t, version, 0, 4);
FIELD(kvx_convert_args_t, struct_bytes, 4, 4);
FIELD(kvx_convert_args_t, flags, 8, 8);
FIELD(kvx_convert_args_t, src_memory, 16, 4);
FIELD(kvx_convert_args_t, dst_memory, 20, 4);
FIELD(kvx_convert_args_t, table_memory, 24, 4);
FIELD(kvx_convert_args_t, device, 28, 4);
FIELD(kvx_convert_args_t, src_buffers, 32, 8);
FIELD(kvx_convert_args_t, dst_buffers, 40, 8);
FIELD(kvx_convert_args_t, src_bytes, 48, 8);
FIELD(kvx_convert_args_t, dst_bytes, 56, 8);
FIELD(kvx_convert_args_t, src_blocks, 64, 104);
FIELD(kvx_convert_args_t, dst_blocks, 168, 104);
FIELD(kvx_convert_args_t, seq_lens, 272, 104);
FIELD(kvx_convert_args_t, errors, 376, 8);
FIELD(kvx_convert_args_t, reserved, 384, 32);

STRUCT(kvx_norm_rope_t, 552);
FIELD(kvx_norm_rope_t, struct_bytes, 0, 4);
FIELD(kvx_norm_rope_t, style, 4, 4);
FIELD(kvx_norm_rope_t, q_weight, 8, 104);
FIELD(kvx_norm_rope_t, k_weight, 112, 104);
FIELD(kvx_norm_rope_t, cos, 216, 104);
FIELD(kvx_norm_rope_t, sin, 320, 104);
FIELD(kvx_norm_rope_t, positions, 424, 104);
FIELD(kvx_norm_rope_t, eps, 528, 4);
FIELD(kvx_norm_rope_t, weight_offset, 532, 4);
FIELD(kvx_norm_rope_t, reserved, 536, 16);

STRUCT(kvx_qkv_norm_rope_args_t, 1240);
FIELD(kvx_qkv_norm_rope_args_t, version, 0, 4);
FIELD(kvx_qkv_norm_rope_args_t, struct_bytes, 4, 4);
FIELD(kvx_qkv_norm_rope_args_t, flags, 8, 8);
FIELD(kvx_qkv_norm_rope_args_t, q, 16, 104);
FIELD(kvx_qkv_norm_rope_args_t, k, 120, 104);
FIELD(kvx_qkv_norm_rope_args_t, v, 224, 104);
FIELD(kvx_qkv_norm_rope_args_t, q_out, 328, 104);
FIELD(kvx_qkv_norm_rope_args_t, k_out, 432, 104);
FIELD(kvx_qkv_norm_rope_args_t, v_out, 536, 104);
FIELD(kvx_qkv_norm_rope_args_t, norm_rope, 640, 552);
FIELD(kvx_qkv_norm_rope_args_t, memory, 1192, 4);
FIELD(kvx_qkv_norm_rope_args_t, device, 1196, 4);
FIELD(kvx_qkv_norm_rope_args_t, errors, 1200, 8);
FIELD(kvx_qkv_norm_rope_args_t, reserved, 1208, 32);

STRUCT(kvx_append_args_t, 1552);
FIELD(kvx_append_args_t, version, 0, 4);
FIELD(kvx_append_args_t, struct_bytes, 4, 4);
FIELD(kvx_append_args_t, flags, 8, 8);
FIELD(kvx_append_args_t, q, 16, 104);
FIELD(kvx_append_args_t, k, 120, 104);
FIELD(kvx_append_args_t, v, 224, 104);
FIELD(kvx_append_args_t, q_out, 328, 104);
FIELD(kvx_append_args_t, norm_rope, 432, 552);
FIELD(kvx_append_args_t, slots, 984, 104);
FIELD(kvx_append_args_t, invalid_slot, 1088, 8);
FIELD(kvx_append_args_t, k_token_scale, 1096, 104);
FIELD(kvx_append_args_t, v_token_scale, 1200, 104);
FIELD(kvx_append_args_t, k_pointers, 1304, 104);
FIELD(kvx_append_args_t, v_pointers, 1408, 104);
FIELD(kvx_append_args_t, errors, 1512, 8);
FIELD(kvx_append_args_t, reserved, 1520, 32);

STRUCT(kvx_merge_args_t, 576);
FIELD(kvx_merge_args_t, version, 0, 4);
FIELD(kvx_merge_args_t, struct_bytes, 4, 4);
FIELD(kvx_merge_args_t, flags, 8, 8);
FIELD(kvx_merge_args_t, outs, 16, 104);
FIELD(kvx_merge_args_t, lses, 120, 104);
FIELD(kvx_merge_args_t, out, 224, 104);
FIELD(kvx_merge_args_t, lse, 328, 104);
FIELD(kvx_merge_args_t, sinks, 432, 104);
FIELD(kvx_merge_args_t, memory, 536, 4);
FIELD(kvx_merge_args_t, device, 540, 4);
FIELD(kvx_merge_args_t, reserved, 544, 32);

STRUCT(kvx_copy_blocks_args_t, 160);
FIELD(kvx_copy_blocks_args_t, version, 0, 4);
FIELD(kvx_copy_blocks_args_t, struct_bytes, 4, 4);
FIELD(kvx_copy_blocks_args_t, flags, 8, 8);
FIELD(kvx_copy_blocks_args_t, pairs, 16, 104);
FIELD(kvx_copy_blocks_args_t, errors, 120, 8);
FIELD(kvx_copy_blocks_args_t, reserved, 128, 32);

STRUCT(kvx_rows_t, 184);
FIELD(kvx_rows_t, pages, 0, 104);
FIELD(kvx_rows_t, rows, 104, 8);
FIELD(kvx_rows_t, dim, 112, 8);
FIELD(kvx_rows_t, rope_dim, 120, 8);
FIELD(kvx_rows_t, group, 128, 8);
FIELD(kvx_rows_t, scale_bytes, 136, 8);
FIELD(kvx_rows_t, dtype, 144, 4);
FIELD(kvx_rows_t, scale_dtype, 148, 4);
FIELD(kvx_rows_t, least_amax, 152, 4);
FIELD(kvx_rows_t, least_scale, 156, 4);
FIELD(kvx_rows_t, flags, 160, 8);
FIELD(kvx_rows_t, reserved, 168, 16);

STRUCT(kvx_step_t, 312);
FIELD(kvx_step_t, slots, 0, 104);
FIELD(kvx_step_t, cu_seqlens, 104, 104);
FIELD(kvx_step_t, starts, 208, 104);

STRUCT(kvx_finish_t, 320);
FIELD(kvx_finish_t, weight, 0, 104);
FIELD(kvx_finish_t, cos, 104, 104);
FIELD(kvx_finish_t, sin, 208, 104);
FIELD(kvx_finish_t, eps, 312, 4);
FIELD(kvx_finish_t, reserved32, 316, 4);

STRUCT(kvx_append_swa_args_t, 1088);
FIELD(kvx_append_swa_args_t, version, 0, 4);
FIELD(kvx_append_swa_args_t, struct_bytes, 4, 4);
FIELD(kvx_append_swa_args_t, flags, 8, 8);
FIELD(kvx_append_swa_args_t, window, 16, 184);
FIELD(kvx_append_swa_args_t, positions, 200, 104);
FIELD(kvx_append_swa_args_t, x, 304, 104);
FIELD(kvx_append_swa_args_t, finish, 408, 320);
FIELD(kvx_append_swa_args_t, step, 728, 312);
FIELD(kvx_append_swa_args_t, errors, 1040, 8);
FIELD(kvx_append_swa_args_t, memory, 1048, 4);
FIELD(kvx_append_swa_args_t, device, 1052, 4);
FIELD(kvx_append_swa_args_t, reserved, 1056, 32);

STRUCT(kvx_compress_args_t, 1512);
FIELD(kvx_compress_args_t, version, 0, 4);
FIELD(kvx_compress_args_t, struct_bytes, 4, 4);
FIELD(kvx_compress_args_t, flags, 8, 8);
FIELD(kvx_compress_args_t, state, 16, 104);
FIELD(kvx_compress_args_t, kv, 120, 104);
FIELD(kvx_compress_args_t, score, 224, 104);
FIELD(kvx_compress_args_t, bias, 328, 104);
FIELD(kvx_compress_args_t, finish, 432, 320);
FIELD(kvx_compress_args_t, entries, 752, 184);
FIELD(kvx_compress_args_t, block_table, 936, 104);
FIELD(kvx_compress_args_t, num_shared, 1040, 104);
FIELD(kvx_compress_args_t, step, 1144, 312);
FIELD(kvx_compress_args_t, ratio, 1456, 8);
FIELD(kvx_compress_args_t, errors, 1464, 8);
FIELD(kvx_compress_args_t, memory, 1472, 4);
FIELD(kvx_compress_args_t, device, 1476, 4);
FIELD(kvx_compress_args_t, reserved, 1480, 32);

STRUCT(kvx_index_scores_args_t, 984);
FIELD(kvx_index_scores_args_t, version, 0, 4);
FIELD(kvx_index_scores_args_t, struct_bytes, 4, 4);
FIELD(kvx_index_scores_args_t, flags, 8, 8);
FIELD(kvx_index_scores_args_t, q, 16, 104);
FIELD(kvx_index_scores_args_t, weights, 120, 104);
FIELD(kvx_index_scores_args_t, keys, 224, 184);
FIELD(kvx_index_scores_args_t, block_table, 408, 104);
FIELD(kvx_index_scores_args_t, scores, 512, 104);
FIELD(kvx_index_scores_args_t, step, 616, 312);
FIELD(kvx_index_scores_args_t, ratio, 928, 8);
FIELD(kvx_index_scores_args_t, errors, 936, 8);
FIELD(kvx_index_scores_args_t, memory, 944, 4);
FIELD(kvx_index_scores_args_t, device, 948, 4);
FIELD(kvx_index_scores_args_t, reserved, 952, 32);

STRUCT(kvx_topk_args_t, 384);
FIELD(kvx_topk_args_t, version, 0, 4);
FIELD(kvx_topk_args_t, struct_bytes, 4, 4);
FIELD(kvx_topk_args_t, flags, 8, 8);
FIELD(kvx_topk_args_t, scores, 16, 104);
FIELD(kvx_topk_args_t, lengths, 120, 104);
FIELD(kvx_topk_args_t, indices, 224, 104);
FIELD(kvx_topk_args_t, workspace, 328, 8);
FIELD(kvx_topk_args_t, workspace_bytes, 336, 8);
FIELD(kvx_topk_args_t, memory, 344, 4);
FIELD(kvx_topk_args_t, device, 348, 4);
FIELD(kvx_topk_args_t, reserved, 352, 32);

STRUCT(kvx_attention_sparse_args_t, 1912);
FIELD(kvx_attention_sparse_args_t, version, 0, 4);
FIELD(kvx_attention_sparse_args_t, struct_bytes, 4, 4);
FIELD(kvx_attention_sparse_args_t, flags, 8, 8);
FIELD(kvx_attention_sparse_args_t, q, 16, 104);
FIELD(kvx_attention_sparse_args_t, out, 120, 104);
FIELD(kvx_attention_sparse_args_t, lse, 224, 104);
FIELD(kvx_attention_sparse_args_t, sinks, 328, 104);
FIELD(kvx_attention_sparse_args_t, window, 432, 184);
FIELD(kvx_attention_sparse_args_t, positions, 616, 104);
FIELD(kvx_attention_sparse_args_t, fresh, 720, 184);
FIELD(kvx_attention_sparse_args_t, entries, 904, 184);
FIELD(kvx_attention_sparse_args_t, block_table, 1088, 104);
FIELD(kvx_attention_sparse_args_t, selected, 1192, 104);
FIELD(kvx_attention_sparse_args_t, cos, 1296, 104);
FIELD(kvx_attention_sparse_args_t, sin, 1400, 104);
FIELD(kvx_attention_sparse_args_t, step, 1504, 312);
FIELD(kvx_attention_sparse_args_t, ratio, 1816, 8);
FIELD(kvx_attention_sparse_args_t, window_tokens, 1824, 8);
FIELD(kvx_attention_sparse_args_t, max_entries, 1832, 8);
FIELD(kvx_attention_sparse_args_t, scale, 1840, 4);
FIELD(kvx_attention_sparse_args_t, reserved32, 1844, 4);
FIELD(kvx_attention_sparse_args_t, workspace, 1848, 8);
FIELD(kvx_attention_sparse_args_t, workspace_bytes, 1856, 8);
FIELD(kvx_attention_sparse_args_t, errors, 1864, 8);
FIELD(kvx_attention_sparse_args_t, memory, 1872, 4);
FIELD(kvx_attention_sparse_args_t, device, 1876, 4);
FIELD(kvx_attention_sparse_args_t, reserved, 1880, 32);

/* ------------------------------------------------------------------ plans: bytes of files too. They change with
 * KVX_PLAN_VERSION alone */

VALUE(KVX_PLAN_MAGIC, 0x5058564bu);
VALUE(KVX_PLAN_VERSION, 1);
VALUE(KVX_PLAN_MAX_DIGITS, 12);

STRUCT(kvx_plan_header_t, 80);
FIELD(kvx_plan_header_t, magic, 0, 4);
FIELD(kvx_plan_header_t, version, 4, 4);
FIELD(kvx_plan_header_t, plan_bytes, 8, 8);
FIELD(kvx_plan_header_t, num_boxes, 16, 4);
FIELD(kvx_plan_header_t, num_src_buffers, 20, 4);
FIELD(kvx_plan_header_t, num_dst_buffers, 24, 4);
FIELD(kvx_plan_header_t, unit_tokens, 28, 4);
FIELD(kvx_plan_header_t, src_block_size, 32, 8);
FIELD(kvx_plan_header_t, dst_block_size, 40, 8);
FIELD(kvx_plan_header_t, src_num_blocks, 48, 8);
FIELD(kvx_plan_header_t, dst_num_blocks, 56, 8);
FIELD(kvx_plan_header_t, num_src_sizes, 64, 4);
FIELD(kvx_plan_header_t, num_dst_sizes, 68, 4);
FIELD(kvx_plan_header_t, num_cells, 72, 4);
FIELD(kvx_plan_header_t, content, 76, 4);

STRUCT(kvx_plan_digit_t, 64);
FIELD(kvx_plan_digit_t, size, 0, 8);
FIELD(kvx_plan_digit_t, src, 8, 8);
FIELD(kvx_plan_digit_t, dst, 16, 8);
FIELD(kvx_plan_digit_t, src_step, 24, 4);
FIELD(kvx_plan_digit_t, dst_step, 28, 4);
FIELD(kvx_plan_digit_t, token, 32, 8);
FIELD(kvx_plan_digit_t, layer, 40, 8);
FIELD(kvx_plan_digit_t, src_scale, 48, 8);
FIELD(kvx_plan_digit_t, dst_scale, 56, 8);

STRUCT(kvx_plan_side_t, 48);
FIELD(kvx_plan_side_t, offset, 0, 8);
FIELD(kvx_plan_side_t, block, 8, 8);
FIELD(kvx_plan_side_t, token_split, 16, 8);
FIELD(kvx_plan_side_t, token_outer, 24, 8);
FIELD(kvx_plan_side_t, token_inner, 32, 8);
FIELD(kvx_plan_side_t, buffer, 40, 4);
FIELD(kvx_plan_side_t, block_step, 44, 4);

STRUCT(kvx_plan_box_t, 896);
FIELD(kvx_plan_box_t, src, 0, 48);
FIELD(kvx_plan_box_t, dst, 48, 48);
FIELD(kvx_plan_box_t, run_bytes, 96, 8);
FIELD(kvx_plan_box_t, num_digits, 104, 4);
FIELD(kvx_plan_box_t, cell, 108, 4);
FIELD(kvx_plan_box_t, digit, 112, 768);
FIELD(kvx_plan_box_t, reserved, 880, 16);

STRUCT(kvx_plan_format_t, 88);
FIELD(kvx_plan_format_t, dtype, 0, 4);
FIELD(kvx_plan_format_t, granularity, 4, 4);
FIELD(kvx_plan_format_t, scale_dtype, 8, 4);
FIELD(kvx_plan_format_t, group_size, 12, 4);
FIELD(kvx_plan_format_t, pack, 16, 4);
FIELD(kvx_plan_format_t, is_inline, 20, 4);
FIELD(kvx_plan_format_t, dim_outer, 24, 8);
FIELD(kvx_plan_format_t, dim_inner, 32, 8);
FIELD(kvx_plan_format_t, scale_offset, 40, 8);
FIELD(kvx_plan_format_t, scale_block, 48, 8);
FIELD(kvx_plan_format_t, scale_token, 56, 8);
FIELD(kvx_plan_format_t, scale_group, 64, 8);
FIELD(kvx_plan_format_t, scale_buffer, 72, 4);
FIELD(kvx_plan_format_t, tensor_scale_buffer, 76, 4);
FIELD(kvx_plan_format_t, first_layer, 80, 8);

STRUCT(kvx_plan_cell_t, 184);
FIELD(kvx_plan_cell_t, src, 0, 88);
FIELD(kvx_plan_cell_t, dst, 88, 88);
FIELD(kvx_plan_cell_t, head_dim, 176, 4);
FIELD(kvx_plan_cell_t, reserved32, 180, 4);
