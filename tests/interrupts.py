"""Ctrl-C at every line of some files, one after the other; and at every point where Python looks for signals."""

from __future__ import annotations

import ast
import dis
import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, TypeVar

import pytest

S = TypeVar("S")


@contextmanager
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def signalled_at_every_point(
    prepare: Callable[[], tuple[S, Callable[[], Any]]], *modules: ModuleType, is_hooked: bool = False
) -> Iterator[S]:
    """Send SIGINT to a call at the first point in these modules where Python looks for signals, to the next call at the second ...

    `prepare` makes what is to be looked at, and the call on it; each is yielded after its call was interrupted. That is what a
    Ctrl-C does: Python looks for signals when a function begins, when a loop jumps back, and after a call of a C function. And
    after a call of a Python function where frames are evaluated through a hook (`is_hooked`): torch.compile sets one, debuggers do.
    """
    files = {str(m.__file__) for m in modules}
    _signalled(lambda: None, 0, {__file__})  # Python 3.12 follows no instructions the first time that a process asks for them
    for number in itertools.count():
        made, call = prepare()
        if not _signalled(call, number, files, is_hooked):
            return
        yield made


def _signalled(call: Callable[[], Any], number: int, files: set[str], is_hooked: bool = False) -> bool:
    """Whether the call has so many points, and so was interrupted."""
    last: dict[FrameType, str] = {}  # the instruction that each frame does now
    calling: set[FrameType] = set()  # that have called a Python function in it
    left = number

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if event == "call":
            if frame.f_back is not None:
                calling.add(frame.f_back)
            if frame.f_code.co_filename not in files:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            before, last[frame] = last.get(frame, "RESUME"), _names(frame.f_code)[frame.f_lasti]
            is_python_call = not is_hooked and before in ("CALL", "CALL_KW") and frame in calling
            calling.discard(frame)
            if not is_python_call and (before in ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME") or "BACKWARD" in before):
                left -= 1
                if left == -1:
                    signal.raise_signal(signal.SIGINT)
        return trace

    outer = sys.gettrace()
    with ctrl_c():
        sys.settrace(trace)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(outer)
    return False


def interrupted_by_another_process(work: Callable[[], Any], wanted: int, gap_s: float = 0.001) -> int:
    """Call `work` again and again while another process sends SIGINT at any time: how often it was interrupted."""
    coverage = sys.modules.get("coverage")
    if coverage is not None and coverage.Coverage.current() is not None:
        pytest.skip("coverage takes a lock of its own at every new line; Ctrl-C inside leaves it taken for ever")
    context = multiprocessing.get_context("spawn")
    sender = context.Process(target=_send_sigint, args=(os.getpid(), gap_s), daemon=True)
    count, is_armed = 0, [False]

    def handle(number: int, frame: FrameType | None) -> None:
        if is_armed[0]:  # else it came between two calls
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        sender.start()
        while count < wanted:
            try:
                is_armed[0] = True
                work()
            except KeyboardInterrupt:
                is_armed[0] = False
                count += 1
            is_armed[0] = False
    finally:
        sender.terminate()
        sender.join()
        signal.signal(signal.SIGINT, before)
    return count


def _send_sigint(pid: int, gap_s: float) -> None:
    rng = random.Random(1)
    while True:
        time.sleep(gap_s * (0.5 + rng.random()))
        os.kill(pid, signal.SIGINT)


@cache
def _names(code: CodeType) -> dict[int, str]:
    return {i.offset: i.opname for i in dis.get_instructions(code)}


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
