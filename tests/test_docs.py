"""What README and docs name exists. tests/test_docs_code.py runs their code."""

from __future__ import annotations

import ast
import re
from functools import cache
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
    assert len(words) > 40
    unused = [word for word in words if f" {word}" not in code and f" {word.replace(' ', '')}" not in code]
    assert not unused, f"docs/words.md has words that no code uses: {', '.join(unused)}"


UNCLEAR = (  # private idiom that readers stumbled over, and what the field says instead
    (r"a tensor a layer", "one tensor per layer"),
    (r"one of \d+ rows", "one of the engine layouts KVX knows"),
    (r"whole after a kill", "still consistent after kill -9"),
    (r"of its own bytes", "of peak bandwidth"),
    (r"over the time its bytes|its bytes need", "time of its memory traffic at peak bandwidth"),
    (r"(is|are|was|were|be) put out\b", "preempted"),
    (r"brought back", "restored, loaded"),
    (r"Of an answer", "Maximum number of tokens per answer"),
    (r"[Ww]hose (KV|K and V) (it|they|these) (is|are)", "which model they belong to"),
    (r"digits \(size: bytes", "loops (size: strides)"),
    (r"Before it is installed the kvx command is", "After `make demo` the command is .venv/bin/kvx"),
    (
        r"\b(bytes|B|rows?|scales?|tensors?|tokens|MB|slots|entries|one) a (token|layer|request|rank|head)\b(?! (sees|reads|has))",
        "per",
    ),
    (r"\bhangs? on\b", "depends on"),
    (r"unless told", "by default"),
)


@cache
def texts_people_read() -> list[tuple[str, str]]:
    """Pages, and every string of kvx that is no docstring: help, errors, tables. Docstrings of commands are help too."""
    found = [
        (p.name, p.read_text()) for p in [*DOCS, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "examples").rglob("*.py")]
    ]
    for path in (ROOT / "kvx").rglob("*.py"):
        tree = ast.parse(path.read_text())
        inner = {
            id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef | ast.Module) and is_doc(n)
        }
        strings = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        shown = [n.value for n in strings if path.parent.name == "cli" or id(n) not in inner]
        found.append((str(path.relative_to(ROOT)), "\n".join(shown)))
    return found


def is_doc(node: ast.FunctionDef | ast.ClassDef | ast.Module) -> bool:
    return bool(node.body) and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)


@pytest.mark.parametrize(("pattern", "instead"), UNCLEAR, ids=[p for p, _ in UNCLEAR])
def test_no_private_idiom(pattern, instead):
    hits = [f"{name}: {m.group()!r}" for name, text in texts_people_read() for m in re.finditer(pattern, text)]
    assert not hits, f"say {instead!r} instead: {hits}"


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
