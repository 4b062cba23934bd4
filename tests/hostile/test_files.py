"""Hostile files: refused with a sentence, within a second, before memory is taken for what they claim."""

from __future__ import annotations

import gc
import json
import os
import resource
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvx
from kvx import handover
from kvx.handover import from_manifest
from kvx.layout.axes import MOST_CHARACTERS, Layout
from tests.handover.test_handover_saved import handover as handover  # noqa: F811 - its fixture, under its own name

SPEC = kvx.CacheSpec(2, 4, 1, 8, layout="layer kv | block token head dim")


@contextmanager
def bounded(seconds: float = 1.0, memory: int = 256 << 20):
    """Within so much processor time of this thread, and so much more address space."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + memory, limits[1]))
    gc.freeze()  # what the tests before left behind is not collected in this time, over and over
    begin = time.thread_time()
    try:
        yield
    finally:
        gc.unfreeze()
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert time.thread_time() - begin < seconds


def refuse(call, words: str = ".", kind: type[Exception] = kvx.KvxError) -> None:
    with bounded(), pytest.raises(kind, match=words):
        call()


@pytest.fixture
def path(tmp_path):
    kvx.save(tmp_path / "cache.kvx", kvx.allocate_buffers(SPEC), SPEC)
    return tmp_path / "cache.kvx"


def rewrite(path: Path, header: object, *, text: str = "") -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    made = (text or json.dumps(header)).encode()
    path.write_bytes(len(made).to_bytes(8, "little") + made + data[8 + length :])


def claim(**fields: object) -> str:
    """A manifest, whatever it says."""
    made = {**json.loads(kvx.to_json(SPEC)), **fields}
    del made["digest"]
    return json.dumps(made)


def header_of(path: Path) -> dict:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


@pytest.mark.parametrize(
    "fields",
    [
        {"num_layers": 2**28},
        {"num_layers": 2**28, "v_head_dim": 16},
        {"num_blocks": 2**33},
        {"num_blocks": 2**33, "layout": "block | head layer kv token dim"},
        {"num_blocks": 2**33, "num_layers": 2**10, "layout": "block layer kv | token head dim"},
        {"block_size": 2**29},
        {"num_kv_heads": 2**29},
        {"head_dim": 2**29},
        {"num_layers": 2**20, "format": "fp8_e4m3_per_head"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("is_sealed", [True, False])
def test_sizes_that_the_file_does_not_have(path, fields, is_sealed):
    header = header_of(path)
    if not is_sealed:
        header["__metadata__"] = {}
    header["__metadata__"]["kvx_manifest"] = claim(**fields)
    rewrite(path, header)
    assert path.stat().st_size < 4096
    refuse(lambda: kvx.load(path, verify=False))


def test_sizes_are_said(path):
    header = {"__metadata__": {"kvx_manifest": kvx.to_json(replace(SPEC, num_layers=2**17))}}
    rewrite(path, header)
    refuse(lambda: kvx.load(path), "its manifest makes 262,144 tensors, which do not fit in it")
    header = {"__metadata__": {"kvx_manifest": kvx.to_json(replace(SPEC, num_blocks=2**40))}}
    rewrite(path, header)
    refuse(lambda: kvx.load(path), r"bytes; its manifest and header make [0-9,]+\. It is cut short")
    header = {"__metadata__": {"kvx_manifest": kvx.to_json(replace(SPEC, num_layers=2**19))}}
    rewrite(path, header)
    refuse(lambda: kvx.load(path), "makes 1,048,576 tensors; a file has at most 524,288")


@pytest.mark.parametrize(
    "fields", [{"num_layers": 2**28, "v_head_dim": 16}, {"num_blocks": 2**33, "layout": "block | head kv token dim"}]
)
def test_a_spec_makes_as_many_allocations_as_a_plan_takes(fields):
    """Whoever has a spec may list them: allocate_buffers, plan, the sizes of buffers."""
    refuse(lambda: kvx.from_json(claim(**fields)), "allocations; at most 4,194,304")
    refuse(lambda: replace(SPEC, **fields), "allocations; at most 4,194,304")


def test_what_stands_behind_or_between_the_tensors(path):
    data = path.read_bytes()
    path.write_bytes(data + b"x")
    refuse(lambda: kvx.load(path), "Something was added behind it")
    path.write_bytes(data)
    header = header_of(path)
    (a, b) = (header[name]["data_offsets"] for name in ("cache.00000", "cache.00001"))
    header["cache.00001"]["data_offsets"] = a
    rewrite(path, header)
    refuse(lambda: kvx.load(path, verify=False), "has gaps between its tensors", kvx.Incompatible)
    header["cache.00000"]["data_offsets"], header["cache.00001"]["data_offsets"] = b, a
    rewrite(path, header)
    assert kvx.load(path, verify=False).spec == SPEC  # in another order: the content tells


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "{", "{}", "[]", "null", '{"__metadata__": []}', '{"__metadata__": {"kvx_manifest": 5}}',
     '{"__metadata__": {"kvx_manifest": NaN}}', '{"__metadata__": {"kvx_manifest": "' + "[" * 50_000 + '"}}',
     '{"__metadata__": ' + "[" * 100_000, '{"__metadata__": {"a": ' + "9" * 5000 + "}}", '{"__metadata__": {"a": "b", "a": "b"}}',
     '{"__metadata__": {"kvx_manifest": "\\ud800"}}', '{"__metadata__": {' + '"a": [[],[]],' * 100_000],
    ids=range(15),
)  # fmt: skip
def test_headers_that_are_none(path, text):
    rewrite(path, None, text=text)
    refuse(lambda: kvx.load(path))


def test_a_header_of_brackets_as_large_as_headers_go(path):
    """100 MB of JSON would be 2 GB of lists."""
    meta = json.dumps({"__metadata__": header_of(path)["__metadata__"]})[:-1]
    text = (meta + ', "x": [' + "[]," * (30 << 20)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with bounded(2.0, (256 << 20) + len(text)), pytest.raises(kvx.KvxError):
        kvx.load(path)


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "head_dim", "num_layers", "block_bytes", "head_start", "v_head_dim"])
@pytest.mark.parametrize(
    "value", ["9" * 4300, "-" + "9" * 4000, "1e999", "NaN", "-Infinity", "9" * 5000, "true", '"8"', "[[]]", "1.0"]
)
def test_numbers_of_a_manifest(name, value):
    text = kvx.to_json(SPEC).replace(f'"{name}": {getattr(SPEC, name)}', f'"{name}": {value}')
    text = text if value in text else text[:-1] + f', "{name}": {value}}}'
    refuse(lambda: kvx.from_json(text))


def test_texts_of_a_manifest():
    fields = json.loads(kvx.to_json(SPEC))
    del fields["digest"]
    for name in ("layout", "format", "v_format", "model"):
        for value in ("\ud800", "a\udfff", "x" * 5000, 5, ["bf16"], None):
            refuse(lambda: kvx.from_json(json.dumps({**fields, name: value})))  # noqa: B023
    refuse(lambda: kvx.from_json('{"kvx_manifest": 1, "kvx_manifest": 1}'), "'kvx_manifest' stands there twice")
    refuse(lambda: kvx.from_json(" " * (1 << 21)), "2,097,152 characters")
    refuse(lambda: kvx.from_json(json.dumps({**fields, "digest": ["x" * 10**5]})), r"the digest is \['x+\.\.\. and the fields")
    for value in (b"{}", None, 5):
        refuse(lambda: kvx.from_json(value), "text is ")  # noqa: B023


@pytest.mark.parametrize(
    "text",
    ["kv[K:" + ";" * 90_000, "kv[K:" + "; V:" * 25_000 + "]", " " * 90_000, "(" * 90_000, "dim/" + "9" * 90_000, "kv[" * 30_000],
    ids=range(6),
)  # fmt: skip
def test_layouts_without_end(text):
    with bounded(0.1), pytest.raises(kvx.LayoutError, match="characters, beginning"):
        Layout.parse(text)
    for end in range(MOST_CHARACTERS - 8, MOST_CHARACTERS + 1):
        with bounded(0.1), pytest.raises(kvx.LayoutError):
            Layout.parse(text[:end])


def test_layouts_that_are_none():
    for text in (None, 5, ["kv"], b"kv"):
        refuse(lambda: Layout.parse(text), "it must be text", kvx.LayoutError)  # noqa: B023
    refuse(lambda: Layout.parse("kv | block token head dim/9999999999 dim%9999999999"), "more than nine digits", kvx.LayoutError)
    refuse(lambda: Layout.parse("kv | block token head dim/٨ dim%٨"), "unknown axis", kvx.LayoutError)


def test_paths_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refuse(lambda: kvx.load(tmp_path / "pipe"), "is no regular file")
    refuse(lambda: kvx.save(tmp_path / "pipe", kvx.allocate_buffers(SPEC), SPEC), "no regular file")  # nor /dev/null replaced
    assert (tmp_path / "pipe").is_fifo()
    refuse(lambda: kvx.load("a\0b"))
    refuse(lambda: kvx.load(None), "names no file")
    refuse(lambda: kvx.load(tmp_path), "is a folder")
    refuse(lambda: kvx.load("x" * 5000))
    refuse(lambda: kvx.save(tmp_path / "a\0b", kvx.allocate_buffers(SPEC), SPEC), "cannot be written")


def test_a_full_disk_is_a_sentence(path, monkeypatch):
    """Room is taken before the file is mapped: writing into a mapping that has none ends the process."""

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    refuse(lambda: kvx.save(path.with_name("b"), kvx.allocate_buffers(SPEC), SPEC), "No space left on device")
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_large_file_is_mapped_at_once(tmp_path):
    """verify=False reads the header alone, whatever the size."""
    spec = kvx.CacheSpec(2**20, 16, 8, 128, format="bf16")
    kvx.save(tmp_path / "a", kvx.allocate_buffers(SPEC), SPEC, check=False)
    header = {"__metadata__": {"kvx_manifest": kvx.to_json(spec)}}
    size = spec.cache_bytes // 2
    for n in range(2):
        header[f"cache.{n:05d}"] = {"dtype": "U8", "shape": [size], "data_offsets": [n * size, (n + 1) * size]}
    text = json.dumps(header).encode()
    with (tmp_path / "b").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2 * size)  # 64 GB, sparse
    begin = time.thread_time()
    assert kvx.load(tmp_path / "b", verify=False).buffers[1].numel() == size
    assert time.thread_time() - begin < 0.2


# ---- handovers in folders


def test_manifests_without_end(handover):
    for text in ("[" * (1 << 22), "[[]," * 100_000, " " * ((1 << 24) + 1), '{"a": {}},' * 100_000):
        refuse(lambda: from_manifest(text), "characters and")  # noqa: B023
    refuse(lambda: from_manifest('{"kvx_handover": 1, "kvx_handover": 1}'), "stands there twice")
    text = handover.to_json()
    assert from_manifest(text).num_tokens == handover.num_tokens


def test_folders_of_other_things(tmp_path, handover):
    folder = tmp_path / "a"
    kvx.handover.save(folder, handover)
    for name in ("handover.json", "files.json", "part0.safetensors"):
        there = folder / name
        data = there.read_bytes()
        there.unlink()
        os.mkfifo(there)
        refuse(lambda: kvx.handover.load(folder), "is no file|no file")
        there.unlink()
        with there.open("wb") as file:
            file.write(data)
            file.truncate(1 << 40)  # sparse
        refuse(lambda: kvx.handover.load(folder), r"bytes; (those of a handover|the manifest's blocks)")
        there.write_bytes(data)
    assert kvx.handover.load(folder).to_json() == handover.to_json()
    (folder / "files.json").write_text("[" + "[]," * 200_000 + "[]]")
    refuse(lambda: kvx.handover.load(folder), "lists no file for each")


def test_tokens_of_any_kind_are_one_error(handover):
    body = json.loads(handover.to_json())
    for value in (["\ud800"], [1e999], [10**4000], {"a": 1}, [None], "x"):
        refuse(lambda: from_manifest(json.dumps({**body, "tokens": value})))  # noqa: B023
    assert torch.is_tensor(handover.parts[0].buffers[0])
