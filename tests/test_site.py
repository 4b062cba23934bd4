"""The documentation builds as a site without a warning, whole and by itself. `make site` is the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed; requirements-dev.txt has it")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout + done.stderr, "mkdocs has something to say"
    return folder


def test_every_link_leads_somewhere(site: Path) -> None:
    """Of the pages as they are, links that mkdocs does not look at too: those of the API reference and of the navigation."""
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', page.read_text())) for page in site.rglob("*.html")}
    assert len(anchors) > 50
    dead = []
    for page in anchors:
        for href in re.findall(r'<(?:a|link|script|img)\b[^>]*?\b(?:href|src)="([^"]+)"', page.read_text()):
            parts = urlsplit(href)
            if parts.scheme or parts.netloc or page.name == "404.html":
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.exists() or (parts.fragment and target in anchors and unquote(parts.fragment) not in anchors[target]):
                dead.append(f"{page.relative_to(site)}: {href}")
    assert not dead, "\n".join(sorted(set(dead))[:20])


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|img|iframe|link|source|video)\b[^>]*>", page.read_text())
        foreign = [tag for tag in tags if re.search(r'\b(?:src|href)="?(?:https?:)?//', tag) and 'rel="canonical"' not in tag]
        assert not foreign, f"{page.relative_to(site)}: {foreign}"
    styles = "".join(sheet.read_text() for sheet in site.rglob("*.css"))
    assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\"']+", styles)


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    import kvx

    text = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    constants = {"FORMATS", "HND", "NHD", "Table"}
    missing = [name for name in kvx.__all__ if name not in constants and f'id="kvx.{name}"' not in text]
    assert not missing, f"docs/reference/ does not have {', '.join(missing)}"
