// Every C entry of kvx_abi.h and kvbm_kernels.h with descriptors that lie: a crash, a stray write, a hang, a demand for
// memory, two answers that disagree, or a wrong result that is called OK, is a failure with its seed and case.
//
//   abi --cases 20000 --seed 1            so many cases
//   abi --seed 1 --first 1234 --cases 1   one case again
//   abi --large --cases 200               scenes large enough that host calls share them out over threads
//   abi --apart --cases 20000             nothing shares memory: for ASan, which calls a copy onto itself an error
//   abi --threads 4 --cases 100000        calls at the same time, each thread in memory of its own
#include <execinfo.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <new>
#include <thread>

#include "scenes.h"

// ---- memory: the library's allocations come here too. A case may ask that one of them fails; none may be large.

namespace {
thread_local int fail_after = 0;  // 0: none fails
thread_local bool asked_too_much = false;
constexpr size_t kMostBytes = 64 << 20;
}  // namespace

void* operator new(size_t bytes) {
  if (bytes > kMostBytes) asked_too_much = true;
  if (fail_after && --fail_after == 0) throw std::bad_alloc();
  if (void* p = bytes > kMostBytes ? nullptr : malloc(bytes ? bytes : 1)) return p;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new[](size_t bytes) { return operator new(bytes); }
void* operator new[](size_t bytes, const std::nothrow_t& none) noexcept { return operator new(bytes, none); }
void operator delete(void* p) noexcept { free(p); }
void operator delete(void* p, size_t) noexcept { free(p); }
void operator delete[](void* p) noexcept { free(p); }
void operator delete[](void* p, size_t) noexcept { free(p); }

namespace {

using namespace fuzz;

struct Options {
  uint64_t seed = 1;
  int64_t first = 0, cases = 20000, threads = 1;
  double hang_s = 1;
  bool is_large = false, is_verbose = false, is_apart = false;
} options;

// ---- a case that does not come back, or that ends the process

struct Now {
  std::atomic<int64_t> number{-1};
  std::atomic<const char*> scene{""};
};
Now now[64];
thread_local Now* mine = &now[0];
std::atomic<bool> is_over{false};

void say(const Now& n, const char* what) {
  fprintf(stderr, "FAILED: %s\n  at %s; again with: --seed %llu --first %lld --cases 1%s\n", what, n.scene.load(),
          (unsigned long long)options.seed, (long long)n.number.load(), options.is_large ? " --large" : "");
  fflush(stderr);
}

void on_signal(int number) {
  say(*mine, strsignal(number));
  void* frames[32];
  backtrace_symbols_fd(frames, backtrace(frames, 32), 2);
  _exit(2);
}

void watch() {  // a case may take hang_s
  std::vector<int64_t> before(64, -1);
  std::vector<int> seen(64, 0);
  while (!is_over) {
    std::this_thread::sleep_for(std::chrono::duration<double>(options.hang_s / 4));
    for (size_t i = 0; i < 64; i++) {
      const int64_t number = now[i].number;
      seen[i] = number >= 0 && number == before[i] ? seen[i] + 1 : 0, before[i] = number;
      if (seen[i] == 5) say(now[i], "it did not come back in time"), _exit(2);
    }
  }
}

// ---- cases

struct Tally {
  int64_t by_status[8] = {}, compared = 0, starved = 0;
  std::vector<int64_t> accepted;
};

bool run_case(Scenes& scenes, int64_t number, Tally* tally) {
  Random random(options.seed * 0x100000001b3u + uint64_t(number));
  const size_t which = size_t(random.below(int(scenes.size())));
  Scene& s = *scenes[which];
  mine->scene = s.name, mine->number = number;
  // Some calls are honest: the scene itself must be accepted, and its result right.
  const int lies = random.chance(8) ? 0 : 1 + random.below(4);
  for (int i = 0; i < lies; i++) s.lie(random);
  if (lies) s.settle(random);
  const bool starves = random.chance(16);
  asked_too_much = false;
  fail_after = starves ? 1 + random.below(12) : 0;
  const int status = s.call();
  const bool starved = starves && fail_after == 0;
  fail_after = 0;
  std::string wrong = s.damage();
  if (wrong.empty() && (status < 0 || status > KVX_STATUS_INTERNAL_ERROR))
    wrong = status == 77 ? "two calls disagree about these arguments" : "status " + std::to_string(status);
  if (wrong.empty() && asked_too_much) wrong = "it asked for more than 64 MB at once";
  if (wrong.empty() && status == KVX_STATUS_INTERNAL_ERROR && !starved)
    wrong = std::string("INTERNAL_ERROR with memory to spare: ") + kvx_last_error();
  if (wrong.empty() && status != KVX_STATUS_OK && strcmp(s.name, "libkvbm_kernels") != 0 && kvx_last_error()[0] == 0)
    wrong = "a refusal without a sentence";
  if (wrong.empty() && lies == 0 && status != KVX_STATUS_OK && !starved && strcmp(s.name, "libkvbm_kernels") != 0)
    wrong = std::string("the honest call was refused: ") + kvx_last_error();
  if (wrong.empty() && status == KVX_STATUS_OK && s.check && !s.is_aliased && !starved)
    wrong = s.check(), tally->compared++;
  if (status >= 0 && status < 8) tally->by_status[status]++;
  if (lies && status == KVX_STATUS_OK) tally->accepted[which]++;
  tally->starved += starved;
  if (options.is_verbose || !wrong.empty())
    fprintf(stderr, "case %lld: %s: %s %s\n", (long long)number, s.name, kvx_status_text(kvx_status_t(status)),
            status ? kvx_last_error() : "");
  s.undo_tables();
  s.put_back();
  if (wrong.empty()) return true;
  say(*mine, wrong.c_str());
  return false;
}

Scenes all_scenes() {
  Scenes scenes;
  const Sizes& z = options.is_large ? kLarge : kSmall;
  add_cache_scenes(z, &scenes), add_hybrid_scenes(z, &scenes), add_plan_scenes(z, &scenes),
      add_other_scenes(z, &scenes);
  for (auto& s : scenes) s->keep(), s->may_alias = !options.is_apart;
  return scenes;
}

// Cases first, first + step, ... in scenes of its own.
bool run_share(int64_t thread, Tally* tally) {
  mine = &now[thread];
  Scenes scenes = all_scenes();
  tally->accepted.resize(scenes.size());
  bool ok = true;
  for (int64_t i = thread; i < options.cases && ok && !is_over; i += options.threads)
    ok = run_case(scenes, options.first + i, tally);
  mine->number = -1;
  if (!ok) is_over = true;
  // A fuzzer whose lies are all caught at the door tests the door alone.
  for (size_t i = 0; ok && i < scenes.size() && options.cases / options.threads >= 400 * int64_t(scenes.size()); i++)
    if (tally->accepted[i] == 0 && strcmp(scenes[i]->name, "libkvbm_kernels") != 0)
      fprintf(stderr, "FAILED: no lie about %s (scene %zu) was believed\n", scenes[i]->name, i), ok = false;
  return ok;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; i++) {
    const std::string key = argv[i];
    const auto value = [&] {
      return i + 1 < argc ? argv[++i] : (fprintf(stderr, "%s wants a number\n", key.c_str()), exit(3), nullptr);
    };
    if (key == "--seed") options.seed = strtoull(value(), nullptr, 10);
    else if (key == "--cases") options.cases = atoll(value());
    else if (key == "--first") options.first = atoll(value());
    else if (key == "--threads") options.threads = atoll(value());
    else if (key == "--hang-s") options.hang_s = atof(value());
    else if (key == "--apart") options.is_apart = true;
    else if (key == "--large") options.is_large = true;
    else if (key == "--verbose") options.is_verbose = true;
    else
      return fprintf(
                 stderr,
                 "abi [--cases N] [--seed S] [--first N] [--threads N] [--hang-s S] [--large] [--apart] [--verbose]\n"),
             3;
  }
  if (options.threads < 1 || options.threads > 64) return fprintf(stderr, "--threads is 1 to 64\n"), 3;
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) signal(number, on_signal);
  std::thread watcher(watch);
  std::vector<Tally> tallies(size_t(options.threads));
  std::atomic<bool> ok{true};
  const auto began = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int64_t t = 1; t < options.threads; t++)
    others.emplace_back([&, t] {
      if (!run_share(t, &tallies[size_t(t)])) ok = false;
    });
  if (!run_share(0, &tallies[0])) ok = false;
  for (std::thread& t : others) t.join();
  is_over = true;
  watcher.join();
  Tally all;
  for (const Tally& t : tallies) {
    for (int i = 0; i < 8; i++) all.by_status[i] += t.by_status[i];
    all.compared += t.compared, all.starved += t.starved;
  }
  printf(
      "%lld cases of seed %llu in %.1f s: %lld OK (%lld compared with a reference), %lld refused, %lld out of range, "
      "%lld without memory: %s\n",
      (long long)options.cases, (unsigned long long)options.seed,
      std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count(), (long long)all.by_status[0],
      (long long)all.compared, (long long)(all.by_status[1] + all.by_status[2] + all.by_status[4]),
      (long long)all.by_status[3], (long long)all.by_status[5], ok ? "passed" : "FAILED");
  return ok ? 0 : 1;
}
