"""The Files tab: digests in Node beside the library's, and the tab in a browser with whole, damaged and hostile files."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import kvx
from kvx.cli.main import app
from kvx.handover import Source, export_blocks, save
from kvx.layout.registry import registry
from kvx.layout.state_rows import STATE_ROWS, state_row
from kvx.layout.vector_cases import random_spec
from kvx.page.bundle import STATIC
from kvx.spec import StateSpec, state_plane
from kvx.view import record

HERE = Path(__file__).parent
HOSTILE = "<img src=x onerror=alert(1)>"
SIZES = {"num_layers": 2, "num_blocks": 6, "num_kv_heads": 2, "head_dim": 16}


def filled(spec: kvx.CacheSpec, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    buffers = kvx.allocate_buffers(spec)
    for tensor in buffers:
        tensor.view(-1).view(torch.uint8).random_(0, 256)
    return buffers


def make(path: Path, *, seed: int = 0, **fields) -> kvx.CacheSpec:
    spec = kvx.CacheSpec(**{"block_size": 8, "layout": "layer | block kv token head dim", **SIZES, **fields})
    kvx.save(path, filled(spec, seed), spec)
    return spec


def in_node(tmp_path: Path, paths: list[Path]) -> list[dict]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not on the PATH; the page's code is then checked in the browser alone")
    (tmp_path / "formats.json").write_text(json.dumps(registry()["formats"]))
    command = [node, str(HERE / "check_files.mjs"), str(STATIC), str(tmp_path / "formats.json"), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_digests_of_every_format_and_random_layouts_are_the_librarys(tmp_path):
    chance, paths = random.Random(24), []
    for i in range(45):
        spec = random_spec(chance, i).replaced(model=f"m\u00e9 {HOSTILE}", layer_start=chance.choice([0, 3]), head_start=i % 4)
        paths.append(tmp_path / f"{i}.kvx")
        kvx.save(paths[-1], filled(spec, i), spec)
    for path, found in zip(paths, in_node(tmp_path, paths), strict=True):
        file = kvx.load(path)
        assert found == {"content": file.content, "parts": file.parts, "kept": file.content, "keptParts": file.parts}, file.spec


def states(r: random.Random, row: str) -> StateSpec:
    """A convolution, and a matrix for each head or none, of a model whose ranks are one, two or four."""
    heads, groups, dim, size = r.choice([4, 8]), r.choice([1, 2]), r.choice([2, 4, 6, 16]), r.choice([4, 8, 16])
    shares = ((heads * dim, dim), (groups * size, size), (groups * size, size))
    conv = state_plane("conv", r.choice(["f32", "bf16"]), channel=sum(n for n, _ in shares), tap=r.choice([1, 2, 3]), shares=shares)
    kind, form = r.choice(["ssm", "delta", ""]), r.choice(["f32", "f32", "int8_per_token_head_inline"])
    planes = (conv, *([state_plane(kind, form, head=heads, row=dim, column=size)] if kind else []))
    spec, ranks = state_row(row).spec(planes, num_blocks=r.choice([1, 3, 70]), num_layers=2), r.choice([1, 2, 4])
    return replace(spec.shard(ranks, r.randrange(ranks)), layer_start=r.choice([0, 5]))


def test_digests_of_states_are_the_librarys(tmp_path):
    chance, paths = random.Random(7), []
    for i, row in enumerate([*STATE_ROWS] * 3):
        spec = states(chance, row)
        paths.append(tmp_path / f"{i}.kvx")
        kvx.save(paths[-1], filled(spec, i), spec)
    for path, found in zip(paths, in_node(tmp_path, paths), strict=True):
        file = kvx.load(path)
        assert found == {"content": file.content, "parts": file.parts, "kept": file.content, "keptParts": file.parts}, file.spec


def test_two_files_of_states_and_where_they_differ(visit, tmp_path):
    planes = (state_plane("conv", "f32", channel=8, tap=3), state_plane("ssm", "f32", head=4, row=2, column=4))
    a, b = (state_row(row).spec(planes, num_blocks=3, num_layers=2) for row in ("vllm.ds", "sglang"))
    here, there = filled(a), kvx.allocate_buffers(b)
    kvx.convert(here, there, plan=kvx.plan(a, b))
    kvx.save(tmp_path / "a.kvx", here, a)
    kvx.save(tmp_path / "b.kvx", there, b)
    view = next(v for v in kvx.layer_views(there, b)[1] if v.plane == "ssm")
    view.tensor[2, 3, 1, 0] = 1.5
    kvx.save(tmp_path / "c.kvx", there, b)
    page = visit("#files")
    drop(page, tmp_path / "a.kvx", tmp_path / "b.kvx")
    page.get_by_text("The same states, element by element").first.wait_for()
    drop(page, tmp_path / "a.kvx", tmp_path / "c.kvx")
    sentence = "They differ: ssm of layer 1, state 2, index 3 of what ranks share, and in 1 rows of 1 states in all."
    page.get_by_text(sentence).first.wait_for()
    make(tmp_path / "kv.kvx")
    drop(page, tmp_path / "a.kvx", tmp_path / "kv.kvx")
    page.get_by_text('They differ: num_kv_heads is "none" in one and 2 in the other.').first.wait_for()


def test_files_that_lie_are_refused(tmp_path):
    make(tmp_path / "good.kvx")
    data = (tmp_path / "good.kvx").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length]

    def changed(old: bytes, new: bytes) -> bytes:
        assert len(old) == len(new)
        assert old in header
        return data[:8] + header.replace(old, new, 1) + data[8 + length :]

    lies = {
        "cut short": (data[:-10], "It is cut short"),
        "cut in its header": (data[: length // 2], "It is cut short or no safetensors file"),
        "longer": (data + b"x", "Something was added behind it"),
        "empty": (b"", "no safetensors file"),
        "noise": (random.Random(1).randbytes(4096), "cut short or no safetensors file"),
        "another's": ((2).to_bytes(8, "little") + b"{}", 'has no "kvx_manifest"'),
        "no JSON": ((9).to_bytes(8, "little") + b"not json!", "is not JSON"),
        "another head_dim": (changed(b'\\"head_dim\\": 16', b'\\"head_dim\\": 32'), "A field was changed after it was written"),
        "another tensor": (changed(b'"cache.00001"', b'"cache.00007"'), "its manifest makes U8"),
    }
    digest = kvx.load(tmp_path / "good.kvx").content.encode()
    lies["another digest"] = (changed(digest, b"0" * 32), "It was changed after it was written")
    paths = []
    for name, (content, _) in lies.items():
        paths.append(tmp_path / name.replace("'", ""))
        paths[-1].write_bytes(content)
    for (name, (_, sentence)), found in zip(lies.items(), in_node(tmp_path, paths), strict=True):
        assert sentence in found.get("refused", ""), (name, found)


def drop(page, *paths: Path) -> None:
    page.locator("input[type=file]").first.set_input_files(list(paths))


def test_a_whole_file_and_a_damaged_one(visit, tmp_path, picture):
    spec = make(tmp_path / "cache.kvx", model=HOSTILE, num_blocks=100)
    file = kvx.load(tmp_path / "cache.kvx")
    page = visit("#files")
    drop(page, tmp_path / "cache.kvx")
    page.get_by_text("As it was written.", exact=True).wait_for()
    text = page.locator("main").inner_text()
    assert HOSTILE in text
    assert page.locator("main img").count() == 0
    assert spec.layout in text
    assert file.content in page.get_by_role("region", name="Digests", exact=True).inner_text()
    assert page.locator("[aria-label='Digests of parts'] tbody tr").count() == len(file.parts)
    picture(page, "files-desktop")
    page.get_by_text("Every block").click()
    first = page.locator(".files-blocks li").first.inner_text()
    assert first == str(kvx.digest(file.buffers, spec, blocks=[0]))
    # Another tab and back: it is still there, with its digests.
    page.get_by_role("tab", name="Size").click()
    page.get_by_role("tab", name="Files").click()
    page.get_by_text("As it was written.", exact=True).wait_for()
    data = bytearray((tmp_path / "cache.kvx").read_bytes())
    data[-3] ^= 4  # of the last layer's last block
    (tmp_path / "damaged.kvx").write_bytes(data)
    other = visit("#files", width=390, height=844, dark=True)
    drop(other, tmp_path / "damaged.kvx")
    other.get_by_text("Damaged: blocks 98 to 99 are not what was written.").first.wait_for()
    assert other.locator(".files-differs").count() == 1
    assert other.evaluate("document.documentElement.scrollWidth") <= 390
    picture(other, "files-phone-dark")


def test_two_files_in_other_layouts_and_where_they_differ(visit, tmp_path, picture):
    spec = make(tmp_path / "a.kvx")
    buffers = kvx.load(tmp_path / "a.kvx").buffers
    other = kvx.CacheSpec(**SIZES | {"num_blocks": 3}, block_size=16, layout="kv layer | block head token dim")
    target = kvx.allocate_buffers(other)
    table = [torch.arange(n).view(1, -1) for n in (6, 3)]
    kvx.convert(buffers, target, plan=kvx.plan(spec, other), src_blocks=table[0], dst_blocks=table[1], seq_lens=torch.tensor([48]))
    kvx.save(tmp_path / "b.kvx", target, other)
    page = visit("#files")
    drop(page, tmp_path / "a.kvx", tmp_path / "b.kvx")
    page.get_by_text("The same KV, element by element").first.wait_for()
    target[3].view(-1).view(torch.uint8)[0] ^= 1  # V of layer 1, block 0, head 0, token 0
    target[0].view(-1).view(torch.uint8)[-1] ^= 1  # K of layer 0, the last head's last token
    kvx.save(tmp_path / "c.kvx", target, other)
    drop(page, tmp_path / "a.kvx", tmp_path / "c.kvx")
    sentence = "They differ: v of layer 1, block 0, token 0 (slot 0), head 0, and in 2 rows of 2 tokens in all."
    page.get_by_text(sentence).first.wait_for()
    told = CliRunner().invoke(app, ["verify", str(tmp_path / "a.kvx"), str(tmp_path / "c.kvx"), "--json"])
    assert told.exit_code == 1
    page.get_by_text("The first of them").click()
    assert page.locator(".files-blocks li").all_inner_texts()[1].startswith("k of layer 0, block 5, token 7 (slot 47), head 1")
    assert "2 tokens differ" in page.locator(".files-map").get_attribute("aria-label")
    picture(page, "files-two")
    make(tmp_path / "wide.kvx", head_dim=32)
    drop(page, tmp_path / "a.kvx", tmp_path / "wide.kvx")
    page.get_by_text("They differ: head_dim is 16 in one and 32 in the other.").first.wait_for()


def test_what_kvx_verify_prints(visit, tmp_path):
    make(tmp_path / "a.kvx", model="one")
    make(tmp_path / "b.kvx", model="one", seed=1)
    runner = CliRunner()
    alone = runner.invoke(app, ["verify", str(tmp_path / "a.kvx"), "--json"])
    assert alone.exit_code == 0
    found = json.loads(alone.stdout)
    file = kvx.load(tmp_path / "a.kvx")
    assert (found["kvx_verify"], found["is_same"], found["verdict"]) == (1, None, "as it was written")
    assert (
        [part["kept"] for part in found["files"][0]["parts"]]
        == [part["digest"] for part in found["files"][0]["parts"]]
        == file.parts
    )
    assert found["files"][0]["digest"] == file.content
    two = runner.invoke(app, ["verify", str(tmp_path / "a.kvx"), str(tmp_path / "b.kvx"), "--json"])
    assert two.exit_code == 1
    told = json.loads(two.stdout)
    assert told["verdict"].startswith("differ: k of layer 0")
    told["files"][0]["name"] = HOSTILE
    (tmp_path / "verify.json").write_text(json.dumps(told))
    page = visit("#files")
    drop(page, tmp_path / "verify.json")
    page.get_by_text("differ: k of layer 0").first.wait_for()
    assert HOSTILE in page.locator("main").inner_text()
    assert page.locator("main img").count() == 0
    assert file.content in page.locator("main").inner_text()


def handover_folder(path: Path) -> kvx.CacheSpec:
    spec = kvx.CacheSpec(
        num_blocks=8, block_size=16, num_layers=2, num_kv_heads=4, head_dim=64, layout="layer | block token head (kv dim)"
    )
    save(path, export_blocks(np.arange(100), [Source(filled(spec), spec, blocks=[5, 1, 0, 7, 2, 3, 4])], model="small"))
    return spec


def test_a_handovers_folder(visit, tmp_path):
    handover_folder(tmp_path / "handover")
    page = visit("#files")
    page.locator("input[type=file]").nth(1).set_input_files(tmp_path / "handover")
    page.get_by_text("Its tokens' rows are as they were sealed.").wait_for()
    assert "100: 0, 1, 2" in page.locator("main").inner_text()
    part = tmp_path / "handover" / "part0.safetensors"
    data = bytearray(part.read_bytes())
    data[-100_000] ^= 1
    part.write_bytes(data)
    drop(page, *(tmp_path / "handover").iterdir())
    page.get_by_text("Damaged: its content is").wait_for()
    part.write_bytes(data[:-5])
    drop(page, *(tmp_path / "handover").iterdir())
    page.get_by_text("It is cut short").first.wait_for()
    drop(page, tmp_path / "handover" / "handover.json", tmp_path / "handover" / "files.json")
    page.get_by_text("There is no part0.safetensors among what was dropped.").wait_for()
    manifest = tmp_path / "handover" / "handover.json"
    manifest.write_text(manifest.read_text().replace('"window": 0', '"window": 8', 1))
    drop(page, manifest, tmp_path / "handover" / "files.json")
    page.get_by_text("It was changed on the way").first.wait_for()


def test_what_is_no_file_of_ours_is_told(visit, tmp_path):
    cases = {
        "config.json": (b'{"model_type": "llama"}', "The Size tab reads it"),
        "large.json": (b'{"a": "' + b"x" * 10_000_000 + b'"}', "is JSON that this page does not know"),
        "cut.json": (b'{"kvx_verify": 1, "files": [', "is no JSON"),
        "empty.kvx": (b"", "no safetensors file"),
        f"{'long' * 50}.kvx": (b"0123456789abcdef" * 10, "cut short or no safetensors file"),
        "<img src=x onerror=alert(1)>.kvx": (b"0123456789abcdef", "<img src=x onerror=alert(1)>.kvx says its header"),
    }
    page = visit("#files")
    for name, (content, sentence) in cases.items():
        (tmp_path / name).write_bytes(content)
        drop(page, tmp_path / name)
        page.get_by_role("alert").get_by_text(sentence).wait_for()
        assert page.locator("main img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    drop(page, *[tmp_path / name for name in list(cases)[:3]])
    page.get_by_role("alert").get_by_text("3 files were given").wait_for()


def test_a_recording_is_handed_on(visit, tmp_path):
    spec = kvx.CacheSpec(num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8)
    cache = kvx.PagedCache([kvx.LayerGroup("attention", (0,), spec)], max_seqs=2, max_seq_len=32)
    with record(cache, tmp_path / "run.jsonl", title=HOSTILE):
        cache.extend(cache.admit(list(range(9))), 9)
    page = visit("#files")
    drop(page, tmp_path / "run.jsonl")
    page.get_by_role("button", name="Show it in Live").wait_for()
    assert HOSTILE in page.locator("main").inner_text()
    assert page.locator("main img").count() == 0
    page.get_by_role("button", name="Show it in Live").click()
    page.locator(".tab-live canvas").first.wait_for()
    assert page.url.split("#")[1].startswith("live")
    assert page.locator("main img").count() == 0
    (tmp_path / "cut.jsonl").write_text('{"type": "header", "kvx": "recording", "version": 99}\n')
    page.get_by_role("tab", name="Files").click()
    drop(page, tmp_path / "cut.jsonl")
    page.get_by_role("button", name="Show it in Live").click()
    page.get_by_role("alert").get_by_text("is no recording that this page can show").wait_for()


def test_labels_and_keys(visit):
    page = visit("#files")
    page.get_by_role("tab", name="Files").focus()
    page.keyboard.press("Tab")
    names = []
    for _ in range(3):
        names.append(page.evaluate("document.activeElement.closest('label')?.innerText.trim() ?? document.activeElement.id"))
        page.keyboard.press("Tab")
    assert "Files" in names
    assert "A handover's folder" in names
