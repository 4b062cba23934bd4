"""vLLM's connector and the runner over one store in other processes' memory, NIXL's or Mooncake's: each finds what the other wrote,
and both go on when the store is gone."""

from __future__ import annotations

import signal
import time

import pytest

from kvx.runner import Engine, Params
from tests.engines.small_models import make_plain
from tests.engines.vllm_process import kvx_connector, session
from tests.engines.wires import store_server

MODEL, BLOCK = "plain-in-a-remote-store", 16
PROMPTS = [[(n * 37 + n // 7 * 11 + seed) % 251 + 3 for n in range(100)] for seed in (0, 5, 9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_plain(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("wire", ["nixl", "mooncake"])
def test_vllm_and_the_runner_share_a_store(wire, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # where the secret is

    def run(engine: Engine, prompt: list[int]) -> tuple[list[int], int]:
        engine.reset()  # nothing but the store can have it
        ((answer,),) = engine.generate([prompt], Params(max_tokens=6, ignore_eos=True))
        return list(answer.tokens), answer.num_cached

    with store_server(wire, tmp_path) as store:
        told = kvx_connector([store.tier], model=MODEL, block_size=BLOCK)
        sizes = {"dtype": "f32", "block_size": BLOCK, "num_blocks": 32}
        with (
            session(folder, connector=told, env={"HOME": str(tmp_path)}, enable_prefix_caching=False) as vllm,
            Engine.load(folder, tiers=[store.tier], tier_model=MODEL, **sizes) as runner,
            Engine.load(folder, **sizes) as alone,
        ):
            want = [run(alone, prompt)[0] for prompt in PROMPTS]
            assert vllm.ask("answer", prompts=PROMPTS[:1], max_tokens=6) == {"tokens": want[:1], "cached": [0]}
            assert run(runner, PROMPTS[0]) == (want[0], 96)  # whole blocks
            assert run(runner, PROMPTS[1]) == (want[1], 0)
            runner.tiers.backing.save()  # as Engine.close() does
            assert vllm.ask("answer", prompts=PROMPTS[:2], max_tokens=6) == {"tokens": want[:2], "cached": [96, 96]}
            store.signal(signal.SIGKILL)
            begin = time.monotonic()
            assert vllm.ask("answer", prompts=[PROMPTS[0], PROMPTS[2]], max_tokens=6)["tokens"] == [want[0], want[2]]
            assert run(runner, PROMPTS[2])[0] == want[2]
            assert time.monotonic() - begin < 40
