"""kvx llama and the bytes of hybrids, windows and quantised K/V, against llama.cpp itself.

The server is llama-server's own code out of the xllamacpp wheel, in this process, listening on a port of its own: its HTTP calls
and its files are those of llama-server.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
pytest.importorskip("gguf")

import xllamacpp

import kvx
from kvx.adapters.llama_cpp import Slots, StateModel, export_slot_file
from kvx.adapters.llama_cpp.checkpoints import read_checkpoints, write_checkpoints
from kvx.adapters.llama_cpp.ggml_rows import decode_rows
from kvx.adapters.llama_cpp.memory import read_memory, write_memory
from kvx.adapters.llama_cpp.server import LlamaServer
from kvx.adapters.llama_cpp.slot_file import read_slot_file
from kvx.adapters.llama_cpp.slot_store import SlotStore
from kvx.cli.main import app
from tests.engines.tiny_gguf import CONTEXT, METADATA, make_gguf

RNG = np.random.default_rng(5)
IDS = [int(t) for t in RNG.integers(0, 256, 2400)]
ARCHITECTURES = list(METADATA)
PLAIN = ("llama", "deepseek2")  # all layers keep every token
KINDS = [  # K, V, flash attention; quantised V needs it
    ("f16", "f16", True),
    ("f32", "f32", True),
    ("f32", "f32", False),
    ("q8_0", "q8_0", True),
    ("q4_0", "q4_0", True),
    ("q8_0", "q4_0", True),
    ("q8_0", "f16", False),
]

# Of a row's largest element: what a conversion may be off by, half a step of the type, and its rotation's rounding.
CLOSE = {"f32": 0.0, "f16": 0.0, "q8_0": 0.51 / 127, "q4_0": 1.01 / 8}


class Llama(LlamaServer):
    def __init__(self, gguf: Path, folder: Path, *, k: str = "f16", v: str = "f16", flash: bool = True, num_slots: int = 1) -> None:
        p = xllamacpp.CommonParams()
        p.model.path, p.slot_save_path, p.endpoint_slots = str(gguf), f"{folder}/", True
        p.n_ctx, p.n_parallel, p.n_gpu_layers, p.warmup, p.verbosity = CONTEXT * num_slots, num_slots, 0, False, 0
        p.cache_type_k, p.cache_type_v = (getattr(xllamacpp.ggml_type, f"GGML_TYPE_{x.upper()}") for x in (k, v))
        on, off = (getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{x}ABLED") for x in ("EN", "DIS"))
        p.flash_attn_type = on if flash else off
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
        p.cache_ram_mib = 0  # else it keeps prompts outside of its slots, and brings them back unasked
        self.server = xllamacpp.Server(p)
        super().__init__(self.server.listening_address)

    def ask(self, ids: list[int], num_tokens: int = 8, slot: int = 0) -> tuple[int, list[int]]:
        """Tokens that were not computed, and the greedy answer."""
        body = {"prompt": ids, "n_predict": num_tokens, "id_slot": slot, "cache_prompt": True, "ignore_eos": True}
        said = self.post("/completion", body | {"temperature": 0, "top_k": 1, "return_tokens": True})
        return said["timings"]["cache_n"], said["tokens"]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder, made = tmp_path_factory.mktemp("gguf"), {}

    def of(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = make_gguf(architecture, folder / f"{architecture}.gguf")
        return made[architecture]

    return of


def run(*args: Any) -> str:
    done = CliRunner().invoke(app, ["llama", *map(str, args)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def saved(llama: Llama, folder: Path, ids: list[int]) -> Any:
    llama.compute(ids, 0)
    return read_slot_file(llama.save_slot(0, folder / "x"))


@pytest.mark.parametrize(
    ("architecture", "k", "v", "flash"),
    [(a, *kind) for a in ARCHITECTURES for kind in KINDS if a != "deepseek2" or kind[0] == kind[1]],  # a latent has one type
)
def test_files_are_read_and_written_byte_for_byte(
    gguf: Callable[[str], Path], tmp_path: Path, architecture: str, k: str, v: str, flash: bool
) -> None:
    file = saved(Llama(gguf(architecture), tmp_path, k=k, v=v, flash=flash), tmp_path, IDS[:100])
    memory, taken = read_memory(file.state, version=file.version)
    assert write_memory(memory) == bytes(file.state[:taken])
    points = read_checkpoints(file.state[taken:], version=file.version)
    assert write_checkpoints(points) == bytes(file.state[taken:])
    assert memory.num_tokens == 100
    assert bool(points) == (architecture not in PLAIN)
    assert all(bool(c.v) == (architecture != "deepseek2") for c in memory.caches)
    if memory.kind:
        assert (memory.kind.k, memory.kind.v, memory.kind.is_v_transposed) == (k, v, not flash)
    has = METADATA[architecture]
    assert (memory.recurrent is not None) == any(key.startswith(("ssm", "shortconv")) for key in has)
    assert len(memory.caches) == (0 if architecture == "mamba2" else 2 if architecture == "gemma3" else 1)
    assert all(c.extra.shape[1] == (3 if architecture == "qwen35" else 0) for c in memory.caches)


@pytest.mark.parametrize("type", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("architecture", ["llama", "lfm2", "qwen35"])
def test_rows_are_quantised_as_llama_cpp_does(gguf: Callable[[str], Path], tmp_path: Path, architecture: str, type: str) -> None:
    """The first layer with attention sees the same numbers whatever K and V are. Heads of 64 are rotated, of 32 not."""
    exact = read_memory(saved(Llama(gguf(architecture), tmp_path, k="f32", v="f32"), tmp_path, IDS[:100]).state)[0]
    theirs = read_memory(saved(Llama(gguf(architecture), tmp_path, k=type, v=type), tmp_path, IDS[:100]).state)[0]
    ours = exact.to([c.kind for c in theirs.caches])
    for a, b in ((ours.caches[0].k[0], theirs.caches[0].k[0]), (ours.caches[0].v[0], theirs.caches[0].v[0])):
        assert (a.data == b.data).mean() > 0.999  # sums of another order may round a step apart
    rotated = type != "f16" and architecture != "qwen35"
    assert (theirs.caches[0].kind.k_rotation, theirs.caches[0].kind.v_rotation) == ((64, 64) if rotated else (0, 0))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_restart_computes_what_follows_the_last_checkpoint(
    gguf: Callable[[str], Path], tmp_path: Path, architecture: str
) -> None:
    """2,000 tokens, then another end after 1,700: llama.cpp's own file is of no use for it, but for plain models."""
    prompt, other = tmp_path / "prompt.json", tmp_path / "other.json"
    parted = IDS[:1700] + IDS[2000:2300]
    prompt.write_text(json.dumps(IDS[:2000]))
    other.write_text(json.dumps(parted))
    folder = tmp_path / "slots"
    folder.mkdir()
    first = Llama(gguf(architecture), folder)
    alone = [Llama(gguf(architecture), folder).ask(ids)[1] for ids in (IDS[:2000], IDS[:2050], parted)]
    out = run("save", folder, "--server", first.address, "--tokens", prompt, "--every", 500)
    assert "4 new checkpoints" in out
    del first
    is_plain = architecture in PLAIN
    for ids, file, at, want in (
        (IDS[:2000], prompt, 1999, alone[0]),
        (IDS[:2050], None, 1999, alone[1]),
        (parted, other, 1700 if is_plain else 1500, alone[2]),
    ):
        fresh = Llama(gguf(architecture), folder)
        if file is None:
            file = tmp_path / "longer.json"
            file.write_text(json.dumps(ids))
        out = run("restore", folder, "--server", fresh.address, "--tokens", file)
        assert f"has {at:,} of {len(ids):,} tokens" in out
        cached, tokens = fresh.ask(ids)
        assert cached == at
        assert tokens == want
        del fresh
    assert "4 of 4 checkpoints" in run("verify", folder)
    assert not list(folder.glob("kvx-*.slot"))


@pytest.mark.parametrize("architecture", ["lfm2", "gemma3", "qwen35", "mamba2"])
def test_a_slot_is_kept_with_the_checkpoints_that_the_server_made(
    gguf: Callable[[str], Path], tmp_path: Path, architecture: str
) -> None:
    llama = Llama(gguf(architecture), tmp_path)
    llama.ask(IDS[:300])
    out = run("save", tmp_path, "--server", llama.address)
    assert "2 new checkpoints" in out
    assert "296 tokens" in out  # where the server makes one: before the last four of the prompt
    asked = tmp_path / "ids.json"
    asked.write_text(json.dumps(ids := IDS[:296] + IDS[1000:1050]))
    fresh = Llama(gguf(architecture), tmp_path)
    assert "296 of 346" in run("restore", tmp_path, "--server", fresh.address, "--tokens", asked)
    cached, tokens = fresh.ask(ids)
    assert cached == 296
    assert tokens == Llama(gguf(architecture), tmp_path).ask(ids)[1]


@pytest.mark.parametrize("architecture", ["gemma3"])
def test_a_prompt_shorter_than_the_window(gguf: Callable[[str], Path], tmp_path: Path, architecture: str) -> None:
    asked = tmp_path / "ids.json"
    asked.write_text(json.dumps(IDS[:21]))
    llama = Llama(gguf(architecture), tmp_path)
    run("save", tmp_path, "--server", llama.address, "--tokens", asked)
    fresh = Llama(gguf(architecture), tmp_path)
    asked.write_text(json.dumps(IDS[:60]))
    run("restore", tmp_path, "--server", fresh.address, "--tokens", asked)
    cached, tokens = fresh.ask(IDS[:60])
    assert cached == 19  # the last of 20 is computed again
    assert tokens == Llama(gguf(architecture), tmp_path).ask(IDS[:60])[1]


@pytest.mark.parametrize(("k", "v", "flash"), [*KINDS[1:5], ("f16", "f16", False)])
@pytest.mark.parametrize("architecture", ["llama", "lfm2", "gemma3", "qwen35"])
def test_restore_converts_to_what_the_server_has(
    gguf: Callable[[str], Path], tmp_path: Path, architecture: str, k: str, v: str, flash: bool
) -> None:
    asked = tmp_path / "ids.json"
    asked.write_text(json.dumps(IDS[:300]))
    llama = Llama(gguf(architecture), tmp_path)
    run("save", tmp_path, "--server", llama.address, "--tokens", asked)
    other = Llama(gguf(architecture), tmp_path, k=k, v=v, flash=flash, num_slots=2)
    out = run("restore", tmp_path, "--server", other.address, "--tokens", asked, "--slot", 1)
    assert "rearranged" in out if k == "f16" else f"converted from f16 to {k}" in out
    store = SlotStore(tmp_path)
    exact, _ = store.get(store.entries()[-1])
    theirs = read_memory(read_slot_file(other.save_slot(1, tmp_path / "x")).state)[0]  # what it has now, in its own bytes
    for a, b in zip(exact.to([c.kind for c in theirs.caches]).caches, theirs.caches, strict=True):
        for ours, taken in zip((*a.k, *a.v), (*b.k, *b.v), strict=True):
            assert (ours.data == taken.data[-len(ours.data) :]).all()  # of windows it has one cell more, that is masked
    back = theirs.to([c.kind for c in exact.caches])
    for a, b in zip(exact.caches, back.caches, strict=True):
        for was, now, type in ((a.k[0], b.k[0], k), (a.v[0], b.v[0], v)):
            x, y = decode_rows(was.data, "f16"), decode_rows(now.data[-len(was.data) :], "f16")
            assert np.abs(x - y).max() <= CLOSE[type] * np.sqrt(64) * np.abs(x).max()
    assert other.ask(IDS[:300], slot=1)[0] == 299


@pytest.mark.parametrize("to", ["q8_0", "q4_0", "q8_0/q4_0"])
@pytest.mark.parametrize("architecture", ["llama", "lfm2", "gemma3"])
def test_converted_directories_are_taken_as_they_are(
    gguf: Callable[[str], Path], tmp_path: Path, architecture: str, to: str
) -> None:
    source, target, asked = tmp_path / "f16", tmp_path / "small", tmp_path / "ids.json"
    source.mkdir()
    asked.write_text(json.dumps(IDS[:300]))
    llama = Llama(gguf(architecture), source)
    run("save", source, "--server", llama.address, "--tokens", asked, "--every", 100)
    run("convert", source, target, "--to", to)
    k, _, v = to.partition("/")
    small = Llama(gguf(architecture), target, k=k, v=v or k)
    out = run("restore", target, "--server", small.address, "--tokens", asked)
    assert "converted" not in out
    assert small.ask(IDS[:300])[0] == 299


def test_latents_are_kept_and_not_handed_over(gguf: Callable[[str], Path], tmp_path: Path) -> None:
    file = (llama := Llama(gguf("deepseek2"), tmp_path)).save_slot
    llama.compute(IDS[:50], 0)
    data = file(0, tmp_path / "x")
    with pytest.raises(kvx.Unsupported, match="is 'deepseek2'; known are"):
        StateModel.of_gguf({"general.architecture": "deepseek2"})
    with pytest.raises(kvx.Unsupported, match=r"K of 2 layers and no V: latents \(MLA\)"):
        export_slot_file(data, model=StateModel("tiny", 2, 1, 96))


def test_another_models_server_and_one_without_a_folder(gguf: Callable[[str], Path], tmp_path: Path) -> None:
    asked, folder = tmp_path / "ids.json", tmp_path / "slots"
    folder.mkdir()
    asked.write_text(json.dumps(IDS[:50]))
    llama = Llama(gguf("lfm2"), folder)
    run("save", folder, "--server", llama.address, "--tokens", asked)
    other = Llama(gguf("llama"), folder)
    done = CliRunner().invoke(app, ["llama", "restore", str(folder), "--server", other.address, "--tokens", str(asked)])
    assert done.exit_code == 1
    assert "no checkpoint of llama.gguf: the directory has lfm2.gguf" in done.output
    elsewhere = tmp_path / "elsewhere"
    done = CliRunner().invoke(app, ["llama", "save", str(elsewhere), "--server", other.address, "--tokens", str(asked)])
    assert "is not its folder for slots" in str(done.exception)


@pytest.mark.parametrize("type", ["q8_0", "q4_0"])
def test_handovers_of_quantised_slots(gguf: Callable[[str], Path], tmp_path: Path, type: str) -> None:
    """Out of a server with quantised K and V as float32, unrotated, and into it again as its own bytes."""
    model = StateModel("tiny", 2, 1, 64)
    small, wide = Llama(gguf("llama"), tmp_path, k=type, v=type), Llama(gguf("llama"), tmp_path, k="f32", v="f32")
    out = []
    for llama in (small, wide):
        llama.compute(IDS[:50], 0)
        out.append(Slots(llama.address, tmp_path, model=model).export_slot())
    exact, near = (h.parts[0].buffers for h in reversed(out))
    assert out[0].spec.format == "f32"
    off = max(float((a.view(torch.float32) - b.view(torch.float32)).abs().max()) for a, b in zip(near, exact, strict=True))
    assert 0 < off < {"q8_0": 0.15, "q4_0": 2.5}[type]
    fresh = Llama(gguf("llama"), tmp_path, k=type, v=type)
    Slots(fresh.address, tmp_path, model=model).import_slot(out[0])
    theirs, again = (read_memory(read_slot_file(x.save_slot(0, tmp_path / "x")).state)[0] for x in (small, fresh))
    for a, b in zip((*theirs.caches[0].k, *theirs.caches[0].v), (*again.caches[0].k, *again.caches[0].v), strict=True):
        assert np.abs(decode_rows(a.data, type) - decode_rows(b.data, type)).max() < 0.02
    assert fresh.ask(IDS[:60])[0] == 50
