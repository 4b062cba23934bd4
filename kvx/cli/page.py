"""kvx page: the page that shows a KV cache in a browser, as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvx.page import write_page


def page(
    file: Annotated[Path, typer.Argument(help="The file to write, or a folder for kvx.html.")] = Path("kvx.html"),
) -> None:
    """Write a page that shows KV caches in a browser, byte by byte. It needs no server and no network."""
    written = write_page(file)
    typer.echo(f"Wrote {written} ({written.stat().st_size // 1000} kB). Open it in a browser: {written.resolve().as_uri()}")
