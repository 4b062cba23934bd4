"""kvx doctor A B: two engines' blocks in one store, and where what they computed differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kvx
from kvx.adapters.sglang.names import SGLANG, page_names
from kvx.cli.main import app
from kvx.connector.store_names import named_kind
from kvx.handover import NEUTRAL, names
from kvx.spec import CacheSpec
from kvx.tiers import BlockKind, DiskTier

MODEL, TOKENS = "weights-of-a-test", list(range(500, 596))
H, D, L = 2, 8, 3


def kept(folder: Path, block_size: int, *, wrong: tuple[int, int, int] | None = None, scheme: str = "", **fields) -> Path:
    """Blocks of the tokens, as an engine keeps them; `wrong` is a (token, layer, head) that it computed otherwise."""
    spec = CacheSpec(**{"num_blocks": 1, "num_kv_heads": H, "head_dim": D, "num_layers": L, "layout": NEUTRAL, "format": "f32",
                        "model": MODEL, "block_size": block_size} | fields)  # fmt: skip
    kind = named_kind(BlockKind.of(spec), scheme)
    plain = spec.replaced(layout="layer kv | block token head dim", format="f32")
    blocks = []
    for n in range(len(TOKENS) // block_size):
        t = torch.arange(n * block_size, (n + 1) * block_size).view(-1, 1, 1).float()
        h = torch.arange(spec.head_start, spec.head_start + spec.num_kv_heads).view(1, -1, 1)
        rows = [
            (t * 0.25 + h * 3 + layer * 5 + plane * 7 + torch.arange(D) / 8 + 1).contiguous()
            for layer in range(L)
            for plane in (0, 1)
        ]
        if wrong is not None and wrong[0] // block_size == n:
            rows[2 * wrong[1] + 1][wrong[0] % block_size, wrong[2], 5] += 100
        out = kvx.allocate_buffers(spec)
        kvx.convert([r.unsqueeze(0) for r in rows], out, plan=kvx.plan(plain, spec))
        blocks.append(kind.block(out))
    keys = page_names(TOKENS, block_size) if scheme else names(TOKENS, block_size, MODEL)
    path = folder / kind.digest.hex()
    with DiskTier(path, kind, 10**8) as tier:
        tier.put(keys, blocks).result()
    return path


def doctor(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", *map(str, args)])
    return done.exit_code, done.output + ("" if isinstance(done.exception, SystemExit) else str(done.exception or ""))


@pytest.fixture
def prompt(tmp_path) -> Path:
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(TOKENS))
    return path


def test_what_would_be_converted(tmp_path):
    one, other = kept(tmp_path, 16), kept(tmp_path, 32, layout="block | layer kv token head dim", scheme=SGLANG)
    code, text = doctor(one, other)
    assert code == 0
    assert "They share blocks, converted by whoever reads" in text
    assert "block_size: 16 and 32" in text
    assert "names: KVX's and SGLang's" in text
    assert "They share bytes" in doctor(one, one)[1]
    found = json.loads(doctor(one, other, "--json")[1])
    assert found["shares"] == "blocks"


def test_what_shares_nothing(tmp_path):
    code, text = doctor(kept(tmp_path, 16), kept(tmp_path, 16, model="a-fine-tune"))
    assert code == 1
    assert "They share nothing" in text
    assert "model: 'weights-of-a-test' and 'a-fine-tune'" in text


def test_a_probe_names_the_first_that_differs(tmp_path, prompt):
    one = kept(tmp_path, 16)
    assert doctor(one, kept(tmp_path, 32, scheme=SGLANG), "--probe", prompt)[1].endswith(
        "the same: 96 tokens of the probe are in both\n"
    )
    code, text = doctor(
        one, kept(tmp_path / "b", 48, wrong=(70, 1, 1), layout="block | token head layer kv dim"), "--probe", prompt
    )
    assert code == 1
    assert "differ: token 70, layer 1, V of head 1, element 5: 34.125 and 134.125" in text


def test_a_probe_of_ranks_and_of_rounded_blocks(tmp_path, prompt):
    one = kept(tmp_path, 16)
    rank = kept(tmp_path, 32, num_kv_heads=1, head_start=1, format="fp8_e4m3_per_token_head_inline")
    code, text = doctor(one, rank, "--probe", prompt)
    assert code == 0
    assert "96 tokens of the probe are in both, within a step of rounding" in text


def test_a_probe_of_latents(tmp_path, prompt):
    """MLA: one row a token. As the connector keeps it, and in another layout."""
    made = []
    for layout, size in (("block | layer token head dim", 16), ("block | token layer head dim", 32)):
        spec = CacheSpec(1, size, 1, D, layout=layout, format="f32", num_layers=L, model=MODEL)
        kind, blocks = BlockKind.of(spec), []
        plain = spec.replaced(layout="layer | block token head dim")
        for n in range(len(TOKENS) // size):
            rows = [
                (torch.arange(n * size, (n + 1) * size).view(1, -1, 1, 1) + layer + torch.zeros(D)).contiguous()
                for layer in range(L)
            ]
            if size == 32 and n == 1:
                rows[2][0, 3, 0, 6] = -1.0
            out = kvx.allocate_buffers(spec)
            kvx.convert(rows, out, plan=kvx.plan(plain, spec))
            blocks.append(kind.block(out))
        made.append(tmp_path / kind.digest.hex())
        with DiskTier(made[-1], kind, 10**8) as tier:
            tier.put(names(TOKENS, size, MODEL), blocks).result()
    assert "differ: token 35, layer 2, the latent, element 6: 37 and -1" in doctor(*made, "--probe", prompt)[1]


def test_what_cannot_be_asked(tmp_path, prompt):
    one = kept(tmp_path / "store", 16)
    kept(tmp_path / "store", 32)
    for args, says in (
        ([one], "give two"),
        ([one, tmp_path / "store"], "has blocks of 2 kinds; name one of them"),
        ([one, tmp_path / "nothing"], "has no blocks of K and V"),
        (["--probe", prompt], "give two"),
        ([one, one, "--probe", tmp_path / "missing.json"], "cannot be read"),
        ([one, kept(tmp_path, 16, model="another"), "--probe", prompt], "cannot be compared: model"),
    ):
        code, text = doctor(*args)
        assert code != 0
        assert says in text, text
    prompt.write_text(json.dumps([7] * 96))
    assert "no block of the probe in common" in doctor(one, one, "--probe", prompt)[1]
