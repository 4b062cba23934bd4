"""What README and docs name exists. tests/test_docs_code.py runs their code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize(
    "path", [p for p in [*DOCS, ROOT / "CONTRIBUTING.md"] if p.exists()], ids=lambda p: str(p.relative_to(ROOT))
)
def test_links_and_files_exist(path):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}, which does not exist"


def test_make_targets_named_in_docs_exist():
    makefile = (ROOT / "Makefile").read_text()
    for path in [*DOCS, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"`make ([a-z-]+)`", path.read_text()):
            assert re.search(rf"^{target}:", makefile, re.M), f"{path.name} names `make {target}`"


def test_words_are_used():
    """Every word of docs/words.md stands somewhere in the code or its header, each word of a row on its own."""
    sources = [p for d in ("kvx", "native", "include") for p in (ROOT / d).rglob("*") if p.suffix in (".py", ".h", ".cpp", ".cu")]
    code = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", "\n".join(p.read_text() for p in sources))
    code = re.sub(r"[^a-z0-9]+", " ", code.lower().replace("'s", ""))
    ours = (ROOT / "docs" / "words.md").read_text().split("## Other engines' words")[0]
    rows = [line.split("|") for line in ours.splitlines() if line.startswith("| ") and "KVX_DTYPE" not in line]
    words = [re.sub(r"[^a-z0-9]+", " ", re.sub(r"\(.*?\)", "", word).lower()).strip() for row in rows for word in row[1].split(",")]
    assert len(words) > 100
    unused = [word for word in words if f" {word}" not in code and f" {word.replace(' ', '')}" not in code]
    assert not unused, f"docs/words.md has words that no code uses: {', '.join(unused)}"


def test_header_and_spec_agree():
    """Every call and struct of the header is in docs/spec.md."""
    header, spec = (ROOT / "include" / "kvx_abi.h").read_text(), (ROOT / "docs" / "spec.md").read_text()
    names = set(re.findall(r"\b(kvx_[a-z0-9_]+)\(", header)) | set(re.findall(r"^} (kvx_\w+_t);", header, re.M))
    missing = sorted(n for n in names if n not in spec and not re.match(r"kvx_launch_.*_(f32|f16|bf16)$", n))
    assert not missing, f"docs/spec.md does not mention {missing}"


def _messages() -> list[str]:
    """Every string of kvx/, its values left out: what errors can say."""
    found = []
    for path in (ROOT / "kvx").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.ClassDef):
                found.append(node.name)
    return found


def test_messages_of_troubleshooting_are_those_of_the_code():
    """Each heading that is a message, its parts between the dots in one string of the code."""
    messages = _messages()
    headings = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    assert len(headings) > 40
    for heading in headings:
        parts = [re.escape(part.strip()) for part in heading.split("...") if part.strip()]
        assert any(re.search(".*".join(parts), m, re.S) for m in messages), f"troubleshooting.md: no message says {heading!r}"
