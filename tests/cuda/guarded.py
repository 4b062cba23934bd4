"""Device memory with nothing after it: a read one byte past its end is an illegal access, and not a neighbour's bytes."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

# cuMemCreate's and cuMemSetAccess's structs are rows of 32-bit numbers: pinned memory of a device, which may read and write it.
PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3


def call(name: str, *args: object) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*args)
    if status:
        raise RuntimeError(f"{name}() returned CUresult {status}")


class GuardedMemory:
    """Half of a range of addresses is mapped; `end` is where the other half begins. `close()` gives both back."""

    def __init__(self) -> None:
        torch.cuda.synchronize()  # the device's context is there and current
        device, size = torch.cuda.current_device(), ctypes.c_size_t()
        memory = (ctypes.c_int32 * 8)(PINNED, 0, ON_DEVICE, device, 0, 0, 0, 0)
        access = (ctypes.c_int32 * 3)(ON_DEVICE, device, READ_WRITE)
        call("cuMemGetAllocationGranularity", ctypes.byref(size), memory, 0)
        self.bytes, self.start, self.handle = size.value, ctypes.c_uint64(), ctypes.c_uint64()
        both, none = ctypes.c_size_t(2 * self.bytes), ctypes.c_uint64(0)
        call("cuMemAddressReserve", ctypes.byref(self.start), both, none, none, none)
        call("cuMemCreate", ctypes.byref(self.handle), size, memory, none)
        call("cuMemMap", self.start, size, none, self.handle, none)
        call("cuMemSetAccess", self.start, size, access, ctypes.c_size_t(1))
        self.end = self.start.value + self.bytes

    def put(self, t: Tensor) -> int:
        """Copy `t` to where its last byte is the last one mapped; returns its address."""
        t = t.contiguous().cuda()
        address, size = self.end - t.nbytes, ctypes.c_size_t(t.nbytes)
        assert t.nbytes <= self.bytes, f"{t.nbytes} bytes; {self.bytes} are mapped"
        torch.cuda.synchronize()
        call("cuMemcpyDtoD_v2", ctypes.c_uint64(address), ctypes.c_uint64(t.data_ptr()), size)
        torch.cuda.synchronize()
        return address

    def close(self) -> None:
        torch.cuda.synchronize()
        call("cuMemUnmap", self.start, ctypes.c_size_t(self.bytes))
        call("cuMemRelease", self.handle)
        call("cuMemAddressFree", self.start, ctypes.c_size_t(2 * self.bytes))
