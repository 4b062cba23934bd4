"""vLLM in a process of its own, as a function: what to run goes in as JSON, what came out comes back.

A fresh process is a fresh engine: nothing of the one before can be what makes a test pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
_MARK = "KVX-ANSWER "
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Answer:
    tokens: list[list[int]]  # of each prompt
    cached: list[int]  # prompt tokens that were not computed
    log: str


def generate(
    model: Path,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 64,
    connector: dict[str, Any] | None = None,  # arguments of KVTransferConfig
    env: dict[str, str] | None = None,
    reset_before: Sequence[int] = (),  # prompts before which vLLM forgets its own prefix cache
    is_shut_down: bool = False,  # the engine ends in order, rather than with its process
    python: str | Path = sys.executable,  # of the environment that has vLLM
    **engine: Any,  # arguments of LLM
) -> Answer:
    """Greedy, one prompt after the other. RuntimeError with what vLLM said where it did not answer."""
    ask: dict[str, Any] = {"model": str(model), "prompts": [list(map(int, p)) for p in prompts], "max_tokens": max_tokens}
    ask |= {"connector": connector, "engine": engine, "reset_before": list(reset_before), "is_shut_down": is_shut_down}
    done = subprocess.run(
        [str(python), "-m", "tests.engines.vllm_process"], input=json.dumps(ask), env=environment(env), cwd=ROOT,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    log = done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        raise RuntimeError(log)
    return Answer(**json.loads(lines[-1].removeprefix(_MARK)), log=log)


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(ROOT), **(more or {})}


def kvx_connector(tiers: Sequence[str], **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KvxConnector",
        "kv_connector_module_path": "kvx.adapters.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": list(tiers), **extra},
    }


def _answer(ask: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(**ask["connector"]) if ask["connector"] else None
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "block_size": 32, "skip_tokenizer_init": True}
    llm = LLM(ask["model"], kv_transfer_config=transfer, **{**settings, **ask["engine"]})
    how = SamplingParams(temperature=0, max_tokens=ask["max_tokens"], ignore_eos=True, detokenize=False)
    tokens, cached = [], []
    for n, prompt in enumerate(ask["prompts"]):
        if n in ask["reset_before"]:
            assert llm.reset_prefix_cache()
        out = llm.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)[0]
        tokens.append(list(out.outputs[0].token_ids))
        cached.append(int(out.num_cached_tokens or 0))
    if ask["is_shut_down"]:
        llm.llm_engine.engine_core.shutdown()
    return {"tokens": tokens, "cached": cached}


if __name__ == "__main__":
    print(_MARK + json.dumps(_answer(json.loads(sys.stdin.read()))), flush=True)
    os._exit(0)  # engines with wires in them may fall over at exit, long after the answer
