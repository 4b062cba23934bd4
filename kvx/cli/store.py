"""kvx store: this machine's memory as a tier for engines here and elsewhere, over NIXL. `disk:DIR` needs no such process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kvx.cli.prefill import say
from kvx.spec.byte_size import byte_text, parse_bytes
from kvx.tiers.nixl_server import NixlServer
from kvx.wires.address import host_and_port
from kvx.wires.choose import check_wire
from kvx.wires.secret import HOME, read_or_make_secret


def store(
    listen: Annotated[str, typer.Option(help="Serve engines whose tiers say nixl:HOST:PORT:SIZE on this HOST:PORT only, until "
                                             "Ctrl-C.")],
    size: Annotated[str, typer.Option(help="Memory for blocks, like 64GB. Each kind of blocks (model, format, block size, rank) "
                                           "gets the SIZE that the first engine to use it asks for, or what is left of --size.")],
    secret_file: Annotated[Path, typer.Option(help="File with the secret that this store and its engines share. It is created, "
                                                   "readable only by its owner, if it is missing.")] = HOME,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:  # fmt: skip
    """Keep blocks of engines in this process's memory: a tier that several machines share, over NIXL.

    Engines read their secret from ~/.kvx/secret: copy the file of --secret-file there. Blocks are lost when this process exits.
    docs/tiers.md has the engines' side, docs/wires.md what the secret protects.
    """
    check_wire("nixl", listen, is_listening=True)
    capacity_bytes = parse_bytes(size, "--size")
    secret, is_new = read_or_make_secret(secret_file)
    if is_new:
        typer.echo(f"made the secret {secret_file.expanduser()}; an engine on another machine needs a copy of it", err=True)
    with NixlServer(*host_and_port(listen), None, capacity_bytes, secret=secret):
        say(as_json, {"listening": listen, "bytes": capacity_bytes},
            f'{byte_text(capacity_bytes)} for engines with "tiers": ["nixl:{listen}:SIZE"]; Ctrl-C ends it')  # fmt: skip
        while True:
            time.sleep(1)
