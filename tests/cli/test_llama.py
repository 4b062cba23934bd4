"""kvx llama against a server of this file's own, which answers as llama-server does, and every wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvx
from kvx.adapters.llama_cpp.checkpoints import Checkpoint, read_checkpoints, write_checkpoints
from kvx.adapters.llama_cpp.ggml_rows import encode_rows
from kvx.adapters.llama_cpp.memory import GgmlRows, KvCache, KvKind, Memory, Recurrent, read_memory, write_memory
from kvx.adapters.llama_cpp.slot_file import read_slot_file, write_slot_file
from kvx.adapters.llama_cpp.slot_store import MARK, SlotStore
from kvx.cli.main import app

IDS = [int(t) for t in np.random.default_rng(3).integers(0, 1000, 64)]


F16 = KvKind()


def memory_of(tokens: list[int], kind: KvKind = F16, *, is_hybrid: bool = True, extra: int = 0) -> Memory:
    """Rows that follow from their tokens, two layers of 64; of a hybrid, a state that follows from all of them."""
    ids = np.asarray(tokens, np.int32)
    rows = [np.cos(np.outer(ids + layer, np.arange(1, 65))).astype(np.float32) for layer in range(4)]
    exact = KvCache(
        KvKind("f32", "f32", num_streams=kind.num_streams),
        np.arange(len(ids), dtype=np.int32),
        np.repeat(ids[:, None], extra, 1),
        *(tuple(GgmlRows("f32", encode_rows(x, "f32")) for x in rows[i : i + 2]) for i in (0, 2)),
    )
    state = Recurrent(len(ids) - 1, 3, tuple((0, np.full(4, ids.sum() + n, "<f4").tobytes()) for n in range(2)))
    return Memory(4, (exact.to(kind),), state if is_hybrid else None)


class FakeLlama(ThreadingHTTPServer):
    """A slot with tokens, saved and restored as files; a hybrid cannot go back, and computes anew."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.tokens, self.kind, self.is_hybrid = folder, list[int](), KvKind(), True
        self.model, self.has_path, self.points = "tiny.gguf", True, list[int]()
        self.address = f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/props":
            return 200, {"model_path": f"/models/{self.model}", "default_generation_settings": {"n_ctx": 4096}}
        if path == "/v1/models":
            return 200, {"data": [{"meta": {"n_params": 5, "size": 20, "n_vocab": 1000, "n_embd": 64}}]}
        if path == "/tokenize":
            return 200, {"tokens": [ord(c) for c in body["content"]]}
        if path == "/apply-template":
            return 200, {"prompt": "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])}
        if path == "/completion":
            self.tokens = body["prompt"]
            return 200, {"timings": {"cache_n": 0}}
        if not self.has_path:
            return 501, {"error": {"message": "This server does not support slots action. Start it with `--slot-save-path`"}}
        file = self.folder / body["filename"]
        if path.endswith("save"):
            state = write_memory(memory_of(self.tokens, self.kind, is_hybrid=self.is_hybrid)) if self.tokens else b""
            points = [Checkpoint(n, Memory(4, (), memory_of(self.tokens[:n]).recurrent)) for n in self.points]
            file.write_bytes(write_slot_file(self.tokens, state + write_checkpoints(points)))
            return 200, {"n_saved": len(self.tokens)}
        read = read_slot_file(file)
        memory, _ = read_memory(read.state)
        want = memory_of(read.tokens.tolist(), self.kind, is_hybrid=self.is_hybrid)
        if memory.kind != self.kind:
            return 400, {"error": {"message": "Unable to restore slot"}}
        self.taken, self.want, self.tokens = memory, want, read.tokens.tolist()
        return 200, {"n_restored": len(read.tokens)}


class _Handler(BaseHTTPRequestHandler):
    server: FakeLlama

    def do_POST(self) -> None:
        self._say(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_GET(self) -> None:
        self._say(None)

    def _say(self, body: Any) -> None:
        code, said = self.server.answer(self.path, body)
        data = json.dumps(said).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[FakeLlama]:
    folder = tmp_path / "slots"
    folder.mkdir()
    with FakeLlama(folder) as fake:
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def run(*args: Any, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["llama", *map(str, args)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output


def ids_file(folder: Path, ids: list[int]) -> Path:
    path = folder.parent / "ids.json"
    path.write_text(json.dumps(ids))
    return path


def save(llama: FakeLlama, ids: list[int] = IDS, every: int = 20) -> str:
    return run("save", llama.folder, "--server", llama.address, "--tokens", ids_file(llama.folder, ids), "--every", every)


def restore(llama: FakeLlama, ids: list[int], code: int = 0) -> str:
    return run("restore", llama.folder, "--server", llama.address, "--tokens", ids_file(llama.folder, ids), code=code)


def test_checkpoints_along_a_prompt_and_the_deepest_that_fits(llama: FakeLlama) -> None:
    assert "4 new checkpoints" in save(llama)  # at 20, 40, 60 and 63
    assert "0 new checkpoints" in save(llama)
    for ids, want in ((IDS, 63), ([*IDS, 5, 6], 63), (IDS[:63], 60), (IDS[:61], 60), ([*IDS[:59], 1, 2, 3], 40), (IDS[:21], 20)):
        assert f"has {want} of {len(ids)} tokens" in restore(llama, ids)
        assert llama.tokens == ids[:want]
        assert write_memory(llama.taken) == write_memory(llama.want)  # whole again, out of its chain of parts
    assert "none of 4 checkpoints" in restore(llama, IDS[:20], code=1)
    assert "none of 4 checkpoints" in restore(llama, [1, 2, 3], code=1)
    assert sorted(p.suffix for p in llama.folder.iterdir()) == [".json"] * 5 + [".part"] * 4


def test_a_plain_model_is_cut_anywhere(llama: FakeLlama) -> None:
    llama.is_hybrid = False
    save(llama)
    for ids, want in ((IDS, 63), (IDS[:63], 62), ([*IDS[:59], 1, 2, 3], 59), (IDS[:7], 6)):
        assert f"has {want} of {len(ids)} tokens" in restore(llama, ids)
        assert write_memory(llama.taken) == write_memory(llama.want)


def test_prompts_that_begin_alike_share_their_parts(llama: FakeLlama) -> None:
    save(llama)
    assert "1 new checkpoint," in save(llama, IDS[:40] + IDS[:20])
    entries = json.loads(run("list", llama.folder, "--json"))
    assert [(e["tokens"], e["first"]) for e in entries] == [(20, 0), (40, 20), (59, 40), (60, 40), (63, 60)]


def test_a_slot_with_the_checkpoints_of_the_server(llama: FakeLlama) -> None:
    llama.tokens, llama.points = IDS, [30, 50]
    assert "3 new checkpoints" in run("save", llama.folder, "--server", llama.address)
    assert "has 50 of 55 tokens" in restore(llama, IDS[:55])
    assert write_memory(llama.taken) == write_memory(llama.want)


def test_text_and_messages(llama: FakeLlama) -> None:
    text, chat = llama.folder.parent / "prompt.txt", llama.folder.parent / "chat.json"
    text.write_text("<user>How far is the moon?")
    run("save", llama.folder, "--server", llama.address, "--prompt", text)
    messages = [{"role": "user", "content": "How far is the moon?"}, {"role": "user", "content": "And the sun?"}]
    chat.write_text(json.dumps({"messages": messages}))
    assert "has 25 of 44 tokens" in run("restore", llama.folder, "--server", llama.address, "--messages", chat)


def test_list_shows_what_an_entry_knows(llama: FakeLlama) -> None:
    save(llama)
    said = run("list", llama.folder)
    for words in ("tiny.gguf", "f16", "20 to 39", "4 checkpoints"):
        assert words in said
    (first, *_) = json.loads(run("list", llama.folder, "--json"))
    assert (first["model"], first["n_ctx"], first["types"], first["tokens"]) == ("tiny.gguf", 4096, "f16", 20)


@pytest.mark.parametrize(
    "kind", [KvKind("q8_0", "q8_0", False, 64, 64), KvKind("q4_0", "q4_0"), KvKind("f16", "f16", True, 0, 0, 2)]
)
def test_restore_converts_to_what_the_server_has(llama: FakeLlama, kind: KvKind) -> None:
    save(llama)
    llama.kind = kind
    said = restore(llama, IDS)
    assert ("rearranged" if kind.k == "f16" else f"converted from f16 to {kind.k}") in said
    assert llama.taken.kind == kind
    assert llama.tokens == IDS[:63]


def test_convert_writes_another_directory(llama: FakeLlama) -> None:
    save(llama)
    out = llama.folder.parent / "small"
    with pytest.raises(kvx.BadArgument, match="--head-dim"):  # the fake's model file is not there
        run("convert", llama.folder, out, "--to", "q8_0")
    assert "4 checkpoints in q8_0" in run("convert", llama.folder, out, "--to", "q8_0", "--head-dim", 64)
    assert "4 of 4" in run("verify", out)
    assert {e.types for e in SlotStore(out).entries()} == {"q8_0"}
    assert SlotStore(out).entries()[0].kinds[0].k_rotation == 64
    size = [sum(e.bytes for e in SlotStore(f).entries()) for f in (llama.folder, out)]
    assert size[1] < 0.6 * size[0]
    with pytest.raises(kvx.Unsupported, match="'q5_k' is no type"):
        run("convert", llama.folder, out, "--to", "q5_k")
    run("convert", llama.folder, llama.folder, "--to", "q8_0", code=2)


def test_prune_by_size_and_age(llama: FakeLlama) -> None:
    save(llama)
    entries = SlotStore(llama.folder).entries()
    assert "removed 0 checkpoints" in run("prune", llama.folder, "--keep", "20GB", "--older-than", "7d")
    room = sum(e.bytes for e in entries[:2])
    assert "removed 2 checkpoints" in run("prune", llama.folder, "--keep", f"{room}B")
    assert [e.num_tokens for e in SlotStore(llama.folder).entries()] == [20, 40]  # what others go on from stays longest
    old = time.time() - 8 * 86400
    for path in llama.folder.glob("*.json"):
        os.utime(path, (old, old))
    assert "removed 2 checkpoints" in run("prune", llama.folder, "--older-than", "7d")
    assert [p.name for p in llama.folder.iterdir()] == [MARK]
    for wrong in (("--keep", "much"), ("--older-than", "7 years")):
        done = CliRunner().invoke(app, ["llama", "prune", str(llama.folder), *wrong])
        assert done.exit_code != 0


def test_what_a_killed_process_leaves_is_nothing(llama: FakeLlama) -> None:
    """Killed at any byte of a save: what is listed is whole."""
    code = (
        "import sys, kvx.adapters.llama_cpp.slot_store as s; from pathlib import Path\n"
        "from tests.cli.test_llama import IDS, memory_of; from kvx.adapters.llama_cpp.server import ServedModel\n"
        "store = s.SlotStore(sys.argv[1], is_made=True); model = ServedModel('m', 'i', 1)\n"
        "print('begun', flush=True)\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1; ids = [n, *IDS]; store.put(memory_of(ids), ids, model)\n"
    )
    for wait in (0.0, 0.02, 0.05):
        worker = subprocess.Popen([sys.executable, "-c", code, str(llama.folder)], stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "begun\n"
        time.sleep(wait)
        worker.kill()
        worker.wait()
        worker.stdout.close()
        assert not SlotStore(llama.folder).problems()
    for path in llama.folder.glob(".*.partial"):
        os.utime(path, (0, 0))
    (llama.folder / ("a" * 24 + ".part")).write_bytes(b"left")
    os.utime(llama.folder / ("a" * 24 + ".part"), (0, 0))
    run("prune", llama.folder)
    assert not list(llama.folder.glob(".*.partial"))
    assert not (llama.folder / ("a" * 24 + ".part")).exists()


@pytest.mark.parametrize("how", ["flip", "cut", "gone", "manifest"])
def test_damage_is_found_and_never_restored(llama: FakeLlama, how: str) -> None:
    save(llama)
    entry = SlotStore(llama.folder).entries()[1]
    part, manifest = llama.folder / f"{entry.name}.part", llama.folder / f"{entry.name}.json"
    data = bytearray(part.read_bytes())
    if how == "flip":
        data[-5] ^= 4
        part.write_bytes(data)
    elif how == "cut":
        part.write_bytes(data[: len(data) // 2])
    elif how == "gone":
        part.unlink()
    else:
        manifest.write_text(manifest.read_text()[:40])
    with pytest.raises(kvx.Damaged, match=entry.name):
        restore(llama, IDS)
    assert "1 of 4 checkpoints are as they were written" in run("verify", llama.folder, code=1)
    run("prune", llama.folder, "--damaged")
    assert [e.num_tokens for e in SlotStore(llama.folder).entries()] == [20]
    assert "has 20 of 64" in restore(llama, IDS)


def test_another_model_and_other_versions(llama: FakeLlama) -> None:
    save(llama)
    llama.model = "other.gguf"
    assert "no checkpoint of other.gguf: the directory has tiny.gguf" in restore(llama, IDS, code=1)
    manifest = llama.folder / f"{SlotStore(llama.folder).entries()[0].name}.json"
    manifest.write_text(manifest.read_text().replace('"kvx_llama": 1', '"kvx_llama": 2'))
    with pytest.raises(kvx.Incompatible, match=r"is of version 2; this KVX knows 1\. Upgrade KVX"):
        run("list", llama.folder)
    (llama.folder / MARK).write_text('{"kvx_llama": 7}')
    with pytest.raises(kvx.Incompatible, match="is of version 7"):
        run("list", llama.folder)


def test_a_newer_slot_file_is_named(llama: FakeLlama) -> None:
    data = bytearray(write_slot_file(IDS, write_memory(memory_of(IDS))))
    data[4] = 5
    with pytest.raises(kvx.Incompatible, match="version is 5; KVX reads 2, 3, 4"):
        read_slot_file(bytes(data))
    points = bytearray(write_checkpoints([Checkpoint(3, memory_of(IDS[:3]))]))
    points[4] = 2
    with pytest.raises(kvx.Incompatible, match="checkpoints of version 2"):
        read_checkpoints(bytes(points), version=4)


@pytest.mark.parametrize("command", ["list", "verify", "prune"])
def test_a_directory_that_is_none(tmp_path: Path, command: str) -> None:
    for path, words in ((tmp_path, f"has no {MARK}"), (tmp_path / "none", "is no folder")):
        with pytest.raises(kvx.BadArgument, match=words):
            run(command, path)


def test_servers_that_do_not_help(llama: FakeLlama) -> None:
    with pytest.raises(kvx.BadArgument, match=r"cannot be reached: .*refused.*Start llama-server there"):
        run("save", llama.folder, "--server", "http://127.0.0.1:9")
    with pytest.raises(kvx.BadArgument, match="begins with http://"):
        run("save", llama.folder, "--server", "localhost:8080")
    with pytest.raises(kvx.BadArgument, match=r"slot 0 of .* has no tokens"):
        run("save", llama.folder, "--server", llama.address)
    elsewhere = llama.folder.parent / "elsewhere"
    llama.tokens = IDS
    with pytest.raises(kvx.BadArgument, match="--slot-save-path"):
        run("save", elsewhere, "--server", llama.address)
    llama.has_path = False
    with pytest.raises(kvx.Unsupported, match="Start it again with --slot-save-path DIR/"):
        run("save", llama.folder, "--server", llama.address)
    run("restore", llama.folder, "--server", llama.address, code=2)  # of which prompt?


@pytest.mark.parametrize("kind", [KvKind(), KvKind("f32", "f32", True), KvKind("q8_0", "q4_0", False, 64, 64, 3)])
@pytest.mark.parametrize("extra", [0, 3])
def test_states_are_read_as_they_were_written_and_any_cut_is_refused(kind: KvKind, extra: int) -> None:
    memory = memory_of(IDS[:9], kind, extra=extra)
    data = write_memory(memory, is_file=False)
    again, taken = read_memory(data)
    assert taken == len(data)
    assert write_memory(again, is_file=False) == data
    assert again.kind == kind
    for size in range(0, len(data), 97):
        with pytest.raises((kvx.BadArgument, kvx.Unsupported)):
            read_whole(data[:size])


def read_whole(data: bytes) -> None:
    """As of a file: K and V of a hybrid are whole before its state is, and then a piece of that stands behind them."""
    _, taken = read_memory(data)
    read_checkpoints(data[taken:] or b"cut", version=4)
