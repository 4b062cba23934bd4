"""Engines in processes of their own, started quickly: a process of an environment imports what an engine needs, and forks for each.

Importing vLLM takes longer than starting it. What is forked is as fresh as a process that imported it all itself: no engine ran
before, and no thread was started. A session is one object in such a process; its methods are called by JSON over a socket.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent.parent
_START_S = 300.0
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """A process of an environment that has imported these modules and nothing else happened in."""

    def __init__(self, python: str | Path, preload: Sequence[str], env: Mapping[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvx-fork-"))
        env = {**os.environ, **env, "PYTHONPATH": str(ROOT)}
        command = [str(python), "-m", "tests.engines.forked", *preload]
        with (self.folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, cwd=ROOT)
        self._count, self._lock = 0, threading.Lock()

    def session(self, target: str, *, env: Mapping[str, str] | None = None, **given: Any) -> Session:
        """`target` is "module:Class", made with `given` in a new process whose environment has `env` too. From any thread."""
        with self._lock:
            self._count += 1
            name, log = self.folder / f"{self._count}.sock", self.folder / f"{self._count}.log"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(name))
            listener.listen(1)
            listener.settimeout(1.0)
            ask = {"target": target, "given": given, "env": dict(env or {}), "socket": str(name), "log": str(log)}
            assert self._process.stdin is not None
            with self._lock:
                self._process.stdin.write(json.dumps(ask).encode() + b"\n")
                self._process.stdin.flush()
            for _ in range(int(_START_S)):
                with suppress(TimeoutError):
                    return Session(listener.accept()[0], log)
                if self._process.poll() is not None:
                    break
        raise RuntimeError((self.folder / "server.log").read_text())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)


class Session:
    """RuntimeError with all that the process said where a call fails there."""

    def __init__(self, connection: socket.socket, log: Path) -> None:
        self._socket, self._log = connection, log
        self._socket.settimeout(600)
        self._file = connection.makefile("rw")
        self.pid = 0
        self.pid = int(self._hear())

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ask(self, call: str, **given: Any) -> Any:
        self.tell(call, **given)
        return self.hear()

    def tell(self, call: str, **given: Any) -> None:
        """Without waiting: hear() has the answer."""
        self._file.write(json.dumps({"call": call, "given": given}) + "\n")
        self._file.flush()

    def hear(self) -> Any:
        return self._hear()

    def _hear(self) -> Any:
        line = self._file.readline()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            self.close()
            raise RuntimeError(f"{self.log}\n{answer['error']}")
        return answer["ok"]

    def close(self) -> None:
        """With every process that it started."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        with suppress(OSError):
            self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_servers: dict[tuple[str, tuple[str, ...]], ForkServer] = {}
_lock = threading.Lock()


def fork_server(python: str | Path, preload: Sequence[str], env: Mapping[str, str] | None = None) -> ForkServer:
    """The one of this environment and these modules; it ends with this process."""
    key = str(python), tuple(preload)
    with _lock:
        if key not in _servers:
            _servers[key] = ForkServer(python, preload, env or {})
            atexit.register(_servers[key].close)
        return _servers[key]


def _child(ask: dict[str, Any]) -> None:
    os.setsid()  # Session.close() ends the group
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # and a test that is killed leaves none behind
    os.environ.update(ask["env"])
    out = os.open(ask["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(ask["socket"])
    file = connection.makefile("rw")

    def say(**answer: Any) -> None:
        sys.stdout.flush()  # what was printed is in the log by then
        file.write(json.dumps(answer) + "\n")
        file.flush()

    try:
        module, name = ask["target"].split(":")
        thing = getattr(importlib.import_module(module), name)(**ask["given"])
        say(ok=os.getpid())
        for line in file:
            told = json.loads(line)
            say(ok=getattr(thing, told["call"])(**told["given"]))
    except BaseException:
        say(error=traceback.format_exc())
    os._exit(0)  # engines with wires in them may fall over at exit, long after the answer


def _serve(preload: Sequence[str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for name in preload:
        importlib.import_module(name)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _child(json.loads(line))


if __name__ == "__main__":
    _serve(sys.argv[1:])
