"""While the command line is still importing: Ctrl-C ends it quietly, with a shell's 130, and not with a trace out of torch; a torch
that is not there or a library of another machine is a sentence.

kvx/__init__.py imports this first. What runs once all is imported has a say of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType


def is_command() -> bool:
    """Whether `kvx` or `python -m kvx` imports KVX, and no program of somebody's own."""
    name = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    return name in ("kvx", "kvx.exe", "-m")  # "-m" stands there while Python looks for the module to run


def begin() -> None:
    """From here on Ctrl-C ends the process at once, unless somebody else has a say in it."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _quit)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _say


def end() -> None:
    """Ctrl-C is KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _quit:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.excepthook is _say:
        sys.excepthook = sys.__excepthook__


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    name = getattr(error, "name", None)
    mend = f"pip install {name}" if kind is ModuleNotFoundError and name else "reinstall kvx, or `make build` in a source checkout"
    sys.stderr.write(f"kvx cannot start: {kind.__name__}: {error}. Mend: {mend}. `python -c 'import kvx'` shows where.\n")


def _quit(number: int, frame: FrameType | None) -> None:
    os._exit(130)  # nothing is open yet


if is_command():
    begin()
