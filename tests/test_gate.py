"""The gate at every public entry: a tensor that is not what the spec says is refused, or read as it is; never as something else.

Each entry of the public API that takes tensors has a small call here, and a test fails when one has none. Every tensor of every
call is then replaced by one that an honest mistake would give: another type, other sizes, a permuted or strided view, memory that
overlaps or is not there, a tensor that wants gradients. The call must raise a KvxError, or give what it gives for a plain copy.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvx
from kvx.ops.entry.tail import Tail
from tests.gate_calls import Entry, entries

# ---- tensors of a call, wherever they stand


def sites(x: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(x, Tensor):
        yield path, x
    elif isinstance(x, dict):
        for name, value in x.items():
            yield from sites(value, (*path, name))
    elif hasattr(x, "_fields"):
        for name in x._fields:
            yield from sites(getattr(x, name), (*path, name))
    elif isinstance(x, (list, tuple)):
        for i, value in enumerate(x):
            yield from sites(value, (*path, i))
    elif is_dataclass(x) and not isinstance(x, (type, kvx.CacheSpec, kvx.Plan)):
        for f in fields(x):
            yield from sites(getattr(x, f.name), (*path, f.name))


def put(x: Any, path: tuple[Any, ...], t: Tensor) -> Any:
    """A copy of x with the tensor at `path` replaced; all others cloned, so that calls do not meet."""
    if isinstance(x, Tensor):
        return t if path == () else x.clone(memory_format=torch.preserve_format)
    if isinstance(x, Tail):
        return copy.deepcopy(x)

    def at(name: Any, value: Any) -> Any:
        return put(value, path[1:] if path and path[0] == name else ("",), t)

    if isinstance(x, dict):
        return {name: at(name, value) for name, value in x.items()}
    if hasattr(x, "_fields"):
        return type(x)(*(at(name, getattr(x, name)) for name in x._fields))
    if isinstance(x, (list, tuple)):
        return type(x)(at(i, value) for i, value in enumerate(x))
    if is_dataclass(x) and not isinstance(x, (type, kvx.CacheSpec, kvx.Plan)) and any(True for _ in sites(x)):
        return replace(x, **{f.name: at(f.name, getattr(x, f.name)) for f in fields(x)})
    return x


def result(entry: Entry, arguments: dict[str, Any]) -> list[Any]:
    """What a call gives, and what stands in its outputs after it, as numbers: types and strides do not matter."""
    got = entry.call(**arguments)
    found = [t for _, t in sites(got)] or [got]
    found += [t for name in entry.outputs for _, t in sites(arguments[name])]
    return [_bits(x) if isinstance(x, Tensor) else x for x in found]


def _bits(t: Tensor) -> Tensor:
    if t.is_meta:
        raise kvx.BadArgument("nothing was read: what comes out is on the meta device too")
    t = t.detach().cpu().flatten()
    return t.to(torch.float64) if t.is_floating_point() else t.to(torch.int64)


def same(got: list[Any], want: list[Any], *, rounded: bool) -> bool:
    """Bit for bit; `rounded` where a wider type was rounded once less, or torch multiplies in the order that strides suggest."""
    pairs = list(zip(got, want, strict=False))
    if len(got) != len(want) or not all(isinstance(x, Tensor) for pair in pairs for x in pair):
        return len(got) == len(want) and all(
            a is b is None or (not isinstance(a, Tensor) and a == b) or (isinstance(a, Tensor) and torch.equal(a, b))
            for a, b in pairs
        )
    if any(len(a) != len(b) for a, b in pairs):
        return False
    close = {"rtol": 2.0**-6, "atol": 2.0**-6} if rounded else {"rtol": 0.0, "atol": 0.0}
    return all(torch.allclose(a.double(), b.double(), equal_nan=True, **close) for a, b in pairs)


# ---- what callers pass by mistake: a tensor, and the plain one it may be taken for (None: it must be refused); or nothing


def wider(t: Tensor) -> Any:
    to = {
        torch.bfloat16: torch.float32,
        torch.float16: torch.float32,
        torch.float32: torch.float64,
        torch.int32: torch.int64,
        torch.int64: torch.int32,
        torch.int8: torch.int16,
        torch.uint8: torch.int16,
    }
    return (t.to(to[t.dtype]), t) if t.dtype in to else None


def complex_numbers(t: Tensor) -> Any:
    return t.to(torch.complex64), None


def same_bits(t: Tensor) -> Any:
    to = {
        torch.bfloat16: torch.int16,
        torch.float32: torch.int32,
        torch.int64: torch.float64,
        torch.int32: torch.float32,
        torch.int8: torch.bool,
        torch.uint8: torch.bool,
    }
    return (t.view(to[t.dtype]), None) if t.dtype in to else None


def longer(t: Tensor) -> Any:
    return (torch.cat([t, t[:1]]), None) if t.dim() and t.shape[0] else None


def narrower(t: Tensor) -> Any:
    return (t[..., :-1].clone(), None) if t.dim() > 1 and t.shape[-1] > 1 else None


def one_more_dimension(t: Tensor) -> Any:
    return t.unsqueeze(0), t


def flat(t: Tensor) -> Any:
    return (t.flatten(), t) if t.dim() > 1 else None


def empty(t: Tensor) -> Any:
    return (t[:0].clone(), None) if t.dim() and t.shape[0] else None


def permuted(t: Tensor) -> Any:
    """The same numbers at the same indices, in memory the other way round."""
    if t.dim() < 2 or t.numel() == 0:
        return None
    order = list(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order), t


def swapped_axes(t: Tensor) -> Any:
    """Another shape over the same memory: conversions, which go by memory, may take it for what it was."""
    return (t.transpose(-2, -3), t) if t.dim() > 2 and t.shape[-2] != t.shape[-3] else None


def strided(t: Tensor) -> Any:
    return (t.repeat_interleave(2, -1)[..., ::2], t) if t.dim() else None


def spread(t: Tensor) -> Any:
    return (t.repeat_interleave(2, 0)[::2], t) if t.dim() else None


def overlapping(t: Tensor) -> Any:
    if t.dim() == 0 or t.shape[0] < 2:
        return None
    x = t[:1].expand_as(t)
    return x, x.contiguous()


def on_meta(t: Tensor) -> Any:
    return t.to("meta"), None


def on_another_device(t: Tensor) -> Any:
    return t.cuda(), t


def wants_gradients(t: Tensor) -> Any:
    return (t.clone().requires_grad_(), None) if t.is_floating_point() else None


DIFFERENTIABLE = {"views", "describe", "scale_from_amax"}  # plain torch, through which gradients flow
MISTAKES = [
    wider,
    complex_numbers,
    same_bits,
    longer,
    narrower,
    one_more_dimension,
    flat,
    empty,
    permuted,
    swapped_axes,
    strided,
    spread,
    overlapping,
    on_meta,
    on_another_device,
    wants_gradients,
]


def test_every_public_entry_that_takes_tensors_has_a_case():
    takes = {
        name
        for name in kvx.__all__
        if inspect.isfunction(f := getattr(kvx, name))
        and any(
            word in str(p.annotation) for p in inspect.signature(f).parameters.values() for word in ("Tensor", "Buffers", "Table")
        )
    }
    assert takes == set(entries("torch"))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_tensor_that_is_not_what_the_spec_says(backend, mistake):
    if mistake is on_another_device and not torch.cuda.is_available():
        pytest.skip("needs a second device: a GPU")
    wrong = []
    for name, several in entries(backend).items():
        for n, entry in enumerate(several):
            for path, good in sites(entry.arguments):
                made = mistake(good)
                if made is None:
                    continue
                given, meant = made
                site = f"{name}[{n}] {'.'.join(map(str, path))} {list(given.shape)} {given.dtype} {list(given.stride())}"
                try:
                    got = result(entry, put(entry.arguments, path, given))
                except kvx.KvxError:
                    continue
                except Exception as error:
                    wrong.append(f"{site}: {type(error).__name__}: {str(error)[:150]}")
                    continue
                if entry.only_asks or (mistake is wants_gradients and name in DIFFERENTIABLE):
                    continue
                if mistake is swapped_axes and path[0] in entry.outputs:
                    continue  # read back the same way it was given, that is by its own shape
                if mistake is swapped_axes and path[0] in entry.loose:
                    continue
                if meant is None:
                    if not (mistake in (longer, narrower, empty) and str(path[0]) in entry.loose):
                        wrong.append(f"{site}: taken")
                    continue
                plain_result = result(entry, put(entry.arguments, path, meant.clone()))
                if not same(got, plain_result, rounded=mistake is wider or "attention" in name):
                    wrong.append(f"{site}: another result than with a plain copy of it")
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_layout_without_kv_where_k_and_v_are_needed(backend):
    """Refused in words, by every op that takes a spec; what only converts or asks may take it."""
    wrong = []
    for name, several in entries(backend).items():
        for n, entry in enumerate(several):
            arguments = dict(entry.arguments)
            for key, value in entry.arguments.items():
                if isinstance(value, kvx.CacheSpec):
                    arguments[key] = replace(value, layout="layer | block token head dim", block_bytes=0)
            if not any(isinstance(value, kvx.CacheSpec) for value in arguments.values()):
                continue
            try:
                entry.call(**arguments)
            except kvx.KvxError:
                continue
            except Exception as error:
                wrong.append(f"{name}[{n}]: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


def test_the_torch_body_wants_one_device():
    """On a machine without a second device: tensors that only say that they are on one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from kvx.layout.gate import check_memory

    with FakeTensorMode():
        here, there, scalar = torch.empty(4), torch.empty(4, device="cuda"), torch.empty(1, device="cuda")
    check_memory("write", "torch", k=here, scales=(None, scalar))
    check_memory("write", "auto", k=here, v=there)  # the library asks for itself
    with pytest.raises(kvx.BadArgument, match=r"write\(\): v is on cuda:0, k on cpu; all are on one device"):
        check_memory("write", "torch", k=here, v=(None, there))
