"""weights_identity: other weights, another config or another type make another name; nothing else does."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

import kvx
from kvx import identity
from kvx.identity import has_identity, model_name

SIZE = 40 << 20  # of a file: some chunks, the last of them not whole


def make(folder: Path, change: tuple[int, bytes] | None = None, *, suffix: str = ".safetensors", **config) -> Path:
    """A folder with two weight files; `change` is written at a place of the first."""
    folder.mkdir(parents=True)
    data = bytearray(b"w" * SIZE + b"tail")
    if change is not None:
        at, new = change
        data[at : at + len(new)] = new
    (folder / f"model-1{suffix}").write_bytes(data)
    (folder / f"model-2{suffix}").write_bytes(b"v" * 5001)
    settings = {"model_type": "llama", "rope_theta": 1e4, "transformers_version": "5.1", "dtype": "bfloat16"} | config
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Path, str]:
    folder = make(tmp_path_factory.mktemp("plain") / "model")
    return folder, kvx.weights_identity(folder)


@pytest.mark.parametrize("at", [0, 5000, (1 << 16) - 5000, (16 << 20) - 1, 16 << 20, SIZE - 3, SIZE + 3])
@pytest.mark.parametrize("size", [1, 1024])
def test_every_byte_counts(tmp_path, plain, at, size):
    """A norm of a small model has a kilobyte, a changed number two bytes; they may lie anywhere."""
    if at + size > SIZE + 4:
        size = SIZE + 4 - at
    assert kvx.weights_identity(make(tmp_path / "model", (at, b"x" * size))) != plain[1]


def test_the_same_files_have_the_same_name(tmp_path, plain):
    folder = make(tmp_path / "other name", transformers_version="5.22", _name_or_path="x", dtype="float32")
    (folder / "model-1.safetensors").rename(folder / "z.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("")
    assert kvx.weights_identity(folder) == plain[1]
    assert has_identity(plain[1])


@pytest.mark.parametrize(
    "change",
    [{"rope_theta": 1e6}, {"rope_scaling": {"factor": 2}}, {"text_config": {"rope_theta": 2}}, {"quantization_config": {"a": 1}}],
    ids=str,
)
def test_the_config_counts(tmp_path, plain, change):
    assert kvx.weights_identity(make(tmp_path / "model", **change)) != plain[1]


def test_what_else_counts(tmp_path, plain):
    folder = plain[0]
    others = [
        kvx.weights_identity(folder, dtype="f32"),
        kvx.weights_identity(folder, dtype="bf16"),
        kvx.weights_identity(folder, settings={"quantization": "fp8"}),
        kvx.weights_identity(folder, settings={"quantization": "int8"}),
    ]
    for name, content in (("quantize_config.json", "{}"), ("modeling_x.py", "a"), ("adapter_model.bin", "b")):
        more = make(tmp_path / name)
        (more / name).write_text(content)
        others.append(kvx.weights_identity(more))
    assert len({plain[1], *others}) == len(others) + 1
    assert kvx.weights_identity(folder, settings={"quantization": ""}) == plain[1]


def test_bin_shards_and_a_gguf_file(tmp_path):
    a, b = make(tmp_path / "a", suffix=".bin"), make(tmp_path / "b", (7, b"x"), suffix=".bin")
    assert kvx.weights_identity(a) != kvx.weights_identity(b)
    files = [tmp_path / f"{n}.gguf" for n in "abc"]
    for file, content in zip(files, (b"1" * 300000, b"1" * 299999 + b"2", b"1" * 300000), strict=True):
        file.write_bytes(content)
    first, second, third = map(kvx.weights_identity, files)
    assert first == third != second
    files[0].write_bytes(b"1" * 300001)
    assert kvx.weights_identity(files[0]) != first


def test_a_file_that_is_written_again_is_read_again(tmp_path):
    folder = make(tmp_path / "model")
    file = folder / "model-2.safetensors"
    time.sleep(1.1)  # so that its digest is remembered
    first = kvx.weights_identity(folder)
    before = os.stat(file)
    with file.open("r+b") as f:
        f.write(b"x")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy that keeps dates has it
    assert kvx.weights_identity(folder) != first


def test_without_xxhash_the_name_is_the_same(plain, monkeypatch):
    if identity.native.LIB is None:
        pytest.skip("libkvx is not built: without it and xxhash names are made by BLAKE2b")
    monkeypatch.setattr(identity, "_known", {})
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert kvx.weights_identity(plain[0]) == plain[1]


def test_what_cannot_be_named_is_said(tmp_path):
    with pytest.raises(kvx.BadArgument, match=r"does not exist\. Give a folder with weight files"):
        kvx.weights_identity(tmp_path / "none")
    with pytest.raises(kvx.BadArgument, match=r"has no weight files; they end in .safetensors"):
        kvx.weights_identity(tmp_path)
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(kvx.BadArgument, match="has no weight files"):
        kvx.weights_identity(tmp_path)


def test_a_config_that_is_no_json_counts_by_its_bytes(tmp_path):
    names = []
    for n, text in enumerate(("{", "{ ", "[" * 100000)):
        folder = make(tmp_path / str(n))
        (folder / "config.json").write_text(text)
        names.append(kvx.weights_identity(folder))
    assert len(set(names)) == 3


def test_a_geometry_is_no_identity():
    name = model_name("qwen3", num_layers=4, num_kv_heads=2, head_dim=16, hidden_size=64, vocab_size=128)
    assert not has_identity(name)
    assert not has_identity("")
    assert has_identity("my model")
    assert has_identity(f"{name}-weights-0123-bf16")
