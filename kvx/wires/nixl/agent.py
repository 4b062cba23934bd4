"""NIXL: an agent with its memory, its peers, and transfers that end by a deadline.

Peers learn of each other by metadata that the caller carries: NIXL's own listener answers on every interface, whoever asks.

Descriptors come from `plan.runs()`: where two caches differ in layout or sharding only, the wire itself does the conversion.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvx.errors import BadArgument
from kvx.layout.buffers import memory_bytes
from kvx.layout.plan import ByteRun
from kvx.wires.wire import Deadline, WireError, need

INSTALL = "pip install --no-deps nixl nixl-cu13 (nixl-cu12 where CUDA is 12; either runs without a GPU)."
_numbers = itertools.count()
_environment = threading.Lock()


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


class NixlAgent:
    """Thread-safe. Use it in a `with`: leaving gives back every registration and handle, whatever happened."""

    def __init__(
        self,
        name: str = "",  # "": one of its own. An agent cannot know two peers of one name
        *,
        devices: Sequence[str] = (),  # of the network, that UCX may use; (): any. UCX_NET_DEVICES of the user comes first
        backends: Sequence[str] = ("UCX",),
        progress_thread: bool = False,  # it keeps a core busy. Without: bytes move while either side looks (read, progress)
    ) -> None:
        api = load()
        logging.getLogger("nixl").setLevel(logging.WARNING)  # its INFO goes to stdout
        _leave_early()
        self.name = name or f"kvx-{os.getpid()}-{next(_numbers)}-{os.urandom(4).hex()}"
        config = api.nixl_agent_config(
            enable_prog_thread=progress_thread,
            enable_listen_thread=False,
            backends=list(backends),
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        try:
            with _on_devices(devices):
                self._agent: Any = api.nixl_agent(self.name, config)
        except Exception as error:
            raise WireError(f"no NIXL agent can be made: {_text(error).rstrip('.')}.") from error
        missing = [b for b in backends if b not in self._agent.backends]
        if missing:
            raise BadArgument(f"NixlAgent: no backend {missing[0]}; this NIXL has {', '.join(self._agent.plugin_list)}.")
        self._registered: dict[int, tuple[Any, Sequence[Tensor]]] = {}
        self._stuck: list[Any] = []  # transfers that were given up; they are let go of with the agent

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

    def metadata(self, registration: int | None = None) -> bytes:
        """What a peer must know to read and write the memory of one registration, and no other; None: of all."""
        try:
            if registration is None:
                return bytes(self._agent.get_agent_metadata())
            handle, _ = self._registered[registration]
            return bytes(self._agent.get_partial_agent_metadata(handle, True, list(self._agent.backends)))
        except Exception as error:
            raise WireError(f"NIXL made no metadata: {_text(error)}.") from error

    def add_peer(self, metadata: bytes) -> str:
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise WireError(f"this is no metadata of a NIXL agent: {_text(error)}.") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def forget(self, peer: str) -> None:
        with suppress(Exception):
            self._agent.remove_remote_agent(peer)

    def progress(self) -> None:
        """Look: that moves the bytes which peers read and write, on links that need both sides. What they say is dropped."""
        with suppress(Exception):
            self._agent.get_new_notifs()

    # ---- bytes

    def read(self, local: Sequence[Tensor], remote: Remote, runs: Iterable[ByteRun], deadline: Deadline) -> int:
        """Bytes of a peer into registered memory here. `runs` have the peer as source. How many bytes came."""
        return self._move("READ", local, remote, list(runs), deadline)

    def write(self, local: Sequence[Tensor], remote: Remote, runs: Iterable[ByteRun], deadline: Deadline) -> int:
        """Registered memory here into a peer's. `runs` have the peer as destination."""
        return self._move("WRITE", local, remote, list(runs), deadline)

    def _move(self, op: str, local: Sequence[Tensor], remote: Remote, runs: list[ByteRun], deadline: Deadline) -> int:
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


def descriptors(runs: Sequence[ByteRun], side: str, addresses: Sequence[int], device: int = 0) -> NDArray[np.uint64]:
    """Rows of NIXL, for the `src` or `dst` of runs: [n, 3] address, bytes, device; with pieces, [n, 5]: also stride and count."""
    table = np.array(runs, np.int64).reshape(len(runs), len(ByteRun._fields))
    column = dict(zip(ByteRun._fields, table.T, strict=True))
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


@contextmanager
def _on_devices(devices: Sequence[str]) -> Iterator[None]:
    """UCX reads its environment when an agent is made, and has no other way to say several devices through NIXL."""
    name = "UCX_NET_DEVICES"
    with _environment:
        if not devices or name in os.environ:
            yield
            return
        os.environ[name] = ",".join(devices)
        try:
            yield
        finally:
            del os.environ[name]


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
