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
  const char* name;
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
// The instructions, and a kernel that lets processes use tiles. `asks`: this process asks for leave; else it is only
// looked whether the kernel knows tiles.
bool has_amx(bool asks) {
  unsigned a, b, c, d = 0;
  const unsigned all = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, int8
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & all) != all || !__builtin_cpu_supports("avx512vbmi"))
    return false;
  constexpr long kSupported = 0x1021, kAsk = 0x1023, kTileData = 18;  // ARCH_GET_XCOMP_SUPP, ARCH_REQ_XCOMP_PERM
  if (asks) return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
  unsigned long features = 0;
  return syscall(SYS_arch_prctl, kSupported, &features) == 0 && (features >> kTileData & 1);
}
#elif defined(KVX_HAS_AMX)
bool has_amx(bool) { return false; }
#endif

Tables choose() {
  // KVX_SIMD (debugging) takes away instruction sets, so that each path can be tested on one machine.
  [[maybe_unused]] const char* cap = getenv("KVX_SIMD");
#if defined(__aarch64__)
  if (has_dotprod() && !(cap && !strcmp(cap, "plain"))) return {"neon-dotprod", rows_plain, attend_dotprod};
  return {"neon", rows_plain, attend_plain};  // every 64-bit Arm has it: rows_plain is compiled with it
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
    return {set.name, set.rows, attend};
  }
#endif
  return {"plain", rows_plain, attend_plain};
}

const Tables& best() {
  static const Tables tables = choose();
  return tables;
}

#if defined(KVX_HAS_AMX)
bool uses_amx(bool asks) {
  const char* cap = getenv("KVX_SIMD");
  return !strcmp(best().name, "avx512bf16") && !(cap && !strcmp(cap, "avx512bf16")) && has_amx(asks);
}
#endif

}  // namespace

const RowTable& best_rows() { return best().rows; }
// Attention alone asks for tiles: a process that has them needs larger stacks for signals.
const AttendTable& best_attend() {
#if defined(KVX_HAS_AMX)
  static const AttendTable* const by_tiles = []() -> const AttendTable* {
    if (!uses_amx(true)) return nullptr;
    static AttendTable attend = best().attend;
    add_amx(&attend);
    return &attend;
  }();
  if (by_tiles) return *by_tiles;
#endif
  return best().attend;
}

const char* simd_name() {
#if defined(KVX_HAS_AMX)
  if (uses_amx(false)) return "amx";
#endif
  return best().name;
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
