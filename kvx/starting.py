"""Ctrl-C while the command line is still importing: it ends quietly, with a shell's 130, and not with a trace out of torch.

kvx/__init__.py imports this first. What runs once all is imported has a say of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType


def is_command() -> bool:
    """Whether `kvx` or `python -m kvx` imports KVX, and no program of somebody's own."""
    name = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    return name in ("kvx", "kvx.exe", "-m")  # "-m" stands there while Python looks for the module to run


def begin() -> None:
    """From here on Ctrl-C ends the process at once, unless somebody else has a say in it."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _quit)


def end() -> None:
    """Ctrl-C is KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _quit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _quit(number: int, frame: FrameType | None) -> None:
    os._exit(130)  # nothing is open yet


if is_command():
    begin()
