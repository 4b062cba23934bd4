"""The screenshots of docs/see.md and README: the page in Chromium, made by a command.

make picture        writes docs/see.png, docs/see_size.png and docs/see_live.png
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import kvx
from kvx.page import write_page
from tests.page.test_page_live import make, work
from tests.test_imports import ROOT

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MOST_BYTES = 150_000


class Shot(NamedTuple):
    name: str  # of the file in docs/
    address: str
    width: int = 1280
    height: int = 800


# What is pinned stands in the address, so no mouse is needed.
SHOTS = (
    Shot(
        "see.png",
        "#layouts?left=vllm.0.26.nhd&right=tensorrt_llm&heads=4&at=plane:v,position:5,layer:0,head:2,dim:3&right-block=8&left-block=8",
    ),
    Shot("see_size.png", "#size?model=Gemma-3-27B&context=131072&requests=8", height=900),
    Shot("see_live.png", "#live?t={late}", height=900),
)


def write_with_run(folder: Path) -> tuple[str, float]:
    """The page with a recording of a cache of 60 blocks that is too small for its requests, and a time late in it."""
    path = folder / "run.jsonl"
    cache = make(num_blocks=60)
    with kvx.view.record(cache, path, title="a run", interval_s=0.01):
        work(cache, 1.5)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return write_page(folder / "kvx.html", {"recording": records, "recording_name": "a run"}).as_uri(), 0.85 * records[-1]["t"]


def browser_path() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise SystemExit(f"tests.picture_page: no browser: none of {', '.join(BROWSERS)} is on the PATH.")
    return found


def take(browser: Any, shot: Shot, address: str, path: Path) -> None:
    context = browser.new_context(viewport={"width": shot.width, "height": shot.height}, color_scheme="light")
    page = context.new_page()
    page.goto(address)
    page.wait_for_timeout(1500)
    page.screenshot(path=path)
    context.close()


def main() -> None:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        home, late = write_with_run(Path(folder))
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        for shot in SHOTS:
            path = ROOT / "docs" / shot.name
            take(browser, shot, home + shot.address.format(late=f"{late:.3f}"), path)
            size = path.stat().st_size
            assert size < MOST_BYTES, f"{path} has {size:,} bytes; a page of the docs loads at most {MOST_BYTES:,}"
            print(f"docs/{shot.name}: {size:,} bytes")
        browser.close()


if __name__ == "__main__":
    main()
