"""DiskTier and what else may stand in its directory: links, pipes, folders, other users' eyes, wrong dates, a missing manifest."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import stat
import threading
import time
import warnings

import pytest

import kvx
from kvx.tiers import TierError, directory
from tests.tiers.blocks import KIND, block, files, found, key, open_tier, put


def mode(path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.fixture
def umask():
    """As a user's shell has it; and wider and narrower."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o377])
def test_nobody_else_can_read_it(tmp_path, umask, mask):
    umask(mask)
    root = tmp_path / "a" / "b"
    with open_tier("disk", root, 4) as tier:
        put(tier, 1, 2)
    assert {mode(p) for p in (tmp_path / "a", root, *root.glob("??"))} == {0o700}
    assert {mode(p) for p in (root / "manifest.json", *files(root))} == {0o600}
    with open_tier("disk", root, 4) as tier:
        assert found(tier, 1, 2) == [True, True]


def test_folders_of_an_earlier_version_are_closed_to_others(tmp_path, umask):
    with open_tier("disk", tmp_path, 4) as tier:
        put(tier, 1)
    folder = files(tmp_path)[0].parent
    folder.chmod(0o755)
    (tmp_path / "manifest.json").chmod(0o644)
    (tmp_path / "zz").mkdir(mode=0o755)  # not the tier's
    open_tier("disk", tmp_path, 4).close()
    assert (mode(folder), mode(tmp_path / "manifest.json"), mode(tmp_path / "zz")) == (0o700, 0o600, 0o755)


def test_a_directory_that_others_can_write_to_is_told(tmp_path, umask):
    umask(0)
    tmp_path.chmod(0o777)
    with pytest.warns(kvx.KvxWarning, match=r"can be written to by other users \(mode 777\).*chmod 700"):
        open_tier("disk", tmp_path, 4).close()
    tmp_path.chmod(0o755)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_tier("disk", tmp_path, 4).close()


def test_a_folder_that_is_a_link_is_not_written_through(tmp_path):
    root, elsewhere = tmp_path / "tier", tmp_path / "elsewhere"
    elsewhere.mkdir()
    events = []
    with open_tier("disk", root, 4, on_event=events.append) as tier:
        put(tier, 2)
        link = root / key(1).hex()[:2]
        link.symlink_to(elsewhere)
        with pytest.raises(TierError, match=r"is a symbolic link, and a tier writes into folders of its own only; remove it"):
            put(tier, 1)
        assert not list(elsewhere.iterdir())
        shutil.copy(tier._directory.path_of(key(2)), elsewhere / f"{key(1).hex()}.kvx")
        before = os.stat(elsewhere / f"{key(1).hex()}.kvx").st_mtime_ns
        assert found(tier, 1) == [False]
        assert tier.drop([key(1)]).result() == [False]
        assert [p.name for p in elsewhere.iterdir()] == [f"{key(1).hex()}.kvx"]
        assert os.stat(elsewhere / f"{key(1).hex()}.kvx").st_mtime_ns == before
    with open_tier("disk", root, 1) as tier:  # nor is what it leads to counted, or evicted
        assert tier.num_blocks == 1
        link.unlink()
        assert put(tier, 1) == [True]


def test_a_block_that_is_a_link_is_refused(tmp_path):
    """Even where it leads to this very block: whoever made the link may change what it leads to."""
    target = tmp_path / "block"
    with open_tier("disk", tmp_path / "tier", 4) as tier:
        put(tier, 1)
        path = tier._directory.path_of(key(1))
        path.rename(target)
        path.symlink_to(target)
        data = target.read_bytes()
        assert tier.has_now([key(1)]) == [False]
        assert found(tier, 1) == [False]
        assert tier.stats.refused == 1
        assert target.read_bytes() == data
        assert put(tier, 1) == [True]
        assert found(tier, 1) == [True]


def in_time(call, seconds: float = 5.0):
    """What it returns; a failure where it hangs."""
    out = []
    thread = threading.Thread(target=lambda: out.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert out, f"it hangs: no answer within {seconds} s"
    return out[0]


@pytest.mark.parametrize("what", ["pipe", "socket", "folder"])
def test_what_is_no_file_hangs_nobody(tmp_path, what, monkeypatch):
    with open_tier("disk", tmp_path, 4) as tier:
        put(tier, 2)
        path = tier._directory.path_of(key(1))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if what == "pipe":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()
        else:
            monkeypatch.chdir(path.parent)  # a socket's path is short
            with socket.socket(socket.AF_UNIX) as s:
                s.bind(path.name)
        assert in_time(lambda: found(tier, 1)) == [False]
        assert in_time(lambda: found(tier, 2)) == [True]
        if what == "folder":
            with pytest.raises(TierError, match=key(1).hex()):
                put(tier, 1)
        else:
            assert tier.stats.refused == 1
            assert put(tier, 1) == [True]
            assert found(tier, 1) == [True]
        in_time(lambda: tier.close() or True)


@pytest.mark.parametrize("what", ["pipe", "link", "folder"])
def test_a_manifest_that_is_no_file_is_said(tmp_path, what):
    path = tmp_path / "manifest.json"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    wanted = (TierError, "cannot be used.*folder") if what == "folder" else (kvx.BadArgument, f"{path} is damaged.*Remove it")

    def opened():
        with pytest.raises(wanted[0], match=wanted[1]):
            open_tier("disk", tmp_path, 4)
        return True

    assert in_time(opened)
    assert not (tmp_path / "elsewhere").exists()


def test_one_folder_that_cannot_be_read_leaves_the_others(tmp_path, monkeypatch):
    with open_tier("disk", tmp_path, 8) as tier:
        put(tier, *range(4))
    real, closed, events = os.open, key(0).hex()[:2], []

    def refuse(path, flags, *args, **more):
        if str(path).endswith(f"/{closed}") and flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", refuse)  # chmod does not stop root
    with open_tier("disk", tmp_path, 8, on_event=events.append, refresh_s=0) as tier:
        assert found(tier, 1, 2, 3) == [True] * 3
        put(tier, 5)
        told = [e for e in events if e.kind == "failed"]
        assert [e.key for e in told] == [key(0)[:1]]  # once
        assert "Permission denied" in told[0].detail
        assert found(tier, 0) == [False]
        with pytest.raises(TierError, match="Permission denied"):
            tier.put([key(0)[:1]], [block(key(0)[:1])]).result()
        monkeypatch.undo()
        assert found(tier, 0) == [True]


@pytest.mark.parametrize("when_s", [-1.0, -3e9, 0.0])
def test_files_from_before_1970_are_counted_and_leave_first(tmp_path, when_s):
    with open_tier("disk", tmp_path, 3) as tier:
        put(tier, 1, 2, 3)
        path = tier._directory.path_of(key(3))
    os.utime(path, (when_s, when_s))
    with open_tier("disk", tmp_path, 3) as tier:
        assert tier.num_blocks == 3
        put(tier, 4)
        assert found(tier, 1, 2, 3, 4) == [True, True, False, True]


def test_files_from_the_future_leave_too(tmp_path):
    with open_tier("disk", tmp_path, 3) as tier:
        put(tier, 1, 2, 3)
        for n in (1, 2, 3):
            os.utime(tier._directory.path_of(key(n)), (time.time() + 10**9,) * 2)

    def fill():
        with open_tier("disk", tmp_path, 3) as tier:
            put(tier, 4, 5, 6)
            return found(tier, 1, 2, 3, 4, 5, 6)

    assert in_time(fill) == [False] * 3 + [True] * 3


def test_names_that_are_no_blocks_are_left_alone(tmp_path):
    with open_tier("disk", tmp_path, 2) as tier:
        put(tier, 1)
    ab = tmp_path / "ab"
    ab.mkdir(exist_ok=True)
    others = [ab / "cd12.kvx", ab / "AB12.kvx", ab / "ab1.kvx", ab / f"ab{'0' * 128}.kvx", tmp_path / "ab12.kvx", tmp_path / "AB"]
    for path in others:
        path.write_bytes(b"mine")
        os.utime(path, (1, 1))
    with open_tier("disk", tmp_path, 2) as tier:
        assert tier.num_blocks == 1
        put(tier, 2, 3, 4)
    assert all(path.read_bytes() == b"mine" for path in others)


@pytest.mark.parametrize("refresh_s", [0, 3600])
def test_a_directory_that_is_made_again_gets_a_manifest(tmp_path, refresh_s):
    root = tmp_path / "tier"
    with open_tier("disk", root, 4, refresh_s=refresh_s) as tier:
        put(tier, 1)
        shutil.rmtree(root)
        assert found(tier, 1) == [False]
        put(tier, 2)
        assert (root / "manifest.json").read_text() == KIND.text
        shutil.rmtree(root)
        root.mkdir(mode=0o700)
        put(tier, 3)
        assert (root / "manifest.json").read_text() == KIND.text
        assert found(tier, 1, 2, 3) == [False, False, True]
        if not refresh_s:
            put(tier, 4)
            assert tier.num_blocks == 2


def test_a_directory_that_became_another_models_is_not_written_to(tmp_path):
    root = tmp_path / "tier"
    with open_tier("disk", root, 4, refresh_s=0) as tier:
        put(tier, 1)
        shutil.rmtree(root)
        other = kvx.tiers.BlockKind({**KIND.manifest, "model": "large"}, KIND.buffer_bytes)
        kvx.tiers.DiskTier(root, other, 1 << 20).close()
        with pytest.raises(kvx.Incompatible, match="model: 'small' here, 'large' there"):
            put(tier, 1)
        assert not files(root)


def test_a_directory_that_can_only_be_read_is_read(tmp_path, monkeypatch):
    with open_tier("disk", tmp_path, 4) as tier:
        put(tier, 1)
    real = os.open

    def read_only(path, flags, *args, **more):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *args, **more)

    def refuse(*args, **more):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    for name in ("utime", "unlink", "fchmod", "replace"):
        monkeypatch.setattr(os, name, refuse)
    with open_tier("disk", tmp_path, 4) as tier:
        assert found(tier, 1) == [True]
        with pytest.raises(TierError, match="Read-only file system"):
            put(tier, 2)
    with pytest.raises(TierError, match=r"DiskTier: .* cannot be used: .*Read-only file system"):
        open_tier("disk", tmp_path / "new", 4)


@pytest.mark.parametrize("is_synced", [False, True])
def test_a_file_system_that_cannot_sync(tmp_path, monkeypatch, is_synced):
    """It keeps blocks, unless they are to outlive a loss of power."""

    def refuse(fd):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    if is_synced:
        with pytest.raises(TierError, match=r"cannot be used: .*Invalid argument"):
            open_tier("disk", tmp_path, 4, fsync=True)
        monkeypatch.undo()
        with open_tier("disk", tmp_path, 4, fsync=True) as tier:
            monkeypatch.setattr(os, "fsync", refuse)
            with pytest.raises(TierError, match="Invalid argument"):
                put(tier, 1)
    else:
        with open_tier("disk", tmp_path, 4) as tier:
            assert put(tier, 1) == [True]
            assert found(tier, 1) == [True]


def test_a_full_disk_leaves_no_half_manifest(tmp_path, monkeypatch):
    def full(fd, is_needed):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(directory, "_sync", full)
    with pytest.raises(TierError, match=r"cannot be used: .*No space left"):
        open_tier("disk", tmp_path, 4)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", ["", "llama-4x64-kv2x16-v128"])
def test_a_directory_needs_the_weights_name(tmp_path, model):
    """Others find its blocks: a name that a fine-tune shares would hand it this model's K and V."""
    nameless = kvx.tiers.BlockKind({**KIND.manifest, "model": model}, KIND.buffer_bytes)
    with pytest.raises(kvx.BadArgument, match=re.escape("kvx.weights_identity(folder")) as error:
        kvx.tiers.DiskTier(tmp_path / "tier", nameless, 1 << 20)
    assert "DiskTier" in str(error.value)
    assert not list(tmp_path.iterdir())
    with kvx.tiers.HostTier(nameless, 1 << 20):  # of this process alone
        pass
