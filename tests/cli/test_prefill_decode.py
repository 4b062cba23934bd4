"""kvx prefill and kvx decode through a folder, and what they say. Over wires: tests/engines/test_prefill_decode_wires.py."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import kvx
from kvx.cli import prefill
from kvx.cli.held import gather, hold
from kvx.cli.main import app
from kvx.handover import NEUTRAL, Handover, Source, export_blocks
from kvx.handover.part import rank_specs
from kvx.runner import small_model
from kvx.runner.handover import name_of
from kvx.runner.open import open_model
from kvx.wires.listener import Client
from kvx.wires.nixl import agent
from kvx.wires.offer import OfferRequest, Offers
from kvx.wires.secret import HOME, read_or_make_secret
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
    assert "tokens equal those of a local prefill" in text


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


# ---- what is refused before a model is loaded


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """What a command says that ends with 2 and never loads a model. NIXL is there, or seems to be."""
    monkeypatch.setattr(agent, "load", lambda: None)
    monkeypatch.setattr(prefill.Engine, "load", lambda *args, **options: pytest.fail("a model was loaded"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    read_or_make_secret(HOME)

    def run(*args: str) -> str:
        done = CliRunner().invoke(app, [*args])
        if isinstance(done.exception, kvx.KvxError):  # main() makes one line of it
            return str(done.exception)
        assert done.exit_code == 2, done.output
        return " ".join(done.output.replace("│", " ").split())

    return run


LISTEN, OUT, FROM = ("prefill", "--listen", "127.0.0.1:5600"), ("prefill", "--out", "x", "--prompt", "y"), ("decode", "--from")
WRONG = {
    "neither": (("prefill",), "give one of --listen"),
    "both": (("prefill", "--out", "x", "--listen", "a:1"), "give one of --listen"),
    "no question": (("prefill", "--out", "x"), "--out needs a prompt"),
    "a folder of no folder": (("prefill", "--out", "no/where/x", "--prompt", "y"), "for --out: there is no folder no/where"),
    "layout of a folder": ((*OUT, "--layout", "nope"), "for --layout: it applies only to --listen"),
    "ranks of a folder": ((*OUT, "--tp", "99"), "for --tp: it applies only to --listen"),
    "wire of a folder": ((*OUT, "--wire", "junk"), "for --wire: it applies only to --listen"),
    "secret of a folder": ((*OUT, "--secret-file", "x"), "for --secret-file: it applies only to --listen"),
    "limit of a folder": ((*OUT, "--offer-gb", "3"), "for --offer-gb: it applies only to --listen"),
    "less than nothing offered": ((*LISTEN, "--offer-gb", "-1"), "for --offer-gb: -1; it must be more than 0"),
    "no number offered": ((*LISTEN, "--offer-gb", "nan"), "for --offer-gb: nan; it must be more than 0"),
    "secret of a folder read": ((*FROM, ".", "--secret-file", "x"), "for --secret-file: it applies only to a prefill server"),
    "no secret": ((*FROM, "127.0.0.1:1", "--prompt", "y", "--secret-file", "x"), "there is no secret at x. `kvx prefill --listen`"),
    "lease of a folder": ((*OUT, "--lease-s", "3"), "for --lease-s: it applies only to --listen"),
    "requests of a folder": ((*OUT, "--requests", "3"), "for --requests: it applies only to --listen"),
    "listening with a question": ((*LISTEN, "--prompt", "y"), "for --prompt: it applies only to --out"),
    "a lease that is over": ((*LISTEN, "--lease-s", "-1"), "for --lease-s: -1; it must be more than 0"),
    "no lease": ((*LISTEN, "--lease-s", "nan"), "for --lease-s: nan; it must be more than 0"),
    "fewer requests than none": ((*LISTEN, "--requests", "-1"), "for --requests: -1; it must be 0 or more"),
    "nobody's name": (("prefill", "--listen", "nobody.invalid:5600"), "no machine called 'nobody.invalid'"),
    "another's address": (("prefill", "--listen", "192.0.2.1:5600"), "192.0.2.1 is no address of this machine"),
    "a folder that is none": ((*FROM, "/nope", "--prompt", "y"), "for --from: /nope does not exist, and is not HOST:PORT"),
    "from nowhere, unasked": ((*FROM, "/nope"), "for --from: /nope does not exist, and is not HOST:PORT"),
    "a file": ((*FROM, __file__, "--prompt", "y"), "is a file, and is not HOST:PORT"),
    "a prefill unasked": ((*FROM, "a:1"), "for --prompt: the prefill server at a:1 needs a prompt"),
    "no time": ((*FROM, "127.0.0.1:1", "--prompt", "y", "--timeout-s", "-3"), "for --timeout-s: -3; it must be more than 0"),
    "asking nobody": ((*FROM, "nobody.invalid:1", "--prompt", "y"), "no machine called 'nobody.invalid'"),
    "no tokens": ((*FROM, "127.0.0.1:1", "--prompt", "y", "--max-tokens", "0"), "max_tokens is 0"),
    "time of a folder": ((*FROM, ".", "--timeout-s", "-5"), "for --timeout-s: it applies only to a prefill server at HOST:PORT"),
    "wire of a folder read": ((*FROM, ".", "--wire", "nixl"), "for --wire: it applies only to a prefill server at HOST:PORT"),
    "system without a question": ((*FROM, ".", "--system", "x"), "for --system: it applies only to a --prompt"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_options_are_refused_by_name(refused, name):
    args, what = WRONG[name]
    assert what in refused(*args)


def test_a_port_in_use_is_said_at_once(refused):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        address = f"127.0.0.1:{s.getsockname()[1]}"
        assert "is in use by another process. Give another port" in refused("prefill", "--listen", address)


@smollm.needs_weights
@pytest.mark.parametrize("verb", ["prefill", "decode"])
def test_what_the_model_s_heads_do_not_allow_is_said_before_its_weights_are_read(refused, verb):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    side = ("prefill", "--listen", address) if verb == "prefill" else ("decode", "--from", address, "--prompt", "x")
    assert 'layout: unknown axis "nope"' in refused(*side, "--layout", "nope")
    assert "--layout: CacheSpec: num_layers is 30 and layout" in refused(*side, "--layout", "block token head dim")
    assert "for --tp: 4 ranks; the model has 3 KV heads. It is 1 to 3, or a multiple of 3" in refused(*side, "--tp", "4")
    assert "for --tp: 0 ranks" in refused(*side, "--tp", "0")
    if verb == "prefill":
        said = refused(*side, "--layout", "layer kv | block head dim token")
        assert "lies in pieces of 4 bytes, and this wire takes 32 or more. Choose one that keeps rows together" in said


@smollm.needs_weights
def test_a_folder_that_is_no_handover_is_named(refused, tmp_path):
    assert str(tmp_path) in refused("decode", "--from", str(tmp_path))
    (tmp_path / "handover.json").write_text("{")
    said = refused("decode", "--from", str(tmp_path))
    assert str(tmp_path) in said
    assert "no JSON" in said


@smollm.needs_weights
def test_a_secret_that_others_can_read_is_said_before_a_model_is_loaded(refused, tmp_path):
    (tmp_path / "open").write_text("x" * 64)
    (tmp_path / "open").chmod(0o644)
    for side in (LISTEN, (*FROM, "127.0.0.1:1", "--prompt", "y")):
        assert "can be read or changed by others (mode 644): chmod 600" in refused(*side, "--secret-file", "open")


# ---- what a prefill is asked


class Said(Offers):
    """What it answers."""

    num_offers = 0

    def __init__(self) -> None:
        self.bodies: list[dict] = []

    def requests(self) -> list[OfferRequest]:
        return []

    def offer(self, request, about, buffers) -> None:
        self.bodies.append(about)

    def _say(self, request, body) -> None:
        self.bodies.append(body)

    def close(self) -> None: ...


@pytest.mark.parametrize(("tokens", "what"), [
    ([1, 2.0], r"tokens\[1\] is 2.0 \(float\)"), ([True], r"tokens\[0\] is true \(bool\)"),
    ([1, [2]], r"tokens\[1\] is \[2\] \(list\)"), (["1"], r"""tokens\[0\] is "1" \(str\)"""),
    ([None], r"tokens\[0\] is null \(NoneType\)"), ([1.5] * 99, r"tokens\[0\] is 1.5"),
    ("12", r'tokens is "12" \(str\)'), (7, r"tokens is 7 \(int\)"), (None, r"tokens is null"), ({}, r"tokens is \{\} \(dict\)"),
], ids=str)  # fmt: skip
def test_what_only_looks_like_token_ids_is_refused_by_name(tokens, what, monkeypatch):
    monkeypatch.setattr(prefill, "export_sequence", lambda *args, **options: pytest.fail("it was computed"))
    said = Said()
    prefill.Server(None, "small", layout="", tp_size=1).answer(said, OfferRequest("1", {"model": "small", "tokens": tokens}))
    with pytest.raises(kvx.KvxError, match=what):
        raise kvx.BadArgument(said.bodies[0]["error"])


def test_other_weights_are_refused_before_anything_is_computed(monkeypatch):
    monkeypatch.setattr(prefill, "export_sequence", lambda *args, **options: pytest.fail("it was computed"))
    for model in ("llama-30x576-kv3x64-v49152-0123", None, 7, ["x"]):
        said = Said()
        prefill.Server(None, "llama-30x576-kv3x64-v49152-4567", layout="", tp_size=1).answer(
            said, OfferRequest("1", {"model": model, "tokens": [1]})
        )
        assert said.bodies[0]["is_other_kind"]
        assert "Their weights differ, or only one side was given a --name. Nothing was computed." in said.bodies[0]["error"]


@smollm.needs_weights
def test_the_name_has_the_weights_in_it(tmp_path):
    """A copy has the same; one changed byte of the last tensor makes another; the folder's own name does not."""
    model = small_model()
    config = open_model(model).config
    if model.is_dir():
        copies = [shutil.copytree(model, tmp_path / str(n)) for n in range(2)]
        file = max(copies[1].glob("*.safetensors"), key=lambda f: f.stat().st_size)
    else:
        copies = [Path(shutil.copy(model, tmp_path / f"{n}.gguf")) for n in range(2)]
        file = copies[1]
    with file.open("r+b") as f:
        f.seek(-5, os.SEEK_END)
        byte = f.read(1)[0]
        f.seek(-5, os.SEEK_END)
        f.write(bytes([byte ^ 1]))
    name = prefill.name_with_weights(model, config)
    assert name == prefill.name_with_weights(copies[0], config)
    assert name != prefill.name_with_weights(copies[1], config)
    assert name.startswith(name_of(config))


def test_nothing_is_computed_for_one_who_is_gone(monkeypatch):
    monkeypatch.setattr(prefill, "export_sequence", lambda *args, **options: pytest.fail("it was computed"))
    client, said = Client(), Said()
    client.is_open = False
    server = prefill.Server(None, "small", layout="", tp_size=1)
    assert server.answer(said, OfferRequest("1", {"model": "small", "tokens": [1]}, client))[0] == {"gone": True}
    assert said.bodies == []


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
