"""KVX's tiers behind vLLM's own OffloadingConnector: a fresh engine loads what one before it stored, token for token.

KvxOffloadingSpec keeps vLLM's pages themselves. KvxTier is behind vLLM's host memory, which is so small here that chunks leave it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from kvx.adapters.vllm.page_facts import chunk_facts
from kvx.bench.vllm import make_tier, offloading_config
from kvx.errors import BadArgument
from kvx.tiers import BlockKind, PackTier
from kvx.tiers.directory import read_manifest
from tests.engines.small_models import make_hybrid, make_lfm2, make_plain
from tests.engines.vllm_process import generate, session


def offloading(path, **extra) -> dict:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KvxOffloadingSpec",
            "spec_module_path": "kvx.adapters.vllm.offloading",
            "tiers": [f"disk:{path}"],
            "model": "small",
            **extra,
        },
    }


def test_a_fresh_engine_loads_it(tmp_path):
    """A hybrid: groups with windows and without, each with a tier."""
    folder, prompt = make_hybrid(tmp_path / "model"), [(n * 37 + n // 7) % 256 for n in range(203)]
    alone = generate(folder, [prompt], max_tokens=24)
    # Stores begin in the step after, so that the last ones of an engine that ends may be lost: a second prompt lets them pass.
    first = generate(folder, [prompt, prompt[:40]], max_tokens=24, connector=offloading(tmp_path / "tiers"))
    second = generate(folder, [prompt], max_tokens=24, connector=offloading(tmp_path / "tiers"))
    assert len(set(alone.tokens[0])) > 5
    assert first.tokens[0] == alone.tokens[0]
    assert second.tokens == alone.tokens
    assert second.cached[0] >= 160


def test_chunks_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match="blocks_per_chunk is 2"):
        generate(make_hybrid(tmp_path / "model"), [[1, 2, 3]], connector=offloading(tmp_path, blocks_per_chunk=2))


def test_it_wants_a_name(tmp_path):
    with pytest.raises(RuntimeError, match=r'"model" is not given.*a name that only these weights have'):
        generate(make_hybrid(tmp_path / "model"), [[1, 2, 3]], connector=offloading(tmp_path, model=""))


# --- KvxTier ---------------------------------------------------------------------------------------------------------------

PROMPTS = [[(n * 37 + n // 7 + s * 11) % 256 for n in range(203)] for s in range(4)]
# Of the first prompt again: by then the others have taken its place in host memory, and vLLM's own prefix cache is emptied.
AGAIN = {"prompts": [*PROMPTS, PROMPTS[0][:40], PROMPTS[0]], "reset_before": [5], "max_tokens": 12}


def tiering(path: Path, host_bytes: int, *, module: str = "kvx.adapters.vllm.secondary_tier", **extra) -> dict:
    tier = {"type": "KvxTier", "module_path": module, "tiers": [f"disk:{path}:1GB"], "model": "small"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": uuid4().hex,
        "kv_connector_extra_config": {
            "spec_name": "KvxTieringSpec",
            "spec_module_path": "kvx.adapters.vllm.tiering",
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": [tier | extra.pop("tier", {})],
            **extra,
        },
    }


def shared_files(connector: dict) -> list[Path]:
    return list(Path("/dev/shm").glob(f"vllm_offload_{connector['engine_id']}*"))


def run(model: Path, connector: dict | None, *, prompts, **options):
    return generate(model, prompts, connector=connector, is_shut_down=True, max_num_seqs=4, **options)


TWO_RANKS = {
    "tensor_parallel_size": 2,
    "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
}


@pytest.mark.parametrize(
    ("make", "host_bytes", "extra", "engine"),
    [
        (make_plain, 400_000, {}, {}),
        (make_plain, 800_000, {"blocks_per_chunk": 2}, {}),
        (make_plain, 400_000, {}, TWO_RANKS),
        (make_lfm2, 200_000, {}, {}),
    ],
    ids=["one group", "chunks of two blocks", "two ranks", "states"],
)
def test_what_left_host_memory_comes_back_from_the_tier(tmp_path, make, host_bytes, extra, engine):
    folder, connector = make(tmp_path / "model"), tiering(tmp_path / "kv", host_bytes, **extra)
    first = run(folder, connector, **AGAIN, **engine)
    assert first.cached[:4] == [0, 0, 0, 0]  # so the first answers are vLLM's own
    assert len(set(first.tokens[0])) > 5
    assert (first.tokens[5], first.cached[5]) == (first.tokens[0], 192)
    second = run(folder, connector, prompts=PROMPTS[:2], max_tokens=12, **engine)  # another process
    assert second.tokens == first.tokens[:2]
    assert second.cached == [192, 192]
    assert list((tmp_path / "kv").rglob("*.kvx"))
    kinds = [read_manifest(made) for made in (tmp_path / "kv").iterdir()]
    if make is make_lfm2:  # [2, 64] float32 of each convolution, of which vLLM's pages have 8192 bytes
        assert {kind.num_bytes for kind in kinds} == {8192, 512}
    assert not shared_files(connector)


@pytest.mark.parametrize("what", ["it is a file", "it is full"])
def test_without_a_store_vllm_goes_on(tmp_path, what):
    folder, kv = make_plain(tmp_path / "model"), tmp_path / "kv"
    if what == "it is a file":
        kv.write_text("")
        connector, said = tiering(kv, 400_000), "the tiers cannot be opened, so nothing is found or kept"
    else:
        connector, said = tiering(kv, 400_000, module="tests.engines.vllm_full_disk"), "No space left on device"
    answer = run(folder, connector, **AGAIN)
    assert answer.tokens[5] == answer.tokens[0]
    assert answer.cached[5] == 32  # which the prompt before it left in host memory
    assert said in answer.log
    assert not [*kv.rglob("*.kvx"), *kv.rglob("*.partial")]


def test_killed_while_it_writes(tmp_path):
    folder, kv = make_plain(tmp_path / "model"), tmp_path / "kv"
    connector = tiering(kv, 4_000_000)
    many = [[(n * 31 + s * 7 + n // 9) % 256 for n in range(600)] for s in range(200)]
    with session(folder, connector=connector, max_num_seqs=4) as process:
        process.tell("answer", prompts=many, max_tokens=1, reset_before=[])
        end = time.monotonic() + 300
        while len(list(kv.rglob("*.kvx"))) < 20 and time.monotonic() < end:
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)  # in the middle of 200 prompts
    (made,) = (p for p in kv.iterdir() if p.is_dir())
    kept = read_manifest(made)
    kind = BlockKind({name: value for name, value in kept.manifest.items() if name != "file"}, kept.buffer_bytes)
    with PackTier(made, kind, "1GB") as tier:
        names = tier.names()
        assert len(names) >= 40
        assert all(block is not None for block in tier.get(names).result())
        assert not tier.stats.refused
    for left in shared_files(connector):  # a killed vLLM leaves its region there
        left.unlink()
    alone = run(folder, None, prompts=many[:1], max_tokens=12)
    after = run(folder, connector, prompts=many[:1], max_tokens=12)
    assert after.tokens == alone.tokens
    assert after.cached[0] > 0


def test_hashes_that_begin_with_a_random_number(tmp_path):
    """vLLM's xxhash: found by the next process with PYTHONHASHSEED, and said without."""
    folder, connector = make_plain(tmp_path / "model"), tiering(tmp_path / "kv", 4_000_000)
    options = {"prompts": [PROMPTS[0], PROMPTS[0][:40]], "max_tokens": 4, "prefix_caching_hash_algo": "xxhash"}
    random = run(folder, connector, **options)
    assert "Nothing that is kept now is found after a restart" in random.log
    first, second = (run(folder, connector, **options, env={"PYTHONHASHSEED": "7"}) for _ in range(2))
    assert "found after a restart" not in first.log
    assert (random.cached[0], first.cached[0], second.cached[0]) == (0, 0, 192)
    assert first.tokens == second.tokens == random.tokens


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"model": ""}, 'KvxTier: "model" is not given'),
        ({"model": "llama-2x64-kv2x32-v256"}, "a geometry"),
        ({"tiers": []}, "it must be a list of them"),
        ({"tiers": ["disk:{kv}:1KB"]}, "one block takes"),
        ({"format": "bf16"}, "format and block_size are vLLM's own"),
        ({"fsync": True}, "'fsync' is not known"),
        ({"timeout_s": 0}, "timeout_s is 0"),
    ],
    ids=str,
)
def test_settings_of_the_tier_that_are_refused(tmp_path, told, said):
    tiers = [t.format(kv=tmp_path) for t in told.get("tiers", ["disk:{kv}"])]
    tier = {"type": "KvxTier", "module_path": "kvx.adapters.vllm.secondary_tier", "model": "small", **told, "tiers": tiers}
    with pytest.raises(BadArgument, match=re.escape(said)):
        make_tier(tier, np.zeros((4, 4096), np.uint8))


def test_chunks_of_other_servers_are_other_kinds(tmp_path):
    """Nothing that changes what bytes mean leaves the kind as it is."""
    plain = offloading_config(4096)
    parallel = plain.parallel
    (group,) = plain.groups
    others = [
        replace(plain, parallel=replace(parallel, tp_size=2, world_size=2)),
        replace(plain, parallel=replace(parallel, pp_size=2, world_size=2)),
        replace(plain, model=replace(plain.model, dtype="float16")),
        replace(plain, cache=replace(plain.cache, blocks_per_chunk=2)),
        replace(plain, cache=replace(plain.cache, tokens_per_hash=8)),
        replace(plain, groups=(replace(group, tokens_per_block=32),)),
        replace(plain, groups=(replace(group, layer_names=group.layer_names[1:]),)),
        replace(plain, kv_cache_layout="LBNHC"),
        replace(plain, canonical_layout=True),
        replace(plain, replicated_layout=True),
    ]
    how = {"group": 0, "spans": ((0, 4096),), "device": "cuda", "version": "0.32"}
    made = [chunk_facts(plain, "a", **how), chunk_facts(plain, "a", **{**how, "spans": ((0, 512),)})]
    made += [chunk_facts(plain, "a", **{**how, **changed}) for changed in ({"device": "cpu"}, {"version": "1"})]
    made += [chunk_facts(plain, "b", **how), *(chunk_facts(other, "a", **how) for other in others)]
    assert len({BlockKind(facts, (4096,)).digest for facts in made}) == len(made) == 15
    assert chunk_facts(plain, "a", **how) == made[0]
