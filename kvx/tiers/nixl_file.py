"""Memory to files and back by NIXL's POSIX backend, past Python: the kernel's asynchronous reads and writes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from kvx.layout.buffers import memory_bytes
from kvx.tiers.nixl_agent import NixlAgent
from kvx.tiers.remote import Deadline, WireError


class NixlFiles(NixlAgent):
    """A file is the bytes of some buffers, one after the other: no header, no checksum. Its reader has a digest of his own."""

    def __init__(self) -> None:
        super().__init__(backends=("POSIX",))

    def write_file(self, path: str | Path, buffers: Sequence[Tensor], deadline: Deadline) -> int:
        """Whole or not at all. How many bytes."""
        path = Path(path)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                os.ftruncate(file.fileno(), sum(map(memory_bytes, buffers)))
                size = self._move_file("WRITE", file.fileno(), buffers, deadline)
            partial.replace(path)
        finally:
            with suppress(OSError):
                partial.unlink()
        return size

    def read_file(self, path: str | Path, buffers: Sequence[Tensor], deadline: Deadline) -> int:
        """A file that has another number of bytes is refused."""
        with Path(path).open("rb") as file:
            size, want = os.fstat(file.fileno()).st_size, sum(map(memory_bytes, buffers))
            if size != want:
                raise WireError(f"{path} has {size} bytes; the buffers have {want}.")
            return self._move_file("READ", file.fileno(), buffers, deadline)

    def _move_file(self, op: str, file: int, buffers: Sequence[Tensor], deadline: Deadline) -> int:
        near, far, at = [], [], 0
        for t in buffers:
            if t.numel():
                near.append((t.data_ptr(), memory_bytes(t), 0))
                far.append((at, memory_bytes(t), file))
                at += memory_bytes(t)
        number, handle = self.register(buffers), None
        try:
            handle = self._agent.register_memory([(0, at, file, "")], "FILE")
            transfer: Any = self._agent.initialize_xfer(
                op, self._agent.get_xfer_descs(near, "DRAM"), self._agent.get_xfer_descs(far, "FILE"), self.name
            )
            self._finish(op, transfer, "the file", deadline)
        except WireError:
            raise
        except Exception as error:
            raise WireError(f"{op} of {at} bytes of a file failed: {error or type(error).__name__}.") from error
        finally:
            if handle is not None:
                with suppress(Exception):
                    self._agent.deregister_memory(handle)
            self.release(number)
        return at
