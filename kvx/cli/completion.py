"""kvx completion: a script for the shell, with every verb and option in it, so that Tab starts no Python."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from kvx.cli import main

_BASH = """\
_kvx() {
    local path=kvx cur="${COMP_WORDS[COMP_CWORD]}" verbs= options= i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$path ${COMP_WORDS[i]}" in
            PATHS) path="$path ${COMP_WORDS[i]}" ;;
        esac
    done
    case "$path" in
CASES
    esac
    case "$cur" in
        -*) COMPREPLY=($(compgen -W "$options" -- "$cur")) ;;
        *) COMPREPLY=($(compgen -W "$verbs" -- "$cur")) ;;
    esac
}
complete -o default -F _kvx kvx
"""


class Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell to complete in.")]) -> None:
    """Print a script that completes commands and options: source <(kvx completion bash), or kvx completion fish | source."""
    commands = _commands()
    if shell is Shell.fish:
        lines = [line for path, (verbs, options) in commands.items() for line in _fish(path.split(), verbs, options)]
        typer.echo("\n".join(lines))
        return
    cases = [f'        "{path}") verbs="{" ".join(v)}" options="{" ".join(o)}" ;;' for path, (v, o) in commands.items()]
    paths = "|".join(f'"{path}"' for path in commands if path != "kvx")
    script = _BASH.replace("PATHS", paths).replace("CASES", "\n".join(cases))
    typer.echo(("autoload -U +X bashcompinit && bashcompinit\n" if shell is Shell.zsh else "") + script, nl=False)


def _commands() -> dict[str, tuple[list[str], list[str]]]:
    """Of "kvx", "kvx bench", "kvx bench write" and so on: the verbs that may follow, and the options."""
    found = {}

    def walk(path: str, command: Any, below: dict[str, Any]) -> None:
        options = [name for p in command.params for name in (*p.opts, *p.secondary_opts) if name.startswith("--")]
        found[path] = list(below), [*options, "--help"]
        for verb, child in below.items():
            walk(f"{path} {verb}", child, getattr(child, "commands", {}))

    walk("kvx", typer.main.get_command(main.app), {verb: main.load(verb) for verb in main.VERBS})
    return found


def _fish(path: list[str], verbs: list[str], options: list[str]) -> list[str]:
    """A verb that stands below another too (convert, bench convert) is told apart by what is not on the line."""
    seen = [f"__fish_seen_subcommand_from {verb}" for verb in path[1:]]
    absent = f"not __fish_seen_subcommand_from {' '.join(verbs)}" if verbs else "not __fish_seen_subcommand_from bench"
    when = "; and ".join([*seen, *([absent] if verbs or len(path) == 2 else [])])
    take = [f"-f -a '{' '.join(verbs)}'"] if verbs else []
    return [f"complete -c kvx -n '{when}' {what}" for what in [*take, *(f"-l {name[2:]}" for name in options)]]
