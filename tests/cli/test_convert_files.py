"""kvx convert and kvx verify on files, as a person uses them; then files that lie."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

import kvx
from kvx import files
from kvx.cli.convert import convert
from kvx.cli.main import app
from kvx.cli.shards import Shards
from kvx.cli.verify import first_difference, verify
from tests.ops import layouts
from tests.ops.test_convert import fill


def run(*args: str, code: int = 0) -> str:
    """The command in this process: what it says on stdout, or on stderr where it fails."""
    done = CliRunner().invoke(app, list(args))
    if isinstance(done.exception, kvx.KvxError):  # main() turns it into a sentence and 2
        assert code == 2, repr(done.exception)
        return f"{type(done.exception).__name__}: {done.exception}"
    assert done.exit_code == code, f"exit code {done.exit_code}\n{done.output}\n{done.exception!r}"
    return done.stdout if code == 0 else done.stderr


SPEC = kvx.CacheSpec(6, 16, 4, 32, num_layers=3, layout="layer | block token head (kv dim)")


@pytest.fixture
def cache(tmp_path):
    path = tmp_path / "vllm.safetensors"
    kvx.save(path, layouts.random_buffers(SPEC, 0), SPEC)
    return path


def test_there_and_back(cache, tmp_path):
    pool, back = tmp_path / "pool.safetensors", tmp_path / "back.safetensors"
    out = run(
        "convert", str(cache), str(pool), "--from", "vllm.0.26.nhd", "--to", "tensorrt_llm", "--block-size", "32", "--id-order"
    )
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
    kvx.convert(kvx.load(path).buffers, want, plan=kvx.plan(SPEC, got.spec))
    assert all(torch.equal(a, b.view(-1).view(torch.uint8)) for a, b in zip(got.buffers, want, strict=True))


def test_verify_names_the_first_difference(cache, tmp_path):
    other = tmp_path / "b.safetensors"
    buffers = [t.clone() for t in kvx.load(cache).buffers]
    buffers[1].view(6, 16, 4, 2, 64)[2, 5, 3, 1, 7] ^= 1
    kvx.save(other, buffers, SPEC)
    done = run("verify", str(cache), str(other), code=1)
    assert done == ""  # said on stdout; nothing went wrong
    a, b = (Shards.open("kvx verify", [path]) for path in (cache, other))
    assert first_difference(a, b) == "v of layer 1, block 2, token 5 (slot 37), head 3"


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
    run("convert", str(cache), str(out), "--to", to, "--block-size", "64", "--id-order")
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
        verify(str(out))
    said = capsys.readouterr().out
    assert f"differs in blocks 4 of 6 from what was written (content {file.content}): it was damaged or changed." in said


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
    file = kvx.load(path, verify=False)
    assert (file.content, file.parts) == ("", [])
    for call in (lambda: kvx.load(path), file.check, lambda: verify(str(path)), lambda: convert(str(path), str(tmp_path / "b"))):
        with pytest.raises(kvx.BadArgument, match="has no seal: it was written without a digest of its content"):
            call()
    assert sorted(tmp_path.iterdir()) == [path]


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
        (["--to", "vllm.9"], "--to: layout: unknown axis"),
        (["--to", "vllm.9"], "`kvx layouts` lists names"),
        (["--from", "vllm.9"], "--from: layout: unknown axis"),
        (["--block-size", "-1"], "1 or more, or 0"),
        (["--table", "[0]", "--id-order"], "Give one of the two"),
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
    with pytest.raises(kvx.KvxError, match=r"tensor cache.00000 is|no readable header: .*cache.00000"):
        kvx.load(path)


# ---- seals


def flip(path, byte: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= bit
    path.write_bytes(data)


def test_a_damaged_file_is_not_converted(cache, tmp_path):
    flip(cache, -100)
    out = tmp_path / "out.safetensors"
    for more in ((), ("--table", "[0, 1, 2]"), ("--tp", "1:2")):
        target = str(tmp_path / "out{rank}") if "--tp" in more else str(out)
        assert "Damaged: " in (said := run("convert", str(cache), target, *more, code=2))
        assert "differs in blocks 5 of 6 from what was written" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == [cache.name]


@pytest.mark.parametrize("step", [1, 1 << 30])
@pytest.mark.parametrize("block", range(6))
def test_damage_is_found_in_any_block_and_at_any_step(cache, tmp_path, monkeypatch, block, step):
    monkeypatch.setattr("kvx.cli.convert._STEP_BYTES", step)
    start = cache.stat().st_size - 3 * 6 * 16 * 4 * 64 * 2
    flip(cache, start + block * 16 * 4 * 64 * 2)
    out = tmp_path / "out.safetensors"
    assert f"in blocks {block} of 6" in run("convert", str(cache), str(out), "--to", "tensorrt_llm", code=2)
    assert not out.exists()


def test_a_damaged_rank_is_named(cache, tmp_path):
    shards = str(tmp_path / "c{rank}.kvx")
    run("convert", str(cache), shards, "--tp", "1:2")
    flip(tmp_path / "c1.kvx", -1)
    assert "c1.kvx differs in blocks 5 of 6" in run("convert", shards, str(tmp_path / "out"), "--tp", "2:1", code=2)
    assert not (tmp_path / "out").exists()


def test_no_verify_says_so_and_gives_no_seal(cache, tmp_path):
    flip(cache, -100)
    out = tmp_path / "out.safetensors"
    done = CliRunner().invoke(app, ["convert", str(cache), str(out), "--no-verify"])
    assert done.exit_code == 0
    assert f"--no-verify: the content of {cache} was not checked, and {out} gets no seal." in done.stderr
    assert kvx.load(out, verify=False).content == ""
    assert "has no seal" in run("verify", str(out), code=2)


def test_load_checks_what_it_gives(cache):
    assert kvx.load(cache).check() is None
    flip(cache, -100)
    with pytest.raises(kvx.Damaged, match="differs in blocks 5 of 6"):
        kvx.load(cache)
    file = kvx.load(cache, verify=False)  # mapped, not read
    with pytest.raises(kvx.Damaged, match="differs in blocks 5 of 6"):
        file.check()


@pytest.mark.parametrize("name", ["kvx_content_digest", "kvx_content_parts", "kvx_seal"])
def test_a_broken_seal(cache, name):
    """A key that was lost, or a digest that was changed with all the others: the file is not taken for one without a seal."""
    data = cache.read_bytes()
    cache.write_bytes(data.replace(name.encode(), name.upper().encode()))
    with pytest.raises(kvx.Damaged, match=f'no "{name}": its seal is broken'):
        kvx.load(cache, verify=False)
    at = data.index(name.encode()) + len(name) + 6
    cache.write_bytes(data[:at] + (b"0" if data[at : at + 1] != b"0" else b"1") + data[at + 1 :])
    with pytest.raises(kvx.Damaged, match="its seal is"):
        kvx.load(cache, verify=False)


def test_a_manifest_of_another_model_under_the_same_seal(cache):
    """A manifest made anew, with a digest that is right: the seal holds the content to the one it was written with."""
    data = cache.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for change in ({"model": "other"}, {"num_blocks": 12, "block_size": 8}, {"format": "f16"}):
        header["__metadata__"]["kvx_manifest"] = kvx.to_json(replace(SPEC, **change))
        text = json.dumps(header).encode().ljust(length)[:length]
        cache.write_bytes(data[:8] + text + data[8 + length :])
        with pytest.raises(kvx.KvxError, match=r"its seal is|digests of 6 parts"):
            kvx.load(cache, verify=False)


# ---- the same KV


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ({"format": "bf16"}, {"format": "f16"}, "format is 'bf16' in one and 'f16' in the other"),
        ({"format": "fp8_e4m3_per_head"}, {"format": "int8_per_head"}, "format is 'fp8_e4m3_per_head' in one and 'int8_per_head'"),
        ({"head_dim": 16}, {"head_dim": 12}, "head_dim is 16 in one and 12 in the other"),
        ({"v_head_dim": 16, "head_dim": 32}, {"head_dim": 32}, "v_head_dim is 16 in one and 32 in the other"),
        ({"v_format": "f16"}, {}, "v_format is 'f16' in one and 'bf16' in the other"),
        ({"num_layers": 2}, {"num_layers": 1}, "num_layers is 2 in one and 1 in the other"),
        ({"num_kv_heads": 2}, {"num_kv_heads": 4}, "num_kv_heads is 2 in one and 4 in the other"),
        ({"head_start": 2}, {}, "head_start is 2 in one and 0 in the other"),
        ({"layer_start": 2}, {}, "layer_start is 2 in one and 0 in the other"),
        ({"layout": "layer | block token head dim"}, {}, "number of planes"),
        ({"num_blocks": 3}, {}, "number of tokens is 48 in one and 32 in the other"),
        ({"model": "a"}, {"model": "b"}, "model is 'a' in one and 'b' in the other"),
    ],
)  # fmt: skip
def test_format_and_geometry_belong_to_the_kv(tmp_path, a, b, said):
    """Zeros everywhere: the bytes alone could not tell them apart."""
    paths = []
    for n, fields in enumerate((a, b)):
        spec = kvx.CacheSpec(**{"num_blocks": 2, "block_size": 16, "num_kv_heads": 4, "head_dim": 32,
                                "layout": "layer kv | block token head dim", **fields})  # fmt: skip
        kvx.save(tmp_path / str(n), [torch.zeros_like(t) for t in kvx.allocate_buffers(spec)], spec)
        paths.append(str(tmp_path / str(n)))
    done = CliRunner().invoke(app, ["verify", *paths])
    assert done.exit_code == 1, done.output
    assert f"differ: {said}" in done.stdout


def test_what_may_differ(tmp_path):
    """Layout, block size, ranks, inline scales, and a model that one of them does not name."""
    spec = kvx.CacheSpec(4, 16, 4, 32, num_layers=2, layout="layer kv | block token head dim", format="int8_per_token_head")
    kvx.save(tmp_path / "a", layouts.random_buffers(spec, 0), spec)
    run("convert", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "int8_per_token_head_inline")
    run("convert", str(tmp_path / "a"), str(tmp_path / "c{rank}.kvx"), "--to", "tensorrt_llm", "--tp", "1:2")
    run("convert", str(tmp_path / "a"), str(tmp_path / "d{rank}.kvx"), "--block-size", "8", "--tp", "1:8")
    named = replace(spec, model="m")
    kvx.save(tmp_path / "e", kvx.load(tmp_path / "a").buffers, named)
    names = [str(tmp_path / name) for name in ("a", "b", "c{rank}.kvx", "d{rank}.kvx", "e")]
    for x in names:
        assert "as it was written" in run("verify", x)
        for y in names:
            assert run("verify", x, y).endswith("the same KV\n")


def test_verify_of_two_tells_that_one_is_damaged(cache, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(cache.read_bytes())
    for path in (cache, other):
        flip(path, -100)
    done = CliRunner().invoke(app, ["verify", str(cache), str(other)])
    assert done.exit_code == 1
    assert done.stdout.count("was damaged or changed") == 2
    assert "the same KV, and not as it was written" in done.stdout


def test_ranks_that_are_missing(cache, tmp_path):
    shards = str(tmp_path / "c{rank}.kvx")
    run("convert", str(cache), shards, "--tp", "1:4")
    assert "there is rank 2 too, and 2 were asked for" in run("convert", shards, str(tmp_path / "o"), "--tp", "2:1", code=2)
    (tmp_path / "c1.kvx").unlink()
    assert "rank 1 is missing" in run("verify", shards, code=2)
    assert "rank 1 is missing" in run("convert", shards, str(tmp_path / "o"), "--tp", "4:1", code=2)
    assert "for any rank" in run("verify", str(tmp_path / "x{rank}"), code=2)
    (tmp_path / "c2.kvx").rename(tmp_path / "c1.kvx")
    (tmp_path / "c3.kvx").rename(tmp_path / "c2.kvx")
    assert "no whole cache. A rank is missing" in run("convert", shards, str(tmp_path / "o"), "--tp", "3:1", code=2)
    kvx.save(
        tmp_path / "c0.kvx",
        layouts.random_buffers(replace(SPEC, num_kv_heads=1, model="m"), 0),
        replace(SPEC, num_kv_heads=1, model="m"),
    )
    assert "c1.kvx has model ''; " in run("verify", shards, code=2)


def test_ranks_by_name(cache, tmp_path):
    """One rank too, twice in a name, in folders, and beside names that are none."""
    for pattern, tp in (("a{rank}.kvx", "1:1"), ("b{rank}.{rank}.kvx", "1:2"), ("r{rank}/c.kvx", "1:2"), ("{rank}", "1:4")):
        for n in range(2):
            (tmp_path / f"r{n}").mkdir(exist_ok=True)
        for odd in ("a.kvx", "ax.kvx", "a1.kvx.bak", "b0.1.kvx", "007"):
            (tmp_path / odd).write_text("no cache")
        run("convert", str(cache), str(tmp_path / pattern), "--tp", tp)
        assert (tmp_path / pattern.replace("{rank}", "0")).is_file()
        assert "the same KV" in run("verify", str(tmp_path / pattern), str(cache))


# ---- blocks that are joined


def test_blocks_are_joined_by_a_table_or_not_at_all(cache, tmp_path):
    out = tmp_path / "out"
    said = run("convert", str(cache), str(out), "--block-size", "32", code=2)
    assert "joins blocks of 16, and which of the 6 belong together is in the engine's block table" in said
    assert "--id-order" in said
    said = run("convert", str(cache), str(out), "--block-size", "32", "--table", "[[4, 0, 2], [5]]")
    assert "2 sequences of the table, 4 of 6 blocks; the other 2 are left out" in said
    got, given = kvx.load(out), kvx.load(cache)
    assert got.spec.num_blocks == 3
    for a, b in zip(got.buffers, given.buffers, strict=True):
        want = torch.zeros(6, 16 * 4 * 64 * 2, dtype=torch.uint8)
        want[[0, 1, 2, 4]] = b.view(6, -1)[[4, 0, 2, 5]]
        assert torch.equal(a.view(6, -1), want)
    (tmp_path / "table.json").write_text("[4, 0, 2]")
    run("convert", str(cache), str(out), "--block-size", "64", "--table", str(tmp_path / "table.json"))
    assert kvx.load(out).spec.num_blocks == 1


def test_blocks_that_are_split_need_no_table(cache, tmp_path):
    said = run("convert", str(cache), str(tmp_path / "out"), "--block-size", "4")
    assert "each block of 16 becomes 4 of 4: block n is 4n to 4n+3" in said
    assert "the same KV" in run("verify", str(cache), str(tmp_path / "out"))
    said = run("convert", str(cache), str(tmp_path / "out"), "--block-size", "96", "--id-order")
    assert "blocks 0 to 5 are one sequence, in the order of their ids" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[0, 1], [1]]", "block 1 twice"),
        ("[[6]]", "block 6; the cache has blocks 0 to 5"),
        ("[[-1]]", "block -1"),
        ("[]", "is []; it must be a row"),
        ("[[]]", "is [[]]; it must be a row"),
        ("[[true]]", "it must be a row"),
        ("[[1.0]]", "it must be a row"),
        ("[[0], 1]", "it must be a row"),
        ("[[0]", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("nowhere.json", "--table nowhere.json cannot be read: No such file"),
    ],
)
def test_wrong_tables(cache, tmp_path, text, said):
    assert said in run("convert", str(cache), str(tmp_path / "out"), "--table", text, code=2)
    assert not (tmp_path / "out").exists()
