"""Mooncake's transfer engine: registered memory of two processes, read and written by address. Peers find each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from kvx.layout.buffers import memory_bytes
from kvx.layout.plan import ByteRun
from kvx.wires.mooncake.store import load
from kvx.wires.nixl.agent import Remote
from kvx.wires.wire import WireError


class MooncakeEngine:
    def __init__(self, host: str = "127.0.0.1", *, protocol: str = "tcp", devices: str = "") -> None:
        self._engine: Any = load("mooncake.engine").TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        if code:
            raise WireError(f"no Mooncake transfer engine at {host} over {protocol}: code {code}.")
        self.name = f"{host}:{self._engine.get_rpc_port()}"  # what a peer's Remote says
        self._registered: dict[int, Tensor] = {}

    def register(self, buffers: Sequence[Tensor]) -> None:
        """Keeps them alive, too."""
        for t in buffers:
            if t.numel():
                code = self._engine.register_memory(t.data_ptr(), memory_bytes(t))
                if code:
                    raise WireError(f"{memory_bytes(t)} bytes could not be registered with Mooncake: code {code}.")
                self._registered[t.data_ptr()] = t

    def release(self, buffers: Sequence[Tensor]) -> None:
        for t in buffers:
            if self._registered.pop(t.data_ptr(), None) is not None:
                self._engine.unregister_memory(t.data_ptr())

    @property
    def num_registered(self) -> int:
        return len(self._registered)

    def read(self, local: Sequence[Tensor], remote: Remote, runs: Iterable[ByteRun]) -> int:
        """Bytes of a peer into registered memory here: plain runs with the peer as source. How many came."""
        return self._move("read", local, remote, list(runs))

    def write(self, local: Sequence[Tensor], remote: Remote, runs: Iterable[ByteRun]) -> int:
        return self._move("write", local, remote, list(runs))

    def _move(self, op: str, local: Sequence[Tensor], remote: Remote, runs: list[ByteRun]) -> int:
        if not runs:
            return 0
        if any(r.pieces > 1 for r in runs):
            raise WireError("Mooncake has no strided descriptors: plan.runs() without strided=True.")
        ends = [
            (r.dst_buffer, r.dst_offset, r.src_buffer, r.src_offset)
            if op == "read"
            else (r.src_buffer, r.src_offset, r.dst_buffer, r.dst_offset)
            for r in runs
        ]
        here = [local[b].data_ptr() + at for b, at, _, _ in ends]
        there = [remote.addresses[b] + at for _, _, b, at in ends]
        call = getattr(self._engine, f"batch_transfer_sync_{op}")
        code = call(remote.peer, here, there, [r.bytes for r in runs])
        if code:
            raise WireError(f"{op} of {len(runs)} pieces with {remote.peer} failed: code {code}.")
        return sum(r.bytes for r in runs)

    def close(self) -> None:
        self.release(list(self._registered.values()))
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
