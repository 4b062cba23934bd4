"""vLLM in a process of its own, as a function: what to run goes in, what came out comes back.

A fresh process is a fresh engine: nothing of the one before can be what makes a test pass.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.forked import ROOT, Session, fork_server

__all__ = ["ROOT", "Answer", "ServedLlm", "generate", "kvx_connector", "session"]
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_PRELOAD = ("vllm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker", "kvx.adapters.vllm.connector")


@dataclass(frozen=True)
class Answer:
    tokens: list[list[int]]  # of each prompt
    cached: list[int]  # prompt tokens that were not computed
    log: str


def generate(
    model: Path,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 32,
    connector: dict[str, Any] | None = None,  # arguments of KVTransferConfig
    env: dict[str, str] | None = None,
    python: str | Path = sys.executable,  # of the environment that has vLLM
    reset_before: Sequence[int] = (),  # of these prompts the prefix cache is emptied first
    is_shut_down: bool = False,  # at the end, as a server is
    **engine: Any,  # arguments of LLM
) -> Answer:
    """Greedy, one prompt after the other. RuntimeError with what vLLM said where it did not answer."""
    with session(model, connector=connector, env=env, python=python, **engine) as one:
        asked = [list(map(int, p)) for p in prompts]
        answer = one.ask("answer", prompts=asked, max_tokens=max_tokens, reset_before=list(reset_before))
        if is_shut_down:
            one.ask("shut_down")
        return Answer(**answer, log=one.log)


def session(
    model: Path,
    *,
    connector: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    python: str | Path = sys.executable,
    **engine: Any,
) -> Session:
    """A ServedLlm that waits for calls."""
    server = fork_server(python, _PRELOAD, _ENVIRONMENT)
    return server.session("tests.engines.vllm_process:ServedLlm", env=env, model=str(model), connector=connector, engine=engine)


def kvx_connector(tiers: Sequence[str], **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KvxConnector",
        "kv_connector_module_path": "kvx.adapters.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": list(tiers), **extra},
    }


class ServedLlm:
    """Of the process that session() starts."""

    def __init__(self, model: str, connector: dict[str, Any] | None, engine: dict[str, Any]) -> None:
        import multiprocessing
        import os

        import torch
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if "OMP_NUM_THREADS" in os.environ:  # which was read when the library was loaded
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        # vLLM spawns its workers on CPUs: each would import it all again.
        if any(engine.get(f"{kind}_parallel_size", 1) > 1 for kind in ("tensor", "pipeline")):
            from vllm.v1.executor import multiproc_executor

            multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
        transfer = KVTransferConfig(**connector) if connector else None
        settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "block_size": 32, "skip_tokenizer_init": True}
        self._llm = LLM(model, kv_transfer_config=transfer, **{**settings, **engine})

    def answer(self, prompts: list[list[int]], max_tokens: int, reset_before: Sequence[int] = ()) -> dict[str, Any]:
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        tokens, cached = [], []
        for n, prompt in enumerate(prompts):
            if n in reset_before:
                assert self._llm.reset_prefix_cache()
            out = self._llm.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)[0]
            tokens.append(list(out.outputs[0].token_ids))
            cached.append(int(out.num_cached_tokens or 0))
        return {"tokens": tokens, "cached": cached}

    def shut_down(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
