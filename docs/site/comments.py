"""The API reference shows comments behind parameters and fields: `k: Tensor,  # [num_tokens, num_kv_heads, head_dim]`.

An extension of griffe, which mkdocstrings reads the sources with. Shapes and units are written once, on the line of the argument.
"""

from __future__ import annotations

import ast
import io
import tokenize
from typing import Any

import griffe


class Comments(griffe.Extension):
    def __init__(self) -> None:
        self._of_file: dict[Any, dict[int, str]] = {}

    def on_function_instance(self, *, node: Any, func: griffe.Function, **_: Any) -> None:
        if not isinstance(node, ast.FunctionDef):
            return
        comments = self._comments(func)
        names = [a for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if a.arg not in ("self", "cls")]
        said = [f"    {a.arg}: {comments[a.end_lineno]}" for a in names if a.end_lineno in comments]
        if said:
            text = func.docstring.value if func.docstring else ""
            func.docstring = griffe.Docstring(f"{text}\n\nArgs:\n" + "\n".join(said), parent=func, parser="google")

    def on_class_members(self, *, node: Any, cls: griffe.Class, **_: Any) -> None:
        """Fields of a dataclass or NamedTuple as one list, in place of a heading for each."""
        if not isinstance(node, ast.ClassDef):
            return
        comments = self._comments(cls)
        fields = [f for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name) and f.target.id[0] != "_"]
        said = [f"    {ast.unparse(f.target)}: {comments[f.end_lineno]}" for f in fields if f.end_lineno in comments]
        if said:
            text = cls.docstring.value if cls.docstring else ""
            cls.docstring = griffe.Docstring(f"{text}\n\nAttributes:\n" + "\n".join(said), parent=cls, parser="google")

    def _comments(self, of: Any) -> dict[int, str]:
        """Behind code, by line. Lines of comment below one belong to it where they go on with its sentence, in lower case."""
        path = of.filepath
        if path not in self._of_file:
            found: dict[int, str] = {}
            above: int | None = None  # the line that a comment on the next line would go on with
            for t in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
                if t.type != tokenize.COMMENT or "type: ignore" in t.string:
                    continue
                line, text, is_behind = t.start[0], t.string.lstrip("# ").strip(), bool(t.line[: t.start[1]].strip())
                if is_behind:
                    found[line] = text
                    above = line
                elif above is not None and line == above + 1 + found[above].count("\0") and text[:1].islower():
                    found[above] += f"\0{text}"
            self._of_file[path] = {line: text.replace("\0", " ") for line, text in found.items()}
        return self._of_file[path]
