"""The pictures of README.md: one token's bytes in two engines' layouts, and the five figures that matter.

    make picture        writes docs/layouts.svg and docs/performance.svg

Both bring their own background, for light and dark pages.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import kvx
from kvx.layout.place import buffer_bytes, places
from tests.performance import ROOT, read

STYLE = """<style>
.bg{fill:#ffffff}.text{fill:#1f2328}.soft{fill:#59636e}.k{fill:#b6d3f2}.v{fill:#f6d5b4}.peer{fill:#c4ccd4}.kvx{fill:#1b6ca8}
.lit{fill:#d1242f}.on{fill:#ffffff}.line{stroke:#d1242f}.edge{stroke:#ffffff}
@media (prefers-color-scheme:dark){.bg{fill:#0d1117}.text{fill:#e6edf3}.soft{fill:#9198a1}.k{fill:#1f4a75}.v{fill:#6b4420}
.peer{fill:#4a535d}.kvx{fill:#58a6ff}.lit{fill:#f85149}.line{stroke:#f85149}.edge{stroke:#0d1117}}
</style>"""
TOKEN, HEAD = 2, 1  # whose key is lit
SIZES = {"num_layers": 1, "num_blocks": 1, "block_size": 4, "num_kv_heads": 2, "head_dim": 128}
LAYOUTS = (("vLLM", "vllm.0.26.nhd"), ("TensorRT-LLM", "tensorrt_llm"))
WIDTH, CELL, TALL, LEFT = 880, 50, 34, 40


class Cell(NamedTuple):
    """One row of `head_dim` elements where it lies."""

    byte: int
    kv: int
    head: int
    token: int

    @property
    def is_lit(self) -> bool:
        return (self.kv, self.head, self.token) == (0, HEAD, TOKEN)


def cells(engine: str) -> list[Cell]:
    """All rows of a small cache, in the order of their bytes."""
    spec = kvx.engine(engine).spec(**SIZES)
    assert len(buffer_bytes(spec)) == 1, f"{engine} has several buffers"
    found = []
    for kv, place in enumerate(places(spec)):
        for head, token in product(range(spec.num_kv_heads), range(spec.block_size)):
            found.append(Cell(place.locate(layer=0, block=0, head=head, token=token, dim=0)[1], kv, head, token))
    return sorted(found)


def _open(height: int) -> list[str]:
    box = f'viewBox="0 0 {WIDTH} {height}" font-family="system-ui,-apple-system,Segoe UI,sans-serif" font-size="13"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>',
        STYLE,
        f'<rect class="bg" width="{WIDTH}" height="{height}" rx="8"/>',
    ]


def _text(x: float, y: float, text: str, css: str = "text", more: str = "") -> str:
    return f'<text class="{css}" x="{x:g}" y="{y:g}"{" " + more if more else ""}>{escape(text)}</text>'


def layouts_svg() -> str:
    """The same block in memory, twice."""
    out = _open(262)
    spots = []
    for n, (title, engine) in enumerate(LAYOUTS):
        top = 44 + n * 134
        out.append(_text(LEFT, top - 14, title, more='font-weight="bold" font-size="15"'))
        out.append(_text(LEFT + 124, top - 14, kvx.engine(engine).layout, "soft", 'font-family="monospace" font-size="11"'))
        for i, cell in enumerate(cells(engine)):
            x = LEFT + i * CELL
            css = "lit" if cell.is_lit else "kv"[cell.kv]
            out.append(f'<rect class="{css} edge" x="{x}" y="{top}" width="{CELL}" height="{TALL}" stroke-width="2"/>')
            label = f"{'KV'[cell.kv]} h{cell.head} t{cell.token}"
            out.append(_text(x + CELL / 2, top + 21, label, "on" if cell.is_lit else "text", 'text-anchor="middle" font-size="10"'))
            if cell.is_lit:
                spots.append((x + CELL / 2, top + (TALL if n == 0 else 0), cell.byte))
    (x0, y0, byte0), (x1, y1, byte1) = spots
    out.append(
        f'<path class="line" d="M{x0:g} {y0:g}C{x0:g} {y0 + 60:g} {x1:g} {y1 - 60:g} {x1:g} {y1:g}" fill="none" stroke-width="2"/>'
    )
    call = 'kvx.convert_cache(tensors, "vllm", "tensorrt_llm")'
    out.append(_text(LEFT, y0 + 38, call, "text", 'font-family="monospace"'))
    out.append(
        _text(WIDTH - LEFT, y0 + 38, f"byte {byte0:,} becomes byte {byte1:,}", "lit", 'text-anchor="end" font-weight="bold"')
    )
    what = f"One block of 4 tokens and 2 heads; each cell is K or V of one head and token. Lit: K of head {HEAD}, token {TOKEN}."
    out.append(_text(LEFT, 240, what, "soft"))
    return "\n".join([*out, "</svg>"]) + "\n"


class Bar(NamedTuple):
    name: str
    us: float


def figures() -> list[tuple[str, list[Bar]]]:
    """What is charted: each of it in one result file, ours first."""

    def case(name: str, beside: str = "", **sizes: object) -> tuple[float, dict[str, float]]:
        result = read(name, beside)
        found = [c for c in result.cases if all(c.sizes.get(k) == v for k, v in sizes.items())]
        assert len(found) == 1, f"{result.path.name}: {sizes} is {len(found)} cases"
        return found[0].us, found[0].peers

    sizes = {"batch": 64, "length": 8192, "layout": "NHD"}
    convert = case("convert-cuda.json", src="vllm.0.26-nhd", dst="trtllm", block=16, blocks=128, format="bf16", to="same")
    write = case("write-cuda.json", "flashinfer", format="bf16", layout="NHD", tokens=65536, slots="blocks")
    decode = case("attention-cuda.json", kind="decode", format="bf16", **sizes)
    fp8 = case("attention-cuda.json", kind="decode", format="fp8_e4m3", **sizes)
    found = [r for r in read("cache-cpu.json").data["rows"] if r["case"].startswith("lookup") and r["hash"] == "sha256"]
    lookup = found[0]["ours"]["median_us"], found[0]["vllm"]["median_us"]
    flashinfer = next(v for k, v in write[1].items() if k.startswith("flashinfer"))
    return [
        ("Convert 671 MB from vLLM to TensorRT-LLM, H200", [Bar("kvx", convert[0]), Bar("torch", convert[1]["torch"])]),
        (
            "Write 65,536 tokens into a paged cache, H200",
            [Bar("kvx", write[0]), Bar("FlashInfer", flashinfer), Bar("torch", write[1]["torch"])],
        ),
        (
            "Decode attention, 64 x 8,192 tokens, bf16, H200",
            [
                Bar("kvx", decode[0]),
                Bar("FlashInfer", decode[1]["flashinfer"]),
                Bar("torch: gather, then cuDNN", decode[1]["gather"] + decode[1]["cudnn"]),
            ],
        ),
        ("The same over an fp8 cache, H200", [Bar("kvx", fp8[0]), Bar("FlashInfer", fp8[1]["flashinfer"])]),
        ("Find a cached prefix of 4,096 tokens, CPU", [Bar("kvx", lookup[0]), Bar("vLLM KVCacheManager", lookup[1])]),
    ]


def performance_svg() -> str:
    """Bars of time, each group to its own scale: shorter is faster."""
    y, step = 30, 19
    body = [_text(LEFT, y, "Time, shorter is faster", more='font-weight="bold" font-size="15"')]
    y += 14
    for title, bars in figures():
        y += 20
        body.append(_text(LEFT, y, title))
        longest = max(bar.us for bar in bars)
        for n, bar in enumerate(bars):
            wide = 420 * bar.us / longest
            y += step if n else 8
            body.append(f'<rect class="{"peer" if n else "kvx"}" x="{LEFT + 190}" y="{y}" width="{wide:.1f}" height="14" rx="2"/>')
            body.append(_text(LEFT + 182, y + 11.5, bar.name, "soft" if n else "text", 'text-anchor="end" font-size="12"'))
            body.append(_text(LEFT + 196 + wide, y + 11.5, f"{bar.us:,.0f} us", "soft" if n else "text", 'font-size="12"'))
        y += step
    return "\n".join([*_open(y + 16), *body, "</svg>"]) + "\n"


PICTURES: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "layouts.svg": layouts_svg,
    ROOT / "docs" / "performance.svg": performance_svg,
}

if __name__ == "__main__":
    for path, draw in PICTURES.items():
        path.write_text(draw())
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
