"""Prefill in one process, decode in another, over NIXL and Mooncake: the answer of the model alone, and what happens on failure."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import kvx
from kvx.cli.decode import fetch
from kvx.cli.held import plans
from kvx.cli.prefill import name_with_weights
from kvx.handover import from_manifest
from kvx.runner import Engine, Params, small_model
from kvx.runner.handover import resume
from kvx.runner.open import open_model
from kvx.spec import from_json
from kvx.wires.choose import puller_from
from kvx.wires.secret import read_or_make_secret
from kvx.wires.wire import Deadline, WireError
from tests.engines.prefill_peer import Prefill, prefill_at
from tests.engines.wires import SECRET, free_port, mooncake_master
from tests.runner import smollm
from tests.wires.peers import eventually

pytest.importorskip("nixl")
pytestmark = smollm.needs_weights

QUESTION = "Why is the sky blue? Answer in three sentences."
TIMEOUT_S = 20.0
NHD, VLLM = "layer kv | block token head dim", "vllm.lbhnc"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(small_model(), num_blocks=128, block_size=32)


@pytest.fixture(scope="module")
def ids(engine) -> list[int]:
    return engine.tokenizer.chat(QUESTION, smollm.SYSTEM)


@pytest.fixture(scope="module")
def name() -> str:
    return name_with_weights(small_model(), open_model(small_model()).config)


@pytest.fixture(scope="module")
def alone(engine, ids) -> list[int]:
    return list(engine.generate([ids], Params(max_tokens=16, ignore_eos=True))[0][0].tokens)


def goes_on(engine, handover, ids, alone) -> bool:
    """Whether the answer is the model's own; and nothing stays in use."""
    engine.reset()
    got = resume(engine, handover, ids, Params(max_tokens=16, ignore_eos=True), model=handover.model)[0]
    assert got.num_cached == len(ids) - 1
    assert [a.num_used for a in engine.cache.allocators] == [0]
    return list(got.tokens) == alone


def run_decode(p: Prefill, *options: str, wire: str = "nixl") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "kvx", "decode", "--from", p.address, "--prompt", QUESTION, "--system", smollm.SYSTEM]
    command += ["--wire", wire, "--secret-file", str(p.secret_file), "--max-tokens", "64", "--ignore-eos", "--check", "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, "--device", "cpu", *options], capture_output=True, text=True, timeout=600, env=env)


def decode(p: Prefill, *options: str, wire: str = "nixl") -> dict:
    done = run_decode(p, *options, wire=wire)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("here", "there"), [
    (("--block-size", "16", "--tp", "2", "--layout", NHD), ("--block-size", "32", "--tp", "1")),
    (("--block-size", "128", "--blocks", "32", "--layout", VLLM), ("--block-size", "16", "--tp", "3", "--layout", NHD)),
], ids=["16 NHD 2 ranks to 32", "128 vLLM to 16 NHD 3 ranks"])  # fmt: skip
def test_64_tokens_are_those_of_the_model_alone(here, there):
    with prefill_at(*here) as p:
        said = decode(p, *there)
        assert (said["is_same"], len(said["tokens"]), said["handed_over"]) == (True, 64, said["prompt_tokens"] - 1)
        assert said["moved"]["bytes"] >= said["prompt_tokens"] * 30 * 2 * 3 * 64 * 4
        assert p.status() == {"used_blocks": 0, "offers": 0, "done": 1}


def test_through_fp8_where_it_parts_is_reported():
    with prefill_at("--kv-format", "fp8") as p:
        said = decode(p)
        assert said["moved"]["bytes"] < said["prompt_tokens"] * 30 * 2 * 3 * 64 * 2
        assert said["is_same"] == (said["same_tokens"] == 64)
        print(f"through fp8 the first {said['same_tokens']} of 64 tokens are the same")
        assert said["same_tokens"] >= 1


def test_mooncake_too(tmp_path):
    pytest.importorskip("mooncake.engine", exc_type=ImportError)  # the package may be there without the system's libibverbs1
    with mooncake_master() as address:
        port = int(address.rpartition(":")[2])
        with prefill_at("--tp", "2", "--layout", NHD, "--wire", "mooncake", port=port) as p:
            said = decode(p, "--tp", "3", wire="mooncake")
            assert (said["is_same"], len(said["tokens"])) == (True, 64)
            with pytest.raises(kvx.Incompatible, match="request was for 'another'"):
                fetch("mooncake", p.address, p.secret, [1, 2], "another", TIMEOUT_S)
            end = time.monotonic() + 5
            while p.status("mooncake")["offers"] > 1:  # that of the status itself
                assert time.monotonic() < end
        begin = time.monotonic()
        # Nobody takes the question, or its memory went with the prefill.
        with pytest.raises(WireError, match=f"no `kvx prefill --listen` answered at the store of {p.address} within 2 s. Is it"):
            fetch("mooncake", p.address, p.secret, [1, 2], "x", 2.0)
        assert time.monotonic() - begin < 4


# ---- what fails, and the request after it


def test_a_wrong_byte_is_found_and_the_next_request_works(engine, ids, name, alone):
    with prefill_at("--tp", "3", "--layout", NHD, flip=True) as p:
        with pytest.raises(kvx.Damaged, match="changed on the way"):
            fetch("nixl", p.address, p.secret, ids, name, TIMEOUT_S)
        assert p.status() == {"used_blocks": 0, "offers": 0, "done": 1}
        handover, _ = fetch("nixl", p.address, p.secret, ids, name, TIMEOUT_S)
        assert goes_on(engine, handover, ids, alone)


def test_another_model_and_bad_tokens_are_refused_and_the_next_request_works(engine, ids, name, alone):
    with prefill_at() as p:
        with pytest.raises(kvx.Incompatible, match=f"this server's model is '{name}'; the request was for 'another'"):
            fetch("nixl", p.address, p.secret, ids, "another", TIMEOUT_S)
        for bad, what in (([], "there are 0 tokens"), ([10**9], "1000000000"), ([1] * 9000, "9000")):
            with pytest.raises(WireError, match=what):
                fetch("nixl", p.address, p.secret, bad, name, TIMEOUT_S)
        assert p.status()["used_blocks"] == 0
        handover, _ = fetch("nixl", p.address, p.secret, ids, name, TIMEOUT_S)
        assert goes_on(engine, handover, ids, alone)


def test_nobody_there():
    begin = time.monotonic()
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(WireError, match=f"no `kvx prefill --listen` answered at {address} within 1.5 s. Is it running"):
        fetch("nixl", address, SECRET, [1, 2], "x", 1.5)
    assert time.monotonic() - begin < 3


def test_another_secret_and_other_weights_are_refused_in_a_sentence(tmp_path):
    """By the commands themselves: nothing was computed, and nothing pulled."""
    path, (other, _) = tmp_path / "secret", read_or_make_secret(tmp_path / "secret")
    weights = changed_copy(tmp_path)
    with prefill_at() as p:
        with pytest.raises(WireError, match=f"`kvx prefill --listen` at {p.address}: it has another secret"):
            fetch("nixl", p.address, other, [1, 2], p.model, TIMEOUT_S)
        done = run_decode(p, "--secret-file", str(path))
        assert done.returncode == 2
        assert "it has another secret. Copy its secret file here, or name the right one: --secret-file FILE." in done.stderr
        done = run_decode(p, "--model", str(weights))
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(
            f"Incompatible: the other side refuses: prefill: this server's model is '{p.model}'; the request was for"
        )
        assert "Their weights differ" in done.stderr
        assert p.status() == {"used_blocks": 0, "offers": 0, "done": 1}
        assert decode(p)["is_same"]


def changed_copy(folder: Path) -> Path:
    """The same model but for one bit of its last tensor."""
    model = small_model()
    copy = Path(shutil.copytree(model, folder / "copy") if model.is_dir() else shutil.copy(model, folder / "copy.gguf"))
    file = max(copy.glob("*.safetensors"), key=lambda f: f.stat().st_size) if copy.is_dir() else copy
    with file.open("r+b") as f:
        f.seek(-5, os.SEEK_END)
        byte = f.read(1)[0]
        f.seek(-5, os.SEEK_END)
        f.write(bytes([byte ^ 1]))
    return copy


def test_what_only_looks_like_token_ids_is_refused_and_the_next_request_works(engine, ids, name, alone):
    with prefill_at() as p:
        for bad in ([1.0, 2.0], [True], [[1, 2]], "12"):
            with (
                puller_from("nixl", p.address, p.secret, Deadline(20)) as puller,
                pytest.raises(WireError, match=r"prefill: tokens"),
            ):
                puller.ask({"model": name, "tokens": bad}, Deadline(20))
        handover, _ = fetch("nixl", p.address, p.secret, ids, name, TIMEOUT_S)
        assert goes_on(engine, handover, ids, alone)


def test_it_listens_where_it_is_told_and_nowhere_else():
    with prefill_at() as p:
        files = Path(f"/proc/{p.pid}/fd")
        links = {os.readlink(f) for f in files.iterdir()}
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        rows += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
        hosts = {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links}
        assert hosts == {"0100007F"}  # 127.0.0.1: its own listener, and UCX's


def test_a_late_answer_is_an_error_in_time_and_the_next_request_works(engine, ids, name, alone):
    with prefill_at("--lease-s", "2") as p:
        p.status()
        os.kill(p.pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(WireError):
            fetch("nixl", p.address, p.secret, ids, name, 1.5)
        assert time.monotonic() - begin < 3
        os.kill(p.pid, signal.SIGCONT)
        handover, _ = fetch("nixl", p.address, p.secret, ids, name, TIMEOUT_S)
        assert goes_on(engine, handover, ids, alone)
        end = time.monotonic() + 10
        while p.status()["offers"]:  # the late one goes when its lease is over
            assert time.monotonic() < end
            time.sleep(0.1)
        assert p.status()["used_blocks"] == 0


@pytest.mark.parametrize(("tls", "when"), [("", "before"), ("tcp", "before"), ("tcp", "during")])
def test_a_prefill_that_is_killed_is_an_error_in_time_and_the_next_one_works(engine, ids, name, alone, tls, when, monkeypatch):
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    long = (ids * 40)[:3000] if when == "during" else ids
    with prefill_at("--block-size", "32", "--blocks", "128", tls=tls) as p:
        deadline = Deadline(90)
        with puller_from("nixl", p.address, p.secret, deadline) as puller:
            offer = puller.ask({"model": name, "tokens": long}, deadline)
            handover = from_manifest(offer.about["handover"])
            specs = [[from_json(text) for text in part] for part in offer.about["specs"]]
            parts = [(part.buffers, way) for part, way in zip(handover.parts, plans(handover, specs), strict=True)]
            killer = threading.Timer(0.02 if when == "during" else 0.0, p.kill)
            killer.start()
            if when == "before":
                killer.join()
            begin = time.monotonic()
            with pytest.raises(WireError, match="READ"):
                puller.pull(offer, parts, Deadline(5))
            assert time.monotonic() - begin < 7
        with pytest.raises(kvx.Damaged):
            handover.check()
        with prefill_at(port=int(p.address.rpartition(":")[2]), tls=tls) as p:
            handover, _ = fetch("nixl", p.address, p.secret, ids, name, TIMEOUT_S)
            assert goes_on(engine, handover, ids, alone)


def test_a_decode_that_dies_gives_back_what_it_was_offered(ids, name, engine, alone):
    with prefill_at("--lease-s", "60") as p:
        with puller_from("nixl", p.address, p.secret, Deadline(20)) as puller:
            puller.ask({"model": name, "tokens": ids}, Deadline(60))  # and never pulls
            assert p.status()["offers"] == 1
        eventually(lambda: p.status()["offers"] == 0)  # long before its lease is over
        assert p.status() == {"used_blocks": 0, "offers": 0, "done": 1}
        handover, _ = fetch("nixl", p.address, p.secret, ids, name, TIMEOUT_S)
        assert goes_on(engine, handover, ids, alone)


def test_the_cli_says_it_in_a_sentence(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    read_or_make_secret(tmp_path / "secret")
    command = [sys.executable, "-m", "kvx", "decode", "--from", address, "--prompt", "x", "--timeout-s", "1"]
    command += ["--secret-file", str(tmp_path / "secret")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 2
    assert done.stdout == ""
    loading, asking, error = done.stderr.splitlines()  # what it does meanwhile, and how it ended
    assert loading.startswith("loading ")
    assert asking == f"requesting K and V from the prefill server at {address}, waiting 1 s at most"
    assert error == f"WireError: no `kvx prefill --listen` answered at {address} within 1 s. Is it running, on the same --wire?"
