"""Sides: the buffers of a conversion's source and destination, checked against its plan and bound to it in the library.

Checking and binding some hundred tensors takes longer than moving a block of them. So a plan keeps the sides it was last given,
without holding their memory, and finds them again when the same tensors come: the same objects, with the address, shape and type
that they had. What changes from call to call, the blocks, is no part of them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.layout.buffers import memory_bytes
from kvx.layout.gate import check_buffers
from kvx.layout.plan import Plan
from kvx.ops import backend as backends
from kvx.ops import native
from kvx.ops.structs import ABI_VERSION, ConvertArgs

Buffers = Tensor | Sequence["Buffers"]
_MOST_KEPT = 8  # of a plan
_bind_sides, _free_sides = native.entry("kvx_door_sides"), native.entry("kvx_door_sides_free")
_plan_load, _plan_free = native.entry("kvx_plan_load"), native.entry("kvx_plan_free")


class Sides:
    def __init__(self, plan: Plan, src: Sequence[Tensor], dst: Sequence[Tensor]) -> None:
        try:
            check_buffers("convert", "src", src, plan.src)
            check_buffers("convert", "dst", dst, plan.dst)
        except BadArgument as error:
            if _fit(dst, plan.src) and _fit(src, plan.dst):
                raise BadArgument(f"{error} The two fit the other way round: convert(src, dst, plan=kvx.plan(src, dst)).") from None
            raise
        where = next((t for t in (*src, *dst) if not t.is_cpu), src[0])
        self.device = where.device
        self.ordinal = self.device.index if self.device.type == "cuda" else None
        self.num_src = len(src)
        self.src, self.dst = SideArrays(src), SideArrays(dst)
        self.gone: list[object] = []  # filled when a tensor dies, since another may then have its id
        self._refs = [weakref.ref(t, self.gone.append) for t in (*src, *dst)]
        self._facts = [_facts(t) for t in (*src, *dst)]
        self._floats = [i for i, facts in enumerate(self._facts) if facts[3].is_floating_point]
        self.has_gradients = any(facts[4] for facts in self._facts)
        self.handle: int | None = None  # in the library, once they are bound there
        self.is_noted = False  # whether the library can tell if tensors are these

    def are_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that were checked, as many and in this order."""
        return not self.gone and all(
            ref() is t and facts == _facts(t) for ref, facts, t in zip(self._refs, self._facts, tensors, strict=True)
        )

    def may_be_of(self, tensors: Sequence[object], num_src: int) -> bool:
        """Whether the library is to be asked if these are the tensors. It cannot tell which require grad; only floats can."""
        if not self.is_noted or self.gone or self.num_src != num_src or len(tensors) != len(self._refs):
            return False
        needs_asking = self._floats and torch.is_grad_enabled()
        return not needs_asking or not any(getattr(tensors[i], "requires_grad", False) for i in self._floats)

    def bind(self, plan: Plan, tensors: tuple[Tensor, ...]) -> None:
        """In the library, once."""
        if self.handle is not None:
            return
        args = new_args(self.device)
        self.src.fill(args, "src")
        self.dst.fill(args, "dst")
        made, is_noted = ctypes.c_void_p(), ctypes.c_int()
        status = _bind_sides(
            loaded(plan),
            ctypes.addressof(args),
            id(tensors) if native.IS_EXCHANGED else None,
            ctypes.addressof(made),
            ctypes.addressof(is_noted),
        )
        if status:
            native.raise_status(status, call="convert()")
        weakref.finalize(self, _free_sides, made.value)
        self.handle = made.value  # first: another thread asks is_noted, and then for the handle
        self.is_noted = bool(is_noted.value)


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


def sides_of(plan: Plan, src: Sequence[Tensor], dst: Sequence[Tensor]) -> Sides:
    """Checked now, or when they were given before."""
    found = kept_sides(plan, src, dst)
    if found is None or not found.are_of((*src, *dst)):
        found = Sides(plan, src, dst)
        if found.has_gradients:  # whether those are taken depends on the grad mode of the call
            return found
        kept, key = plan.__dict__.setdefault("_sides", {}), _key(src, dst)
        for old in (key, *list(kept)[: len(kept) + 1 - _MOST_KEPT]):
            kept.pop(old, None)
        kept[key] = found
    plan.__dict__["_latest_sides"] = found
    return found


def kept_sides(plan: Plan, src: Sequence[Tensor], dst: Sequence[Tensor]) -> Sides | None:
    """Those that the plan has under the ids of these tensors, whatever has become of them."""
    kept: dict[tuple[int, ...], Sides] = plan.__dict__.get("_sides", {})
    found = kept.get(_key(src, dst))
    if found is not None:
        plan.__dict__["_latest_sides"] = found
    return found


def latest_sides(plan: Plan) -> Sides | None:
    """Those of the last call, which are most often those of the next."""
    found: Sides | None = plan.__dict__.get("_latest_sides")
    return found


def _key(src: Sequence[Tensor], dst: Sequence[Tensor]) -> tuple[int, ...]:
    return (len(src), *map(id, src), *map(id, dst))


def new_args(device: torch.device) -> ConvertArgs:
    return ConvertArgs(
        version=ABI_VERSION,
        struct_bytes=ctypes.sizeof(ConvertArgs),
        device=device.index if device.type == "cuda" else -1,
    )


def loaded(plan: Plan) -> int:
    """The plan in the library, loaded once."""
    handle = plan.__dict__.get("_handle")
    if handle is None:
        data, out = plan.to_bytes(), ctypes.c_void_p()
        status = _plan_load(data, len(data), ctypes.addressof(out))
        if status:
            native.raise_status(status, call="convert()")
        handle = plan.__dict__["_handle"] = out.value
        weakref.finalize(plan, _plan_free, out.value)
    assert handle is not None
    return int(handle)


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


def _facts(t: Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype, bool]:
    """What may change of a tensor while it stays the same object. There may be hundreds: a named tuple would take as long again."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad


def _fit(buffers: Sequence[Tensor], specs: Sequence[Any]) -> bool:
    try:
        check_buffers("convert", "src", buffers, specs)
    except BadArgument:
        return False
    return True
