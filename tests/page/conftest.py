"""A real browser: Chromium through Playwright. What the page logs as an error, throws or asks of another host fails a test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvx.page import write_page
from kvx.page.bundle import STATIC

ROOT = Path(__file__).resolve().parent.parent.parent
SCREENSHOTS = ROOT / "build" / "page"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: requirements-dev.txt has it")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the PATH")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--force-color-profile=srgb"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `kvx page` writes."""
    return write_page(tmp_path_factory.mktemp("page") / "kvx.html")


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's modules in a folder that every version of Node reads as modules."""
    folder = tmp_path_factory.mktemp("modules")
    for path in STATIC.glob("*.js"):
        shutil.copy(path, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


@pytest.fixture
def visit(browser: Any, page_file: Path) -> Iterator[Callable[..., Any]]:
    """visit("#layouts?left=vllm.lbnhc", width=390, dark=True): a tab of the browser on the page, from the file.

    `at` is another file, or the address of a server whose page it is. Nothing but what stands there may be asked for.
    """
    opened: list[Any] = []
    wrong: list[str] = []

    def go(address: str = "", *, at: str | Path = page_file, width: int = 1280, height: int = 800, dark: bool = False) -> Any:
        home = at.as_uri() if isinstance(at, Path) else at
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            accept_downloads=True,
        )
        opened.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda said: wrong.append(f"console: {said.text}") if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(f"page error: {error}"))
        page.on(
            "request",
            lambda asked: (
                None if asked.url.startswith((home, "data:", "blob:")) else wrong.append(f"asked for {asked.url}, from {home}")
            ),
        )
        page.goto(home + address)
        return page

    go.wrong = wrong  # type: ignore[attr-defined]  # for the test that sees that they are found
    yield go
    for context in opened:
        context.close()
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def picture() -> Callable[[Any, str], Path]:
    """picture(page, "layouts-dark"): a screenshot, kept in build/page."""

    def take(page: Any, name: str) -> Path:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        page.screenshot(path=path)
        return path

    return take
