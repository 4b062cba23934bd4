"""kvx: the command line's root. Verbs live in files of their own."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import kvx
from kvx.cli import bench, convert, decode, demo, doctor, generate, inspect, layouts, prefill, size, verify
from kvx.errors import KvxError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="One library for every KV cache: describe it, convert it, write it, see it.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvx {kvx.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass  # what every command shares: nothing yet


app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("generate")(generate.generate)
app.command("prefill")(prefill.prefill)
app.command("decode")(decode.decode)
app.command("convert")(convert.convert)
app.command("inspect")(inspect.inspect)
app.command("layouts")(layouts.layouts)
app.command("size")(size.size)
app.command("verify")(verify.verify)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Errors KVX raises on purpose, and those of the disk, are one sentence on stderr, not a trace."""
    try:
        app()
    except KvxError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(2) from None
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        sys.stderr.write(f"kvx: {error.strerror or error}{where}. `kvx doctor` says what this machine has.\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
