"""The long trials for a few seconds each, also where SIGINT is ignored, as in what nohup starts; and ended early by Ctrl-C."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors and memory of a process are read in /proc, of Linux")
NOTHING = "nothing was wrong, nothing hung, nothing was kept"
needs_model = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "safetensors")),
    reason="the small random model is made with transformers and safetensors: pip install transformers safetensors",
)
PROGRAMS = {"runner": ("--model", "random"), "disk_tier": ()}
each = pytest.mark.parametrize("program", [pytest.param("runner", marks=needs_model), "disk_tier"])


def start(program: str, seconds: int) -> subprocess.Popen[str]:
    """With SIGINT ignored: a trial takes it all the same."""
    command = [sys.executable, "-m", f"tests.soak.{program}", "--seconds", str(seconds), "--seed", "1", *PROGRAMS[program]]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # children have it so, too
    try:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    finally:
        signal.signal(signal.SIGINT, before)


@each
def test_a_few_seconds(program):
    process = start(program, 8)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    assert out.splitlines()[-1] == NOTHING, out


@each
def test_ctrl_c_ends_it(program):
    """In the middle: all its processes end, and it says how far it came."""
    process = start(program, 3600)
    try:
        while not (children := children_of(process.pid)) and process.poll() is None:
            time.sleep(0.1)
        time.sleep(3)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, out
    assert "stopped" in out
    assert out.splitlines()[-1] == NOTHING, out
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}")]


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]
