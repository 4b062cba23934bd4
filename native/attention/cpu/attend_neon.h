// The inner loops for four query rows on 64-bit Arm, in assembly. A core multiplies two vectors a cycle only while
// loads and widening are a step ahead of the multiplications and evenly among them; the compiler puts them where they
// are used. Included by attend.cpp, in its namespace.
//
// v8 to v23 are sums. v24 to v27 and v28 to v31 are two steps, one multiplied while the other is filled; v4 to v7 are
// what 16-bit rows are widened from, all of a step at once: a pipe that changes between long and short instructions
// loses cycles. v3 is zero; v0 and v1 are queries or weights. Every loop ends by reading what follows, so that the next
// one starts at full speed.

// Four rows: where they begin, less `offset`.
struct FourRows {
  const char* const* at;
  int64_t offset;
};

// Vectors v24 to v27 and v4 to v7 as the block before has left them.
struct Incoming {
  Vec step[4], raw[4];
};

// Through registers: what was just stored would be loaded too late for the first multiplications.

// An even number of positions into four rows of sums, [4, dim].
struct SumBlock {
  const char* const* at;
  const char* const* ask;  // rows asked for; one more pointer than positions is read
  const float* weights;    // [positions, 4]
  float* out;
  int64_t dim, offset, ask_offset;  // offsets: of the head in the rows, bytes
  int64_t pairs;                    // of positions
  int64_t near;  // bytes from a row to the one that follows in its place: asked for into the first level
};

// clang-format off: assembly, a step a line

#define KVX_MUL(with, a, b, c, d, x0, x1, x2, x3, y)                                                                   \
  with " v" #a ".4s, v" #x0 ".4s, v" #y ".4s\n " with " v" #b ".4s, v" #x1 ".4s, v" #y ".4s\n "                        \
  with " v" #c ".4s, v" #x2 ".4s, v" #y ".4s\n " with " v" #d ".4s, v" #x3 ".4s, v" #y ".4s\n "
#define KVX_LOAD(to, row, at) "ldr q" #to ", [x" #row ", " #at "]\n"

// A vector of each position, x0 to x3, against that of each query row; `at` bytes into the queries, `then` the next. l0
// to l3 stand between. `with` is fmla, or fmul where sums begin.
#define KVX_STEP(with, x0, x1, x2, x3, at, then, l0, l1, l2, l3)                                                       \
  KVX_LOAD(1, 19, at) KVX_MUL(with, 8, 9, 10, 11, x0, x1, x2, x3, 0) l0                                                \
  KVX_LOAD(0, 20, at) KVX_MUL(with, 12, 13, 14, 15, x0, x1, x2, x3, 1) l1                                              \
  KVX_LOAD(1, 21, at) KVX_MUL(with, 16, 17, 18, 19, x0, x1, x2, x3, 0) l2                                              \
  KVX_LOAD(0, 17, then) KVX_MUL(with, 20, 21, 22, 23, x0, x1, x2, x3, 1) l3

// A line of a row asked for: of `ask` into the second level, and of the block after this into the first.
#define KVX_ASK(far, row) "prfm pldl2keep, [x" #far ", x22]\n prfm pldl1keep, [x" #row ", %[near]]\n"

// A line of f32: four steps, each loading the next. `on` moves the rows to what follows the line.
#define KVX_LINE_F32(with, low, high, on)                                                                              \
  KVX_ASK(13, 9) KVX_STEP(with, 24, 25, 26, 27, 0, 16, KVX_LOAD(28, 9, 16), KVX_LOAD(29, 10, 16),                      \
      KVX_LOAD(30, 11, 16), KVX_LOAD(31, 12, 16))                                                                      \
  KVX_ASK(14, 10) KVX_STEP("fmla", 28, 29, 30, 31, 16, 32, KVX_LOAD(24, 9, 32), KVX_LOAD(25, 10, 32),                  \
      KVX_LOAD(26, 11, 32), KVX_LOAD(27, 12, 32))                                                                      \
  KVX_ASK(15, 11) KVX_STEP("fmla", 24, 25, 26, 27, 32, 48, KVX_LOAD(28, 9, 48), KVX_LOAD(29, 10, 48),                  \
      KVX_LOAD(30, 11, 48), KVX_LOAD(31, 12, 48))                                                                      \
  on KVX_ASK(16, 12) KVX_STEP("fmla", 28, 29, 30, 31, 48, 64, KVX_LOAD(24, 9, 0), KVX_LOAD(25, 10, 0),                 \
      KVX_LOAD(26, 11, 0), KVX_LOAD(27, 12, 0))                                                                        \
  "add x17, x17, 64\n add x19, x19, 64\n add x20, x20, 64\n add x21, x21, 64\n add x22, x22, 64\n"

// A line of 16-bit numbers: four times two steps.
#define KVX_TWO_STEPS(with, low, high, at, then, last, next)                                                           \
  high(28, 4) high(29, 5) high(30, 6) high(31, 7)                                                                      \
  KVX_STEP(with, 24, 25, 26, 27, at, then, KVX_LOAD(4, 9, next), KVX_LOAD(5, 10, next), KVX_LOAD(6, 11, next),         \
      KVX_LOAD(7, 12, next))                                                                                           \
  low(24, 4) low(25, 5) low(26, 6) low(27, 7)                                                                          \
  KVX_STEP("fmla", 28, 29, 30, 31, then, last, "", "", "", "")
#define KVX_LINE_16(with, low, high, on)                                                                               \
  KVX_ASK(13, 9) KVX_TWO_STEPS(with, low, high, 0, 16, 32, 16) KVX_ASK(14, 10)                                         \
      KVX_TWO_STEPS("fmla", low, high, 32, 48, 64, 32)                                                                 \
  KVX_ASK(15, 11) KVX_TWO_STEPS("fmla", low, high, 64, 80, 96, 48) on KVX_ASK(16, 12)                                  \
      KVX_TWO_STEPS("fmla", low, high, 96, 112, 128, 0)                                                                \
  "add x17, x17, 128\n add x19, x19, 128\n add x20, x20, 128\n add x21, x21, 128\n add x22, x22, 64\n"

// bf16 by interleaving with zeros: both pipes of a core do that, only one shifts.
#define KVX_LOW_BF16(to, from) "zip1 v" #to ".8h, v3.8h, v" #from ".8h\n"
#define KVX_HIGH_BF16(to, from) "zip2 v" #to ".8h, v3.8h, v" #from ".8h\n"
#define KVX_LOW_F16(to, from) "fcvtl v" #to ".4s, v" #from ".4h\n"
#define KVX_HIGH_F16(to, from) "fcvtl2 v" #to ".4s, v" #from ".8h\n"

#define KVX_ADD(to, a, b) "faddp v" #to ".4s, v" #a ".4s, v" #b ".4s\n"
#define KVX_AFTER                                                                                                      \
  "ldp x9, x10, [%[after]]\n ldp x11, x12, [%[after], 16]\n add x9, x9, %[after_offset]\n"                             \
  "add x10, x10, %[after_offset]\n add x11, x11, %[after_offset]\n add x12, x12, %[after_offset]\n"
#define KVX_FORTH "add x9, x9, 64\n add x10, x10, 64\n add x11, x11, 64\n add x12, x12, 64\n"
#define KVX_SCORES(line, low, high)                                                                                    \
  "ldp x9, x10, [%[rows]]\n ldp x11, x12, [%[rows], 16]\n ldp x13, x14, [%[ask]]\n ldp x15, x16, [%[ask], 16]\n"       \
  "add x9, x9, %[offset]\n add x10, x10, %[offset]\n add x11, x11, %[offset]\n add x12, x12, %[offset]\n"              \
      "mov x22, %[ask_offset]\n"                                                                                       \
  "mov x17, %[q]\n add x19, x17, %[stride]\n add x20, x19, %[stride]\n add x21, x20, %[stride]\n"                      \
      "sub x23, %[lines], 2\n"                                                                                         \
  "movi v3.4s, 0\n ldr q0, [x17]\n" line("fmul", low, high, KVX_FORTH) "cbz x23, 2f\n"                                 \
  "1:\n" line("fmla", low, high, KVX_FORTH) "subs x23, x23, 1\n b.ne 1b\n"                                             \
  "2:\n" line("fmla", low, high, KVX_AFTER)                                                                            \
  KVX_ADD(8, 8, 12) KVX_ADD(16, 16, 20) KVX_ADD(9, 9, 13) KVX_ADD(17, 17, 21) KVX_ADD(10, 10, 14) KVX_ADD(18, 18, 22)  \
  KVX_ADD(11, 11, 15) KVX_ADD(19, 19, 23) KVX_ADD(8, 8, 16) KVX_ADD(9, 9, 17) KVX_ADD(10, 10, 18) KVX_ADD(11, 11, 19)  \
  "stp q8, q9, [%[scores]]\n stp q10, q11, [%[scores], 32]\n"

// One vector of a position, column c, times the four weights in w.
#define KVX_ROWS(a, b, c, d, x, w)                                                                                     \
  "fmla v" #a ".4s, v" #x ".4s, v" #w ".s[0]\n fmla v" #b ".4s, v" #x ".4s, v" #w ".s[1]\n"                            \
  "fmla v" #c ".4s, v" #x ".4s, v" #w ".s[2]\n fmla v" #d ".4s, v" #x ".4s, v" #w ".s[3]\n"
#define KVX_POSITION(x0, x1, x2, x3, w, l0, l1, l2, l3)                                                                \
  KVX_ROWS(8, 12, 16, 20, x0, w) l0 KVX_ROWS(9, 13, 17, 21, x1, w) l1                                                  \
  KVX_ROWS(10, 14, 18, 22, x2, w) l2 KVX_ROWS(11, 15, 19, 23, x3, w) l3

// Two positions, while those after them are loaded from x24 and x25.
#define KVX_PAIR_F32(low, high)                                                                                        \
  KVX_POSITION(24, 25, 26, 27, 0, KVX_LOAD(24, 24, 0), KVX_LOAD(25, 24, 16) "prfm pldl2keep, [x6]\n",                  \
      KVX_LOAD(26, 24, 32) "prfm pldl1keep, [x24, x26]\n", KVX_LOAD(27, 24, 48))                                       \
  KVX_LOAD(0, 23, 0)                                                                                                   \
  KVX_POSITION(28, 29, 30, 31, 1, KVX_LOAD(28, 25, 0), KVX_LOAD(29, 25, 16) "prfm pldl2keep, [x6, 64]\n",              \
      KVX_LOAD(30, 25, 32) "prfm pldl1keep, [x25, x26]\n", KVX_LOAD(31, 25, 48))                                       \
  KVX_LOAD(1, 23, 16) "add x6, x6, 128\n"
#define KVX_PAIR_16(low, high)                                                                                         \
  low(28, 4) high(29, 4) low(30, 5) high(31, 5)                                                                        \
  KVX_POSITION(24, 25, 26, 27, 0, KVX_LOAD(4, 24, 0), KVX_LOAD(5, 24, 16) "prfm pldl2keep, [x6]\n",                    \
      "prfm pldl1keep, [x24, x26]\n", "")                                                                              \
  KVX_LOAD(0, 23, 0) low(24, 4) high(25, 4) low(26, 5) high(27, 5)                                                     \
  KVX_POSITION(28, 29, 30, 31, 1, KVX_LOAD(4, 25, 0), KVX_LOAD(5, 25, 16), "prfm pldl1keep, [x25, x26]\n", "")         \
  KVX_LOAD(1, 23, 16) "add x6, x6, 64\n"
#define KVX_PAIR(pair, low, high, label)                                                                               \
  "ldp x24, x25, [x21], 16\n add x24, x24, x16\n add x25, x25, x16\n" pair(low, high)                                  \
  "add x23, x23, 32\n subs x7, x7, 1\n b.ne " #label "f\n ldr x6, [x22], 8\n add x6, x6, x17\n mov x7, x28\n" #label   \
      ":\n"
#define KVX_START_F32(low, high)                                                                                       \
  "ldp q24, q25, [x24]\n ldp q26, q27, [x24, 32]\n ldp q28, q29, [x25]\n ldp q30, q31, [x25, 32]\n"
#define KVX_START_16(low, high)                                                                                        \
  "movi v3.4s, 0\n ldp q4, q5, [x24]\n" low(24, 4) high(25, 4) low(26, 5) high(27, 5) "ldp q4, q5, [x25]\n"
#define KVX_OUT(with, row, a, b, c, d)                                                                                 \
  #with " q" #a ", q" #b ", [x" #row "]\n " #with " q" #c ", q" #d ", [x" #row ", 32]\n"
#define KVX_OUTS(with)                                                                                                 \
  KVX_OUT(with, 12, 8, 9, 10, 11) KVX_OUT(with, 13, 12, 13, 14, 15) KVX_OUT(with, 14, 16, 17, 18, 19)                  \
      KVX_OUT(with, 15, 20, 21, 22, 23)

// Sixteen columns at a time down all positions, then the next sixteen.
#define KVX_SUMS(start, pair, low, high, bytes)                                                                        \
  "sub x27, x27, 1\n mov x7, x28\n mov x8, x16\n ldr x6, [x10]\n add x22, x10, 8\n add x6, x6, x17\n"                  \
  "ldp x24, x25, [x9]\n add x24, x24, x16\n add x25, x25, x16\n ldp q0, q1, [x11]\n" start(low, high)                  \
  "1:\n" KVX_OUTS(ldp) "add x21, x9, 16\n add x23, x11, 32\n mov x19, x27\n cbz x19, 3f\n"                             \
  "2:\n" KVX_PAIR(pair, low, high, 4) "subs x19, x19, 1\n b.ne 2b\n"                                                   \
  "3:\n mov x21, x9\n mov x23, x11\n add x16, x16, " #bytes "\n cmp x20, 1\n csel x16, x8, x16, eq\n"                  \
  KVX_PAIR(pair, low, high, 5) KVX_OUTS(stp)                                                                           \
  "add x12, x12, 64\n add x13, x13, 64\n add x14, x14, 64\n add x15, x15, 64\n subs x20, x20, 1\n b.ne 1b\n"

#define KVX_VECTORS                                                                                                    \
  "v0", "v1", "v3", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21",    \
      "v22", "v23"
#define KVX_NEON(T, width, bytes)                                                                                      \
  template <> struct Neon<T> {                                                                                         \
    static constexpr bool kIs = true;                                                                                  \
    static KVX_INLINE void scores(FourRows rows, FourRows after, FourRows ask, const float* q, int64_t stride,         \
        int64_t lines, float* scores, int64_t near, Incoming& in) {                                                    \
      register Vec s0 asm("v24") = in.step[0], s1 asm("v25") = in.step[1], s2 asm("v26") = in.step[2],                 \
          s3 asm("v27") = in.step[3];                                                                                  \
      register Vec r0 asm("v4") = in.raw[0], r1 asm("v5") = in.raw[1], r2 asm("v6") = in.raw[2],                       \
          r3 asm("v7") = in.raw[3];                                                                                    \
      asm volatile(KVX_SCORES(KVX_LINE_##width, KVX_LOW_##T, KVX_HIGH_##T)                                             \
                   : "+w"(s0), "+w"(s1), "+w"(s2), "+w"(s3), "+w"(r0), "+w"(r1), "+w"(r2), "+w"(r3)                    \
                   : [rows] "r"(rows.at), [offset] "r"(rows.offset), [after] "r"(after.at),                            \
                       [after_offset] "r"(after.offset), [ask] "r"(ask.at),                                            \
                     [ask_offset] "r"(ask.offset), [q] "r"(q), [stride] "r"(stride), [lines] "r"(lines),               \
                         [scores] "r"(scores), [near] "r"(near)                                                        \
                   : "memory", "cc", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16", "x17", "x19", "x20",       \
                       "x21", "x22", "x23",                                                                            \
                     KVX_VECTORS, "v28", "v29", "v30", "v31");                                                         \
      in.step[0] = s0, in.step[1] = s1, in.step[2] = s2, in.step[3] = s3, in.raw[0] = r0, in.raw[1] = r1,              \
          in.raw[2] = r2, in.raw[3] = r3;                                                                              \
    }                                                                                                                  \
    static KVX_INLINE void sums(const SumBlock& b) {                                                                   \
      register auto at asm("x9") = b.at;                                                                               \
      register auto ask asm("x10") = b.ask;                                                                            \
      register auto weights asm("x11") = b.weights;                                                                    \
      register auto out0 asm("x12") = b.out;                                                                           \
      register auto out1 asm("x13") = b.out + b.dim;                                                                   \
      register auto out2 asm("x14") = b.out + 2 * b.dim;                                                               \
      register auto out3 asm("x15") = b.out + 3 * b.dim;                                                               \
      register auto offset asm("x16") = b.offset;                                                                      \
      register auto ask_offset asm("x17") = b.ask_offset;                                                              \
      register auto chunks asm("x20") = b.dim / 16;                                                                    \
      register auto near asm("x26") = b.near;                                                                          \
      register auto pairs asm("x27") = b.pairs;                                                                        \
      register auto pairs_a_row asm("x28") = b.dim * T::kBytes / (T::kBytes == 4 ? 128 : 64);                          \
      asm volatile(KVX_SUMS(KVX_START_##width, KVX_PAIR_##width, KVX_LOW_##T, KVX_HIGH_##T, bytes)                     \
                   : "+r"(at), "+r"(ask), "+r"(weights), "+r"(out0), "+r"(out1), "+r"(out2), "+r"(out3),               \
                       "+r"(offset), "+r"(ask_offset),                                                                 \
                     "+r"(chunks), "+r"(near), "+r"(pairs), "+r"(pairs_a_row)                                          \
                   :                                                                                                   \
                   : "memory", "cc", "x6", "x7", "x8", "x19", "x21", "x22", "x23", "x24", "x25", KVX_VECTORS, "v4",    \
                       "v5", "v24", "v25", "v26", "v27",                                                               \
                     "v28", "v29", "v30", "v31");                                                                      \
    }                                                                                                                  \
  };

// clang-format on

template <class T> struct Neon {
  static constexpr bool kIs = false;
};
KVX_NEON(F32, F32, 64)
KVX_NEON(BF16, 16, 32)
KVX_NEON(F16, 16, 32)

// Scores where rows are whole lines, two or more, and every run has four query rows; false: not so.
template <class T>
bool scores_neon(const cpu::TileRows& k, const cpu::TileRows& next, const cpu::TileStates& s) {
  if (k.dim * T::kBytes % 64 != 0 || k.dim * T::kBytes < 128 || s.final_rows != kLanes || k.scale) return false;
  if (k.count == 0 || s.first == s.last) return true;
  Incoming in;
  for (int i = 0; i < 4; i++) in.step[i] = T::part(T::read(k.at[i]), 0), in.raw[i] = load<Vec>(k.at[i]);
  const int64_t last_t = (k.count - 1) / 4 * 4, last_h = k.heads - 1;
  for (int64_t t = 0, h = 0;;) {
    int64_t then_t = t, then_h = h;  // the block after this one, in the order of memory
    if (k.by_head ? t < last_t : h == last_h && t < last_t) then_t += 4, then_h = k.by_head ? h : 0;
    else if (h < last_h) then_h++, then_t = k.by_head ? 0 : t;
    const FourRows rows{k.at + t, h * k.head}, then{k.at + then_t, then_h * k.head}, ask{next.at + t, h * next.head};
    for (int64_t run = s.first; run < s.last; run++) {
      const int64_t state = h * s.fours + run;
      Neon<T>::scores(rows, run + 1 < s.last ? rows : then, ask, s.q + state * kLanes * k.dim, k.dim * 4,
                      k.dim * T::kBytes / 64, s.scores + (state * cpu::kTile + t) * kLanes,
                      k.by_head ? 4 * k.dim * T::kBytes : k.head, in);
    }
    if (then_t == t && then_h == h) return true;
    t = then_t, h = then_h;
  }
}

// Sums, likewise; one(position, head) where a position has no other beside it.
template <class T, class One>
bool sums_neon(const cpu::TileRows& v, const cpu::TileRows& next, const cpu::TileStates& s, One&& one) {
  constexpr int64_t kGroup = T::kBytes == 2 ? 16 : 8;  // rows of f32 are as far apart as 16 fill the first level's ways
  if (v.dim * T::kBytes % 64 != 0 || s.final_rows != kLanes || v.scale) return false;
  each_block(v, kGroup, [&](int64_t t, int64_t head) {
    const int64_t count = v.count - t < kGroup ? v.count - t : kGroup;
    for (int64_t run = s.first; run < s.last && count > 1; run++) {
      const int64_t state = head * s.fours + run;
      Neon<T>::sums(SumBlock{v.at + t, next.at + t, s.scores + (state * cpu::kTile + t) * kLanes,
                             s.out + state * kLanes * v.dim, v.dim, head * v.head, head * next.head, count / 2,
                             v.by_head ? kGroup * v.dim * T::kBytes : v.head});
    }
    if (count % 2) one(t + count - 1, head);
  });
  return true;
}
