// What this CPU has: the widest row table it runs, and how many threads a call may use.
#ifdef _OPENMP
#include <omp.h>
#endif
#include <stdlib.h>
#include <string.h>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(KVX_HAS_AMX) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention/cpu/attend.h"
#include "cpu/rows.h"
#include "run.h"

namespace kvx {
namespace cpu {

namespace {

struct Tables {
  const RowTable& rows;
  const AttendTable attend;
};

#if defined(__aarch64__)
bool has_dotprod() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}
#endif

#if defined(KVX_HAS_AMX) && defined(__linux__)
// Besides the instructions, the kernel's leave to use tiles, which it gives a process on request.
bool has_amx() {
  unsigned a, b, c, d = 0;
  const unsigned all = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, int8
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & all) != all) return false;
  constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return __builtin_cpu_supports("avx512vbmi") && syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
}
#elif defined(KVX_HAS_AMX)
bool has_amx() { return false; }
#endif

Tables choose() {
  // KVX_SIMD (debugging) takes away instruction sets, so that each path can be tested on one machine.
  [[maybe_unused]] const char* cap = getenv("KVX_SIMD");
#if defined(__aarch64__)
  if (has_dotprod() && !(cap && !strcmp(cap, "plain"))) return {rows_plain, attend_dotprod};
#elif defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni"), bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  const struct {
    const char* name;
    bool is_there;
    const RowTable& rows;
    const AttendTable& attend;
    void (*adds[2])(AttendTable*);
  } sets[] = {{"avx512bf16", bf16, rows_avx512, attend_avx512, {&add_vnni, &add_bf16}},
              {"avx512vnni", vnni, rows_avx512, attend_avx512, {&add_vnni}},
              {"avx512", avx512, rows_avx512, attend_avx512, {}},
              {"avx2", avx2, rows_avx2, attend_avx2, {}},
              {"plain", true, rows_plain, attend_plain, {}}};
  bool is_known = false, is_allowed = false;
  for (const auto& set : sets) is_known |= cap && !strcmp(cap, set.name);
  for (const auto& set : sets) {
    is_allowed |= !is_known || !strcmp(cap, set.name);
    if (!is_allowed || !set.is_there) continue;
    AttendTable attend = set.attend;
    for (const auto add : set.adds)
      if (add) add(&attend);
    return {set.rows, attend};
  }
#endif
  return {rows_plain, attend_plain};
}

const Tables& best() {
  static const Tables tables = choose();
  return tables;
}

}  // namespace

const RowTable& best_rows() { return best().rows; }
// Attention alone asks for tiles: a process that has them needs larger stacks for signals.
const AttendTable& best_attend() {
#if defined(KVX_HAS_AMX)
  static const AttendTable* const by_tiles = []() -> const AttendTable* {
    const char* cap = getenv("KVX_SIMD");
    const bool has_bf16 = best().attend.pack != nullptr;
    if (!has_bf16 || (cap && !strcmp(cap, "avx512bf16")) || !has_amx()) return nullptr;
    static AttendTable attend = best().attend;
    add_amx(&attend);
    return &attend;
  }();
  if (by_tiles) return *by_tiles;
#endif
  return best().attend;
}

const char* simd_name() {
#if defined(__aarch64__)
  return "neon";  // every 64-bit Arm has it: rows_plain is compiled with it
#else
  return best_rows().name;
#endif
}

int max_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

}  // namespace cpu
}  // namespace kvx
