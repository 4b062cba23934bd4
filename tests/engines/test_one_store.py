"""One disk store serves every engine: what each wrote is found by every other, with the same content and the same tokens.

Every engine writes a prompt of its own and then reads those of all others, out of a store in which only the writer has been. Blocks
of 16, 32 and 128 tokens, three formats in the store, one rank and two are swept in pairs: each engine has each block size and each
format once. Engines are processes of their own environments; store_engines.py has a row for each, and another engine gets one.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

import kvx
from kvx.adapters.engine_names import namer_of
from kvx.connector.store_names import NAMES, spec_of
from kvx.handover import names
from kvx.tiers import DiskTier
from kvx.tiers.directory import read_manifest
from tests.engines.forked import Session
from tests.engines.small_models import make_plain
from tests.engines.store_engines import ENGINES, StoreCase, missing_environment, open_engine

OTHERS = [name for name in ENGINES if name != "lmcache"]
MISSING, NO_LMCACHE = missing_environment(*OTHERS), missing_environment("lmcache")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"`make engines` makes {MISSING}, which is not here")
FP8 = "fp8_e4m3_per_token_head_inline"
CACHED, PROMPT, ANSWER = 128, 140, 10  # whole blocks of a prompt in every block size
PLAIN = {"heads": 2, "dim": 32, "layers": 2}


class Round(NamedTuple):
    """Engines on one store at the same time, each with blocks of so many tokens."""

    format: str
    block_sizes: dict[str, int]
    ranks: Mapping[str, int] = MappingProxyType({})  # of those that have more than one
    layout: str = "page_first"  # of SGLang's pools


SMOLLM2 = {
    "f32": Round("f32", {"vllm": 16, "sglang": 32, "runner": 128, "transformers": 32, "llama_cpp": 16, "paged": 128}),
    "bf16": Round(
        "bf16", {"vllm": 32, "sglang": 128, "runner": 16, "transformers": 128, "llama_cpp": 32, "paged": 16},
        {"transformers": 2}, "layer_first",
    ),
    "fp8": Round(
        FP8, {"vllm": 128, "sglang": 16, "runner": 32, "transformers": 16, "llama_cpp": 128, "paged": 32},
        {"llama_cpp": 2}, "page_head",
    ),
}  # fmt: skip
# A model of two KV heads, which two ranks share evenly, as vLLM's and SGLang's must. SmolLM2 has three: two and one above.
RANKS = {
    "vllm_tp2": Round(
        "f32", {"vllm": 16, "sglang": 128, "runner": 32, "transformers": 128, "paged": 16}, {"vllm": 2, "transformers": 2}
    ),
    "sglang_tp2": Round(
        "f32", {"vllm": 128, "sglang": 16, "runner": 16, "transformers": 32, "paged": 32}, {"sglang": 2}, "page_first_direct"
    ),
}
# LMCache beside the others: SmolLM2 by one worker, and two that share two heads. Not with SGLang: neither tells its tokens, so what
# one wrote the other finds once an engine that has them was asked.
LMCACHE = {
    "smollm2_f32": Round("f32", {"lmcache": 32, "vllm": 16, "runner": 128, "transformers": 16, "llama_cpp": 128}),
    "smollm2_fp8": Round(FP8, {"lmcache": 16, "vllm": 32, "transformers": 128, "llama_cpp": 32, "paged": 16}),
    "plain_bf16_tp2": Round("bf16", {"lmcache": 128, "runner": 16, "transformers": 32, "paged": 16}, {"lmcache": 2}),
}


class Text(NamedTuple):
    """A model, a prompt for each engine, and what each engine says to each of them alone."""

    case: StoreCase
    prompts: dict[str, list[int]]
    alone: dict[str, dict[str, list[int]]]
    bound: torch.Tensor  # [layer, kv, 1, 1, 1]: how far K and V of an engine may be from Transformers'
    rows: torch.Tensor  # [prompt, layer, kv, head, token, dim], Transformers' own


def open_engines(stack: ExitStack, cases: Mapping[str, StoreCase]) -> dict[str, Session]:
    """Two at once: much of a start is one thread's work."""
    with ThreadPoolExecutor(2) as threads:
        return {
            name: stack.enter_context(e) for name, e in zip(cases, threads.map(open_engine, cases, cases.values()), strict=True)
        }


def make_text(case: StoreCase, ids: list[int], path: Path, engines: list[str]) -> Text:
    prompts = {name: (ids[11 * n :] + ids[: 11 * n])[:PROMPT] for n, name in enumerate(engines)}
    assert all(len(p) == PROMPT for p in prompts.values())
    assert all(a[:16] != b[:16] for a, b in pairwise(prompts.values()))
    alone: dict[str, dict[str, list[int]]] = {}
    with ExitStack() as stack:
        for name, engine in open_engines(stack, {name: case for name in engines if ENGINES[name].decodes}).items():
            said = engine.ask("read", prompts=list(prompts.values()), num_tokens=ANSWER)
            if name == "transformers":
                engine.ask("reference", prompts=list(prompts.values()), count=CACHED, path=str(path))
            engine.close()
            alone[name] = {of: answer["tokens"] for of, answer in zip(prompts, said, strict=True)}
            assert [answer["cached"] for answer in said] == [0] * len(said)
    single, double = torch.load(path / "f32.pt").double(), torch.load(path / "f64.pt")
    # What float32 is off in Transformers, in the worst place of a layer's K or V. Another engine takes the same sums in another
    # order, and may be off by twice that; Transformers, with which it is compared, by once.
    off = (single[:1] - double).abs().amax(dim=(0, 3, 4, 5), keepdim=True)[0]
    return Text(case, prompts, alone, 3 * off, single)


@pytest.fixture(scope="module")
def smollm2(small_model_copies, tmp_path_factory) -> Text:
    from transformers import AutoTokenizer

    from tests.engines.test_vllm_connector import TEXT

    ids = list(AutoTokenizer.from_pretrained(small_model_copies.folder)(TEXT)["input_ids"])
    case = StoreCase(str(small_model_copies.folder), str(small_model_copies.gguf), "smollm2-in-one-store")
    return make_text(case, ids, tmp_path_factory.mktemp("reference"), list(ENGINES))


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Text:
    ids = [(n * 37 + n // 7 * 11) % 251 + 3 for n in range(200)]
    case = StoreCase(str(make_plain(tmp_path_factory.mktemp("plain"))), "", "plain-in-one-store", **PLAIN)
    return make_text(case, ids, tmp_path_factory.mktemp("reference"), [name for name in ENGINES if name != "llama_cpp"])


def contents(store: Path, tokens: list[int]) -> Iterator[tuple[str, list[tuple[torch.Tensor, kvx.CacheSpec]]]]:
    """Of each kind of blocks in the store that has these tokens: its shards, as float32 in one plain layout."""
    families: dict[str, list[tuple[torch.Tensor, kvx.CacheSpec]]] = {}
    for folder in sorted(p for p in store.iterdir() if p.is_dir()):
        kind = read_manifest(folder)
        found = None if kind is None else spec_of(kind)
        if kind is None or found is None:
            continue
        spec, scheme = found[0], str(kind.manifest.get(NAMES, ""))
        namer = namer_of(scheme)
        keys = names(tokens, spec.block_size, spec.model) if namer is None else namer(tokens, spec.block_size)
        with DiskTier(folder, kind, 10**10, threads=1) as tier:
            blocks = tier.get(keys).result()
        if None in blocks:
            continue
        here = spec.replaced(num_blocks=len(blocks))
        plain = here.replaced(layout="layer kv | block head token dim", format="f32", v_format="")
        made = kvx.allocate_buffers(plain)
        kvx.convert([block.buffers[0] for block in blocks if block is not None], made, plan=kvx.plan(here, plain))
        rows = torch.stack([t.view(torch.float32).view(len(blocks), spec.num_kv_heads, spec.block_size, -1) for t in made])
        rows = rows.permute(0, 2, 1, 3, 4).reshape(spec.num_layers, 2, spec.num_kv_heads, len(blocks) * spec.block_size, -1)
        family = json.dumps({k: v for k, v in kind.manifest.items() if k not in ("head_start", "num_kv_heads")}, sort_keys=True)
        families.setdefault(family, []).append((rows, plain))
    yield from families.items()


def whole(shards: list[tuple[torch.Tensor, kvx.CacheSpec]], heads: int) -> torch.Tensor | None:
    """[layer, kv, head, token, dim] of all heads; None where some are missing."""
    ordered = sorted(shards, key=lambda s: s[1].head_start)
    held = [h for _, spec in ordered for h in range(spec.head_start, spec.head_start + spec.num_kv_heads)]
    return torch.cat([rows for rows, _ in ordered], dim=2) if held == list(range(heads)) else None


def digest(rows: torch.Tensor) -> str:
    """KVX's content digest: the same in every layout, block size and sharding."""
    layers, _, heads, tokens, dim = rows.shape
    spec = kvx.CacheSpec(1, tokens, heads, dim, layout="layer kv | block head token dim", format="f32", num_layers=layers)
    buffers = [rows[layer, kv].contiguous().view(1, heads, tokens, dim) for layer in range(layers) for kv in range(2)]
    return str(kvx.digest(buffers, spec))


def within(rows: torch.Tensor, text: Text, writer: str, format: str) -> None:
    """What an engine wrote is the model's K and V, up to its arithmetic and one rounding to the store's format."""
    want = text.rows[list(text.prompts).index(writer)]
    room = {"f32": 0.0, "bf16": 2.0**-8, FP8: 2.0**-4}[format] * want.abs()  # of a significand of 8 bits, and of 4
    if format == FP8:  # below the smallest normal number of a row's scale, half a step of 2**-9
        room = room + want.abs().amax(dim=-1, keepdim=True) / 448 * 2.0**-10
    # llama.cpp makes the angle of K's pair i by i multiplications, each rounded to 24 bits: at position p it is off by p i f(i),
    # with frequencies f(i) = theta ** (-2 i / dim), which is most at i = dim / (2 ln theta). No theta is below 10000 here.
    turn = CACHED * text.case.dim / (2 * math.e * math.log(10_000)) * 2.0**-24
    room = room + torch.tensor([turn, 0.0]).view(2, 1, 1, 1) * want.abs().amax(dim=-1, keepdim=True)
    # What is rounded is the engine's number, which may be the bound larger.
    over = ((rows.double() - want).abs() - (room + (1 + 2.0**-4) * text.bound)).max().item()
    assert over <= 0, f"{writer}: K or V is {over:.3g} further from Transformers' than {format} and float32 explain"


def run(text: Text, one: Round, path: Path, report: list[str]) -> None:
    store, before = path / "store", path / "before"
    here = replace(text.case, store=str(store), format=one.format, layout=one.layout)
    cases = {name: replace(here, block_size=size, ranks=one.ranks.get(name, 1)) for name, size in one.block_sizes.items()}
    with ExitStack() as stack:
        # SGLang and LMCache first: others see that they are there.
        engines = open_engines(stack, {name: cases.pop(name) for name in ("sglang", "lmcache") if name in cases})
        engines |= open_engines(stack, cases)
        for name, engine in engines.items():
            engine.ask("write", prompt=text.prompts[name])
        shutil.copytree(store, before)
        written = {}
        for name in engines:
            found = [whole(s, text.case.heads) for _, s in contents(before, text.prompts[name][:CACHED])]
            (written[name],) = (rows for rows in found if rows is not None)  # nobody else has been there
            within(written[name], text, name, one.format)
        for name, engine in engines.items():
            others = [w for w in engines if w != name]
            said = engine.ask("read", prompts=[text.prompts[w] for w in others], num_tokens=ANSWER)
            for writer, answer in zip(others, said, strict=True):
                check(text, one, store, (writer, name), answer, written[writer], report)
            put_back(store, before)


def check(text: Text, one: Round, store: Path, pair: tuple[str, str], answer: dict[str, Any], rows: Any, report: list[str]) -> None:
    """What one engine wrote and another read."""
    writer, reader = pair
    assert answer["cached"] == CACHED, f"{reader} found {answer['cached']} of {CACHED} tokens that {writer} wrote"
    want = digest(rows)
    if not ENGINES[reader].decodes:
        assert answer["content"] == want, f"{reader} has other bytes than {writer} wrote"
        return
    for kind, shards in contents(store, text.prompts[writer][:CACHED]):  # the writer's, and the reader's copy
        here = whole(shards, text.case.heads)
        assert here is None or digest(here) == want, f"{reader} keeps other bytes than {writer} wrote: {kind}"
    alone = text.alone[reader][writer]
    same = next((n for n, (a, b) in enumerate(zip(answer["tokens"], alone, strict=True)) if a != b), ANSWER)
    report.append(f"{writer} -> {reader}: {same}")
    assert same >= (ANSWER if one.format == "f32" else 1), f"{reader} after {writer}: {answer['tokens']}; alone {alone}"


def put_back(store: Path, before: Path) -> None:
    """The store as the writers left it: what a reader took over is not there for the next."""
    kept = {p.relative_to(before) for p in before.rglob("*") if p.is_file()}
    for path in [p for p in store.rglob("*") if p.is_file() and p.relative_to(store) not in kept]:
        path.unlink()
    for name in kept:
        if not (store / name).exists():
            shutil.copy2(before / name, store / name)


@pytest.mark.parametrize("name", SMOLLM2)
def test_smollm2(smollm2, name, tmp_path, capsys):
    report: list[str] = []
    run(smollm2, SMOLLM2[name], tmp_path, report)
    with capsys.disabled():
        print(f"\n{name}: tokens of {ANSWER} that are the reader's alone:", *report, sep="\n  ")


@pytest.mark.parametrize("name", RANKS)
def test_ranks(plain, name, tmp_path):
    run(plain, RANKS[name], tmp_path, [])


@pytest.mark.skipif(bool(NO_LMCACHE), reason=f"`make engines` makes {NO_LMCACHE}, which is not here")
@pytest.mark.parametrize("name", LMCACHE)
def test_lmcache(request, name, tmp_path):
    run(request.getfixturevalue(name.split("_")[0]), LMCACHE[name], tmp_path, [])
