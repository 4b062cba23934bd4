"""Every ordered pair of engines for hybrid models: the second goes on from what the first computed, token for token.

LFM2 keeps convolutions beside K and V, Falcon-H1 matrices beside them in each layer, and Gemma 4 windows, heads of two widths and
layers that read others' K and V. Each engine computes a prompt of its own; handovers go through a folder, and to and from vLLM
through the directory of its connector. SGLang's pools and LMCache's server are on that directory too: what they wrote the others
find and go on from, and what the others wrote they find, with equal contents. They compute nothing here: that needs a GPU.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="needs vllm: make engines")
pytest.importorskip("xllamacpp", reason="needs xllamacpp: make engines")

from kvx.handover import Handover, load, save
from tests.engines import small_models
from tests.engines.forked import ROOT, Session, fork_server
from tests.engines.hybrid_engines import MODEL, HybridLlama, HybridPaged, HybridTransformers, HybridVllm, Said, contents
from tests.engines.hybrid_gguf import write_hybrid

ENGINES = ("transformers", "kvx", "llama_cpp", "vllm")
# Those that keep and compute nothing here: their environments, and tokens of a page or chunk.
POOLS = {
    "sglang": (".venv-sglang", "tests.engines.hybrid_pools:HybridSglang", 16),
    "lmcache": (".venv-lmcache", "tests.engines.hybrid_objects:HybridLmcache", 64),
}
WRITERS = (*ENGINES, *(name for name, row in POOLS.items() if (ROOT / row[0] / "bin" / "python").exists()))
NUM_TOKENS, PROMPT, HANDED = 24, 300, 256
# vLLM's CPU kernels have Mamba-2 states at the end of a step alone: prefix caching is off, and steps end where blocks do.
_STEPS = {"enable_prefix_caching": False, "enable_chunked_prefill": True, "max_num_batched_tokens": 64, "max_num_seqs": 4}
MODELS: dict[str, dict[str, Any]] = {"lfm2": {}, "falcon_h1": _STEPS, "gemma4": {}, "gemma4 K=V": {}}
_WINDOW = 64  # of Gemma 4, whole blocks of vLLM's, as published models' are
# Largest difference of log-probabilities between llama.cpp and Transformers that was seen: 6.8e-6, 4.6e-5 and 1.3e-4.
CLOSE = 1e-3


class Copies(NamedTuple):
    """One model's weights in each engine, and what each says alone to the prompt of each."""

    name: str
    engines: dict[str, Any]
    prompts: dict[str, list[int]]  # by the engine that computes it
    handovers: dict[str, Handover]
    said: dict[tuple[str, str], Said]  # (from, to)
    alone: dict[tuple[str, str], Said]  # (prompt of, engine)
    read: dict[tuple[str, str], tuple[dict[str, Any], list[str]]]  # (from, pools): what they found, and what the store has of it


@pytest.fixture(scope="module", params=list(MODELS))
def copies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Copies:
    path, name = tmp_path_factory.mktemp(request.param.split()[0]), request.param
    make, more = getattr(small_models, f"make_{name.split()[0]}"), {}
    if name.startswith("gemma4"):
        more = {"window": _WINDOW, "k_is_v": name != "gemma4"}
    folder = make(path / "model", **more)
    hf, vllm = HybridTransformers(folder), HybridVllm(folder, path / "store", **MODELS[name])
    (path / "slots").mkdir()
    llama = HybridLlama(write_hybrid(folder, path / "model.gguf"), path / "slots")
    engines = {"transformers": hf, "kvx": HybridPaged(hf.model), "llama_cpp": llama, "vllm": vllm}
    prompts = _prompts(hf)
    (path / "store").mkdir()
    told = {"folder": str(folder), "store": str(path / "store"), "model": MODEL, "num_tokens": HANDED}
    pools = {e: _session(*POOLS[e], **told) for e in WRITERS[len(ENGINES) :]}

    # It keeps the state at the last end of a block in a prompt, and computes a token after it.
    vllm.compute([prompts["vllm"][: HANDED + 1]])
    for e, session in pools.items():
        session.ask("write", ids=prompts[e][:HANDED])
    shutil.copytree(path / "store", path / "copy")  # so that vLLM takes over what it finds itself
    engines |= {e: HybridVllm(folder, path / "copy") for e in pools}
    handovers = {e: _through_folder(engines[e].prefill(prompts[e][:HANDED]), path / f"handover-{e}") for e in WRITERS}
    alone = {(p, e): engines[e].decode(prompts[p], NUM_TOKENS) for p in WRITERS for e in ENGINES if e != "vllm"}
    said = {
        (a, b): engines[b].decode(prompts[a], NUM_TOKENS, handovers[a]) for a in WRITERS for b in ENGINES if b != "vllm"
    }  # fmt: skip
    for a in ENGINES[:3]:
        vllm.put(_through_folder(engines[a].prefill_blocks(prompts[a][:HANDED]), path / f"blocks-{a}"))
    every = [prompts[e] for e in WRITERS]
    for found, is_alone in ((said, False), (alone, True)):
        for a, one in zip(WRITERS, vllm.decode(every, NUM_TOKENS, alone=is_alone), strict=True):
            found[a, "vllm"] = one
    read = {}
    for e, session in pools.items():
        for a in WRITERS:
            here = [str(each) for each in contents(vllm.prefill(prompts[a][:HANDED]))]
            read[a, e] = session.ask("read", ids=prompts[a][:HANDED]), here
        session.close()
    return Copies(name, engines, prompts, handovers, said, alone, read)


def _session(environment: str, target: str, page: int, **told: Any) -> Session:
    return fork_server(ROOT / environment / "bin" / "python", (target.split(":")[0],)).session(target, page=page, **told)


def _prompts(hf: HybridTransformers) -> dict[str, list[int]]:
    """One for each engine, of random tokens, to which the answers are clear."""
    rng, found = random.Random(5), list[list[int]]()
    while len(found) < len(WRITERS):
        some = [[rng.randrange(3, 256) for _ in range(PROMPT)] for _ in range(16)]
        for n in (PROMPT, HANDED + 1):
            clear = hf.clear([ids[:n] for ids in some], NUM_TOKENS) if some else []
            some = [ids for ids, ok in zip(some, clear, strict=True) if ok]
        found += some
    return dict(zip(WRITERS, found, strict=False))


def _through_folder(handover: Handover, path: Path) -> Handover:
    save(path, handover)
    return load(path, model=MODEL)


@pytest.mark.parametrize("b", ENGINES)
@pytest.mark.parametrize("a", WRITERS)
def test_the_second_goes_on_as_it_would_alone(copies: Copies, a: str, b: str) -> None:
    assert copies.handovers[a].num_tokens == HANDED
    got, want = copies.said[a, b], copies.alone[a, b]
    assert got.tokens == want.tokens
    assert len(set(want.tokens)) > 5  # a text, in which a wrong cache would show
    assert (got.computed, want.computed) == (PROMPT - HANDED, PROMPT)


@pytest.mark.parametrize("b", WRITERS[len(ENGINES) :])
@pytest.mark.parametrize("a", WRITERS)
def test_pools_find_what_each_wrote(copies: Copies, a: str, b: str) -> None:
    got, want = copies.read[a, b]
    assert (got["cached"], got["contents"]) == (HANDED, want)


@pytest.mark.parametrize(("a", "first", "is_found"), [("transformers", 193, False), ("llama_cpp", 192, True), ("kvx", 192, True)])
def test_a_window_is_found_in_a_store_in_whole_blocks(
    copies: Copies, a: str, first: int, is_found: bool, tmp_path: Path
) -> None:  # fmt: skip
    """Transformers keeps one token less than the window has: of the window's first block one is missing, so it has no name."""
    handover, here = copies.handovers[a], copies.engines["vllm"]
    windows = [part for part in handover.parts if part.window]
    assert [part.first_token for part in windows] == [first] * len(windows)
    elsewhere = HybridVllm(here.folder, tmp_path / "store")
    elsewhere.put(handover)
    assert (elsewhere.found(copies.prompts[a][:HANDED]) is not None) == (is_found or not windows)


@pytest.mark.parametrize("b", ENGINES[:3])
@pytest.mark.parametrize("a", [*ENGINES[:3], *WRITERS[len(ENGINES) :]])
def test_the_very_next_token(copies: Copies, a: str, b: str) -> None:
    """One token is computed: what it says hangs on every state, also on a convolution's last inputs."""
    ids, engine = copies.prompts[a][: HANDED + 1], copies.engines[b]
    got, want = engine.decode(ids, NUM_TOKENS, copies.handovers[a]), engine.decode(ids, NUM_TOKENS)
    assert got.tokens == want.tokens
    assert (got.computed, want.computed) == (1, HANDED + 1)


def test_every_engine_says_the_same_alone(copies: Copies) -> None:
    """That the weights are the same in all of them."""
    # Behind its attention vLLM's LFM2 computes other numbers than Transformers, without KVX too.
    same = ENGINES[:3] if copies.name == "lfm2" else ENGINES
    for p in ENGINES:
        assert {tuple(copies.alone[p, e].tokens) for e in same} == {tuple(copies.alone[p, "transformers"].tokens)}


def test_logits_of_llama_cpp_are_those_of_transformers(copies: Copies) -> None:
    import torch

    ids = copies.prompts["llama_cpp"]
    with torch.no_grad():
        want = copies.engines["transformers"].model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
    got = copies.engines["llama_cpp"].llama.logprobs(ids)
    assert (got - want).abs().max() < CLOSE
