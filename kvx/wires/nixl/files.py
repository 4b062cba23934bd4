"""Memory to files and back by NIXL's POSIX backend, past Python: the kernel's asynchronous reads and writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from kvx.layout.buffers import memory_bytes
from kvx.wires.nixl.agent import NixlAgent
from kvx.wires.wire import Deadline, WireError


class NixlFiles(NixlAgent):
    """A file is the bytes of some buffers, one after the other: no header, no checksum. Its reader has a digest of his own.

    Files are its user's alone (mode 600).
    """

    def __init__(self) -> None:
        super().__init__(backends=("POSIX",))
        self._given_up: list[int] = []  # files of transfers that were not done in time: open until they can write no more

    def write_file(self, path: str | Path, buffers: Sequence[Tensor], deadline: Deadline) -> int:
        """Whole or not at all. How many bytes."""
        path = Path(path)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            with suppress(FileNotFoundError):  # of a process of the same number, that was killed
                partial.unlink()
            # K and V are prompts: for the owner alone. Never through a link that somebody laid there.
            file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            size = self._move_file("WRITE", file, buffers, deadline)
            partial.replace(path)
        finally:
            with suppress(OSError):
                partial.unlink()
        return size

    def read_file(self, path: str | Path, buffers: Sequence[Tensor], deadline: Deadline) -> int:
        """A file that has another number of bytes is refused."""
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for its writer
        found, want = os.fstat(file), sum(map(memory_bytes, buffers))
        if not stat.S_ISREG(found.st_mode):
            os.close(file)
            raise WireError(f"{path} is no file.")
        if found.st_size != want:
            os.close(file)
            raise WireError(f"{path} has {found.st_size} bytes; the buffers have {want}.")
        return self._move_file("READ", file, buffers, deadline)

    def _move_file(self, op: str, file: int, buffers: Sequence[Tensor], deadline: Deadline) -> int:
        """Closes the file. After an error it and the buffers stay with the agent: a transfer given up may still use them."""
        near, far, at = [], [], 0
        self._given_up.append(file)
        for t in buffers:
            if t.numel():
                near.append((t.data_ptr(), memory_bytes(t), 0))
                far.append((at, memory_bytes(t), file))
                at += memory_bytes(t)
        number = self.register(buffers)
        try:
            if op == "WRITE":
                os.ftruncate(file, at)
            handle = self._agent.register_memory([(0, at, file, "")], "FILE")
            transfer: Any = self._agent.initialize_xfer(
                op, self._agent.get_xfer_descs(near, "DRAM"), self._agent.get_xfer_descs(far, "FILE"), self.name
            )
            self._finish(op, transfer, "the file", deadline)
        except WireError:
            raise
        except Exception as error:
            raise WireError(f"{op} of {at} bytes of a file failed: {error or type(error).__name__}.") from error
        with suppress(Exception):
            self._agent.deregister_memory(handle)
        self.release(number)
        self._close_file(file)
        return at

    def _close_file(self, file: int) -> None:
        self._given_up.remove(file)
        os.close(file)

    def close(self) -> None:
        super().close()
        for file in list(self._given_up):
            self._close_file(file)
