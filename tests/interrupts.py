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
    """Not those of `with`: a trace also comes by when the block ends, before its end is called, where no signal can."""
    found = {n.lineno for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.stmt)}
    return found - {n.lineno for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.With)}
