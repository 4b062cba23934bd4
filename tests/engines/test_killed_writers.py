"""kill -9 of writers of a store, 200 times: nothing that was kept is lost, and nothing wrong is read."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from kvx.connector.store_names import spec_of
from kvx.handover import names
from kvx.tiers import DiskTier
from kvx.tiers.directory import read_manifest
from tests.engines.forked import ForkServer, Session, fork_server
from tests.engines.killed_writers import MODEL, prompt_of, told_by
from tests.engines.small_models import make_plain
from tests.engines.store_engines import ENGINES, ROOT, missing_environment

pytestmark = pytest.mark.skipif(
    bool(missing_environment()), reason=f"`make engines` makes {missing_environment()}, which is not here"
)
MODULE = "tests.engines.killed_writers"
KILLS = {"tier": 145, "sglang": 50, "vllm": 5}
assert sum(KILLS.values()) == 200


def server_of(engine: str) -> ForkServer:
    row = ENGINES[engine]
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return fork_server(ROOT / row.environment / "bin" / "python", row.preload, env)


def kill_often(server: ForkServer, target: str, count: int, told: Path, *, together: int = 1, life_s: float, **given: str) -> None:
    """So many writers are started, and killed while they write; `together` of them at once, two of which write the same."""
    rng, alive = random.Random(count), list[tuple[Session, Path]]()
    for trial in range(count):
        while len(alive) < min(together, count - trial):
            n = trial + len(alive)
            session, path = server.session(f"{MODULE}:{target}", **given), told / f"{n}.told"
            session.tell("write_on", told=str(path), first=n // 2 * 1_000_000)
            alive.append((session, path))
        victim, path = alive.pop(0)
        until = time.monotonic() + 120
        while not path.exists():
            assert time.monotonic() < until, f"the writer wrote nothing: {victim.log[-3000:]}"
            time.sleep(0.005)
        time.sleep(rng.random() * life_s)
        victim.close()  # SIGKILL


def test_disk_tiers(tmp_path):
    server, store = server_of("runner"), str(tmp_path / "store")
    kill_often(server, "TierWriter", KILLS["tier"], tmp_path, together=3, life_s=0.05, folder=store)
    told = told_by(tmp_path)
    with server.session(f"{MODULE}:TierWriter", folder=store) as reader:
        found = reader.ask("verify", told=told)
    assert len(told) >= KILLS["tier"]
    assert (found["lost"], found["wrong"]) == (0, 0)
    assert found["right"] >= len(set(told)) * 8


def test_sglang(tmp_path):
    server, store = server_of("sglang"), str(tmp_path / "store")
    kill_often(server, "SglangWriter", KILLS["sglang"], tmp_path, together=2, life_s=0.05, folder=store)
    told = told_by(tmp_path)
    with server.session(f"{MODULE}:SglangWriter", folder=store, layout="page_head") as reader:
        found = reader.ask("verify", told=told)
    assert len(told) >= KILLS["sglang"]
    assert (found["lost"], found["wrong"]) == (0, 0)
    assert found["right"] >= len(set(told)) * 8


def test_vllm(tmp_path):
    server, store, model = server_of("vllm"), tmp_path / "store", str(make_plain(tmp_path / "model"))
    kill_often(server, "VllmWriter", KILLS["vllm"], tmp_path, life_s=1.0, model=model, folder=str(store))
    told = sorted(set(told_by(tmp_path)))
    assert len(told) >= KILLS["vllm"] // 2  # two and two write the same
    for folder in (p for p in store.iterdir() if p.is_dir()):
        kind = read_manifest(folder)
        assert kind is not None
        with DiskTier(folder, kind, 10**11) as tier:
            assert None not in tier.get(tier.names()).result()  # every file under a block's name is whole
            spec = spec_of(kind)
            if spec is not None and spec[0].block_size == 16:
                assert all(all(tier.has_now(names(prompt_of(n), 16, MODEL))) for n in told)
    some = random.Random(1).sample(told, min(len(told), 12))
    begun = [max(n for n in told if n // 1_000_000 == first) + 1 for first in {n // 1_000_000 for n in told}]
    with server.session(f"{MODULE}:VllmWriter", model=model, folder="") as alone:
        want = alone.ask("answer", numbers=some + begun)
    with server.session(f"{MODULE}:VllmWriter", model=model, folder=str(store)) as reader:
        got = reader.ask("answer", numbers=some + begun)
    assert got["tokens"] == want["tokens"]
    assert got["cached"][: len(some)] == [192] * len(some)
