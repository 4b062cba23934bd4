"""Ctrl-C at every line of some files, one after the other."""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


def interrupted_at_every_line(call: Callable[[], Any], *modules: ModuleType) -> Iterator[int]:
    """Run `call`, interrupted at its first line in these modules, then at its second, ... until one run is over before.

    Yields after each that was interrupted: look at what it left behind.
    """
    lines = {str(m.__file__): _lines(Path(str(m.__file__))) for m in modules}
    for number in itertools.count():
        left = number

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal left
            mine = lines.get(frame.f_code.co_filename)
            if mine is None:
                return None
            if event == "line" and frame.f_lineno in mine:
                left -= 1
                if left == -1:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            call()
        except KeyboardInterrupt:
            sys.settrace(before)
            yield number
        else:
            return
        finally:
            sys.settrace(before)


def _lines(path: Path) -> set[int]:
    """Of statements, but for two kinds.

    `with`: a trace also comes by when the block ends, before its end is called, where no signal can. Comprehensions: Python 3.12
    has them in the function's own frame, and leaves a `with` around one without its end when a trace raises in it.
    """
    nodes = list(ast.walk(ast.parse(path.read_text())))
    left_out = {n.lineno for n in nodes if isinstance(n, ast.With)}
    for n in nodes:
        if isinstance(n, (ast.ListComp, ast.SetComp, ast.DictComp)):
            left_out.update(range(n.lineno, (n.end_lineno or n.lineno) + 1))
    return {n.lineno for n in nodes if isinstance(n, ast.stmt)} - left_out
