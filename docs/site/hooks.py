"""What the site takes from outside docs/: files that pages link to, CONTRIBUTING.md and SECURITY.md as pages, the C header.

mkdocs.yml names this file. Nothing here runs when the pages are read in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = ("CONTRIBUTING.md", "SECURITY.md")  # of the repository's root
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    for page in list(files.documentation_pages()):
        for target in LINK.findall(page.content_string):
            path = _outside(page.src_uri, target)
            is_copied = path and path not in PAGES and not path.startswith("docs/") and (ROOT / path).is_file()
            if is_copied and not files.get_file_from_path(path):
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files of the repository go to the site's copy; of a folder the name is said. mkdocs warns of what does not exist."""
    where = page.file.src_uri

    def folder(match: re.Match[str]) -> str:
        path = _outside(where, match[2])
        if not path or not (ROOT / path).is_dir():
            return match[0]
        return f"`{path}/`" if match[1].strip("`/") == path else f"{match[1]} (`{path}/` of the repository)"

    def link(match: re.Match[str]) -> str:
        path = _outside(where, match[1])
        if not path or not (ROOT / path).is_file():
            return match[0]
        return f"]({posixpath.relpath(path.removeprefix('docs/'), posixpath.dirname(where) or '.')}"

    markdown = re.sub(r"\[([^][]+)\]\(([^)#\s]+)\)", folder, markdown)
    return LINK.sub(link, markdown.replace("<!-- include/kvx_abi.h -->", _header()))


def _outside(page: str, target: str) -> str:
    """The path in the repository of what a page links to; "" where it is one of docs/."""
    base = "." if page in PAGES else posixpath.join("docs", posixpath.dirname(page))
    path = posixpath.normpath(posixpath.join(base, target))
    return "" if path.startswith("..") or (path.startswith("docs/") and page not in PAGES) else path


def _header() -> str:
    """include/kvx_abi.h in its own sections: each begins with a comment of dashes."""
    first, *sections = re.split(r"^(?=/\* -{4,} )", (ROOT / "include" / "kvx_abi.h").read_text(), flags=re.M)
    out = [f"## Rules, and the version\n\n```c\n{first.strip()}\n```\n"]
    for section in sections:
        title = re.sub(r" *\*/| \(docs/.*|:.*", "", re.sub(r"^/\* -+ ", "", section.splitlines()[0])).strip()
        out.append(f"## {title[0].upper()}{title[1:]}\n\n```c\n{section.strip()}\n```\n")
    return "\n".join(out)
