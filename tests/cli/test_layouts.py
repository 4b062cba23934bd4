"""kvx layouts: the table holds every row; a drawing says of each cell where places() says it lies."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from kvx.cli.layouts import draw, tiny
from kvx.layout import ENGINES, engine
from kvx.layout.place import buffer_bytes, places


def run(*args: str, code: int = 0, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvx", "layouts", *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**{n: v for n, v in os.environ.items() if n not in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE")}, **env},
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout if code == 0 else done.stderr


def text_of(name: str) -> str:
    return "\n".join(line.plain for line in draw(engine(name)))


def test_a_pipe_gets_a_line_a_row():
    lines = run().splitlines()
    assert [re.split(r" {2,}", line) for line in lines] == [
        [row.name, row.layout, f"{row.engine} {row.versions}"] for row in ENGINES.values()
    ]


def test_a_terminal_gets_a_table_with_every_row():
    out = run(FORCE_COLOR="1", COLUMNS="200")
    assert "\x1b[" in out
    for row in ENGINES.values():
        assert f"│ {row.name} " in out
        assert f"│ {row.layout} " in out


DYNAMO = """\
dynamo.universal  Dynamo 1.4
  layout      block | head layer kv token dim
  notes       UniversalTP: a head's bytes are one run.

example: 2 layers, 2 blocks of 4 tokens, 2 heads, head_dim 4, bf16: 2 allocations, 512 bytes
  K  [head, layer, token, dim] shape [2, 2, 4, 4] strides [128, 64, 8, 2] bytes, from byte 0
  V  [head, layer, token, dim] shape [2, 2, 4, 4] strides [128, 64, 8, 2] bytes, from byte 32

| B0 256 bytes
      0  L0 h0   K t0   K t1   K t2   K t3   V t0   V t1   V t2   V t3
     64  L1 h0   K t0   K t1   K t2   K t3   V t0   V t1   V t2   V t3
    128  L0 h1   K t0   K t1   K t2   K t3   V t0   V t1   V t2   V t3
    192  L1 h1   K t0   K t1   K t2   K t3   V t0   V t1   V t2   V t3

| B1 256 bytes
      0  L0 h0   K t0   K t1   K t2   K t3   V t0   V t1   V t2   V t3
     64  L1 h0   K t0   K t1   K t2   K t3   V t0   V t1   V t2   V t3
    128  L0 h1   K t0   K t1   K t2   K t3   V t0   V t1   V t2   V t3
    192  L1 h1   K t0   K t1   K t2   K t3   V t0   V t1   V t2   V t3
"""


def test_a_drawing():
    assert run("dynamo.universal") == DYNAMO


def test_colours_are_for_terminals():
    assert "\x1b[36mK t0" in run("dynamo.universal", FORCE_COLOR="1")


def test_different_orders_of_k_and_v_are_seen():
    text = text_of("vllm.cpu")
    assert "K  [block, head, dim, token] shape [2, 2, 4, 4] strides [128, 64, 8, 2] bytes, from byte 0" in text
    assert "V  [block, head, token, dim] shape [2, 2, 4, 4] strides [128, 64, 8, 2] bytes, from byte 32" in text
    assert re.search(r"^ +64  B0 h1   K t0-3 d0   K t0-3 d1   K t0-3 d2   K t0-3 d3   V t0 +V t1 +V t2 +V t3$", text, re.M)


def test_long_allocations_are_cut_in_the_middle():
    lines = text_of("vllm.cpu.amx").splitlines()
    at = lines.index("         ... 16 lines more")
    assert lines[at - 1].startswith("    352  B0 K d10-11   t8 ")
    assert lines[at + 1].startswith("    896  B0 V t12-13   d0 ")


def labels(text: str) -> dict[str, tuple[int, int]]:
    """Axis -> first and last index: "B1 K t0-3" is block 1, kv 0, tokens 0 to 3."""
    names = {"L": "layer", "B": "block", "h": "head", "t": "token", "d": "dim"}
    found: dict[str, tuple[int, int]] = {}
    for word in text.split():
        if word in ("K", "V"):
            found["kv"] = (int(word == "V"), int(word == "V"))
    for letter, first, last in re.findall(r"\b([LBhtd])(\d+)(?:-(\d+))?\b", text):
        found[names[letter]] = (int(first), int(last or first))
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_each_cell_is_where_it_is_drawn(name):
    spec, text = tiny(engine(name)), text_of(name)
    where, unit, drawn = places(spec), spec.plane(0).unit_bytes, 0
    for buffer, part in enumerate(re.split(r"^\| ", text, flags=re.M)[1:]):
        header, *lines = part.rstrip().splitlines()
        assert header.endswith(f"{buffer_bytes(spec)[buffer]} bytes")
        for line in lines:
            if "lines more" in line:
                continue
            byte, front, *cells = re.fullmatch(r" +(\d+)  (.*)", line).groups()[0], *re.split(r" {3,}", line[9:])
            next_byte = int(byte)
            for cell in cells:
                at = labels(f"{header} {front} {cell}")
                kv = at.pop("kv", (0, 0))[0]
                at.setdefault("dim", (0, spec.plane(kv).row_units - 1))
                first, last = ({axis: ends[i] for axis, ends in at.items()} for i in (0, 1))
                assert where[kv].locate(**first) == (buffer, next_byte)
                next_byte = where[kv].locate(**last)[1] + unit
                drawn += 1
    assert buffer == len(buffer_bytes(spec)) - 1
    assert drawn


def test_an_unknown_name_names_those_near_it():
    error = run("sglang.page", code=2)
    assert error.startswith(
        'BadArgument: engine "sglang.page" does not exist. Similar names: sglang.page_first, sglang.page_first_direct, '
    )
    assert "Traceback" not in error
