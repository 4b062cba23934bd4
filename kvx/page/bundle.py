"""From ES modules to one HTML file: modules in the order of their imports, in one inline script that the page's policy names.

Imports have one form, `import { a, b } from "./file.js"`, and names at the top level are unique over all modules, so that joining
is dropping the import lines and the word `export`. A browser then runs what Node runs in the
tests, token for token (kvx/page/squeeze.py).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from kvx.page.squeeze import squeeze_script, squeeze_style

STATIC = Path(__file__).parent / "static"
ENTRY = "page.js"
FIRST_LINE = "<!doctype html><!-- A page of KVX -->"
_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w./-]+\.js)";?\n', re.M)
_EXPORT = re.compile(r"^export (?=(?:async function|const|let|function|class)\b)", re.M)
_NAME = re.compile(r"^(?:export )?(?:const|let|class|(?:async )?function\*?) +(?:\{ ?([\w, ]+?) ?\}|(\w+))", re.M)


def modules() -> list[str]:
    """Names of the files in static/, each after those it imports."""
    found: list[str] = []
    waiting: list[str] = []

    def visit(name: str) -> None:
        if name in found:
            return
        if name in waiting:
            raise ValueError(f"static/{name} imports itself through {' -> '.join([*waiting, name])}.")
        waiting.append(name)
        for _, other in _IMPORT.findall(_read(name)):
            visit(other)
        found.append(waiting.pop())

    visit(ENTRY)
    return found


def names(module: str) -> list[str]:
    """What a module declares at its top level."""
    return [name.strip() for many, one in _NAME.findall(_read(module)) for name in (many or one).split(",")]


def script() -> str:
    """All modules as one."""
    parts = []
    for name in modules():
        text = _EXPORT.sub("", _IMPORT.sub("", _read(name)))
        left = re.search(r"^(import|export)\b.*", text, re.M)
        if left:
            raise ValueError(f"static/{name}: {left[0]!r} is not of a form that bundle.py reads; its first lines say which are.")
        parts.append(f"// ---- {name}\n{squeeze_script(text)}")
    return "".join(parts)


def style() -> str:
    """page.css, then those of the tabs."""
    files = sorted(STATIC.glob("*.css"), key=lambda path: (path.name != "page.css", path.name))
    return squeeze_style("".join(path.read_text(encoding="utf-8") for path in files))


def html(data: dict[str, Any]) -> str:
    """The page as one text, with `data` for its tabs to read."""
    parts = {"style": style(), "script": script()}
    for name, text in parts.items():
        if re.search(r"</(script|style)|<!--", text, re.I):
            raise ValueError(f"static/: the {name} has text that would end its element: </script, </style or <!--.")
    policy = (
        "default-src 'none'; "
        f"script-src {_digest(parts['script'])}; style-src {_digest(parts['style'])}; "
        "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    # "<" as an escape of JSON: no text of the data can end the element it stands in.
    embedded = json.dumps(packed(data), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    fill = {"policy": policy, **parts, "data": embedded}
    return FIRST_LINE + "\n" + re.sub(r"\{\{(\w+)\}\}", lambda part: fill[part[1]], _read("page.html"))


def packed(value: Any) -> Any:
    """Lists of objects with the same fields as a table, which names each field once; data.js makes them objects again."""
    if isinstance(value, dict):
        return {name: packed(part) for name, part in value.items()}
    if not isinstance(value, list | tuple):
        return value
    columns = list(value[0]) if value and isinstance(value[0], dict) else []
    if len(value) > 3 and columns and all(isinstance(row, dict) and list(row) == columns for row in value):
        return {"$columns": columns, "$rows": [[packed(row[name]) for name in columns] for row in value]}
    return [packed(part) for part in value]


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
