"""tests/soak/two_engines.py, shortened: vLLM and the runner on one store with too little room; no token is wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.engines.store_engines import missing_environment


@pytest.mark.skipif(bool(missing_environment()), reason=f"`make engines` makes {missing_environment()}, which is not here")
def test_half_a_minute():
    command = [sys.executable, "-m", "tests.soak.two_engines", "--seconds", "30", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "nothing was wrong, nothing hung, nothing was kept"
