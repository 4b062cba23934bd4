"""A directory in memory that goes with an engine's processes, also where they were killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from kvx.connector import shared_host
from kvx.connector.shared_host import SharedHost
from kvx.errors import BadArgument


@pytest.fixture(autouse=True)
def _in_memory_of_the_test(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_host, "ROOT", tmp_path)


def test_it_goes_with_the_first_that_ends_in_order():
    one, other = SharedHost("engine", 1000), SharedHost("engine", 1000)
    assert one.path == other.path
    assert one.option(500).path == one.path
    assert SharedHost("another", 1000).path != one.path
    assert one.path.stat().st_mode & 0o777 == 0o700
    (one.path / "block").write_text("x")
    one.close()
    assert not one.path.exists()
    SharedHost("engine", 1000)  # whoever has the same name begins anew
    one.close()
    assert other.path.exists()
    other.close()
    assert not other.path.exists()


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path, monkeypatch):
    held = SharedHost("lives", 1000)
    code = (
        "import sys, time; from pathlib import Path; from kvx.connector import shared_host\n"
        "shared_host.ROOT = Path(sys.argv[1]); made = shared_host.SharedHost('dies', 1000)\n"
        "print(made.path, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    path = tmp_path / child.stdout.readline().strip()
    monkeypatch.setattr(shared_host, "_YOUNG_S", -1.0)
    SharedHost("next", 1000).close()
    assert path.exists()  # it is held
    child.kill()
    child.wait()
    SharedHost("next", 1000).close()
    assert not path.exists()
    assert held.path.exists()
    held.close()


def test_a_young_folder_is_left_alone(tmp_path):
    """Who made it may not hold it yet."""
    young = tmp_path / f"kvx-{os.getuid()}-young"
    young.mkdir()
    SharedHost("next", 1000).close()
    assert young.exists()
    os.utime(young, (time.time() - 3600,) * 2)
    SharedHost("next", 1000).close()
    assert not young.exists()


def test_too_little_room_is_said_at_the_start():
    with pytest.raises(BadArgument, match=r'tier "host:.*processes of their own.*--shm-size.*disk:DIR'):
        SharedHost("engine", 1 << 60)
