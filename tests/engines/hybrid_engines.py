"""Hybrid models in four engines, each as two calls: a prompt's handover, and the answer to a prompt that goes on from one.

All have the same float32 weights. `computed` counts the tokens of the prompt that the engine itself says it computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import kvx
from kvx.adapters.store import HandoverStore, store_parts
from kvx.adapters.transformers import KvxCache, PagedModel, layer_groups
from kvx.adapters.transformers.handover import export_cache, import_cache
from kvx.handover import Handover
from kvx.runner import Engine, Params
from kvx.runner.handover import export_sequence, resume
from kvx.spec import StateSpec
from tests.engines.hybrid_gguf import END
from tests.engines.vllm_process import generate, kvx_connector

MODEL, BLOCK = "weights-made-by-the-test", 32


# Of the largest logit. llama.cpp's Gemma 4 is off by 6e-4: it looks up GELU in a table of 16 bits.
NEAR = 5e-3


class Said(NamedTuple):
    tokens: list[int]
    computed: int  # tokens of the prompt


def contents(handover: Handover) -> list[kvx.Digest]:
    """What its parts hold now, in one order of them: engines have different ones."""
    parts = sorted(handover.parts, key=lambda p: (isinstance(p.spec, StateSpec), p.layers))
    return [part.digest(handover.num_tokens) for part in parts]


def prefilled(model: Any, ids: list[int], block_size: int, name: str) -> Handover:
    """By Transformers, in whole blocks."""
    cache = KvxCache(model.config, block_size=block_size)
    with torch.no_grad():
        model(torch.tensor([ids]), past_key_values=cache)
    return export_cache(cache, ids, model=name, block_size=block_size)


class HybridTransformers:
    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._seen: list[int] = []  # tokens of each forward
        self.model.get_input_embeddings().register_forward_pre_hook(lambda _, given: self._seen.append(given[0].shape[-1]))

    @torch.no_grad()
    def prefill(self, ids: Sequence[int]) -> Handover:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        self.model(torch.tensor([ids]), past_key_values=cache)
        cache.config = self.model.config  # it says which planes the states are; the name is the test's own
        return export_cache(cache, ids, model=MODEL)

    @torch.no_grad()
    def prefill_blocks(self, ids: Sequence[int]) -> Handover:
        """For a store: transformers' own cache has one token less than a window, and a block that lacks one has no name."""
        cache = KvxCache(self.model.config, block_size=BLOCK)
        self.model(torch.tensor([ids]), past_key_values=cache)
        return export_cache(cache, ids, model=MODEL, block_size=BLOCK)

    @torch.no_grad()
    def decode(self, ids: Sequence[int], num_tokens: int, handover: Handover | None = None) -> Said:
        cache = None if handover is None else import_cache(handover, self.model.config, model=MODEL, tokens=ids)
        self._seen.clear()
        out = self.model.generate(torch.tensor([ids]), past_key_values=cache, **_greedy(num_tokens))
        return Said(out[0, len(ids) :].tolist(), self._seen[0])

    @torch.no_grad()
    def clear(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[bool]:
        """Of prompts of one length: no two tokens are so near at any step of the answer that another's rounding may decide."""
        how = _greedy(num_tokens) | {"return_dict_in_generate": True, "output_logits": True}
        logits = torch.stack(self.model.generate(torch.tensor(prompts), **how).logits, dim=1)  # [prompt, step, token]
        top, best = logits.topk(2)
        is_ended = (best[..., 0] == END).any(dim=1)  # llama.cpp never says it where it is asked not to end
        is_apart = ((top[..., 0] - top[..., 1]) > NEAR * logits.abs().amax(dim=(1, 2))[:, None]).all(dim=1)
        return [bool(ok) for ok in is_apart & ~is_ended]


def _greedy(num_tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None}


class HybridPaged:
    """The KVX runner: the weights are Transformers', and what they cache is in a PagedCache."""

    def __init__(self, model: Any) -> None:
        groups = layer_groups(model.config, num_blocks=64, num_states=4, block_size=BLOCK, format="f32")
        cache = kvx.PagedCache(groups, max_seqs=2, max_seq_len=512, prefix=False)
        self.engine = Engine(PagedModel(model, cache), max_batch_tokens=512)

    def prefill(self, ids: Sequence[int]) -> Handover:
        return export_sequence(self.engine, list(ids), model=MODEL)

    prefill_blocks = prefill  # its window's blocks are whole until none of it is seen

    def decode(self, ids: Sequence[int], num_tokens: int, handover: Handover | None = None) -> Said:
        params, counts = Params(max_tokens=num_tokens, ignore_eos=True), self.engine.scheduler.counts
        before = counts.computed_tokens
        if handover is None:
            (answer,) = self.engine.generate([list(ids)], params)[0]
        else:
            (answer,) = resume(self.engine, handover, list(ids), params, model=MODEL)
        # Each answer's token but the last is computed too, for the one after it.
        return Said(list(answer.tokens), counts.computed_tokens - before - (num_tokens - 1))


class HybridLlama:
    def __init__(self, gguf: Path, folder: Path) -> None:
        from tests.engines.llama_cpp import LlamaCpp  # which other environments do not have

        self.llama = LlamaCpp(gguf, folder, name=MODEL)

    def prefill(self, ids: Sequence[int]) -> Handover:
        return self.llama.prefill(ids)

    prefill_blocks = prefill  # it keeps as many tokens as the window has, which are whole blocks

    def decode(self, ids: Sequence[int], num_tokens: int, handover: Handover | None = None) -> Said:
        answer = self.llama.answer(ids, num_tokens, handover)
        return Said([int(t) for t in answer["tokens"]], int(answer["timings"]["prompt_n"]))


class HybridVllm:
    """Through the connector, which keeps blocks in a directory and finds them there. Each call is a process of its own."""

    def __init__(self, folder: Path, store: Path, **engine: Any) -> None:
        self.folder, self.store, self._engine = folder, store, engine

    def compute(self, prompts: Sequence[Sequence[int]]) -> None:
        """These, and what the connector keeps of them."""
        answer = generate(self.folder, prompts, max_tokens=1, connector=self._connector, **self._engine)
        assert answer.cached == [0] * len(prompts)

    def prefill(self, ids: Sequence[int]) -> Handover:
        """Of a prompt that was computed: what the store has of it, as far as these tokens go."""
        found = self.found(ids)
        assert found is not None, "the connector kept nothing"
        return found

    def found(self, ids: Sequence[int]) -> Handover | None:
        with self._shared() as store:
            return store.find(ids)

    def put(self, handover: Handover) -> None:
        """Into the store, in blocks of the connector's size."""
        with self._shared() as store:
            store.keep(handover)

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int, *, alone: bool = False) -> list[Said]:
        connector = None if alone else self._connector
        answer = generate(self.folder, prompts, max_tokens=num_tokens, connector=connector, **self._engine)
        return [Said(t, len(p) - n) for p, t, n in zip(prompts, answer.tokens, answer.cached, strict=True)]

    @property
    def _connector(self) -> dict[str, Any]:
        return kvx_connector([f"disk:{self.store}"], model=MODEL, block_size=BLOCK)

    def _shared(self) -> HandoverStore:
        """The connector's directory, for who has handovers."""
        return HandoverStore(f"disk:{self.store}", store_parts(self.folder, model=MODEL, block_size=BLOCK, dtype="f32"))
