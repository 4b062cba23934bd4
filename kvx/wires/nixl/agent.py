"""A door to NIXL: an agent with its memory, its peers, their messages, and transfers that end by a deadline.

Descriptors come from `plan.runs()`: where two caches differ in layout or sharding only, the wire itself does the conversion.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvx.errors import BadArgument
from kvx.layout.buffers import memory_bytes
from kvx.layout.plan import Run
from kvx.wires.wire import Deadline, WireError, need

INSTALL = "pip install --no-deps nixl nixl-cu13 (nixl-cu12 where CUDA is 12; either runs without a GPU)."
_numbers = itertools.count()


def load() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # what goes wrong is raised here as a sentence
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    return need("nixl._api", "nixl", INSTALL)


class Remote(NamedTuple):
    """Buffers in a peer's memory, registered there."""

    peer: str
    addresses: tuple[int, ...]  # of buffer 0, 1, ... of the plan's side
    memory: str = "DRAM"  # or VRAM
    device: int = 0


def agent_name(port: int) -> str:
    """Whoever asks a port for metadata must name the agent there."""
    return f"kvx:{port}"


class NixlAgent:
    """Thread-safe. Use it in a `with`: leaving gives back every registration and handle, whatever happened."""

    def __init__(
        self,
        name: str = "",  # "": one of its own. An agent cannot know two peers of one name
        *,
        listen_port: int | None = None,  # answers those who ask for its metadata; None: give metadata by hand
        backends: Sequence[str] = ("UCX",),
        progress_thread: bool = False,  # it keeps a core busy. Without: bytes move while either side looks (wait, notifications)
    ) -> None:
        api = load()
        logging.getLogger("nixl").setLevel(logging.WARNING)  # its INFO goes to stdout
        _leave_early()
        self.name = name or f"kvx-{os.getpid()}-{next(_numbers)}-{os.urandom(4).hex()}"
        config = api.nixl_agent_config(
            enable_prog_thread=progress_thread,
            enable_listen_thread=listen_port is not None,
            listen_port=listen_port or 0,
            backends=list(backends),
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        try:
            self._agent: Any = api.nixl_agent(self.name, config)
        except Exception as error:
            at = f" at port {listen_port}" if listen_port else ""
            hint = " Is the port in use? Give another." if listen_port else ""
            raise WireError(f"no NIXL agent{at}: {_text(error).rstrip('.')}.{hint}") from error
        missing = [b for b in backends if b not in self._agent.backends]
        if missing:
            raise BadArgument(f"NixlAgent: no backend {missing[0]}; this NIXL has {', '.join(self._agent.plugin_list)}.")
        self._registered: dict[int, tuple[Any, Sequence[Tensor]]] = {}
        self._stuck: list[Any] = []  # transfers that were given up; they are let go of with the agent
        self._inbox: list[tuple[str, bytes]] = []
        self._inbox_lock = threading.Lock()

    # ---- memory

    def register(self, buffers: Sequence[Tensor]) -> int:
        """Make memory known to NIXL, and keep it alive: a number for `release`. Buffers are contiguous, on the host or a GPU."""
        rows = [(t.data_ptr(), memory_bytes(t), max(t.get_device(), 0), "") for t in buffers if t.numel()]
        kind = "VRAM" if buffers[0].is_cuda else "DRAM"
        try:
            handle = self._agent.register_memory(rows, kind)
        except Exception as error:
            raise WireError(f"{sum(r[1] for r in rows)} bytes could not be registered with NIXL: {_text(error)}.") from error
        number = next(_numbers)
        self._registered[number] = handle, buffers
        return number

    def release(self, number: int) -> None:
        """Forget memory. A peer that reads it now gets any bytes, or an error."""
        handle, _ = self._registered.pop(number)
        with suppress(Exception):
            self._agent.deregister_memory(handle)

    @property
    def num_registered(self) -> int:
        return len(self._registered)

    # ---- peers

    def metadata(self) -> bytes:
        """What a peer must know to read and write this memory. It changes with every registration."""
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise WireError(f"this is no metadata of a NIXL agent: {_text(error)}.") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def connect(self, host: str, port: int, name: str, deadline: Deadline, *, who: str = "", hint: str = "") -> None:
        """Exchange metadata with the agent of this name that listens there. Both can talk then.

        `who` it is to the reader of an error, and what to do.
        """
        asked_s = 1.0
        while not self._agent.check_remote_metadata(name):
            if asked_s >= 0.5:  # a peer that is just starting is asked again
                self._agent.fetch_remote_metadata(name, host, port)
                self._agent.send_local_metadata(host, port)
                asked_s = 0.0
            deadline.pause(f"{who or f'nobody called {name}'} answered at {host}:{port}", 0.005, hint)
            asked_s += 0.005

    def knows(self, peer: str) -> bool:
        return bool(self._agent.check_remote_metadata(peer))

    def forget(self, peer: str) -> None:
        with suppress(Exception):
            self._agent.remove_remote_agent(peer)

    # ---- messages

    def notify(self, peer: str, message: dict[str, Any]) -> None:
        try:
            self._agent.send_notif(peer, json.dumps(message).encode())
        except Exception as error:
            raise WireError(f"{peer} cannot be reached: {_text(error)}.") from error

    def notifications(self) -> list[tuple[str, dict[str, Any]]]:
        """(peer, message) of all that came since. What is no message is dropped."""
        with self._inbox_lock:
            self._collect()
            came, self._inbox = self._inbox, []
        return [(peer, body) for peer, text in came if (body := _body(text)) is not None]

    def ask(self, peer: str, message: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Send a message and wait for its answer: the one with the same number under "re"."""
        number = f"{self.name}/{next(_numbers)}"
        self.notify(peer, {**message, "id": number})
        while True:
            with self._inbox_lock:
                self._collect()
                for n, (who, text) in enumerate(self._inbox):
                    body = _body(text)
                    if who == peer and body is not None and body.get("re") == number:
                        del self._inbox[n]
                        return body
            deadline.pause(f"{peer} did not answer {message.get('op', 'a message')!r}")

    def _collect(self) -> None:
        try:
            came = self._agent.get_new_notifs()
        except Exception as error:
            raise WireError(f"NIXL lost its messages: {_text(error)}.") from error
        self._inbox += [(peer, text) for peer, texts in came.items() for text in texts]

    # ---- bytes

    def read(self, local: Sequence[Tensor], remote: Remote, runs: Iterable[Run], deadline: Deadline) -> int:
        """Bytes of a peer into registered memory here. `runs` have the peer as source. How many bytes came."""
        return self._move("READ", local, remote, list(runs), deadline)

    def write(self, local: Sequence[Tensor], remote: Remote, runs: Iterable[Run], deadline: Deadline) -> int:
        """Registered memory here into a peer's. `runs` have the peer as destination."""
        return self._move("WRITE", local, remote, list(runs), deadline)

    def _move(self, op: str, local: Sequence[Tensor], remote: Remote, runs: list[Run], deadline: Deadline) -> int:
        if not runs:
            return 0
        near, far = ("dst", "src") if op == "READ" else ("src", "dst")
        here = descriptors(runs, near, [t.data_ptr() for t in local], max(local[0].get_device(), 0))
        there = descriptors(runs, far, remote.addresses, remote.device)
        kind, count = ("VRAM" if local[0].is_cuda else "DRAM"), sum(r.pieces for r in runs)
        handles: list[Any] = []
        try:
            ours = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, kind)
            handles.append(ours)
            theirs = self._agent.prep_xfer_dlist(remote.peer, there, remote.memory)
            handles.append(theirs)
            index = np.arange(count, dtype=np.int32)  # of pieces, not of rows
            transfer = self._agent.make_prepped_xfer(op, ours, index, theirs, index)
            self._finish(op, transfer, remote.peer, deadline)
        except WireError:
            raise
        except Exception as error:
            raise WireError(f"{op} of {count} pieces with {remote.peer} failed: {_text(error)}.") from error
        finally:
            for handle in reversed(handles):
                self._let_go(handle)
        return sum(r.bytes * r.pieces for r in runs)

    def _finish(self, op: str, transfer: Any, peer: str, deadline: Deadline) -> None:
        state, looks = "PROC", 0
        try:
            state = self._agent.transfer(transfer)
            while state == "PROC":
                looks += 1
                # Looking is what moves the bytes on some links, so it does not sleep at first.
                deadline.pause(f"{op} with {peer} was not done", 0.0 if looks < 2000 else 0.0001)
                state = self._agent.check_xfer_state(transfer)
        finally:
            self._let_go(transfer)
        if state != "DONE":
            raise WireError(f"{op} with {peer} ended in state {state}.")

    def _let_go(self, handle: Any) -> None:
        try:
            handle.release()
        except Exception:  # in flight still: NIXL lets go of it with the agent
            self._stuck.append(handle)

    def close(self) -> None:
        """Give everything back. Transfers that were given up end here: only now is their memory free for others."""
        if self._agent is None:
            return
        for handle in self._stuck:
            with suppress(Exception):
                handle.release()
        memory = [buffers for _, buffers in self._registered.values()]
        for number in list(self._registered):
            self.release(number)
        self._stuck.clear()
        self._agent = None
        memory.clear()  # not before: a transfer may write until the agent is gone

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def descriptors(runs: Sequence[Run], side: str, addresses: Sequence[int], device: int = 0) -> NDArray[np.uint64]:
    """Rows of NIXL, for the `src` or `dst` of runs: [n, 3] address, bytes, device; with pieces, [n, 5]: also stride and count."""
    table = np.array(runs, np.int64).reshape(len(runs), len(Run._fields))
    column = dict(zip(Run._fields, table.T, strict=True))
    size, pieces = column["bytes"], column["pieces"]
    start = np.array(addresses, np.uint64)[column[f"{side}_buffer"]] + column[f"{side}_offset"].astype(np.uint64)
    rows = [start, size, np.full(len(runs), device)]
    if (pieces > 1).any():
        rows += [np.where(pieces > 1, column[f"{side}_stride"], size), pieces]
    return np.stack([r.astype(np.uint64) for r in rows], axis=1)


@cache
def _leave_early() -> None:
    """nixl 1.5.1 brings a libnl whose destructor crashes the process when all is done. A process that used it ends without them.

    Python is finished by then, its files are flushed, and the status stays what it was.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc's
        libc.on_exit(libc._exit, None)


def _body(text: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
