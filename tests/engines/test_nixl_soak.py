"""tests/soak/wires.py, shortened: clients are killed and others misbehave; no byte is wrong, nobody hangs, nothing stays."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("nixl")


@pytest.mark.parametrize("options", [("--seconds", "20"), ("--clients", "60", "--quiet")], ids=["killed", "one after the other"])
def test_soak(options):
    command = [sys.executable, "-m", "tests.soak.wires", *options, "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "nothing was wrong, nothing hung, nothing was kept"
