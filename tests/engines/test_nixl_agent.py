"""NIXL moves what a plan says: from one layout and sharding to another, on the wire itself, as convert() does in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvx
from kvx.tiers import TierError
from kvx.wires.address import devices_of
from kvx.wires.nixl.agent import NixlAgent, Remote, descriptors
from kvx.wires.nixl.files import NixlFiles
from kvx.wires.wire import Deadline, WireError

pytest.importorskip("nixl")


NHD, HND, UNIVERSAL = "layer kv | block token head dim", "layer | block kv head token dim", "block | head layer kv token dim"
BASE = kvx.CacheSpec(num_blocks=6, block_size=4, num_kv_heads=4, head_dim=8, num_layers=3, format="f32", layout=NHD)
CASES = {
    "same": ([NHD], [NHD]),
    "to universal": ([NHD], [UNIVERSAL]),
    "from universal": ([UNIVERSAL], [HND]),
    "2 ranks to 1": ([NHD, NHD], [UNIVERSAL]),
    "1 rank to 4": ([HND], [UNIVERSAL] * 4),
    "scales apart": ([NHD], [UNIVERSAL]),
}


def ranks(layouts: list[str], spec: kvx.CacheSpec) -> list[kvx.CacheSpec]:
    return [replace(spec, layout=layout).shard(len(layouts), r) for r, layout in enumerate(layouts)]


def buffers(specs: list[kvx.CacheSpec], *, random: bool) -> list[torch.Tensor]:
    made = [t for s in specs for t in kvx.allocate_buffers(s)]
    for t in made:
        view = t.view(torch.uint8)
        view.random_(0, 255) if random else view.fill_(7)
    return made


@pytest.mark.parametrize("strided", [False, True], ids=["plain", "strided"])
@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("case", CASES)
def test_a_plan_over_the_wire_is_convert(case, op, strided):
    base = replace(BASE, format="int8_per_token_head_f16") if case == "scales apart" else BASE
    src_specs, dst_specs = (ranks(layouts, base) for layouts in CASES[case])
    plan = kvx.plan(src_specs, dst_specs)
    torch.manual_seed(0)
    src, dst = buffers(src_specs, random=True), buffers(dst_specs, random=False)
    want = [t.clone() for t in dst]
    ids = [4, 0, 3], [5, 1, 0]
    kvx.convert(src, want, plan=plan, src_blocks=ids[0], dst_blocks=ids[1])
    runs = list(plan.runs(*ids, strided=strided))
    near, far = (dst, src) if op == "read" else (src, dst)
    with NixlAgent() as here, NixlAgent(progress_thread=True) as there:
        here.register(near)
        there.register(far)
        peer = here.add_peer(there.metadata())
        assert peer == there.name
        remote = Remote(peer, tuple(t.data_ptr() for t in far))
        assert getattr(here, op)(near, remote, runs, Deadline(10)) == plan.unit_bytes * 3
        columns = 5 if strided and any(r.pieces > 1 for r in runs) else 3
        assert descriptors(runs, "src", [0] * len(src)).shape == (len(runs), columns)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(dst, want, strict=True))


def test_strided_descriptors_are_fewer():
    plan = kvx.plan(replace(BASE, layout=NHD), replace(BASE, layout=UNIVERSAL))
    plain, strided = list(plan.runs()), list(plan.runs(strided=True))
    assert sum(r.pieces for r in strided) == len(plain) > len(strided)


@pytest.mark.parametrize("op", ["read", "write"])
def test_metadata_of_one_registration_opens_no_other(op):
    """Two agents of one peer: what one is given does not let it touch the other's memory."""
    with NixlAgent() as a, NixlAgent() as b, NixlAgent(progress_thread=True) as there:
        mine, theirs = torch.full((64,), 1, dtype=torch.uint8), torch.full((64,), 2, dtype=torch.uint8)
        numbers = there.register([mine]), there.register([theirs])
        near = torch.zeros(64, dtype=torch.uint8)
        run = [kvx.layout.plan.ByteRun(0, 0, 0, 0, 64)]
        for agent, number, own, other in ((a, numbers[0], mine, theirs), (b, numbers[1], theirs, mine)):
            agent.register([near])
            peer = agent.add_peer(there.metadata(number))
            assert agent.read([near], Remote(peer, (own.data_ptr(),)), run, Deadline(5)) == 64
            assert torch.equal(near, own)
            before = other.clone()
            with pytest.raises(TierError, match=f"{op.upper()} of 1 pieces with .* failed: NIXL_ERR_NOT_FOUND"):
                getattr(agent, op)([near], Remote(peer, (other.data_ptr(),)), run, Deadline(5))
            assert torch.equal(other, before)


def listening_at() -> set[str]:
    """Addresses, in hexadecimal, that this process listens at over TCP."""
    links = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links}


def test_ucx_listens_at_the_device_of_an_address_alone():
    """NIXL's own listener, which answers everywhere, is not begun."""
    before = listening_at()
    with NixlAgent(devices=devices_of("127.0.0.1")):
        assert listening_at() - before <= {"0100007F"}
    assert "UCX_NET_DEVICES" not in os.environ


def test_memory_that_is_not_registered_is_refused():
    with NixlAgent() as here, NixlAgent(progress_thread=True) as there:
        near, far = torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)
        number = here.register([near])
        remote = Remote(here.add_peer(there.metadata()), (far.data_ptr(),))
        with pytest.raises(TierError, match="READ of 1 pieces with "):
            here.read([near], remote, [kvx.layout.plan.ByteRun(0, 0, 0, 0, 64)], Deadline(5))
        here.release(number)
        assert here.num_registered == 0


def test_files(tmp_path):
    src = [torch.randint(0, 255, (n,), dtype=torch.uint8) for n in (5000, 1, 70_000)]
    dst = [torch.zeros_like(t) for t in src]
    with NixlFiles() as files:
        assert files.write_file(tmp_path / "x", src, Deadline(10)) == 75_001
        assert (tmp_path / "x").read_bytes() == b"".join(bytes(t.tolist()) for t in src)
        assert files.read_file(tmp_path / "x", dst, Deadline(10)) == 75_001
        assert all(torch.equal(a, b) for a, b in zip(src, dst, strict=True))
        with pytest.raises(TierError, match="75001 bytes; the buffers have 70001"):
            files.read_file(tmp_path / "x", dst[1:], Deadline(10))
        assert files.num_registered == 0
        assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(TierError, match="pipe is no file"):
            files.read_file(tmp_path / "pipe", dst, Deadline(10))
        (tmp_path / "victim").write_text("kept")
        (tmp_path / f".y.{os.getpid()}.partial").symlink_to(tmp_path / "victim")
        assert files.write_file(tmp_path / "y", src, Deadline(10)) == 75_001
        assert (tmp_path / "victim").read_text() == "kept"
        assert not (tmp_path / "y").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["pipe", "victim", "x", "y"]


def test_a_file_that_was_given_up_stays_open_until_the_agent_is_closed(tmp_path, monkeypatch):
    """A late write must find its own file and memory, not what was opened and allocated since."""

    def late(self, op, transfer, peer, deadline):
        finish(self, op, transfer, peer, deadline)
        raise WireError("late")

    finish, src = NixlAgent._finish, [torch.ones(5000, dtype=torch.uint8)]
    with NixlFiles() as files:
        monkeypatch.setattr(NixlAgent, "_finish", late)
        with pytest.raises(WireError, match="late"):
            files.write_file(tmp_path / "x", src, Deadline(10))
        assert os.listdir(tmp_path) == []
        (given_up,) = files._given_up
        assert os.fstat(given_up).st_size == 5000
        assert files.num_registered == 1
        monkeypatch.undo()
        assert files.write_file(tmp_path / "y", src, Deadline(10)) == 5000
        assert files._given_up == [given_up]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(given_up)


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_that_used_nixl_ends_with_its_own_status(status):
    code = f"import sys; from kvx.wires.nixl.agent import NixlAgent; NixlAgent(); print('said'); sys.exit({status})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "said\n")
