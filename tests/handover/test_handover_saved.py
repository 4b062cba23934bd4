"""Handovers in folders: there whole or not at all, read only when whole."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading

import pytest

import kvx
from kvx.handover import load, save, saved
from tests.handover.caches import MODEL, small


@pytest.fixture
def handover():
    return small(random.Random(0), num_tokens=14, format="int8_per_token_head")


def refuse(call, words, kind=kvx.BadArgument):
    with pytest.raises(kind, match=words):
        call()


def test_there_and_back(tmp_path, handover):
    save(tmp_path / "deep" / "a", handover)
    back = load(str(tmp_path / "deep" / "a"), model=MODEL)
    assert back.to_json() == handover.to_json()
    assert sorted(os.listdir(tmp_path / "deep")) == ["a"]
    refuse(lambda: load(tmp_path / "deep" / "a", model="other"), "of model 'small'; here it is 'other'", kvx.Incompatible)
    part = kvx.load(tmp_path / "deep" / "a" / "part0.safetensors", verify=False)  # a cache file; its seal is in the manifest
    assert part.spec == handover.spec


def test_what_is_there_stays(tmp_path, handover):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "link"):
        refuse(lambda name=name: save(tmp_path / name, handover), "is there already")
    assert (tmp_path / "file").read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "link"]


def test_what_is_no_folder_and_no_handover(tmp_path, handover):
    (tmp_path / "file").write_text("x")
    refuse(lambda: save(tmp_path / "file" / "a", handover), "cannot be made: Not a directory")
    refuse(lambda: save(tmp_path / ("a" * 300), handover), "cannot be made: File name too long")
    refuse(lambda: save(tmp_path / "a", {}), "handover is a dict; it must be a Handover")
    refuse(lambda: save(None, handover), r"save\(\): path is None; it names a folder")
    refuse(lambda: load(None), r"load\(\): path is None; it names a folder")
    assert os.listdir(tmp_path) == ["file"]


def test_damage_is_not_saved(tmp_path, handover):
    handover.parts[0].buffers[0][0] ^= 1
    refuse(lambda: save(tmp_path / "a", handover), "part 0", kvx.Damaged)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("step", ["save_cache", "_write", "sync_folder"])
def test_an_end_midway_leaves_nothing(tmp_path, handover, monkeypatch, step):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(saved, step, fail)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path / "a", handover)
    assert not os.listdir(tmp_path)


def test_two_save_at_once(tmp_path, handover, monkeypatch):
    """One name: one of them has it, and the others are told. Names of their own: all."""
    start, told = threading.Barrier(8), []

    def run(name: str) -> None:
        start.wait()
        try:
            save(tmp_path / name, handover)
        except kvx.BadArgument as error:
            told.append(str(error))

    threads = [threading.Thread(target=run, args=(f"one{max(0, n - 3)}",)) for n in range(8)]  # four of one name
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(told) == 3
    assert all("is there already" in t for t in told)
    assert sorted(os.listdir(tmp_path)) == [f"one{n}" for n in range(5)]
    for n in range(5):
        assert load(tmp_path / f"one{n}").to_json() == handover.to_json()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where it must not")
def test_a_folder_that_cannot_be_written(tmp_path, handover):
    tmp_path.chmod(0o500)
    try:
        refuse(lambda: save(tmp_path / "a", handover), "cannot be made: Permission denied")
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_can_only_be_read(tmp_path, handover):
    save(tmp_path / "a", handover)
    for file in (tmp_path / "a").iterdir():
        file.chmod(0o400)
    (tmp_path / "a").chmod(0o500)
    try:
        assert load(tmp_path / "a").to_json() == handover.to_json()
    finally:
        (tmp_path / "a").chmod(0o700)


@pytest.mark.parametrize("missing", ["handover.json", "files.json", "part0.safetensors"])
def test_half_a_folder(tmp_path, handover, missing):
    save(tmp_path / "a", handover)
    (tmp_path / "a" / missing).unlink()
    refuse(lambda: load(tmp_path / "a"), missing)
    (tmp_path / "a" / missing).mkdir()
    refuse(lambda: load(tmp_path / "a"), missing)


def test_no_folder(tmp_path):
    refuse(lambda: load(tmp_path / "a"), "no readable handover.json")
    (tmp_path / "a").write_text("x")
    refuse(lambda: load(tmp_path / "a"), "no readable handover.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1]", "[{}]", "[null]", '[{"bytes": "x", "heading": 4}]', "[" * 100_000])
def test_a_list_of_files_that_is_none(tmp_path, handover, text):
    save(tmp_path / "a", handover)
    (tmp_path / "a" / "files.json").write_text(text)
    refuse(lambda: load(tmp_path / "a"), "files.json|part0", kvx.Damaged)


def test_parts_of_another_folder(tmp_path, handover):
    other = small(random.Random(1), num_tokens=14, format="int8_per_token_head")
    shape = small(random.Random(2), num_tokens=13, format="bf16")
    for name, h in (("a", handover), ("b", other), ("c", shape)):
        save(tmp_path / name, h)
    shutil.copy(tmp_path / "b" / "part0.safetensors", tmp_path / "a")
    refuse(lambda: load(tmp_path / "a"), "part 0 .*has content", kvx.Damaged)
    shutil.copy(tmp_path / "b" / "handover.json", tmp_path / "a")
    assert load(tmp_path / "a").to_json() == other.to_json()
    shutil.copy(tmp_path / "c" / "part0.safetensors", tmp_path / "a")
    refuse(lambda: load(tmp_path / "a"), "another handover's", kvx.Damaged)
    shutil.copy(tmp_path / "c" / "files.json", tmp_path / "a")
    with pytest.raises((kvx.Incompatible, kvx.Damaged)):
        load(tmp_path / "a")


def test_bytes_behind_the_file(tmp_path, handover):
    save(tmp_path / "a", handover)
    with (tmp_path / "a" / "part0.safetensors").open("ab") as f:
        f.write(b"more")
    refuse(lambda: load(tmp_path / "a"), "changed", kvx.Damaged)


def test_a_manifest_that_is_none(tmp_path, handover):
    """The sentence says which file."""
    save(tmp_path / "a", handover)
    path = tmp_path / "a" / "handover.json"
    text = path.read_text()
    for changed, words, kind in (
        ("{", "the manifest is no JSON", kvx.BadArgument),
        (text.replace('"window": 0', '"window": 1'), "the manifest's digest is", kvx.Damaged),
        (text.replace('"kvx_handover": 1', '"kvx_handover": 2'), "the manifest's version is '2'", kvx.Incompatible),
    ):
        path.write_text(changed)
        refuse(lambda: load(tmp_path / "a"), rf"^load\(\): {path}: {words}", kind)


def test_a_manifest_without_end(tmp_path, handover, monkeypatch):
    save(tmp_path / "a", handover)
    monkeypatch.setattr(saved, "_MOST_TEXT_BYTES", {"handover.json": 100})
    refuse(lambda: load(tmp_path / "a"), "under 100")


def test_a_header_that_lies(tmp_path, handover):
    """Made anew with all hashes: refused with a sentence, by whoever reads it."""
    save(tmp_path / "a", handover)
    file = tmp_path / "a" / "part0.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for lie in ("cache", {"data_offsets": "ab"}, {"data_offsets": [-8, 8]}, [1], None):
        changed = json.dumps({**header, "cache.00000": lie}).encode().ljust(length)
        file.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
        listed = [saved._heading(file, handover.spec)]
        (tmp_path / "a" / "files.json").write_text(json.dumps(listed))
        with pytest.raises(kvx.KvxError):
            load(tmp_path / "a")
