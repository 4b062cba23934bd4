"""kvx size: the table, the JSON, the picture, the sentences; and docs/size.md shows what it prints."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import kvx
from kvx.cache.hybrid import HybridSchema
from kvx.cache.hybrid.store import groups_of
from kvx.cache.kinds import State
from kvx.cli.main import main
from kvx.cli.size import parse_bytes, parse_tokens
from kvx.errors import BadArgument
from kvx.layout.buffers import allocate_buffers
from kvx.spec.models import MODELS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(capsys, monkeypatch):
    """`kvx size`, in this process: what it prints, or its sentence where it ends with a code."""

    def call(*args: str, code: int = 0, **env: str) -> str:
        for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["kvx", "size", *args])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert (end.value.code or 0) == code, f"{end.value.code}\n{out}\n{err}"
        return out if code == 0 else err

    return call


LLAMA = """\
Llama-3.1-70B: what each kind of layer stores
  kind  layers  stored                kept per request
  full      80  K 8 x 128, V 8 x 128  all tokens
requests of 131,072 tokens (4,000 of them shared) in blocks of 16, with 80GB for the cache on each of 8 ranks
  format               bytes/token  fixed  per request  64 requests  requests fit  tokens fit  longest of 64 requests
  bf16                      40,960      0     5.00 GiB   310.39 GiB            15   1,966,080                  34,448
  fp8_e4m3                  20,480      0     2.50 GiB   155.19 GiB            30   3,932,160                  64,960
  int8_per_token_head       21,120      0     2.58 GiB   160.04 GiB            29   3,801,088                  63,120
  nvfp4                     11,520      0     1.41 GiB    87.30 GiB            54   7,077,888                 112,432
"""


def test_a_pipe_gets_plain_lines(run):
    assert run("Llama-3.1-70B", "--tp", "8", "--requests", "64", "--context", "131072", "--shared-prefix", "4000") == LLAMA


def test_a_terminal_gets_tables(run):
    out = run("DeepSeek-V4-Flash", "--state", "tight", FORCE_COLOR="1", COLUMNS="160")
    assert "\x1b[" in out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert re.search(r"│ fp8_ds_mla +│ mxfp4 +│ +3,514.25 │ 4.41 MiB │", plain)


def test_no_model_lists_the_known_ones(run):
    lines = run().splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(MODELS)
    assert [m["model"] for m in json.loads(run("--json"))] == list(MODELS)


def test_json_has_the_library_s_numbers(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["GPT-OSS-20B"]))
    out = json.loads(run(str(tmp_path), "--json", "--memory", "10GiB", "--requests", "3", "--format", "nvfp4", "--format", "bf16"))
    assert (out["context"], out["requests"], out["memory_bytes"], out["block_size"]) == (8192, 3, 10 * 2**30, 16)
    assert [s["format"] for s in out["sizes"]] == ["nvfp4", "bf16"]
    size, got = kvx.size("GPT-OSS-20B"), out["sizes"][1]
    assert got["token_bytes"] == size.token_bytes == 24_576
    assert got["fixed_bytes"] == size.fixed_bytes == 3_538_944
    assert got["request_bytes"] == size.request_bytes(8192) == 3_538_944 + 8192 * 24_576
    assert got["total_bytes"] == 3 * size.request_bytes(8192)
    assert got["requests_fit"] == 10 * 2**30 // size.request_bytes(8192)
    assert got["longest_context"] == size.fit_context(10 * 2**30, 3)
    assert [(g["name"], g["token_bytes"], g["fixed_bytes"]) for g in got["groups"]] == [
        ("sliding", 24_576, 3_538_944),
        ("full", 24_576, 0),
    ]


def test_a_window_in_every_layer_fits_any_length(run):
    assert run("Mistral-7B-v0.1", "--format", "bf16").splitlines()[-1].split()[-1] == "any"
    assert json.loads(run("Mistral-7B-v0.1", "--json"))["sizes"][0]["longest_context"] is None


def test_plot(run, tmp_path):
    pytest.importorskip("matplotlib")
    for model in ("DeepSeek-V4-Flash", "Mistral-7B-v0.1"):
        path = tmp_path / f"{model}.png"
        assert run(model, "--plot", str(path), "--shared-prefix", "3000").splitlines()[-1] == f"plot: {path}"
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "nothing to draw" in run("Llama-3.1-8B", "--plot", str(tmp_path / "x.png"), "--memory", "1MB", code=2)
    assert "No such file" in run("Llama-3.1-8B", "--plot", str(tmp_path / "no" / "x.png"), code=2)
    assert "not supported" in run("Llama-3.1-8B", "--plot", str(tmp_path / "x.foo"), code=2)


def test_plot_of_all_formats_is_legible(run, tmp_path, monkeypatch):
    """Formats of the same bytes are one line, and the legend stands beside the axes and inside the picture."""
    figures = pytest.importorskip("matplotlib.figure")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
    run("Llama-3.1-8B", "--format", "all", "--plot", str(tmp_path / "x.png"))
    figure = drawn[0]
    FigureCanvasAgg(figure).draw()
    axes, legend = figure.axes[0], figure.legends[0]
    names = [name for text in legend.get_texts() for name in text.get_text().replace("\n", " ").split(", ")]
    assert sorted(names) == sorted(kvx.spec.size.size_formats("Llama-3.1-8B", every=True))
    lines = [tuple(line.get_ydata()) for line in axes.get_lines()]
    assert len(set(lines)) == len(lines) < len(names)
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.get_lines()}
    assert len(looks) == len(lines)
    box, plot = legend.get_window_extent(), axes.get_window_extent()
    assert box.x0 >= plot.x1
    assert box.x1 <= figure.bbox.x1
    assert box.y0 >= figure.bbox.y0
    assert box.y1 <= figure.bbox.y1
    run("Llama-3.1-8B", "--plot", str(tmp_path / "x.png"))
    few = drawn[1].axes[0].get_legend()
    assert [text.get_text() for text in few.get_texts()] == ["nvfp4", "fp8_e4m3", "int8_per_token_head", "bf16"]


def test_plot_without_matplotlib_says_so(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = run("Llama-3.1-8B", "--plot", "x.png", code=2)
    assert said == "BadArgument: size: --plot needs matplotlib: pip install matplotlib.\n"
    assert "Llama" in run("Llama-3.1-8B")  # nothing else needs it


def test_what_was_not_compared_is_said(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["Llama-3.1-8B"], "model_type": "brand_new", "kv_share_group": 2}))
    lines = run(str(tmp_path), "--format", "bf16").splitlines()
    assert lines[3].startswith("  unchecked: model_type brand_new was not compared with a real cache")
    assert lines[4].startswith("  not understood: kv_share_group")
    out = json.loads(run(str(tmp_path), "--format", "bf16", "--json"))
    assert (out["model_type"], out["is_checked"]) == ("brand_new", False)
    assert out["notes"][0].startswith("not understood")
    out = json.loads(run("Llama-3.1-8B", "--json"))
    assert (out["model_type"], out["is_checked"], out["notes"]) == ("llama", True, [])
    newer = {**MODELS["Llama-3.1-8B"], "model_type": "brand_new", "layer_types": ["gated_delta_net"] * 28 + ["full_attention"] * 4}
    (tmp_path / "config.json").write_text(json.dumps(newer))
    assert "  not counted: 28 layers (28 gated_delta_net) keep a state of fixed size for each request" in run(str(tmp_path))


def test_what_engines_take_is_said(run):
    out = run("Qwen3-Next-80B-A3B", "--format", "fp8_e4m3", "--format", "bf16", "--context", "32K")
    assert "  GDN       36  conv 8192 x 3, delta 32 x 128 x 128  one state\n" in out
    assert "what engines allocate for a request of 32,768 tokens in fp8_e4m3\n" in out
    assert "attention's block grew from 16 to 1072 tokens, to hold a state" in out
    sizes = json.loads(run("Qwen3-Next-80B-A3B", "--json", "--context", "32K", "--state-format", "f32"))["sizes"]
    assert [p["num_bytes"] for p in sizes[0]["groups"][0]["planes"]] == [8192 * 3 * 2, 32 * 128 * 128 * 4]
    rows = {(e["engine"], e["setting"]): e for e in sizes[0]["engines"]}
    assert {e for e, _ in rows} == {"transformers", "vllm", "sglang", "llama.cpp"}
    assert all(e["state_format"] == "f32" for e in rows.values())
    assert rows["vllm", "prefix caching off"]["block_size"] == 1056
    assert rows["sglang", "radix cache off"]["request_bytes"] == sizes[0]["request_bytes"]
    assert "full + Mamba-2" in run("Falcon-H1-34B")
    # Where all layers keep the same, an engine takes what is counted.
    assert "engines" not in run("Llama-3.1-8B")
    assert "engines" not in json.loads(run("Llama-3.1-8B", "--json"))["sizes"][0]
    assert "keeps no recurrent matrices" in run("Llama-3.1-8B", "--state-format", "f32", code=2)


def test_errors_are_one_sentence(run):
    assert "80 GB? Write 80GB" in run("Llama-3.1-8B", "--memory", "80", code=2)
    assert run("Lama-3.1-8B", code=2).startswith('BadArgument: size(): "Lama-3.1-8B" is neither a file or folder here nor a known')
    assert "takes a number and B, KB" in run("Llama-3.1-8B", "--memory", "80XB", code=2)
    assert "shared_prefix is 9000 and context 8192" in run("Llama-3.1-8B", "--shared-prefix", "9000", code=2)


def test_memory():
    texts = {
        "80GB": 80 * 10**9,
        "74.5 GiB": 149 * 2**29,
        "1000B": 1000,
        "80000000000": 80 * 10**9,
        "1.5kb": 1500,
        "2.5GB": 25 * 10**8,
        "80 GiB": 80 * 2**30,
        "0.1TB": 10**11,
        "64MiB": 2**26,
    }
    assert {text: parse_bytes(text) for text in texts} == texts
    for text in ("", "GB", "-1GB", "1e9", "1GBit"):
        with pytest.raises(BadArgument, match="like 80GB"):
            parse_bytes(text)
    for text in ("80", "1", "40.5", "999999"):
        with pytest.raises(BadArgument, match=rf'memory is "{text}", a number without a unit. {text} GB\? Write {text}GB'):
            parse_bytes(text)


@pytest.mark.parametrize(("name", "token", "fixed_mib"), [("flash", 3514.25, 4.41), ("pro", 5031.4375, 6.29)])
def test_deepseek_v4_is_what_a_cache_allocates(run, name, token, fixed_mib):
    """A request of a million tokens, in blocks of each size: counted here, and allocated, where memory costs nothing."""
    lines = json.loads(run(f"deepseek-v4-{name}", "--context", "1M", "--format", "fp8_ds_mla", "--state", "tight", "--json"))
    size = lines["sizes"][0]
    assert lines["context"] == 2**20
    assert [f["block_size"] for f in lines["hybrid"]] == [128, 256, 512]
    for facts in lines["hybrid"]:
        assert facts["token_bytes"] == size["token_bytes"] == token
        assert facts["fixed_bytes"] == size["fixed_bytes"]
        assert facts["request_bytes"] == size["request_bytes"]
        assert round(facts["fixed_bytes"] / 2**20, 2) == fixed_mib
        schema = HybridSchema.of(f"deepseek-v4-{name}", block_tokens=facts["block_size"])
        blocks = 2**20 // facts["block_size"]
        groups = groups_of(schema, blocks, 1, State(), "")
        buffers = [b for group in groups for m in group.members for _ in m.layers for b in allocate_buffers(m.spec, "meta")]
        assert sum(b.numel() * b.element_size() for b in buffers) == facts["request_bytes_allocated"]
        assert sum(group.num_bytes for group in groups) == facts["request_bytes_allocated"]
    padding = [f["padding"] for f in lines["hybrid"]]
    assert padding == sorted(padding, reverse=True)
    assert "kvx.cache.hybrid with fp8_v4 rows" in run(f"deepseek-v4-{name}", "--context", "1M")
    assert "hybrid" not in json.loads(run("Llama-3.1-8B", "--json"))


def test_tokens():
    texts = {"8192": 8192, "128K": 2**17, "1M": 2**20, "2 m": 2**21}
    assert {text: parse_tokens(text) for text in texts} == texts
    for text in ("", "K", "1G", "1.5M", "-1"):
        with pytest.raises(BadArgument, match="like 8192, 128K or 1M"):
            parse_tokens(text)


def test_docs_show_what_is_printed(run):
    """Each `$ kvx size` of docs/size.md, run, prints the lines below it."""
    shown = re.findall(r"\$ kvx size (.*)\n((?:.+\n)+?)```", (ROOT / "docs" / "size.md").read_text())
    assert shown
    for args, lines in shown:
        assert run(*args.split()) == lines, args
    assert f"{len(MODELS)} known models" in (ROOT / "README.md").read_text()
