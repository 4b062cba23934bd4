"""The code of README and docs/ runs.

Blocks of a page run in order, in one namespace and one temporary folder:
    ```python                       run
    ```python title="Needs vLLM"    read but not run where that is missing; counted as a skipped test. Readers see the title too
    ```console                      each line after "$ " is run; lines below it must be in its output, "..." standing for anything.
                                    "# exit code 1" behind a command: that is what it ends with
Other blocks are text. Of `kvx` commands anywhere, the verbs and options must exist.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import kvx.cli.main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What a block may need, and whether this machine has it. What is never there is tried elsewhere: `make test-engines`, tests/wires.
NEEDS: dict[str, Callable[[], bool]] = {
    "a GPU": torch.cuda.is_available,
    "a download": lambda: False,
    "a peer with NIXL": lambda: False,
    "vLLM": lambda: False,
    "kvx[events]": lambda: bool(find_spec("zmq") and find_spec("msgspec")),  # tests/engines/test_vllm_events.py runs it
}


class Block(NamedTuple):
    page: Path
    line: int  # of its first line of code
    language: str
    title: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def needs(self) -> str:
        return self.title.removeprefix("Needs ") if self.title.startswith("Needs ") else ""

    @property
    def runs(self) -> bool:
        return self.language in ("python", "console") and (not self.needs or NEEDS[self.needs]())


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"^( *)```(\w*)([^\n`]*)\n(.*?)^\1``` *$", text, re.S | re.M)
    return [
        Block(page, text.count("\n", 0, m.start(4)) + 1, m[2], "".join(re.findall(r'title="(.*?)"', m[3])), textwrap.dedent(m[4]))
        for m in found
    ]


BLOCKS = [block for page in PAGES for block in blocks(page)]
LEFT_OUT = [b for b in BLOCKS if b.needs and not b.runs]


@pytest.mark.filterwarnings("default::kvx.errors.KvxWarning")  # a page may show what warns
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.runs for b in blocks(p))], ids=lambda p: str(p.relative_to(ROOT)))
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("COLUMNS", "160"), ("TERM", "dumb"), ("PYTHONPATH", str(ROOT))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if not block.runs:
            continue
        if block.language == "python":
            code = "\n" * (block.line - 1) + block.code  # so that errors name the line of the page
            exec(compile(code, block.name, "exec"), names)
        else:
            for at, command, shown in commands(block):
                _compare(at, command, shown)


@pytest.mark.parametrize("block", LEFT_OUT, ids=lambda b: b.name)
def test_blocks_that_need_more(block: Block) -> None:
    compile(block.code, block.name, "exec")
    pytest.skip(f"{block.name} needs {block.needs}")


def test_blocks_are_found() -> None:
    """So that a block which is written otherwise does not silently stop being one."""
    fences = sum(len(re.findall(r"^ *```(?:python|console)\b", page.read_text(), re.M)) for page in PAGES)
    ours = [b for b in BLOCKS if b.language in ("python", "console")]
    assert len(ours) == fences > 30
    assert len(LEFT_OUT) * 10 < len(ours), "most code of the documentation has to run"
    assert not [b.name for b in BLOCKS if b.language in ("py", "Python", "python3", "pycon")], "say ```python"
    assert not [f"{b.name}: {b.title}" for b in BLOCKS if b.needs and b.needs not in NEEDS]


def commands(block: Block) -> list[tuple[str, str, list[str]]]:
    """(where, the command, the lines shown below it)."""
    found: list[tuple[str, str, list[str]]] = []
    for n, line in enumerate(block.code.splitlines()):
        if line.startswith("$ "):
            found.append((f"{block.page.relative_to(ROOT)}:{block.line + n}", line[2:], []))
        elif line.strip():
            assert found, f"{block.name}: a console block begins with a command, `$ ...`"
            found[-1][2].append(line)
    return found


def _compare(at: str, command: str, shown: list[str]) -> None:
    code, out = _run(command)
    want = int(m[1]) if (m := re.search(r"# exit code (\d+)", command)) else 0
    assert code == want, f"{at}: {command} ended with {code}\n{out}"
    lines = iter(" ".join(line.split()) for line in out.splitlines())
    for line in shown:
        pattern = re.escape(" ".join(line.split())).replace(r"\.\.\.", ".*")
        assert any(re.fullmatch(pattern, got) for got in lines), f"{at}: {command} does not say {line!r} (in this order):\n{out}"


def _run(command: str) -> tuple[int, str]:
    if not command.startswith("kvx "):
        done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
        return done.returncode, done.stdout
    out = io.StringIO()
    argv, sys.argv = sys.argv, shlex.split(command, comments=True)
    try:
        with redirect_stdout(out), redirect_stderr(out):
            kvx.cli.main.main()
    except SystemExit as end:
        return int(end.code or 0), out.getvalue()
    finally:
        sys.argv = argv
    return 0, out.getvalue()


def _kvx_lines() -> list[tuple[str, list[str]]]:
    """(where, words) of each kvx command in a block that is not Python, or between backticks."""
    found = []
    for page in PAGES:
        for n, line in enumerate(page.read_text().splitlines(), 1):
            inline = re.findall(r"`(kvx [a-z].*?)`", line)
            whole = re.match(r"^ *(?:\$ )?(kvx [a-z]+ .*)$", line)
            for text in [*inline, *([whole[1]] if whole else [])]:
                found.append((f"{page.relative_to(ROOT)}:{n}", re.sub(r"  #.*", "", text).split()[1:]))
    return found


def test_commands_and_options_exist() -> None:
    verbs: dict[str, Any] = {}
    checked = 0
    for where, (verb, *words) in _kvx_lines():
        if verb not in kvx.cli.main.VERBS:
            continue  # a sentence
        if verb not in verbs:
            verbs[verb] = kvx.cli.main.load(verb)
        command = verbs[verb]
        if getattr(command, "commands", None) and words and re.fullmatch("[a-z]+", words[0]):
            assert words[0] in command.commands, f"{where}: kvx {verb} {words[0]}: there are {', '.join(command.commands)}"
            command = command.commands[words[0]]
        known = {"--help", *(opt for p in command.params for opt in (*p.opts, *p.secondary_opts))}
        for word in words:
            if re.fullmatch(r"--[a-z][a-z-]*", word):
                checked += 1
                assert word in known, f"{where}: kvx {verb} has no {word}"
    assert checked > 50
