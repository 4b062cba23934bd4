"""kvx prefill and kvx decode through a folder, and what they say. Over wires: tests/engines/test_prefill_decode_wires.py."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import kvx
from kvx.cli.held import gather, hold
from kvx.cli.main import app
from kvx.handover import NEUTRAL, Handover, Source, export_blocks
from kvx.handover.part import rank_specs
from kvx.wires.choose import host_and_port, offers_at, puller_from
from kvx.wires.wire import Deadline
from tests.runner import smollm


def run(*args: str) -> str:
    done = CliRunner().invoke(app, [*args, "--device", "cpu"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("handover") / "sky"
    said = json.loads(run("prefill", "--out", str(path), "--prompt", smollm.QUESTIONS[0], "--json"))
    assert said["path"] == str(path)
    assert said["bytes"] >= said["tokens"] * 30 * 2 * 3 * 64 * 4
    return path


@smollm.needs_weights
@pytest.mark.parametrize("side", [
    (), ("--block-size", "16", "--tp", "2"), ("--block-size", "128", "--tp", "3", "--layout", "vllm.lbnhc", "--blocks", "64"),
], ids=["plain", "2 ranks", "3 ranks of vLLM"])  # fmt: skip
def test_a_folder_carries_a_generation_on(folder, side):
    said = json.loads(run("decode", "--from", str(folder), "--max-tokens", "24", "--check", "--json", *side))
    assert said["is_same"]
    assert len(said["tokens"]) == said["same_tokens"] == 24
    assert said["handed_over"] == said["prompt_tokens"] - 1  # the last one's logits are to be computed
    assert said["moved"]["bytes"] > 0


@smollm.needs_weights
def test_through_fp8_where_it_parts_is_said(folder):
    args = ("--prompt", smollm.QUESTIONS[0], "--max-tokens", "24", "--kv-format", "fp8", "--check")
    said = json.loads(run("decode", "--from", str(folder), *args, "--json"))
    assert said["text"]
    assert said["is_same"] == (said["same_tokens"] == 24)
    text = run("decode", "--from", str(folder), *args)
    assert f"{said['handed_over']} of {said['prompt_tokens']} prompt tokens were not computed here" in text
    assert "what the model says alone" in text


@smollm.needs_weights
def test_another_model_is_refused_by_name(folder):
    with pytest.raises(kvx.Incompatible, match="'another'"):
        run("decode", "--from", str(folder), "--name", "another")


@smollm.needs_weights
def test_a_changed_byte_is_refused(folder, tmp_path):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in folder.iterdir():
        content = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            content[len(content) // 2] ^= 1
        (damaged / file.name).write_bytes(bytes(content))
    with pytest.raises(kvx.KvxError, match="changed on the way"):
        run("decode", "--from", str(damaged))


@pytest.mark.parametrize(("args", "what"), [
    (("prefill",), "give one of --listen"),
    (("prefill", "--out", "x", "--listen", "a:1"), "give one of --listen"),
    (("prefill", "--out", "x"), "--out needs the question"),
], ids=["neither", "both", "no question"])  # fmt: skip
def test_options_that_do_not_go_together(args, what):
    done = CliRunner().invoke(app, list(args))
    assert done.exit_code == 2
    assert what in " ".join(done.output.replace("│", " ").split())


# ---- ranks and layouts


def handover(num_heads: int = 3, format: str = "f32") -> Handover:
    spec = kvx.CacheSpec(num_blocks=5, block_size=16, num_kv_heads=num_heads, head_dim=32, num_layers=2, format=format,
                         layout=NEUTRAL, model="small")  # fmt: skip
    buffers = kvx.allocate_buffers(spec)
    generator = torch.Generator().manual_seed(0)
    for t in buffers:
        t.view(torch.uint8).random_(0, 120, generator=generator)  # no NaN in any format
    return export_blocks(np.arange(70), [Source(buffers, spec, range(5))])


@pytest.mark.parametrize("tp_size", [1, 2, 3, 6])
@pytest.mark.parametrize("format", ["f32", "fp8_e4m3_per_token_head"])
@pytest.mark.parametrize("layout", ["", "layer kv | block token head dim", "layer | block head token (kv dim)"])
def test_ranks_in_any_layout_are_the_handover_again(layout, format, tp_size):
    given = handover(format=format)
    held = hold(given, layout=layout, tp_size=tp_size)
    assert len(held.specs[0]) == tp_size
    back = gather(held)
    assert back.to_json() == given.to_json()
    assert back.parts[0].content == given.parts[0].content


def test_a_wrong_byte_of_a_rank_is_found():
    held = hold(handover(), layout="layer kv | block token head dim", tp_size=3)
    for t in held.buffers[0]:
        t[777] ^= 1
        with pytest.raises(kvx.Damaged):
            gather(held)
        t[777] ^= 1
    gather(held)


def test_heads_are_dealt_evenly():
    spec = handover(5).spec
    assert [(s.head_start, s.num_kv_heads) for s in rank_specs(spec, 2)] == [(0, 3), (3, 2)]
    assert [(s.head_start, s.num_kv_heads) for s in rank_specs(spec, 10)] == [(r // 2, 1) for r in range(10)]
    with pytest.raises(kvx.BadArgument, match="tp_size is 0"):
        rank_specs(spec, 0)


# ---- wires that are not there


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:0", "host:port", "host:70000"])
def test_an_address_is_a_host_and_a_port(address):
    with pytest.raises(kvx.BadArgument, match="is no HOST:PORT"):
        host_and_port(address)


@pytest.mark.parametrize(("wire", "how"), [("nixl", "pip install --no-deps nixl"), ("mooncake", "pip install mooncake-transfer")])
def test_a_missing_package_says_how_to_get_it(wire, how):
    if importlib.util.find_spec(wire) is not None:
        pytest.skip(f"{wire} is installed")
    for call in (lambda: offers_at(wire, "127.0.0.1:9", 1.0), lambda: puller_from(wire, "127.0.0.1:9", Deadline(1))):
        with pytest.raises(kvx.Unsupported, match=f"needs the package {wire}: {how}"):
            call()


def test_a_wire_that_does_not_exist():
    with pytest.raises(kvx.BadArgument, match="--wire is 'string'; it is nixl or mooncake"):
        offers_at("string", "127.0.0.1:9", 1.0)
