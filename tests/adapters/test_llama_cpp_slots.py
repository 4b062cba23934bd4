"""Slots against a server of this file's own, which answers as llama-server does."""

from __future__ import annotations

import base64
import json
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvx
from kvx.adapters.llama_cpp import Slots, StateKind, StateModel, export_slot_file
from kvx.adapters.llama_cpp.ggml_rows import decode_rows, rotate
from kvx.adapters.llama_cpp.memory import UNSAID, read_memory, write_memory
from kvx.adapters.llama_cpp.slot_file import read_slot_file

MODEL = StateModel("m", num_layers=2, num_kv_heads=2, head_dim=8)


class FakeServer(ThreadingHTTPServer):
    """One layer of llama-server: slots with token ids, saved as files of version 4 in f32."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.tokens: list[int] = []
        self.restored = b""
        self.calls: list[str] = []
        self.wrong_count = False
        self.is_slow = threading.Event()
        self.saves = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.calls.append(path)
        if self.is_slow.is_set():
            threading.Event().wait(1.0)
        if path == "/completion":
            self.tokens = body["prompt"]
            return 200, {"tokens": []}
        slot, action = path.removeprefix("/slots/").split("?action=")
        if slot != "0":
            return 400, {"error": {"message": "Invalid slot ID"}}
        file = self.folder / body["filename"]
        if action == "save":
            if self.saves:
                file.write_bytes(slot_file(self.tokens))
            return 200, {"n_saved": len(self.tokens)}
        self.restored = file.read_bytes()
        words = struct.unpack_from("<i", self.restored, 20)[0]
        return 200, {"n_restored": words + self.wrong_count}


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        code, said = self.server.answer(self.path, body)
        data = json.dumps(said).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def slot_file(tokens: list[int]) -> bytes:
    n = len(tokens)
    words = [-1, 1, n, *tokens, 0]
    out = struct.pack(f"<III{len(words)}i", 0x67677371, 4, len(words), *words) + struct.pack("<II", 1, n)
    if not n:
        return out
    out += b"".join(struct.pack("<iIi", i, 1, 0) for i in range(n)) + struct.pack("<IIII", 0, 2, 0, 0)
    rows = np.arange(4 * n * 16, dtype="<f4").reshape(4, n * 16)
    return out + b"".join(struct.pack("<iQ", 0, 64) + r.tobytes() for r in rows)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    with FakeServer(tmp_path) as fake:
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def test_export_leaves_no_file(server: FakeServer) -> None:
    server.tokens = [5, 6, 7]
    handover = Slots(server.address, server.folder, model=MODEL).export_slot()
    assert handover.tokens.tolist() == [5, 6, 7]
    assert not list(server.folder.iterdir())


def test_import_learns_the_kind_once(server: FakeServer) -> None:
    want = slot_file([5, 6, 7])
    handover = export_slot_file(want, model=MODEL)
    slots = Slots(server.address, server.folder, model=MODEL)
    slots.import_slot(handover)
    assert server.restored == want
    assert server.calls == ["/completion", "/slots/0?action=save", "/slots/0?action=restore"]
    slots.import_slot(handover)
    assert server.calls[3:] == ["/slots/0?action=restore"]
    assert not list(server.folder.iterdir())


def test_import_with_a_kind_asks_nothing_else(server: FakeServer) -> None:
    handover = export_slot_file(slot_file([5, 6, 7]), model=MODEL)
    Slots(server.address, server.folder, model=MODEL, kind=StateKind("f32")).import_slot(handover)
    assert server.calls == ["/slots/0?action=restore"]
    assert server.restored == slot_file([5, 6, 7])


def test_what_goes_wrong_is_said(server: FakeServer) -> None:
    handover = export_slot_file(slot_file([5, 6]), model=MODEL)
    slots = Slots(server.address, server.folder, model=MODEL, kind=StateKind("f32"))
    with pytest.raises(kvx.BadArgument, match="no cells"):
        slots.export_slot()
    with pytest.raises(kvx.Incompatible, match=r"refused /slots/3.*400.*Invalid slot ID"):
        slots.export_slot(3)
    server.wrong_count = True
    with pytest.raises(kvx.InternalError, match="restored 3 tokens of 2"):
        slots.import_slot(handover)
    server.saves = False
    with pytest.raises(kvx.BadArgument, match="has no such file"):
        slots.export_slot()
    assert not list(server.folder.iterdir())


def test_a_server_that_is_slow_or_gone(server: FakeServer) -> None:
    server.is_slow.set()
    slots = Slots(server.address, server.folder, model=MODEL, timeout_s=0.1)
    with pytest.raises(kvx.BadArgument, match=r"did not answer /slots/0\?action=save within 0.1 s"):
        slots.export_slot()
    with pytest.raises(kvx.BadArgument, match="cannot be reached"):  # nobody listens there
        Slots("http://127.0.0.1:9", server.folder, model=MODEL).export_slot()


@pytest.mark.parametrize("kind", [StateKind("f32"), None], ids=["told", "learned"])
def test_another_models_handover_never_reaches_the_server(server: FakeServer, kind: StateKind | None) -> None:
    other = StateModel("other", num_layers=2, num_kv_heads=2, head_dim=8)
    handover = export_slot_file(slot_file([5, 6]), model=other)
    with pytest.raises(kvx.Incompatible, match="model is 'other'"):
        Slots(server.address, server.folder, model=MODEL, kind=kind).import_slot(handover)
    assert server.calls == []


VERSIONS = json.loads((Path(__file__).parents[1] / "golden" / "slot_versions.json").read_text())


@pytest.mark.parametrize("case", VERSIONS["cases"], ids=lambda c: f"{c['model']} {c['type']} of {c['wheel']}")
def test_files_of_older_servers(case):
    """Of the engines of August and September 2026: read, written byte for byte, and converted where the bytes say enough."""
    file = read_slot_file(base64.b64decode(case["data"]))
    assert (file.version, file.tokens.tolist()) == (2 if case["wheel"].startswith("2026.8") else 3, VERSIONS["tokens"])
    memory, taken = read_memory(file.state, version=file.version)
    assert write_memory(memory) == bytes(file.state)
    assert (taken, memory.num_tokens, memory.kind.name) == (len(file.state), 5, case["type"])
    (cache,) = memory.caches
    assert cache.extra.shape[1] == (0 if case["model"] != "qwen35" else file.version)
    wide = [replace(cache.kind, k="f32", v="f32", k_rotation=0, v_rotation=0)]
    if case["type"] == "f16":
        assert memory.to(wide).num_tokens == 5
        return
    assert (cache.kind.k_rotation, cache.kind.v_rotation) == (UNSAID, UNSAID)
    # As those servers rotate them, which their files do not say: the f16 file of the same tokens has the numbers.
    (exact,) = (c for c in VERSIONS["cases"] if (c["model"], c["type"], c["wheel"]) == ("llama", "f16", case["wheel"]))
    told = read_memory(read_slot_file(base64.b64decode(exact["data"])).state, version=file.version)[0].caches[0].k[0]
    want, got = decode_rows(told.data, "f16"), decode_rows(cache.k[0].data, "q8_0")
    assert abs(rotate(want, 64) - got).max() < 0.02 * abs(want).max() < abs(want - got).max()
    with pytest.raises(kvx.Unsupported, match="rotates K and V before it quantises them, and its files do not say how"):
        memory.to(wide)
    with pytest.raises(kvx.Unsupported, match="do not say how"):
        export_slot_file(base64.b64decode(case["data"]), model=StateModel("m", 2, 1, 64))
