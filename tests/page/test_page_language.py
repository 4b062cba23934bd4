"""The page's reading of the layout language is a second implementation; the vectors hold it to the library's."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvx.layout.engines import ENGINES
from kvx.layout.registry import registry
from kvx.layout.state_rows import STATE_ROWS
from kvx.layout.vectors import vectors

CHECK = Path(__file__).with_name("language_check.mjs")


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return {"vectors": vectors(), "formats": registry()["formats"]}


def check(data: dict[str, Any], modules: Path) -> dict[str, Any]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on the PATH")
    done = subprocess.run([node, str(CHECK), str(modules)], input=json.dumps(data), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_node_agrees_with_every_vector(data, modules):
    found = check(data, modules)
    assert not found["wrong"], "\n".join(found["wrong"][:20])
    assert found["places"] >= len(ENGINES) + len(STATE_ROWS) + 300
    assert found["refused"] >= 300
    assert found["elements"] > 500_000


def test_a_wrong_vector_is_found(data, modules):
    """One byte off in one case, and one word of one sentence."""
    changed = json.loads(json.dumps(data))
    changed["vectors"]["places"][3]["planes"][0]["elements"][1][2] += 1
    changed["vectors"]["places"][4]["planes"][0]["crc32"] ^= 1
    changed["vectors"]["refused"][5]["error"] += "?"
    assert len(check(changed, modules)["wrong"]) == 3
