"""The page's script and style without comments, indentation and spaces that say nothing: a quarter less to carry.

Names, strings, regular expressions and the ends of statements stay as they are, so that what a browser runs is what Node runs in
the tests, token for token, and an error still names a line.
"""

from __future__ import annotations

import re

_WORD = re.compile(r"[\w$]")
# Behind these a slash begins a regular expression; behind a name, a number or a closing bracket it divides.
_BEFORE_REGEX = set("(,=:[!&|?{};+-*%<>~^\n")
_WORDS_BEFORE_REGEX = ("return", "typeof", "case", "in", "of", "new", "delete", "void", "throw")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'')
_REGEX = re.compile(r"/(?:[^/\\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


def squeeze_script(text: str) -> str:
    """Of one ES module. ValueError where a string or a template has no end."""
    out, end = _code(text, 0, is_inside=False)
    if end != len(text):
        raise ValueError(f"a brace too many at character {end}: {text[end : end + 40]!r}")
    return out.strip("\n") + "\n"


def squeeze_style(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"\s*([{;,])\s*", r"\1", text)
    return re.sub(r"\s*;?\s*\}\s*", "}\n", re.sub(r":\s+", ":", text)).lstrip()


def _code(text: str, at: int, *, is_inside: bool) -> tuple[str, int]:
    """Code from `at` on, to the end, or to the brace that ends a template's `${` where it is_inside one; and where that is."""
    out: list[str] = []
    last, depth = "\n", 0  # the last character that is no space

    def add(piece: str) -> None:
        nonlocal last
        out.append(piece)
        last = piece[-1]

    while at < len(text):
        c = text[at]
        if found := _COMMENT.match(text, at):
            at = found.end()
        elif c.isspace():
            stop = re.compile(r"\s+").match(text, at).end()  # type: ignore[union-attr]
            comes = text[stop : stop + 1]
            if "\n" in text[at:stop]:
                if last not in "\n{,([" and comes not in "})]":
                    add("\n")
            elif (_WORD.match(last) and _WORD.match(comes)) or (last == comes and last in "+-/"):
                out.append(" ")
            at = stop
        elif c in "\"'":
            found = _STRING.match(text, at)
            if found is None:
                raise ValueError(f"a string has no end: {text[at : at + 40]!r}")
            add(found[0])
            at = found.end()
        elif c == "`":
            piece, at = _template(text, at)
            add(piece)
        elif c == "/" and _is_regex(out, last) and (found := _REGEX.match(text, at)):
            add(found[0])
            at = found.end()
        else:
            if c == "}" and is_inside and not depth:
                return "".join(out), at
            depth += (c == "{") - (c == "}")
            add(c)
            at += 1
    return "".join(out), at


def _is_regex(out: list[str], last: str) -> bool:
    if last in _BEFORE_REGEX:
        return True
    word = re.search(r"[\w$]+$", "".join(out[-12:]).rstrip())
    return word is not None and word[0] in _WORDS_BEFORE_REGEX


def _template(text: str, at: int) -> tuple[str, int]:
    out, at = ["`"], at + 1
    while at < len(text):
        c = text[at]
        if c == "\\":
            out.append(text[at : at + 2])
            at += 2
        elif c == "`":
            return "".join((*out, "`")), at + 1
        elif text.startswith("${", at):
            inner, at = _code(text, at + 2, is_inside=True)
            out.append(f"${{{inner}}}")
            at += 1
        else:
            out.append(c)
            at += 1
    raise ValueError(f"a template has no end: {text[:40]!r}")
