"""kvx completion: the script, in the shell it is for. Shells that are not installed are skipped by name."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvx.cli.main import VERBS, app


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    paths = {shell: folder / shell for shell in ("bash", "zsh", "fish")}
    for shell, path in paths.items():
        done = CliRunner().invoke(app, ["completion", shell])
        assert done.exit_code == 0, done.output
        path.write_text(done.stdout)
    return paths


def ask(script: dict[str, Path], shell: str, line: str) -> list[str]:
    """What Tab offers at the end of the line."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    if shell == "fish":
        code = f"source {script['fish']}; complete -C '{line}'"
    else:
        words = " ".join(f"'{word}'" for word in line.split(" "))
        setup = "compdef() { :; }; setopt ksh_arrays sh_word_split; " if shell == "zsh" else ""
        last = line.count(" ")
        code = f'{setup}source {script[shell]}; COMP_WORDS=({words}) COMP_CWORD={last}; _kvx; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run([shell, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    offered = [each.split("\t")[0] for each in done.stdout.split("\n") if each]
    return [each for each in offered if each.startswith(line.split(" ")[-1])] if shell == "zsh" else offered  # as zsh does itself


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_tab(script, shell):
    assert set(ask(script, shell, "kvx ")) >= set(VERBS)
    assert ask(script, shell, "kvx ge") == ["generate"]
    assert "--kv-format" in ask(script, shell, "kvx generate --kv")
    assert "--prompt" not in ask(script, shell, "kvx doctor --")
    assert ask(script, shell, "kvx bench conv") == ["convert"]
    bench = ask(script, shell, "kvx bench convert --")
    assert "--only" in bench
    assert "--id-order" not in bench  # of `kvx convert`
    assert "--id-order" in ask(script, shell, "kvx convert --to vllm --")
    assert "--version" in ask(script, shell, "kvx --")


def test_bash_completes_at_a_prompt(script, tmp_path):
    """As a person has it: bash looks the function up by the command's name, and falls back on files."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    code = f"source {script['bash']}; complete -p kvx"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout == "complete -o default -F _kvx kvx\n"
    assert ask(script, "bash", "kvx inspect ") == []  # then -o default names files


def test_an_unknown_shell_is_refused():
    done = CliRunner().invoke(app, ["completion", "tcsh"])
    assert done.exit_code == 2
    assert "tcsh" in done.output
