"""kvx convert and kvx verify on files, as a person uses them; then files that lie."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import typer

import kvx
from kvx import files
from kvx.cli.verify import first_difference, verify
from tests.cli.test_cli import run
from tests.ops import layouts
from tests.ops.test_convert import fill

SPEC = kvx.CacheSpec(6, 16, 4, 32, num_layers=3, layout="layer | block token head (kv dim)")


@pytest.fixture
def cache(tmp_path):
    path = tmp_path / "vllm.safetensors"
    kvx.save(path, layouts.random_buffers(SPEC, 0), SPEC)
    return path


def test_there_and_back(cache, tmp_path):
    pool, back = tmp_path / "pool.safetensors", tmp_path / "back.safetensors"
    out = run("convert", str(cache), str(pool), "--from", "vllm.0.26.nhd", "--to", "tensorrt_llm", "--block-size", "32")
    assert "row copy" in out
    assert "3 blocks" in out or "blocks of 16 -> 32" in out
    assert "the same KV" in run("verify", str(cache), str(pool))
    run("convert", str(pool), str(back), "--to", "vllm.0.26.nhd", "--block-size", "16")
    assert all(torch.equal(a, b) for a, b in zip(kvx.load(cache).buffers, kvx.load(back).buffers, strict=True))
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_shards(cache, tmp_path):
    run("convert", str(cache), str(tmp_path / "tp{rank}.safetensors"), "--tp", "1:4")
    assert kvx.load(tmp_path / "tp2.safetensors").spec.head_start == 2
    run(
        "convert",
        str(tmp_path / "tp{rank}.safetensors"),
        str(tmp_path / "two{rank}.safetensors"),
        "--tp",
        "4:2",
        "--to",
        "dynamo.universal",
    )
    run("convert", str(tmp_path / "two{rank}.safetensors"), str(tmp_path / "one.safetensors"), "--tp", "2:1")
    assert "the same KV" in run("verify", str(cache), str(tmp_path / "one.safetensors"))


def test_formats(tmp_path):
    path, coded = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    kvx.save(path, fill(SPEC, 0), SPEC)
    run("convert", str(path), str(coded), "--format", "int8_per_token_head", "--to", "layer kv | block head token dim")
    got = kvx.load(coded)
    want = kvx.allocate_buffers(got.spec)
    kvx.convert(want, kvx.load(path).buffers, plan=kvx.plan(SPEC, got.spec))
    assert all(torch.equal(a, b.view(-1).view(torch.uint8)) for a, b in zip(got.buffers, want, strict=True))


def test_verify_names_the_first_difference(cache, tmp_path):
    other = tmp_path / "b.safetensors"
    buffers = [t.clone() for t in kvx.load(cache).buffers]
    buffers[1].view(6, 16, 4, 2, 64)[2, 5, 3, 1, 7] ^= 1
    kvx.save(other, buffers, SPEC)
    done = run("verify", str(cache), str(other), code=1)
    assert done == ""  # said on stdout; nothing went wrong
    assert first_difference(kvx.load(cache), kvx.load(other)) == "v of layer 1, block 2, token 5 (slot 37), head 3"


def test_verify_finds_a_damaged_file(cache):
    assert "as it was written" in run("verify", str(cache))
    data = bytearray(cache.read_bytes())
    data[-100] ^= 4
    cache.write_bytes(data)
    run("verify", str(cache), code=1)


@pytest.mark.parametrize("to", ["tensorrt_llm", "vllm.cpu", "layer kv | block token head dim"])
def test_a_converted_file_keeps_its_digest(cache, tmp_path, to):
    """By the bytes written, block by block; layouts whose rows are cut too. Tokens past the source's end count as they stand."""
    out = tmp_path / "out.safetensors"
    run("convert", str(cache), str(out), "--to", to, "--block-size", "64")
    file = kvx.load(out)
    assert (file.spec.num_blocks, file.content) == (2, str(kvx.digest(file.buffers, file.spec)))
    assert [part.start for part in files.part_ranges(file.spec)] == [0, 1]
    assert "as it was written" in run("verify", str(out))


def test_a_damaged_block_is_named(cache, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    run("convert", str(cache), str(out), "--to", "tensorrt_llm", "--format", "int8_per_token_head")
    file = kvx.load(out)
    data = bytearray(out.read_bytes())
    start = len(data) - sum(t.numel() for t in file.buffers)
    data[start + 4 * file.buffers[0].numel() // 6 + 5] ^= 1  # a byte of block 4 of 6
    out.write_bytes(data)
    with pytest.raises(typer.Exit):
        verify(out)
    said = capsys.readouterr().out
    assert f"differs in blocks 4 of 6: it was written with {file.content}. The file was damaged or changed." in said


@pytest.mark.parametrize("num_blocks", [1, 63, 64, 65, 1000])
def test_parts_of_a_file(num_blocks):
    parts = files.part_ranges(replace(SPEC, num_blocks=num_blocks))
    assert [i for part in parts for i in part] == list(range(num_blocks))
    assert len(parts) <= 64


def test_digests_of_blocks_add_up(cache):
    file = kvx.load(cache)
    for layout in (SPEC.layout, "layer | block head kv[K: dim token; V: token dim]"):  # whole words, and not
        spec = replace(SPEC, layout=layout)
        whole = files.digest_blocks(file.buffers, spec, 0, 6)
        assert whole == kvx.digest(file.buffers, spec)
        assert files.digest_blocks(file.buffers, spec, 0, 2) + files.digest_blocks(file.buffers, spec, 2, 6) == whole


def test_a_file_without_a_digest(tmp_path):
    path = tmp_path / "a.safetensors"
    kvx.save(path, layouts.random_buffers(SPEC, 0), SPEC, check=False)
    assert (kvx.load(path).content, kvx.load(path).parts) == ("", [])
    with pytest.raises(kvx.BadArgument, match="keeps no digest of its content"):
        verify(path)


def test_inspect_shows_what_a_file_holds(cache, tmp_path):
    facts = json.loads(run("inspect", str(cache), "--json"))
    assert (facts["layout"], facts["num_layers"], facts["buffers"]) == (SPEC.layout, 3, ["3 x 49,152 bytes"])
    assert facts["content digest"] == kvx.load(cache).content
    spec = tmp_path / "universal.json"
    spec.write_text(kvx.to_json(replace(SPEC, layout="block | head layer kv token dim")))
    assert "convert only" in run("inspect", str(spec))


def test_other_readers_see_the_tensors(cache):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load_file(cache)
    assert list(tensors) == ["cache.00000", "cache.00001", "cache.00002"]
    assert torch.equal(tensors["cache.00001"], kvx.load(cache).buffers[1])


def test_an_interrupted_conversion_leaves_nothing(tmp_path):
    writer = files.create(tmp_path / "a.safetensors", SPEC)
    writer.__enter__().buffers[0].fill_(1)
    assert len(list(tmp_path.iterdir())) == 1
    assert not writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)  # Ctrl-C goes on to the caller
    assert list(tmp_path.iterdir()) == []


def test_files_that_lie(cache, tmp_path):
    data = cache.read_bytes()
    wrong = tmp_path / "wrong.safetensors"

    def refused(change: bytes, said: str, error: type[Exception] = kvx.BadArgument) -> None:
        wrong.write_bytes(change)
        with pytest.raises(error, match=said):
            kvx.load(wrong)

    refused(data[:-1], "cut short")
    refused(data[:4], "no safetensors file")
    refused(b"\xff" * 64, "cut short or no safetensors file")
    refused((10).to_bytes(8, "little") + b"not json!!" + data[18:], "no readable header")
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])

    def with_header(change: dict) -> bytes:
        text = json.dumps(change).encode()
        text += b" " * (header_bytes - len(text))
        return len(text).to_bytes(8, "little") + text + data[8 + header_bytes :]

    refused(with_header({k: v for k, v in header.items() if k != "__metadata__"}), "kvx_manifest")
    manifest = json.loads(header["__metadata__"]["kvx_manifest"])
    changed = {**header, "__metadata__": {"kvx_manifest": json.dumps({**manifest, "num_kv_heads": 2})}}
    refused(with_header(changed), "a field was changed", kvx.Incompatible)
    refused(with_header({k: v for k, v in header.items() if k != "cache.00002"}), "cache.00002", kvx.Incompatible)
    parts = {**header, "__metadata__": {**header["__metadata__"], "kvx_content_parts": "00 11"}}
    refused(with_header(parts), "keeps digests of 2 parts; its manifest makes 6")
    with pytest.raises(kvx.BadArgument, match="does not exist"):
        kvx.load(tmp_path / "nowhere")
    with pytest.raises(kvx.Incompatible, match="manifests differ in num_kv_heads: 8 here, 4 there"):
        kvx.load(cache, expect=replace(SPEC, num_kv_heads=8))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tp", "4"], "4:8"),
        (["--tp", "1:3"], "neither divides"),
        (["--tp", "1:2"], "{rank}"),
        (["--to", "vllm.9"], "unknown axis"),
        (["--format", "fp9"], 'format "fp9" does not exist'),
        (["--from", "tensorrt_llm"], "--from says"),
    ],
)
def test_wrong_options(cache, tmp_path, arguments, said):
    err = run("convert", str(cache), str(tmp_path / "out.safetensors"), *arguments, code=2)
    assert said in " ".join(err.split())
    assert not (tmp_path / "out.safetensors").exists()


def test_a_file_that_cannot_be_made(cache, tmp_path):
    before = sorted(tmp_path.iterdir())
    assert f"{tmp_path} cannot be written: it is a folder. Name a file in it." in run("convert", str(cache), str(tmp_path), code=2)
    nowhere = tmp_path / "no" / "where.safetensors"
    said = run("convert", str(cache), str(nowhere), code=2)
    assert f"BadArgument: {nowhere} cannot be written: No such file or directory. There is no folder {nowhere.parent}" in said
    assert f"{cache / 'x'} cannot be written: Not a directory" in run("convert", str(cache), str(cache / "x"), code=2)
    assert f"load(): {tmp_path} is a folder" in run("verify", str(tmp_path), code=2)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("lie", ["cache", {"data_offsets": "ab"}, {"data_offsets": [0.5, 8]}, [1], None], ids=str)
def test_a_header_whose_offsets_are_none(tmp_path, lie):
    spec = kvx.CacheSpec(num_blocks=2, block_size=4, num_kv_heads=1, head_dim=8)
    path = tmp_path / "cache.safetensors"
    kvx.save(path, kvx.allocate_buffers(spec), spec)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = {**json.loads(data[8 : 8 + length]), "cache.00000": lie}
    changed = json.dumps(header).encode().ljust(length)
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    with pytest.raises(kvx.BadArgument, match=r"tensor cache.00000 says it is at"):
        kvx.load(path)
