// fp8 and int8 on 64-bit Arm, sixteen elements at a time: the numbers of format.h in fewer steps than the compiler
// finds. Included by rows.cpp, in its namespace.

#define KVX_INLINE inline __attribute__((always_inline))

struct Vec16 {
  float32x4_t v[4];
};

template <class Step>
KVX_INLINE Vec16 each(const Vec16& x, Step&& step) {
  return {{step(x.v[0]), step(x.v[1]), step(x.v[2]), step(x.v[3])}};
}

// Low and high bytes become 16-bit numbers, low and high halves become floats.
KVX_INLINE uint16x8x2_t zip_bytes(uint8x16_t low, uint8x16_t high) {
  return {{vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high))}};
}
KVX_INLINE Vec16 zip_halves(uint16x8x2_t low, uint16x8x2_t high) {
  return {{vreinterpretq_f32_u16(vzip1q_u16(low.val[0], high.val[0])),
           vreinterpretq_f32_u16(vzip2q_u16(low.val[0], high.val[0])),
           vreinterpretq_f32_u16(vzip1q_u16(low.val[1], high.val[1])),
           vreinterpretq_f32_u16(vzip2q_u16(low.val[1], high.val[1]))}};
}
// And back.
KVX_INLINE uint8x16_t low_bytes(uint16x8_t a, uint16x8_t b) {
  return vuzp1q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b));
}
KVX_INLINE uint8x16_t high_bytes(uint16x8_t a, uint16x8_t b) {
  return vuzp2q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b));
}
KVX_INLINE uint16x8_t low_halves(float32x4_t a, float32x4_t b) {
  return vuzp1q_u16(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b));
}
KVX_INLINE uint16x8_t high_halves(float32x4_t a, float32x4_t b) {
  return vuzp2q_u16(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b));
}

// ---- floats

template <int IO>
KVX_INLINE Vec16 load_16(const char* src) {
  if constexpr (IO == KVX_DTYPE_F32) {
    auto* s = reinterpret_cast<const float*>(src);
    return {{vld1q_f32(s), vld1q_f32(s + 4), vld1q_f32(s + 8), vld1q_f32(s + 12)}};
  } else if constexpr (IO == KVX_DTYPE_F16) {
    auto* s = reinterpret_cast<const __fp16*>(src);
    const float16x8_t a = vld1q_f16(s), b = vld1q_f16(s + 8);
    return {{vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)), vcvt_high_f32_f16(b)}};
  } else {
    auto* s = reinterpret_cast<const uint16_t*>(src);
    const uint16x8_t zero = vdupq_n_u16(0);
    return zip_halves({{zero, zero}}, {{vld1q_u16(s), vld1q_u16(s + 8)}});
  }
}

// A NaN is what its type has as the one NaN already, or for bf16 0x7fff and zeros below.
template <int IO>
KVX_INLINE void store_16(char* dst, const Vec16& x) {
  if constexpr (IO == KVX_DTYPE_F32) {
    auto* d = reinterpret_cast<float*>(dst);
    vst1q_f32(d, x.v[0]), vst1q_f32(d + 4, x.v[1]), vst1q_f32(d + 8, x.v[2]), vst1q_f32(d + 12, x.v[3]);
  } else if constexpr (IO == KVX_DTYPE_F16) {
    auto* d = reinterpret_cast<__fp16*>(dst);
    vst1q_f16(d, vcvt_high_f16_f32(vcvt_f16_f32(x.v[0]), x.v[1])),
        vst1q_f16(d + 8, vcvt_high_f16_f32(vcvt_f16_f32(x.v[2]), x.v[3]));
  } else {
    auto* d = reinterpret_cast<uint16_t*>(dst);
    const uint32x4_t last = vdupq_n_u32(0x10000), half = vdupq_n_u32(0x7fff);
    const auto nudged = [&](float32x4_t a) {  // by the last bit that stays: a tie goes to even
      const uint32x4_t b = vreinterpretq_u32_f32(a);
      return vsraq_n_u32(b, vandq_u32(b, last), 16);
    };
    vst1q_u16(d, vaddhn_high_u32(vaddhn_u32(nudged(x.v[0]), half), nudged(x.v[1]), half));
    vst1q_u16(d + 8, vaddhn_high_u32(vaddhn_u32(nudged(x.v[2]), half), nudged(x.v[3]), half));
  }
}

// ---- floats to codes

template <int C> struct Fp8;
template <> struct Fp8<KVX_DTYPE_F8_E4M3> {
  static constexpr int mantissa = 3, bias = 7;
};
template <> struct Fp8<KVX_DTYPE_F8_E5M2> {
  static constexpr int mantissa = 2, bias = 15;
};

// To a magnitude is added its power of two times 2^(23 - mantissa), for small ones that of the smallest normal code:
// the sum's low bits are then the significand, rounded to even by the addition, and its exponent is the code's but for
// a constant. The constant is added too; it is even, so that even stays even.
template <int C>
KVX_INLINE uint8x16_t fp8_codes(const Vec16& x) {
  constexpr int m = Fp8<C>::mantissa, bias = Fp8<C>::bias;
  constexpr uint32_t smallest = uint32_t(128 - bias) << 23, constant = uint32_t((bias + m - 151) * (1 << m)) & 255u;
  const float32x4_t most = vdupq_n_f32(dtype_qmax(C)),
                    factor = vdupq_n_f32(float(1 << (23 - m)) + float(constant) / float(1 << m));
  const Vec16 sum = each(x, [&](float32x4_t a) {
    a = vminq_f32(vabsq_f32(a), most);  // NaN stays NaN
    const uint32x4_t power = vandq_u32(vreinterpretq_u32_f32(a), vdupq_n_u32(0x7f800000u));
    return vfmaq_f32(a, vreinterpretq_f32_u32(vmaxq_u32(power, vdupq_n_u32(smallest))), factor);
  });
  const uint16x8_t a = high_halves(sum.v[0], sum.v[1]), b = high_halves(sum.v[2], sum.v[3]),
                   infinity = vdupq_n_u16(0x7f80);
  const uint8x16_t codes = low_bytes(vsraq_n_u16(low_halves(sum.v[0], sum.v[1]), a, 7 - m),
                                     vsraq_n_u16(low_halves(sum.v[2], sum.v[3]), b, 7 - m));
  const uint8x16_t signs = high_bytes(high_halves(x.v[0], x.v[1]), high_halves(x.v[2], x.v[3]));
  return vbslq_u8(low_bytes(vcgtq_u16(a, infinity), vcgtq_u16(b, infinity)), vdupq_n_u8(0x7f),
                  vbslq_u8(vdupq_n_u8(0x80), signs, codes));
}

KVX_INLINE uint8x16_t s8_codes(const Vec16& x) {
  const auto whole = [](float32x4_t a) { return vcvtaq_s32_f32(a); };  // half away from zero; NaN is 0
  const int16x8_t a = vqmovn_high_s32(vqmovn_s32(whole(x.v[0])), whole(x.v[1])),
                  b = vqmovn_high_s32(vqmovn_s32(whole(x.v[2])), whole(x.v[3]));
  return vreinterpretq_u8_s8(vqmovn_high_s16(vqmovn_s16(a), b));
}

template <int IO, int C>
struct Encoder {
  static constexpr bool exists = C == KVX_DTYPE_S8 || C == KVX_DTYPE_F8_E4M3 || C == KVX_DTYPE_F8_E5M2;
  static constexpr int64_t from_bytes = sizeof(typename Float<IO>::Raw), to_bytes = 1;
  float scale;
  KVX_INLINE uint8x16_t load(const char* src) const {
    const Vec16 x = each(load_16<IO>(src), [&](float32x4_t a) { return vdivq_f32(a, vdupq_n_f32(scale)); });
    if constexpr (C == KVX_DTYPE_S8) return s8_codes(x);
    else return fp8_codes<C>(x);
  }
  KVX_INLINE static void store(char* dst, uint8x16_t codes) { vst1q_u8(reinterpret_cast<uint8_t*>(dst), codes); }
};

// ---- codes to floats

// Four bits of significand are in the upper half of an f32: its low and high bytes are made, those of codes up to 15,
// the subnormal ones among them, by a table. A NaN is all ones below the sign, and so passes a multiplication.
template <bool OnesBelow>
KVX_INLINE Vec16 e4m3_values(uint8x16_t codes) {
  static const uint8_t low_of[16] = {0,    0,    0x80, 0xc0, 0,    0x20, 0x40, 0x60,
                                     0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0};
  static const uint8_t high_of[16] = {0,    0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c,
                                      0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c};
  const uint8x16_t m = vandq_u8(codes, vdupq_n_u8(0x7f)), nan = vceqq_u8(m, vdupq_n_u8(0x7f)),
                   below = OnesBelow ? nan : vdupq_n_u8(0);
  const uint8x16_t low = vqtbx1q_u8(vshlq_n_u8(m, 4), vld1q_u8(low_of), m),
                   high = vqtbx1q_u8(vaddq_u8(vshrq_n_u8(m, 4), vdupq_n_u8(0x3c)), vld1q_u8(high_of), m);
  const uint8x16_t with_sign = vbslq_u8(vdupq_n_u8(0x80), codes, high);
  return zip_halves(zip_bytes(below, below), zip_bytes(vorrq_u8(low, nan), vbslq_u8(nan, vdupq_n_u8(0x7f), with_sign)));
}

// 2^23 + 128 + code as bytes, less 2^23 + 128: shorter than widening twice and converting.
KVX_INLINE Vec16 s8_values(uint8x16_t codes) {
  const uint16x8_t top = vdupq_n_u16(0x4b00);
  const Vec16 x = zip_halves(zip_bytes(veorq_u8(codes, vdupq_n_u8(0x80)), vdupq_n_u8(0)), {{top, top}});
  return each(x, [](float32x4_t a) { return vsubq_f32(a, vdupq_n_f32(8388736.0f)); });
}

template <int C, int IO>
struct Decoder {
  static constexpr bool exists = C == KVX_DTYPE_S8 || C == KVX_DTYPE_F8_E4M3;
  static constexpr int64_t from_bytes = 1, to_bytes = sizeof(typename Float<IO>::Raw);
  float scale;
  KVX_INLINE Vec16 load(const char* src) const {
    const uint8x16_t codes = vld1q_u8(reinterpret_cast<const uint8_t*>(src));
    const auto scaled = [&](float32x4_t a) { return vmulq_n_f32(a, scale); };
    if constexpr (C == KVX_DTYPE_S8) return each(s8_values(codes), scaled);
    else return each(e4m3_values < IO != KVX_DTYPE_BF16 > (codes), scaled);
  }
  KVX_INLINE static void store(char* dst, const Vec16& x) { store_16<IO>(dst, x); }
};

// ---- rows

// Two blocks at a time: a core's queues do not reach from one into the next. A last block that is short overlaps the
// one before it; a row that is short is padded.
template <class Block>
KVX_INLINE void for_blocks_of_16(char* dst, const char* src, int64_t n, const Block block) {
  constexpr int64_t to = Block::to_bytes, from = Block::from_bytes;
  if (n < 16) {
    char in[16 * from] = {}, out[16 * to];
    memcpy(in, src, size_t(n * from));
    block.store(out, block.load(in));
    memcpy(dst, out, size_t(n * to));
    return;
  }
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const auto a = block.load(src + i * from), b = block.load(src + (i + 16) * from);
    block.store(dst + i * to, a), block.store(dst + (i + 16) * to, b);
  }
  if (i + 16 <= n) block.store(dst + i * to, block.load(src + i * from));
  if (n % 16) block.store(dst + (n - 16) * to, block.load(src + (n - 16) * from));
}
