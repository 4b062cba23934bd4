"""What `pytest --fast` leaves out: files that are slow by what they do, and most cases of a test that has many."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

CASES = 3  # of one test, spread over all it has
# Under tests/. A folder ends with a slash.
SLOW = (
    # Builds a wheel, the site, or a C or CUDA program, or asks cmake what it would.
    "test_build.py",
    "test_package.py",
    "test_site.py",
    "abi/",
    "cuda/",
    # Runs a real model, or every architecture.
    "adapters/test_transformers_architectures.py",
    "adapters/test_transformers_handover.py",
    "adapters/test_transformers_paged.py",
    "cli/test_generate.py",
    "cli/test_prefill_decode.py",
    "handover/test_handover_example.py",
    "runner/test_bench_generate.py",
    "runner/test_bf16.py",
    "runner/test_families.py",
    "runner/test_greedy.py",
    "runner/test_handover.py",
    "runner/test_kv_formats.py",
    "runner/test_quantised.py",
    "runner/test_tiers.py",
    # Seconds for each case: commands that start a Python each, a browser, sizes of real models, latents of 512 in torch.
    "cli/test_cli.py",
    "cli/test_layouts.py",
    "hybrid/test_real_sizes.py",
    "page/",
    "ops/test_attention_mla.py",
    # Long by design: random cases, processes that are killed, an interrupt at every point, torch.compile.
    "fuzz/",
    "cache/test_cache_interrupts.py",
    "handover/test_handover_corruption.py",
    "hybrid/test_hybrid_interrupts.py",
    "ops/test_compile.py",
    "ops/test_compile_append.py",
    "ops/test_compile_generate.py",
    "runner/test_engine_interrupts.py",
    "soak/",
    "tiers/test_disk_processes.py",
    "tiers/test_tier_interrupts.py",
)


def is_slow(path: Path) -> bool:
    here = path.relative_to(Path(__file__).parent).as_posix()
    return here in SLOW or f"{here.split('/')[0]}/" in SLOW


def few_cases(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Those that run, and those that do not: of each test its first case, its last, and some between."""
    by_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_test[item.nodeid.partition("[")[0]].append(item)
    chosen: set[str] = set()
    for cases in by_test.values():
        count = min(CASES, len(cases))
        chosen |= {cases[n * (len(cases) - 1) // max(1, count - 1)].nodeid for n in range(count)}
    return [i for i in items if i.nodeid in chosen], [i for i in items if i.nodeid not in chosen]
