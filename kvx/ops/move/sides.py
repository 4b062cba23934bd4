"""Sides: the buffers of a conversion's source and destination, checked against its plan, with their addresses for the library.

Checking some hundred tensors takes longer than moving a block of them. So a plan keeps the sides it was last given, without holding
their memory, and finds them again when the same tensors come: the same objects, with the address, shape and type that they had.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from kvx.errors import BadArgument
from kvx.layout.buffers import memory_bytes
from kvx.layout.gate import check_buffers
from kvx.layout.plan import Plan
from kvx.ops import backend as backends
from kvx.ops.structs import ConvertArgs

Buffers = Tensor | Sequence["Buffers"]
_MOST_KEPT = 8  # of a plan


class Sides:
    def __init__(self, plan: Plan, src: list[Tensor], dst: list[Tensor]) -> None:
        try:
            check_buffers("convert", "src", src, plan.src)
            check_buffers("convert", "dst", dst, plan.dst)
        except BadArgument as error:
            if _fit(dst, plan.src) and _fit(src, plan.dst):
                raise BadArgument(f"{error} The two fit the other way round: convert(src, dst, plan=kvx.plan(src, dst)).") from None
            raise
        where = next((t for t in (*src, *dst) if not t.is_cpu), src[0])
        self.device = where.device
        self.src, self.dst = SideArrays(src), SideArrays(dst)
        self._tensors = [(weakref.ref(t), _facts(t)) for t in (*src, *dst)]

    def are_of(self, tensors: Iterable[Tensor]) -> bool:
        """Whether these are the tensors that were checked. The key was made of as many."""
        for (ref, facts), t in zip(self._tensors, tensors, strict=True):
            # _facts(t), written out: there may be hundreds
            if ref() is not t or facts != (t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad):
                return False
        return True


class SideArrays:
    """Addresses and sizes of one side's buffers. They must live as long as a call that was given them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._pointers = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
        self._sizes = (ctypes.c_uint64 * len(tensors))(*(memory_bytes(t) for t in tensors))
        self.memory = memory_of(tensors)
        self.pointers, self.sizes = ctypes.addressof(self._pointers), ctypes.addressof(self._sizes)

    def fill(self, args: ConvertArgs, side: str) -> None:
        setattr(args, f"{side}_memory", self.memory)
        setattr(args, f"{side}_buffers", self.pointers)
        setattr(args, f"{side}_bytes", self.sizes)


def sides_of(plan: Plan, src: list[Tensor], dst: list[Tensor]) -> Sides:
    """Checked now, or when they were given before."""
    kept: dict[tuple[int, ...], Sides] = plan.__dict__.setdefault("_sides", {})
    key = (len(src), *map(id, src), *map(id, dst))
    found = kept.get(key)
    if found is not None and found.are_of((*src, *dst)):
        return found
    made = Sides(plan, src, dst)
    for old in (key, *list(kept)[: len(kept) + 1 - _MOST_KEPT]):
        kept.pop(old, None)
    if not any(t.requires_grad for t in (*src, *dst)):  # whether those are taken depends on the grad mode of the call
        kept[key] = made
    return made


def flat(name: str, buffers: Buffers, call: str = "convert") -> Iterator[Tensor]:
    if isinstance(buffers, Tensor):
        yield buffers
    elif isinstance(buffers, (list, tuple)):
        for part in buffers:
            if isinstance(part, Tensor):
                yield part
            else:
                yield from flat(name, part, call)
    else:
        yield backends.as_tensor(call, name, buffers)


def memory_of(tensors: Iterable[Tensor]) -> int:
    return 2 if next(iter(tensors)).is_cuda else 1


def _facts(t: Tensor) -> tuple[Any, ...]:
    """What may change of a tensor while it stays the same object."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad


def _fit(buffers: list[Tensor], specs: Sequence[Any]) -> bool:
    try:
        check_buffers("convert", "src", buffers, specs)
    except BadArgument:
        return False
    return True
