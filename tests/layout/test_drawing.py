"""Layouts as SVG: every cell where places() says, scales outlined, padding hatched; every row can be drawn."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

import kvx
from kvx.errors import BadArgument
from kvx.layout import ENGINES, Layout
from kvx.layout.drawing import COLOURS, spec_svg
from kvx.layout.place import places
from kvx.page.bundle import STATIC


def rects(svg: str) -> list[dict[str, str]]:
    return [one.attrib for one in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")]


def test_cells_lie_where_places_say():
    spec = kvx.engine("vllm.0.23").spec(num_layers=2, num_blocks=2, block_size=4, num_kv_heads=2, head_dim=8)
    svg = spec_svg(spec, colour_by="head")
    cells = [r for r in rects(svg) if r["fill"] in COLOURS and r.get("rx") is None]
    assert len(cells) == 2 * 2 * 2 * 4 * 2 * 8
    # One width, so that a line has a fixed number of bytes: from x and y back to a byte, and to a head.
    left, width = min(float(r["x"]) for r in cells), float(cells[0]["width"]) + 1
    columns = round((max(float(r["x"]) for r in cells) - left) / width) + 1
    half = len(cells) // 2
    for buffer, mine in enumerate((cells[:half], cells[half:])):
        top, height = float(mine[0]["y"]), float(mine[0]["height"]) + 1
        drawn = {}
        for r in mine:
            n = round((float(r["y"]) - top) / height) * columns + round((float(r["x"]) - left) / width)
            drawn[n * 2] = COLOURS.index(r["fill"])
        for place in places(spec):
            for head in range(2):
                assert drawn[place.locate(layer=buffer, block=1, token=2, head=head, dim=3)[1]] == head


@pytest.mark.parametrize("name", ENGINES)
def test_every_row_draws_itself(name):
    svg = Layout.parse(ENGINES[name].layout)._repr_svg_()
    assert len(rects(svg)) > 100
    assert ENGINES[name].layout in "".join(ElementTree.fromstring(svg).itertext())


def test_scales_padding_states_and_half_bytes():
    inline = kvx.CacheSpec(2, 4, 2, 8, layout="block token head (kv dim)", format="int8_per_token_head_inline", block_bytes=256)
    svg = spec_svg(inline)
    assert svg.count('fill-opacity=".3"') == 2 * 4 * 2 * 2  # a scale a row
    assert "url(#kvx-padding)" in svg
    nvfp4 = spec_svg(kvx.CacheSpec(1, 2, 2, 16, format="nvfp4"))
    assert re.findall(r">((?:tensor )?scales of \w)", nvfp4) == [
        "scales of K",
        "scales of V",
        "tensor scales of K",
        "tensor scales of V",
    ]
    states = Layout.parse("layer | block plane[conv: channel tap+1; delta: head row column]").to_svg(colour_by="kv")
    assert ">conv<" in states
    assert "url(#kvx-padding)" in states  # the column that is never read


def test_what_cannot_be_drawn_is_said():
    layout = Layout.parse("layer | block token head (kv dim)")
    with pytest.raises(BadArgument, match="at most 20,000"):
        layout.to_svg(num_blocks=1000)
    with pytest.raises(BadArgument, match="colour_by is 'heads'; this cache has kv, layer, block, token, head, dim"):
        layout.to_svg(colour_by="heads")


def test_colours_are_those_of_the_page():
    light = (STATIC / "page.css").read_text().split("@media")[0]
    assert tuple(re.search(rf"--c{n}: (#\w+);", light)[1] for n in range(10)) == COLOURS
