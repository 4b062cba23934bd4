"""kvx view: a recording of a cache in a browser, or one that is still being written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer

from kvx.page import page_text
from kvx.view.server import PORT, FileSource, NoSource, PageServer


def view(
    recording: Annotated[
        Path | None, typer.Argument(help="File of `kvx generate --record` or kvx.view.record(); one that still grows is followed.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. If others can reach it, an access token is made and printed with the URL.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0: any that is free.")] = PORT,
) -> None:
    """Serve the page that shows KV caches in a browser, with a recording to replay, and /metrics for Prometheus."""
    source = NoSource() if recording is None else FileSource(recording)
    server = PageServer(source, page_text({"live": recording is not None}), host=host, port=port)
    try:
        typer.echo(f"{server.url}{'#live' if recording is not None else ''}")
        if server.token:
            typer.echo("Whoever has this address with its token can look; without the token nobody can.")
        typer.echo("Ctrl-C ends it.")
        threading.Event().wait()
    except KeyboardInterrupt:
        typer.echo()
    finally:
        server.close(0.2)
