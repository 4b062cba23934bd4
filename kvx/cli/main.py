"""kvx: the command line's root. Verbs live in files of their own, which are imported when called: `kvx --help` needs no torch."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import kvx
from kvx.cli import starting
from kvx.errors import KvxError

# In the order of `kvx --help`. Each is a function in kvx/cli/<verb>.py, or a typer app of verbs of its own.
VERBS = (
    "demo",
    "doctor",
    "generate",
    "prefill",
    "decode",
    "store",
    "convert",
    "inspect",
    "layouts",
    "page",
    "view",
    "size",
    "verify",
    "llama",
    "bench",
    "completion",
)


class CannotStart(Exception):
    """A verb's imports failed; the cause says how."""


def load(verb: str) -> Any:
    """The verb as a command, imported. Ctrl-C meanwhile ends the process quietly."""
    starting.begin()
    try:
        module = import_module(f"kvx.cli.{verb}")
    except Exception as error:
        raise CannotStart from error
    finally:
        starting.end()
    if hasattr(module, "app"):
        group = typer.main.get_group(module.app)
        group.name = verb
        return group
    single = typer.Typer(add_completion=False)
    single.command(verb)(getattr(module, verb))
    return typer.main.get_command(single)


def summary(verb: str) -> str:
    """What --help says of it, read and not run: its function's docstring, or its app's help."""
    found = find_spec(f"kvx.cli.{verb}")
    if found is None or found.origin is None or not Path(found.origin).is_file():
        return ""  # an installation without sources
    for node in ast.parse(Path(found.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == verb:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.targets[0]) == "app":
            return str(next(ast.literal_eval(part.value) for part in node.value.keywords if part.arg == "help"))
    raise LookupError(f"kvx/cli/{verb}.py has neither a function {verb}() nor an app.")


class Verbs(TyperGroup):
    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.commands = {verb: TyperCommand(verb) for verb in VERBS}  # names alone, until one is called or --help asks

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for verb, command in self.commands.items():
            command.help = summary(verb)
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        verb, _, rest = super().resolve_command(ctx, args)
        return verb, load(str(verb)), rest


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    help="One library for every KV cache of LLM inference: describe it, convert it, run on it, move it, see it.",
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


def main() -> None:
    """Errors KVX raises on purpose, and those of the disk, are one sentence on stderr, not a trace."""
    try:
        app()
    except CannotStart as error:
        starting.say(error.__cause__ or error)
        raise SystemExit(1) from None
    except KvxError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(2) from None
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        sys.stderr.write(f"kvx: {error.strerror or error}{where}. `kvx doctor` says what this machine has.\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
