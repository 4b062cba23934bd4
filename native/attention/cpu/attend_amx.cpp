// What AMX adds to attention's loops on AVX-512: tiles of bf16 and of bytes.
#define KVX_ISA amx
#include "attention/cpu/attend_loops.h"

namespace kvx {
namespace amx {
namespace {

#include "attention/cpu/attend_amx.h"
#include "attention/cpu/attend_amx_s8.h"
#include "attention/cpu/unpack_bf16.h"

}  // namespace
}  // namespace amx

namespace cpu {

using namespace amx;

void add_amx(AttendTable* table) {
  table->sums[KVX_DTYPE_BF16] = &sums_tiles;
  table->unpacked = KVX_DTYPE_BF16;
  table->unpack[KVX_DTYPE_F8_E4M3] = &unpack_bytes<kE4M3Codes, false>;
  table->unpack[KVX_DTYPE_F8_E5M2] = &unpack_bytes<kE5M2Codes, false>;
  table->unpack[KVX_DTYPE_S8] = &unpack_bytes<kS8Codes, true>;
  table->unpack[KVX_DTYPE_S4] = &unpack_nibbles<kS4>;
  table->unpack[KVX_DTYPE_E2M1] = &unpack_nibbles<kE2M1>;
  table->unpack_scaled[KVX_DTYPE_F8_E4M3] = &unpack_scaled_bytes<kE4M3Codes, false>;
  table->unpack_scaled[KVX_DTYPE_F8_E5M2] = &unpack_scaled_bytes<kE5M2Codes, false>;
  table->unpack_scaled[KVX_DTYPE_S8] = &unpack_scaled_bytes<kS8Codes, true>;
  table->unpack_scaled[KVX_DTYPE_S4] = &unpack_scaled_nibbles<kS4>;
  table->unpack_scaled[KVX_DTYPE_E2M1] = &unpack_scaled_nibbles<kE2M1>;
  table->pack = nullptr, table->pack_tiles = &pack_tiles, table->dots = &dots_tiles, table->split = &split_row;
  table->few[KVX_DTYPE_F8_E4M3] = made_loops<E4M3Elements>(0x1p8f);
  table->few[KVX_DTYPE_F8_E5M2] = made_loops<E5M2Elements>(0x1p16f);
  table->few[KVX_DTYPE_S8] = byte_loops<S8Elements>(1);
  table->few[KVX_DTYPE_S4] = byte_loops<S4Elements>(0x1p-4f);
  table->few[KVX_DTYPE_E2M1] = made_loops<NibbleElements<kE2M1>>();
  table->few_scaled[KVX_DTYPE_F8_E4M3] = made_loops<ScaledE4M3>();
  table->few_scaled[KVX_DTYPE_F8_E5M2] = made_loops<ScaledE5M2>();
  table->few_scaled[KVX_DTYPE_S4] = made_loops<ScaledNibbles<kS4>>();
  table->few_scaled[KVX_DTYPE_E2M1] = made_loops<ScaledNibbles<kE2M1>>();
}

}  // namespace cpu
}  // namespace kvx
