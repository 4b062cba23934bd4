"""The tab Layouts in a browser, as a person uses it: rows and typed strings, hover, keys, links, pictures; every engine's row."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from xml.etree import ElementTree

import pytest

from kvx.layout.engines import ENGINES
from kvx.layout.vectors import place_vectors

CHECKS = re.sub(r"^//.*\n", "", Path(__file__).with_name("layouts_check.js").read_text()).strip()
VIEW = "kvxPage.shown.handle.view"


def address(**values: Any) -> str:
    return "#layouts?" + urlencode({name.replace("_", "-"): value for name, value in values.items()})


def settle(page: Any) -> None:
    """Two frames: one that was asked for, and the one that has drawn it."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def point_of(page: Any, side: str, plane: str, **at: int) -> tuple[float, float]:
    """Where on the screen an element is drawn, scrolled to if it is out of view."""
    found = page.evaluate(
        CHECKS + ".point",
        [side, {"plane": plane, **at}],
    )
    settle(page)
    return found[0], found[1]


# ---- every row, against the vectors


@pytest.fixture(scope="module")
def places() -> list[dict[str, Any]]:
    return place_vectors()


def test_every_engine_row_is_drawn_where_the_vectors_say(visit, places):
    cases = [case for case in places if case["name"].startswith("engine ")]
    assert len(cases) == len(ENGINES) >= 60
    page = visit(address(left="vllm.0.23"))
    found = page.evaluate(CHECKS + ".compare", cases)
    assert not found["wrong"], "\n".join(found["wrong"][:10])
    assert found["points"] > 800
    assert found["pixels"] > 400


def test_states_are_drawn_too(visit, picture, places):
    cases = [case for case in places if case["name"].startswith("state ") and "padded" not in case["name"]]
    page = visit(
        address(left="state.vllm.sd.delta", right="state.transformers.delta", by="kv", left_format="f32", right_format="f32")
    )
    assert page.evaluate(CHECKS + ".states", cases) == []
    settle(page)
    assert "never read" in page.locator(".legend").inner_text()  # Transformers' oldest column
    picture(page, "layouts-states")


# ---- a person's hand


def test_hovering_says_where_and_lights_the_other_side(visit, picture):
    page = visit(address(left="vllm.0.23", right="tensorrt_llm"))
    page.mouse.move(*point_of(page, "left", "v", position=5, head=1, dim=3, layer=1))
    settle(page)
    assert page.locator(".side-left .side-where").inner_text() == (
        "V, layer 1, block 1, token 1, head 1, dim 3: buffer 1, byte 438 (2 bytes)"
    )
    right = page.locator(".side-right .side-where").inner_text()
    want = re.escape("V, layer 1, block 1, token 1, head 1, dim 3: buffer 0, byte ")
    assert re.match(want, right)
    lights = page.evaluate(f"Object.values({VIEW}.sides).map((side) => side.map.lights.length)")
    assert lights == [1, 1]
    picture(page, "layouts-hover")
    page.mouse.move(5, 5)
    settle(page)
    assert page.evaluate(f"{VIEW}.sides.right.map.lights.length") == 0


def test_an_element_the_other_side_lacks_is_said(visit):
    page = visit(address(left="vllm.0.23", right="vllm.mla"))
    page.mouse.move(*point_of(page, "left", "v", position=0, head=0, dim=0, layer=0))
    settle(page)
    assert page.locator(".side-right .side-where").inner_text() == "This side has no such element."


def test_a_click_pins_scrolls_the_other_side_and_stands_in_the_address(visit):
    page = visit(address(left="vllm.0.23", right="tensorrt_llm", tokens=64, dim=16))
    page.mouse.click(*point_of(page, "left", "k", position=60, head=1, dim=3, layer=0))
    settle(page)
    assert "at=plane%3Ak%2Cposition%3A60" in page.url
    seen = """(side) => { const { map } = kvxPage.shown.handle.view.sides[side]; const light = map.lights[0];
        const rect = map.geometry.rects(light.section, light.start, light.size)[0];
        return rect.y >= map.scroller.scrollTop && rect.y < map.scroller.scrollTop + map.scroller.clientHeight; }"""
    assert page.evaluate(seen, "right")
    linked = visit(page.url[page.url.index("#") :])
    settle(linked)
    assert linked.evaluate(seen, "right")
    assert "token 0" in linked.locator(".side-left .side-where").inner_text()  # position 60 is token 0 of block 15


def test_a_row_is_chosen_and_back_comes_back(visit):
    page = visit()
    left, text = page.get_by_label("Left: engine and version"), page.locator(".side-left .side-text")
    left.select_option("sglang.nhd")
    assert text.input_value() == ENGINES["sglang.nhd"].layout
    assert "left=sglang.nhd" in page.url
    page.evaluate("location.hash = '#layouts?left=dynamo.universal'")
    page.wait_for_function("document.querySelector('.side-left .side-text').value.startsWith('block | head')")
    page.go_back()
    page.wait_for_function(f"document.querySelector('.side-left .side-text').value === {json.dumps(ENGINES['sglang.nhd'].layout)}")


def test_choosing_a_row_makes_sizes_fit(visit):
    page = visit(address(left="vllm.0.23"))
    page.get_by_label("Left: engine and version").select_option("vllm.cpu.amx")
    assert not page.locator(".side-left .side-error").is_visible()
    assert page.get_by_label("Tokens per block").first.input_value() == "16"
    assert page.get_by_label("Head dim").input_value() == "16"
    assert "Sizes now fit" in page.locator("[role=status]").inner_text()


def test_a_typed_layout_is_drawn_and_a_wrong_one_says_where(visit, picture):
    page = visit()
    text = page.locator(".side-left .side-text")
    text.fill("layer | block head token (kv dim)")
    assert page.locator(".side-left .side-row").input_value() == ""
    assert page.evaluate(f"{VIEW}.sides.left.shown.cache.buffers.length") == 2
    text.fill("layer | block tokn head (kv dim)")
    error = page.locator(".side-left .side-error")
    assert 'Unknown axis "tokn".' in error.inner_text()
    shown, marks = error.locator("pre").inner_text().split("\n")
    assert shown[marks.index("^") : marks.rindex("^") + 1] == "tokn"
    assert text.get_attribute("aria-invalid") == "true"
    picture(page, "layouts-error")
    text.fill("layer | block head/4 token head%4 (kv dim)")
    assert "num_kv_heads 2 is not a multiple of the 4" in error.inner_text()
    page.get_by_role("button", name="Use sizes that fit").click()
    assert not error.is_visible()
    assert page.get_by_label("KV heads").input_value() == "4"
    text.fill("")
    assert error.is_visible()
    page.get_by_label("Tokens", exact=True).fill("100000000")
    text.fill("NHD")
    page.get_by_label("Layers").fill("1")
    assert "draws up to 400,000" in error.inner_text()


def test_sizes_that_are_none_are_said(visit):
    page = visit(address(left="vllm.0.23", right="tensorrt_llm"))
    errors = page.locator(".side-error")
    for size in ("", "0", "-3", "1e9", "2.5"):
        page.get_by_label("KV heads").fill(size)
        assert errors.first.is_visible(), size
        assert errors.last.is_visible(), size
        page.get_by_label("KV heads").fill("3")
        assert not errors.first.is_visible()


HOSTILE = (
    "plane:k,position:0.5,layer:NaN,head:-1,dim:1e99",
    "<img src=x onerror=window.stolen=1>",
    "layer | <script>window.stolen=1</script>",
    "plane[__proto__: | block channel tap]",
    "plane[constructor: | block channel tap; tostring: | block row column]",
    "{{7*7}} ${7*7}",
    "\u202elayer | block\u0000 \U0001f600",
    "x" * 1100,
)


def test_hostile_strings_are_text(visit):
    page = visit()
    for text in HOSTILE:
        page.evaluate(
            "(hash) => { location.hash = hash; }", address(left=text, right=text, by=text, at=text, left_format=text, wrong=1)
        )
        page.wait_for_function("(text) => kvxPage.shown.handle.view.sides.left.wanted.layout === text", arg=text)
        settle(page)
        assert page.evaluate("window.stolen") is None
        assert page.locator("img, main script").count() == 0
        assert page.locator(".side-left .side-text").input_value() == re.sub("\n", "", text)
        assert page.locator(".side-left .side-error").is_visible()


def test_an_address_that_names_nothing_is_said(visit):
    page = visit("#nothing?x=1")
    assert 'names a view "nothing"' in page.locator("[role=status]").inner_text()
    assert page.get_by_role("tab", name="Layouts").get_attribute("aria-selected") == "true"


# ---- keys and screen readers


def test_keys_walk_and_are_announced(visit):
    page = visit(address(left="vllm.0.23", right="tensorrt_llm"))
    canvas = page.locator(".side-left canvas").first
    canvas.focus()
    said = page.locator("[role=status]")
    page.keyboard.press("ArrowRight")
    assert said.inner_text() == "K, layer 0, block 0, token 0, head 0, dim 0: buffer 0, byte 0 (2 bytes)"
    page.keyboard.press("ArrowRight")
    assert "dim 1: buffer 0, byte 2" in said.inner_text()
    page.keyboard.press("ArrowDown")
    line = page.evaluate(f"{VIEW}.sides.left.map.geometry.lineBytes[0]")
    assert f"byte {line + 2}" in said.inner_text()
    page.keyboard.press("End")
    assert "V, layer 0, block 1, token 3, head 1, dim 7: buffer 0, byte 510" in said.inner_text()
    page.keyboard.press("ArrowRight")
    assert "layer 1" in said.inner_text()
    page.keyboard.press("Enter")
    assert "at=" in page.url
    page.keyboard.press("Escape")
    assert "at=" not in page.url


def test_everything_has_a_name(visit):
    page = visit()
    nameless = page.evaluate(
        """[...document.querySelectorAll("input, select, button, canvas:not([aria-hidden]), [role=tab]")]
            .filter((one) => !one.closest("[hidden]"))
            .filter((one) => !(one.labels?.[0]?.innerText || one.getAttribute("aria-label") || one.innerText))
            .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    label = page.locator(".side-left canvas").first.get_attribute("aria-label")
    assert "vllm.lbnhc: 512 cells in 1 buffers of together 1,024 bytes" in label
    assert page.evaluate("document.documentElement.lang") == "en"


# ---- colours, formats, padding


def test_colours_follow_the_axis_and_the_theme(visit, picture):
    seen = set()
    for dark in (False, True):
        page = visit(address(left="vllm.0.26.nhd", right="sglang.vectorized_5d", tokens=16, dim=16, right_block=16), dark=dark)
        for axis in ("kv", "layer", "position", "head", "dim", "block"):
            page.get_by_label("Colour by").select_option(axis)
            colour = page.evaluate(
                f"(() => {{ const {{ look, table }} = {VIEW}.sides.left.map; return look.colour(table.count - 1); }})()"
            )
            assert re.fullmatch(r"#[0-9a-f]{6}", colour)
            seen.add((dark, axis, colour))
        settle(page)
        picture(page, f"layouts-{'dark' if dark else 'light'}")
    assert len(seen) == 12
    assert not {c for dark, _, c in seen if dark} & {c for dark, _, c in seen if not dark}


def test_scales_padding_and_half_bytes_are_drawn_as_they_lie(visit, picture):
    page = visit(
        address(
            left="vllm.lbnhc",
            left_format="int8_per_token_head_inline",
            left_bytes=384,
            right="vllm.lbnhc",
            right_format="nvfp4",
            dim=16,
        )
    )
    kinds = page.evaluate(
        f"""Object.values({VIEW}.sides).map(({{ map }}) => {{ const {{ table }} = map; const found = {{}};
            for (let i = 0; i < table.count; i++) found[table.kind[i]] = (found[table.kind[i]] ?? 0) + 1; return found; }})"""
    )
    assert kinds == [{"0": 1024, "1": 64}, {"0": 1024, "1": 64, "2": 4}]
    legend = page.locator(".legend").inner_text()
    assert "scale" in legend
    assert "padding" in legend
    page.mouse.move(*point_of(page, "right", "k", position=0, head=0, dim=3, layer=0))
    settle(page)
    assert page.locator(".side-right .side-where").inner_text().endswith("buffer 0, byte 1, high half (4 bits)")
    titles = page.evaluate(f"{VIEW}.sides.right.map.table.sections.map((section) => section.title)")
    assert titles == ["", "scales of K", "scales of V", "tensor scales of K", "tensor scales of V"]
    picture(page, "layouts-scales")


# ---- read it wrong


def test_read_it_wrong_says_what_is_taken_for_what(visit, picture):
    page = visit(address(left="vllm.0.23", right="vllm.0.23.hnd"))
    page.get_by_role("button", name="Read it wrong").click()
    assert "wrong=1" in page.url
    text = page.locator(".wrong").inner_text()
    # NHD read as HND: of [4 tokens, 2 heads] as [2 heads, 4 tokens] the first and the last row of every block stay.
    assert "128 of 512 elements are what the reader takes them for (25 %)" in text
    cells = page.locator(".matrix-cell").all_inner_texts()
    assert cells == ["50", "50", "50", "50"]
    page.mouse.move(*point_of(page, "right", "k", position=1, head=0, dim=0, layer=0))
    settle(page)
    said = page.locator(".side-right .side-where").inner_text()
    assert said == "Taken for K, layer 0, block 0, token 1, head 0, dim 0. Really K, layer 0, block 0, token 0, head 1, dim 0."
    assert (
        page.locator(".side-left .side-where")
        .inner_text()
        .startswith("K, layer 0, block 0, token 0, head 1, dim 0: buffer 0, byte 16")
    )
    picture(page, "layouts-wrong")


def test_the_same_layout_is_read_right(visit):
    page = visit(address(left="vllm.0.23", right="flashinfer.stacked.nhd", wrong=1))
    assert "Every element is what the reader takes it for" in page.locator(".wrong").inner_text()


def test_bytes_of_another_size_are_said(visit):
    page = visit(address(left="vllm.0.23", right="vllm.0.23", right_format="f32", wrong=1))
    text = page.locator(".wrong").inner_text()
    assert "512 are no whole element" in text
    assert "The left has 1,024 bytes and the right reads 2,048." in text


# ---- pictures and links


@pytest.mark.parametrize("kind", ["SVG", "PNG"])
def test_pictures_are_saved(visit, tmp_path, kind):
    page = visit(address(left="layer | block token head (kv dim)", right="tensorrt_llm", left_bytes=320))
    with page.expect_download() as download:
        page.get_by_role("button", name=kind).click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    assert path.name == f"layout-tensorrt_llm.{kind.lower()}"
    if kind == "PNG":
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert path.stat().st_size > 20_000
        return
    root = ElementTree.fromstring(path.read_text())
    names = [one.tag.split("}")[1] for one in root.iter()]
    assert names.count("rect") > 1024
    assert "layer | block token head (kv dim)" in "".join(root.itertext())
    assert "url(#padding)" in path.read_text()


def test_a_link_is_copied(visit):
    page = visit(address(left="sglang.nhd", by="layer"))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy link").click()
    page.wait_for_function("document.querySelector('[role=status]').innerText.includes('copied')")
    assert page.evaluate("navigator.clipboard.readText()") == page.url


def test_sides_are_swapped(visit):
    page = visit(address(left="sglang.nhd", left_block=2, right="tensorrt_llm"))
    page.get_by_role("button", name="Swap").click()
    assert page.locator(".side-right .side-row").input_value() == "sglang.nhd"
    assert page.locator(".side-left .side-row").input_value() == "tensorrt_llm"
    assert page.get_by_label("Tokens per block").last.input_value() == "2"


# ---- screens and speed


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800)])
def test_phone_and_desktop(visit, picture, width, height):
    page = visit(address(left="vllm.0.26.nhd", right="tgi.paged", dim=16), width=width, height=height)
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = [page.locator(f".side-{name} canvas").first.bounding_box() for name in ("left", "right")]
    assert all(box["width"] > 300 for box in boxes)
    assert (boxes[1]["y"] > boxes[0]["y"] + 200) == (width < 800)  # one under the other on a phone
    small = page.evaluate(
        """[...document.querySelectorAll("button, select, input")]
            .filter((one) => one.offsetParent && one.getBoundingClientRect().height < 34).map((one) => one.outerHTML)"""
    )
    assert small == []
    picture(page, f"layouts-{width}")
    page.locator(".side-left canvas").first.scroll_into_view_if_needed()
    picture(page, f"layouts-{width}-map")


@pytest.mark.parametrize("extra", [{}, {"wrong": 1}], ids=["maps", "wrong"])
def test_100000_elements_scroll_and_hover_without_a_stall(visit, extra):
    page = visit(
        address(
            left="vllm.lbnhc",
            right="sglang.vectorized_5d",
            layers=2,
            tokens=256,
            heads=2,
            dim=64,
            left_block=16,
            right_block=16,
            by="position",
            **extra,
        )
    )
    counts = page.evaluate(f"Object.values({VIEW}.sides).map((side) => side.shown.table.count)")
    assert all(count >= 100_000 for count in counts)
    settle(page)
    busy = os.getloadavg()[0] > (os.cpu_count() or 1)  # other tests run beside this one, and frames wait for them
    for side in ("left", "right"):
        found = []
        for _ in range(5):
            times = page.evaluate(CHECKS + ".frames", side)
            found.append(times[len(times) // 2] if busy else times[-1])
            if found[-1] < 50:
                break
        assert min(found) < 50, f"{side}: the {'median' if busy else 'longest'} frames of five runs took {found} ms"
