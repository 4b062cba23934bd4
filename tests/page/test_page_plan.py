"""The Plan tab: its planner in Node beside the library's, and the tab in a browser, stepped and played."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import kvx
from kvx.layout.plan_vectors import plan_vectors
from kvx.layout.registry import registry
from kvx.page.bundle import STATIC

HERE = Path(__file__).parent
SIZES = {"num_layers": 2, "num_blocks": 2, "block_size": 4, "num_kv_heads": 4, "head_dim": 8}
ADDRESS = "#plan?from=vllm.lbnhc&to=tensorrt_llm&m=2&n=4"


def the_plan(m: int = 2, n: int = 4, ranks: range | None = None) -> kvx.Plan:
    src, dst = kvx.engine("vllm.lbnhc").spec(**SIZES), kvx.engine("tensorrt_llm").spec(**SIZES)
    return kvx.plan([src.shard(m, i) for i in range(m)], [dst.shard(n, i) for i in ranks or range(n)], partial=ranks is not None)


def test_every_plan_has_the_librarys_words_and_runs(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not on the PATH; the page's code is then checked in the browser alone")
    vectors = plan_vectors()
    (tmp_path / "formats.json").write_text(json.dumps(registry()["formats"]))
    (tmp_path / "vectors.json").write_text(json.dumps(vectors))
    done = subprocess.run(
        [node, str(HERE / "check_plans.mjs"), str(STATIC), str(tmp_path / "formats.json"), str(tmp_path / "vectors.json")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert not result["wrong"], json.dumps(result["wrong"][:2])
    assert result["planned"] == sum("explain" in v for v in vectors) > 150
    assert result["refused"] == sum("refused" in v for v in vectors) > 30
    assert result["runs"] > 2000


def test_stepping_by_button_key_and_slider(visit, picture):
    page = visit(ADDRESS)
    plan = the_plan()
    page.get_by_text("As plan.explain() writes it").click()
    assert page.locator(".plan-text").inner_text() == plan.explain()
    assert page.locator(".plan-boxes tbody tr").count() == len(plan.boxes)
    runs = list(plan.runs([0], [0]))
    caption = page.locator(".plan-caption")
    assert caption.inner_text() == f"{2 * len(runs)} runs, none moved yet."
    page.get_by_role("button", name="One step on").click()
    page.get_by_role("button", name="One step on").click()
    run = runs[1]
    said = f"Run 2 of {2 * len(runs)}, row copy: {run.bytes} bytes from rank 0, buffer 0, byte {run.src_offset}"
    assert caption.inner_text().startswith(said)
    assert page.get_by_role("status").inner_text() == caption.inner_text()
    assert "step=2" in page.url
    page.locator(".plan-canvas").focus()
    page.keyboard.press("End")
    assert caption.inner_text().startswith(f"Run {2 * len(runs)} of")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert caption.inner_text().startswith("Run 1 of")
    assert "Run 1 of" in page.locator(".plan-canvas").get_attribute("aria-label")
    page.get_by_label("Step", exact=True).fill("40")
    picture(page, "plan-desktop")
    # The link shows the same step; a click on a byte goes to the run that moves it.
    other = visit("#" + page.url.split("#", 1)[1], width=390, height=844, dark=True)
    assert other.locator(".plan-caption").inner_text() == caption.inner_text()
    assert other.evaluate("document.documentElement.scrollWidth") <= 390
    picture(other, "plan-phone-dark")
    page.locator(".plan-canvas").click(position={"x": 76, "y": 10})
    assert "byte 0 to" in caption.inner_text()


def test_what_moved_is_drawn(visit):
    """All of the destination has the colour of the ranks it came from; before, none of it has."""
    page = visit(ADDRESS)
    page.get_by_role("button", name="To the end").click()
    count = """() => {
        const canvas = document.querySelector(".plan-canvas"), ink = canvas.getContext("2d");
        const data = ink.getImageData(canvas.width / 2, 0, canvas.width / 2, canvas.height).data, found = {};
        for (let i = 0; i < data.length; i += 4) {
            const name = `${data[i]} ${data[i + 1]} ${data[i + 2]} ${data[i + 3]}`;
            found[name] = (found[name] ?? 0) + 1;
        }
        return found;
    }"""
    colours = page.evaluate(count)
    named = "name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
    blue, orange = (" ".join(map(str, [*bytes.fromhex(page.evaluate(named, name)[1:]), 255])) for name in ("--c0", "--c1"))
    assert colours[blue] > 10_000
    assert abs(colours[blue] - colours[orange]) < 0.1 * colours[blue]
    assert blue not in visit(ADDRESS).evaluate(count)


def test_playing_ends_and_can_be_stopped(visit):
    page = visit("#plan?from=vllm.lbnhc&to=tensorrt_llm&m=1&n=1&layers=1&heads=1&blocks=1")
    page.get_by_role("button", name="Play").click()
    page.get_by_role("button", name="Pause").wait_for()
    page.get_by_text("All runs moved.").wait_for()
    assert page.get_by_role("button", name="Play").count() == 1
    assert re.search(r"step=\d+", page.url)


def test_without_motion_where_none_is_wanted(visit):
    page = visit(ADDRESS)
    page.emulate_media(reduced_motion="reduce")
    page.get_by_role("button", name="Play").click()
    assert page.locator(".plan-caption").inner_text().startswith("Run 128 of 128")


def test_a_single_rank_leaves_the_others_out(visit):
    page = visit(ADDRESS + "&rank=1")
    found = the_plan(ranks=range(1, 2))
    assert [f"Left out: {r}" in page.locator(".plan-facts").inner_text() for r in found.left_out] == [True] * len(found.left_out)
    assert found.left_out
    page.get_by_role("button", name="Swap sides").click()
    assert page.locator(".plan-where").first.input_value() == "tensorrt_llm"
    assert "4 -> 2 shards" in page.locator(".plan-facts").inner_text()


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("from=layer | block tokn head dim", 'unknown axis "tokn"'),
        ("from=<img src=x onerror=alert(1)>", "unknown axis"),
        ("m=3", "4 KV heads over 3 ranks: neither divides the other"),
        ("from=sglang.mla&heads=1&m=1&n=1", "has 1 planes (k)"),
        ("layers=none", 'Layers is "none"'),
        ("n=2&rank=7", "the address names rank 7"),
        ("ff=fp8_e4m3_per_block&ft=fp8_e4m3_per_block&bt=8", "whose scales belong to blocks"),
        ("ff=gold", 'format "gold" does not exist'),
    ],
)
def test_what_cannot_be_planned_is_told(visit, address, sentence):
    page = visit("#plan?" + address.replace(" ", "%20").replace("<", "%3C").replace("|", "%7C"))
    assert sentence in page.get_by_role("alert").inner_text()
    assert page.locator("main img").count() == 0
    assert not page.locator(".plan-picture").is_visible()


def test_many_runs_are_stepped_through_up_to_a_limit(visit):
    page = visit("#plan?from=sglang.nhd&to=tensorrt_llm&m=8&n=4&layers=32&heads=8&dim=128&blocks=64&bf=16&bt=16")
    assert "The first 20,000 of" in page.locator(".plan-caption").inner_text()
    click = "document.querySelector('[aria-label=\"To the end\"]').click()"
    assert page.evaluate(f"() => {{ const begin = performance.now(); {click}; return performance.now() - begin; }}") < 1000


def test_a_plan_draws_itself_as_svg():
    """Well formed, with both sides' buffers, every run of the first blocks, and no text of a spec as markup."""
    from xml.etree import ElementTree

    plan = the_plan()
    root = ElementTree.fromstring(plan.to_svg())
    rectangles = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(rectangles) == 2 + 4 + 2 * len(list(plan.runs([0], [0])))
    words = " ".join(e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "2 → 4 shards" in words
    assert "row copy, 16 bytes each" in words
    assert plan._repr_html_().startswith("<svg")
    assert "print(plan.explain())" in plan._repr_html_()
    partial = the_plan(ranks=range(1, 2))
    assert f"left out: {partial.left_out[0]}" in partial.to_svg()
    # A format that changes, and more runs and buffers than a picture has room for.
    sizes = {**SIZES, "num_layers": 64, "head_dim": 64, "num_kv_heads": 8}
    cells = kvx.plan(kvx.engine("sglang.nhd").spec(**sizes), kvx.engine("tensorrt_llm").spec(**sizes, format="int8_per_token_head"))
    text = cells.to_svg()
    ElementTree.fromstring(text)
    assert "drawn: the first 3,000 runs" in text
    assert "drawn: the first 40 of 128" in text
    assert len(text) < 10**6
