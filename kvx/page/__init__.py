"""The page: any KV cache in a browser, byte by byte. One HTML file that needs no server, no network and no build tool.

The text is plain ES modules, style sheets and a skeleton under static/, joined by kvx/page/bundle.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvx.errors import BadArgument
from kvx.page.bundle import FIRST_LINE, html
from kvx.page.data import page_data

__all__ = ["page_data", "page_text", "write_page"]


def page_text(data: dict[str, Any] | None = None) -> str:
    """The page as HTML, with `page_data()` and then `data` embedded: {"live": true} says that a server stands behind it."""
    return html(page_data() | (data or {}))


def write_page(path: str | Path, data: dict[str, Any] | None = None) -> Path:
    """Write the page to a file. An older page is replaced; BadArgument where the file is something else."""
    path = Path(path)
    if path.is_dir():
        path = path / "kvx.html"
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(FIRST_LINE)) != FIRST_LINE.encode():
                raise BadArgument(
                    f"page(): {path} exists and is no page of KVX. `kvx page FILE` writes FILE; name one that does not exist, "
                    "such as kvx.html."
                )
    path.write_text(page_text(data), encoding="utf-8")
    return path
