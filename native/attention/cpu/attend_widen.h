// Rows as f32, whole ones and those with a scale for every few elements. Included by attend.cpp, in its namespace; what
// AVX does otherwise is in attend_avx.h.

void widen_f32(float* to, const char* row, int64_t n, float) { memcpy(to, row, size_t(n) * 4); }

template <class T>
void widen(float* to, const char* row, int64_t n, float) {
  constexpr int64_t kStep = W * T::kParts;
  int64_t d = 0;
  for (; d + kStep <= n; d += kStep) {
    const typename T::Raw raw = T::read(row + d * T::kBytes);
#pragma GCC unroll 2
    for (int part = 0; part < T::kParts; part++) store(to + d + part * W, T::part(raw, part));
  }
  if (d == n) return;
  char rest[kStep * T::kBytes] = {};
  memcpy(rest, row + d * T::kBytes, size_t(n - d) * T::kBytes);
  float last[kStep];
  const typename T::Raw raw = T::read(rest);
  for (int part = 0; part < T::kParts; part++) store(last + part * W, T::part(raw, part));
  memcpy(to + d, last, size_t(n - d) * 4);
}

// Sixteen elements at a time; what is left over goes through a row of sixteen.
template <class F>
KVX_INLINE void widen_bytes(float* to, const char* row, int64_t n, F&& sixteen) {
  int64_t d = 0;
  for (; d + 16 <= n; d += 16) sixteen(to + d, row + d);
  if (d == n) return;
  char rest[16] = {};
  float last[16];
  memcpy(rest, row + d, size_t(n - d));
  sixteen(last, rest);
  memcpy(to + d, last, size_t(n - d) * 4);
}

KVX_INLINE void widen_s8(float* to, const char* row, int64_t n, float scale) {
  widen_bytes(to, row, n, [scale](float* out, const char* in) {
#if defined(__aarch64__)
    const int8x16_t c = vld1q_s8(reinterpret_cast<const int8_t*>(in));
    const auto four = [&](int32x4_t x, float* at) { vst1q_f32(at, vmulq_n_f32(vcvtq_f32_s32(x), scale)); };
    const int16x8_t low = vmovl_s8(vget_low_s8(c)), high = vmovl_high_s8(c);
    four(vmovl_s16(vget_low_s16(low)), out), four(vmovl_high_s16(low), out + 4);
    four(vmovl_s16(vget_low_s16(high)), out + 8), four(vmovl_high_s16(high), out + 12);
#else
    int32_t wide[16];  // one width a loop: each then vectorises
    for (int i = 0; i < 16; i++) wide[i] = int8_t(in[i]);
    for (int i = 0; i < 16; i++) out[i] = float(wide[i]) * scale;
#endif
  });
}

// e4m3's NaN and e5m2's, with its infinities, which Raw passes over, in a row: codes from there on, whatever the sign.
KVX_INLINE bool has_nan(int dtype, const char* row, int64_t n) {
  uint8_t most = 0;
  int64_t d = 0;
#if defined(__aarch64__)
  uint8x16_t mosts[4] = {};  // four: each step waits for the one before
  for (; d + 64 <= n; d += 64)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
      mosts[i] = vmaxq_u8(mosts[i], vorrq_u8(load<uint8x16_t>(row + d + 16 * i), vdupq_n_u8(0x80)));
  for (; d + 16 <= n; d += 16) mosts[0] = vmaxq_u8(mosts[0], vorrq_u8(load<uint8x16_t>(row + d), vdupq_n_u8(0x80)));
  most = vmaxvq_u8(vmaxq_u8(vmaxq_u8(mosts[0], mosts[1]), vmaxq_u8(mosts[2], mosts[3])));
#endif
  for (; d < n; d++) {
    const uint8_t code = uint8_t(row[d]) | 0x80;
    most = most > code ? most : code;
  }
  return most >= (dtype == KVX_DTYPE_F8_E4M3 ? 0xff : 0xfc);
}

#if defined(__aarch64__)
// fp8 by way of f16: e4m3 moved into its places is the number times 2^-8, subnormal or not, but for NaN, and e5m2 is
// its upper byte.
template <class T>
inline float16x8_t as_f16(uint8x8_t c) {
  if constexpr (std::is_same_v<T, E5M2>) return vreinterpretq_f16_u16(vshll_n_u8(c, 8));
  const int16x8_t wide =
      vshll_n_s8(vreinterpret_s8_u8(c), 7);  // the sign stays above: bit 15, and 14, which is cleared
  const uint16x8_t half = vbicq_u16(vreinterpretq_u16_s16(wide), vdupq_n_u16(0x4000));
  const uint16x8_t nan = vceqq_u16(vandq_u16(half, vdupq_n_u16(0x3f80)), vdupq_n_u16(0x3f80));
  return vreinterpretq_f16_u16(vorrq_u16(half, vandq_u16(nan, vdupq_n_u16(0x7fff))));
}

// The scale takes the lift in, unless there is NaN in the row or the lifted scale is too large for f32.
template <class T, int kDtype>
KVX_INLINE void widen_fp8(float* to, const char* row, int64_t n, float scale) {
  const float by = scale * T::kLiftIn * T::kLiftOut;
  if (isfinite(by) && !has_nan(kDtype, row, n))
    return widen_bytes(to, row, n, [by](float* out, const char* in) {
      const typename T::Raw raw = T::read(in);
#pragma GCC unroll 4
      for (int part = 0; part < 4; part++) store(out + part * W, T::part(raw, part) * by);
    });
  widen_bytes(to, row, n, [scale](float* out, const char* in) {
    const float by = std::is_same_v<T, E4M3> ? scale * 256 : scale;
    for (int i = 0; i < 16; i += 8) {
      const float16x8_t f = as_f16<T>(vld1_u8(reinterpret_cast<const uint8_t*>(in) + i));
      vst1q_f32(out + i, vmulq_n_f32(vcvt_f32_f16(vget_low_f16(f)), by)),
          vst1q_f32(out + i + 4, vmulq_n_f32(vcvt_high_f32_f16(f), by));
    }
  });
}

template <const Nibbles& kCodes>
KVX_INLINE void widen_nibbles(float* to, const char* row, int64_t n, float scale) {
  const uint8x16_t low_of = vld1q_u8(kCodes.low), high_of = vld1q_u8(kCodes.high);
  const auto sixteen = [&](float* out, uint8x16_t c) {
    const uint8x16_t low = vqtbl1q_u8(low_of, c), high = vqtbl1q_u8(high_of, c);
    const auto eight = [&](uint8x16_t half, float* at) {
      for (int i = 0; i < 2; i++) store(at + 4 * i, BF16::part(vreinterpretq_u16_u8(half), i) * scale);
    };
    eight(vzip1q_u8(low, high), out), eight(vzip2q_u8(low, high), out + 8);
  };
  int64_t d = 0;
  for (; d + 32 <= n; d += 32) {
    const uint8x16_t c = load<uint8x16_t>(row + d / 2), even = vandq_u8(c, vdupq_n_u8(15)), odd = vshrq_n_u8(c, 4);
    sixteen(to + d, vzip1q_u8(even, odd)), sixteen(to + d + 16, vzip2q_u8(even, odd));
  }
  const auto codes = [](uint8x8_t c) {
    const uint8x8_t even = vand_u8(c, vdup_n_u8(15)), odd = vshr_n_u8(c, 4);
    return vcombine_u8(vzip1_u8(even, odd), vzip2_u8(even, odd));
  };
  if (d + 16 <= n) sixteen(to + d, codes(load<uint8x8_t>(row + d / 2))), d += 16;
  if (d == n) return;
  uint8_t rest[8] = {};
  float last[16];
  memcpy(rest, row + d / 2, size_t(n - d + 1) / 2);
  sixteen(last, codes(vld1_u8(rest)));
  memcpy(to + d, last, size_t(n - d) * 4);
}
#endif

// Groups of 16 and of 32 elements are loops without a rest.
template <WidenRow kWiden, int kBits>
void widen_groups(float* to, const char* row, int64_t n, const float* scales, int64_t size) {
  const auto each = [&](auto step) {
    for (int64_t d = 0; d < n; d += step) kWiden(to + d, row + d * kBits / 8, step, *scales++);
  };
  if (size == 16) each(std::integral_constant<int64_t, 16>());
  else if (size == 32) each(std::integral_constant<int64_t, 32>());
  else each(size);
}
