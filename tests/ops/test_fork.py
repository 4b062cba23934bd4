"""Ops in a forked child, after the parent's ran on several threads: they work, on one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CHILD = """
import os, signal, torch, kvx
spec = kvx.CacheSpec(num_blocks=1024, block_size=16, num_kv_heads=8, head_dim=128, format="f32")
storage, slots = kvx.allocate(spec), torch.arange(4096)
k = torch.ones(4096, 8, 128)
table = kvx.PackedTable(torch.arange(256, dtype=torch.int32)[None], torch.tensor([4096]))
q = torch.ones(1, 8, 128)
def work(x):
    kvx.write(storage.cache, x, x, slot_mapping=slots, spec=spec)
    got, _ = kvx.gather(storage.cache, table, spec=spec)
    kvx.attention_decode(q, storage.cache, table, spec=spec)
    kvx.amax(x)
    return got
work(k)
pid = os.fork()
if pid == 0:
    signal.alarm(60)  # a child that hangs is ended, and has no status of 0
    x = torch.empty_like(k)
    x.numpy().fill(2.0)  # torch's own fill would hang, having threads of its own
    got = work(x).numpy()
    os._exit(0 if (got == 2.0).all() else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_ops_work_in_a_forked_child():
    environment = os.environ | {"OMP_NUM_THREADS": "4"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
