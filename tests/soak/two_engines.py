"""vLLM and the KVX runner on one store for as long as you say, with less room than they write: no token is wrong, nothing is kept.

    python -m tests.soak.two_engines --seconds 600

Two processes, each in its engine's own environment, answer prompts of one set at the same time. What they keep goes to one
directory, vLLM's in blocks of 16 tokens and the runner's in blocks of 32, each with room for a third of the set: blocks are evicted
all the time, by either, between being found and being read too. Every answer is compared with what the engine says without a store.
A line a minute, with the descriptors and the memory of both processes.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.engines.forked import Session, fork_server
from tests.engines.small_models import make_plain
from tests.engines.store_engines import ENGINES, ROOT, RunnerOnStore, StoreCase, VllmOnStore
from tests.soak.trial import SAID_S, Flat, arguments, files_and_memory, finish, take_ctrl_c

NUM_PROMPTS, LENGTH, ANSWER, TOGETHER = 48, 200, 12, 6
ROOM_MB = {16: 4, 32: 4}  # a third of 48 prompts of 12 blocks of 20 KB, and of 6 of 36 KB
ENGINE = {"vllm": 16, "runner": 32}  # and its blocks


class LoadedVllm(VllmOnStore):
    """What is evicted after it was found is computed again: vLLM does so without async scheduling, and with its older runner."""

    def open(self) -> None:
        from tests.engines.vllm_process import ServedLlm, kvx_connector

        c = self.case
        told = kvx_connector([f"disk:{c.store}"], model=c.model, block_size=c.block_size) if c.store else None
        told = told and told | {"kv_load_failure_policy": "recompute"}
        self._llm = ServedLlm(c.folder, told, {"enable_prefix_caching": False, "async_scheduling": False})

    def rest(self) -> dict[str, int]:
        return _rested(0)


class LoadedRunner(RunnerOnStore):
    def answer(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        answer = super().answer(prompt, num_tokens)
        if self.case.store:
            self._save()
        return answer

    def rest(self) -> dict[str, int]:
        return _rested(sum(tier.stats.evicted for tier in self._engine.tiers.backing.movers[0].tiers))


def _rested(evicted: int) -> dict[str, int]:
    gc.collect()
    files, memory = files_and_memory(os.getpid())
    return {"files": files, "memory": memory, "evicted": evicted}


class TwoEngines:
    def __init__(self, folder: Path, seconds: float, seed: int) -> None:
        self.rng, self.seconds, self.counts = random.Random(seed), seconds, Counter[str]()
        self.wrong: list[str] = []
        self.prompts = [[self.rng.randrange(3, 256) for _ in range(LENGTH)] for _ in range(NUM_PROMPTS)]
        self.folder, self.is_stopped = folder, False
        self._answered: dict[str, set[int]] = {name: set() for name in ENGINE}  # the prompts that an engine has written
        self.model = str(make_plain(folder / "model"))
        self.flat = {name: Flat(more_files=2, more_bytes=48 << 20) for name in ENGINE}
        self.alone = {name: self._alone(name) for name in ENGINE}
        self.engines = {name: self._open(name, f"{folder / 'store'}:{ROOM_MB[ENGINE[name]]}MB") for name in ENGINE}

    def _open(self, name: str, store: str) -> Session:
        row = ENGINES[name]
        case = StoreCase(self.model, "", "two-engines", store, ENGINE[name], heads=2, dim=32, layers=2)
        settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
        env = {**settings, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        server = fork_server(ROOT / row.environment / "bin" / "python", row.preload, env)
        kind = {"vllm": "LoadedVllm", "runner": "LoadedRunner"}[name]
        return server.session(f"tests.soak.two_engines:{kind}", env=env, **vars(case))

    def _alone(self, name: str) -> list[list[int]]:
        with self._open(name, "") as engine:
            return [a["tokens"] for a in engine.ask("read", prompts=self.prompts, num_tokens=ANSWER)]

    def run(self) -> None:
        self.begin = said_s = time.monotonic()
        try:
            while not self.wrong and time.monotonic() - self.begin < self.seconds:
                self._once()
                if time.monotonic() - said_s > min(SAID_S, self.seconds / 5):
                    said_s = time.monotonic()
                    self._rest()
            self._rest()
        except KeyboardInterrupt:
            self.is_stopped = True
            print("two engines: stopped", flush=True)
        finally:
            for engine in self.engines.values():
                engine.close()

    def _once(self) -> None:
        """Both answer at the same time: some prompts that both are asked, and some of their own."""
        shared = self.rng.sample(range(NUM_PROMPTS), TOGETHER // 2)
        asked = {name: self.rng.sample([*shared, *self.rng.sample(range(NUM_PROMPTS), TOGETHER // 2)], TOGETHER) for name in ENGINE}
        for name, engine in self.engines.items():
            engine.tell("read", prompts=[self.prompts[n] for n in asked[name]], num_tokens=ANSWER)
        for name, engine in self.engines.items():
            for n, answer in zip(asked[name], engine.hear(), strict=True):
                self.counts[f"{name} answers"] += 1
                self.counts[f"{name} cached"] += answer["cached"]
                if n not in self._answered[name]:  # so whatever it found the other wrote
                    self.counts[f"{name} from the other"] += answer["cached"]
                    self._answered[name].add(n)
                if answer["tokens"] != self.alone[name][n]:
                    self.wrong.append(f"{name} says {answer['tokens']} to prompt {n}; alone it says {self.alone[name][n]}")

    def _rest(self) -> None:
        is_warm = time.monotonic() - self.begin > min(120, self.seconds / 3)
        for name, engine in self.engines.items():
            seen = engine.ask("rest")
            self.flat[name].see(seen["files"], seen["memory"], is_warm=is_warm)
            self.counts["evicted"] = max(self.counts["evicted"], seen["evicted"])
        for path in (self.folder / "store").iterdir():
            size = sum(p.stat().st_size for p in path.rglob("*.kvx") if p.exists())
            self.counts["most bytes"] = max(self.counts["most bytes"], size)
        text = ", ".join(f"{name} {self.counts[f'{name} answers']} answers, {flat}" for name, flat in self.flat.items())
        print(f"two engines: {(time.monotonic() - self.begin) / 60:.1f} min, {text}; no wrong token", flush=True)


def main() -> None:
    options = arguments(__doc__, seconds=60.0).parse_args()
    take_ctrl_c()
    if not all((ROOT / ENGINES[name].environment).exists() for name in ENGINE):
        sys.exit("two engines: `make engines` makes the environments of vLLM and of the runner, and one of them is not here")
    with tempfile.TemporaryDirectory() as folder:
        trial = TwoEngines(Path(folder), options.seconds, options.seed)
        trial.run()
    c = trial.counts
    whole = (LENGTH - 1) // 16 * 16
    rows: dict[str, object] = {"time": f"{(time.monotonic() - trial.begin) / 60:.1f} min"}
    for name in ENGINE:
        share = c[f"{name} cached"] / max(1, c[f"{name} answers"] * whole)
        rows[name] = f"{c[f'{name} answers']} answers as alone, {share:.0%} of their prompts' blocks found in the store"
        rows[f"{name} found"] = f"{c[f'{name} from the other']} tokens of prompts that only the other had answered"
    rows["evicted"] = f"{c['evicted']} blocks by the runner; {c['most bytes'] / 1e6:.1f} MB of a kind at most, with room for 4"
    wrong = list(trial.wrong)
    for name, flat in trial.flat.items():
        rows |= {f"{name} {what}": value for what, value in flat.rows().items()}
        wrong += [f"{name}: {what}" for what in flat.wrong()]
    if c["most bytes"] > 2 * 4e6:
        wrong.append(f"{c['most bytes']} bytes of one kind were there; its room is 4 MB, and what is written within a second")
    if not wrong and not trial.is_stopped:
        shown = (*(f"{name} from the other" for name in ENGINE), "evicted")
        wrong += [f"nothing {what}: the trial shows nothing" for what in shown if not c[what]]
    finish("two engines", rows, wrong, options.seed)


if __name__ == "__main__":
    main()
