// The ways attention is computed on a device, and who takes which call.
#pragma once
#include "attention/attention.h"
#include "cuda/device.cuh"
#include "tiles/block_rows.cuh"

namespace kvx {
namespace cuda {

// Few queries a sequence: attention/decode/decode.cu.
constexpr int64_t kMostRows = 16;  // query rows (queries * group) of a sequence
enum DecodePart { DECODE_NONE, DECODE_SHORT, DECODE_ALL };
// What of a call is decoded: all of it, or of a varlen call the sequences whose rows fit. `part` is then what these
// calls are given.
DecodePart decode_part(const AttentionParams& p, AttentionParams* part);
uint64_t decode_workspace(const AttentionParams& p, int num_sms);
kvx_status_t plan_decode(const AttentionParams& p, int num_sms, void* stream);
kvx_status_t run_decode(const AttentionParams& p, int num_sms, void* stream);

// Many queries a sequence, on Hopper: attention/prefill/prefill.cu.
bool takes_prefill(const AttentionParams& p);
kvx_status_t run_prefill(const AttentionParams& p, int num_sms, void* stream);
bool has_warpgroups();  // the current device is Hopper and the library has code for it

// Any format, layout and table, rows of up to 512 elements: attention/any/any.cu. The first four are of few query rows,
// as decode's; `rows` is then how many a sequence of theirs has at most.
DecodePart any_part(const AttentionParams& p, AttentionParams* part);
uint64_t any_workspace(const AttentionParams& p, int num_sms);
kvx_status_t plan_any(const AttentionParams& p, int num_sms, void* stream);
kvx_status_t run_any_split(const AttentionParams& p, int num_sms, int64_t* rows, void* stream);
bool takes_any(const AttentionParams& p);
kvx_status_t run_any(const AttentionParams& p, void* stream);

// Any shape: attention/cuda/row.cu.
kvx_status_t run_row(const AttentionParams& p, void* stream);

// Latent caches (MLA), on Hopper: attention/latent/latent.cu; any of them: attention/latent/any.cu.
bool takes_latent(const AttentionParams& p);
uint64_t latent_workspace(const AttentionParams& p, int num_sms);
kvx_status_t plan_latent(const AttentionParams& p, int num_sms, void* stream);
kvx_status_t run_latent(const AttentionParams& p, int num_sms, void* stream);
kvx_status_t run_latent_any(const AttentionParams& p, void* stream);

// Dense rows at multiples of `unit` bytes, and offsets that it can count.
bool fits_row_finder(const AttentionParams& p, int unit = 16);
// The same inside of one cache a sequence, whose address is in a table.
bool fits_own_caches(const AttentionParams& p, int unit = 16);
// The most bytes, up to 16, that rows of both planes and their places are multiples of, as copies take them; 0:
// under 4.
int row_unit(const AttentionParams& p);
tiles::RowFinder make_row_finder(const AttentionParams& p, int unit = 16);

// More than 48 KB of shared memory has to be asked for, once a kernel and device.
int max_shared_memory();  // of a block of threads, on the current device
kvx_status_t allow_shared_memory(const void* kernel, int bytes);

}  // namespace cuda
}  // namespace kvx
