"""Mooncake's store: objects by name in the memory of all who joined one master. Codes of errors become sentences."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from kvx.layout.buffers import memory_bytes
from kvx.wires.address import connect
from kvx.wires.wire import WireError, need

INSTALL = (
    "pip install mooncake-transfer-engine (mooncake-transfer-engine-non-cuda where there is no GPU); "
    "it wants libibverbs of the system, also for tcp: apt install libibverbs1."
)
MASTER, MASTER_TIMEOUT_S = "mooncake_master", 5.0
NO_ROOM, OWNER_GONE, NO_ANSWER = -200, -800, (-900, -901)
_CODES = {
    NO_ROOM: "the store is full, or nobody who is in it gave it memory",
    -704: "no such object",
    OWNER_GONE: "its owner is gone",
    -900: "the master does not answer",
    -901: "the master did not answer in time",
}


class StoreError(WireError):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code  # the store's


def load(module: str) -> Any:
    os.environ.setdefault("GLOG_minloglevel", "3")  # what goes wrong is raised here as a sentence
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    # A master that hangs is waited for 30 s at every call, and one that is none for minutes, if Mooncake 0.3.13 is not told.
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(int(MASTER_TIMEOUT_S * 1000)))
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    return need(module, "mooncake", INSTALL)


class MooncakeStore:
    def __init__(
        self,
        master: str,  # HOST:PORT of a mooncake_master
        *,
        host: str = "",  # this machine's, as others reach it; "": the one that it reaches the master from
        segment_bytes: int = 0,  # memory that this process gives to the store
        buffer_bytes: int = 64 << 20,  # for put and get of bytes
        protocol: str = "tcp",  # or rdma
        devices: str = "",  # of rdma
        timeout_s: float = MASTER_TIMEOUT_S,  # until the master answers
    ) -> None:
        module = load("mooncake.store")
        here = connect(master, MASTER, timeout_s)  # setup() itself tries for a minute and a half
        self.host, self.segment_bytes = host or here, segment_bytes
        self._store: Any = module.MooncakeDistributedStore()
        code = self._store.setup(self.host, "P2PHANDSHAKE", segment_bytes, buffer_bytes, protocol, devices, master)
        if code:
            raise WireError(f"the store of {master} cannot be joined: {_reason(code)}. Is it a {MASTER} of the same version?")
        self._registered: list[int] = []

    def register(self, buffers: Sequence[Tensor]) -> None:
        """Memory for put_from and get_into. It must stay until `release`."""
        for t in buffers:
            if t.numel():
                _check("register_buffer", self._store.register_buffer(t.data_ptr(), memory_bytes(t)))
                self._registered.append(t.data_ptr())

    def release(self, buffers: Sequence[Tensor]) -> None:
        for t in buffers:
            if t.data_ptr() in self._registered:
                self._registered.remove(t.data_ptr())
                self._store.unregister_buffer(t.data_ptr())

    @property
    def num_registered(self) -> int:
        return len(self._registered)

    def put(self, name: str, value: bytes) -> None:
        """The first of a name stays, without a word."""
        _check(f"put of {name}", self._store.put(name, value))

    def get(self, name: str) -> bytes:
        """b"" where there is none."""
        return bytes(self._store.get(name) or b"")

    def put_from(self, name: str, buffer: Tensor) -> None:
        """Registered memory, without a copy in between."""
        _check(f"put of {name}", self._store.put_from(name, buffer.data_ptr(), memory_bytes(buffer)))

    def get_into(self, name: str, buffer: Tensor) -> int:
        """Bytes that came, into registered memory. 0: no such object."""
        code = int(self._store.get_into(name, buffer.data_ptr(), memory_bytes(buffer)))
        if code == -704:
            return 0
        return _check(f"get of {name}", code)

    def has(self, names: Sequence[str]) -> list[bool]:
        codes = self._store.batch_is_exist(list(names)) if names else []
        for code in codes:
            _check("is_exist", code)
        return [code == 1 for code in codes]

    def remove(self, name: str) -> bool:
        """Also while somebody has just looked at it, which the store otherwise refuses for some seconds."""
        return int(self._store.remove(name, True)) == 0

    def close(self) -> None:
        """Gives back the memory of this process, and the objects in it. Slow, about 12 s, where the master is gone."""
        if self._store is not None:
            for address in self._registered:
                with suppress(Exception):
                    self._store.unregister_buffer(address)
            self._registered.clear()
            self._store.close()
            self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _check(what: str, code: int) -> int:
    if code < 0:
        raise StoreError(f"{what}: {_reason(code)}.", code)
    return code


def _reason(code: int) -> str:
    return f"{_CODES[code]} (code {code})" if code in _CODES else f"code {code}"
