"""A layer's cache as an op sees it: tensors, spec, scales. Public ops make one of their keywords; all below them takes it whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kvx.layout.planes import cache_tensors
from kvx.layout.pointers import CachePointers
from kvx.ops.backend import as_tensor
from kvx.spec.cache_spec import CacheSpec


class Scales(NamedTuple):
    """The scales a call is given, by the keywords of `write`. None: the format has none there, or they are 1."""

    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_tensor_scale: Tensor | None = None
    v_tensor_scale: Tensor | None = None
    k_token_scale: Tensor | None = None
    v_token_scale: Tensor | None = None

    def plane(self, index: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """K's (0) or V's (1): the stored scale, the tensor's, and those given for each token."""
        if index:
            return self.v_scale, self.v_tensor_scale, self.v_token_scale
        return self.k_scale, self.k_tensor_scale, self.k_token_scale


NO_SCALES = Scales()


def scales_of(
    k_scale: Tensor | None, v_scale: Tensor | None, k_tensor_scale: Tensor | None = None, v_tensor_scale: Tensor | None = None
) -> Scales:
    """Those of a call; NO_SCALES itself where there are none, which is asked by `is`."""
    if k_scale is v_scale is k_tensor_scale is v_tensor_scale is None:
        return NO_SCALES
    return Scales(k_scale, v_scale, k_tensor_scale, v_tensor_scale)


class CacheView(NamedTuple):
    tensors: tuple[Tensor, ...]  # one, or K's and V's; KV_OFFSETS: its pools; none where the caches stand behind pointers
    spec: CacheSpec
    scales: Scales = NO_SCALES
    errors: Tensor | None = None  # one int64 on the device: bad ids of the call are added to it
    pointers: CachePointers | None = None

    @staticmethod
    def of(
        call: str,
        cache: Tensor | Sequence[Tensor] | CachePointers,
        spec: CacheSpec,
        scales: Scales = NO_SCALES,
        errors: Tensor | None = None,
    ) -> CacheView:
        if isinstance(cache, Tensor):
            return CacheView((cache,), spec, scales, errors)
        if isinstance(cache, CachePointers):
            return CacheView((), spec, scales, errors, cache)
        return CacheView(tuple(as_tensor(call, "cache", c) for c in cache), spec, scales, errors)

    @property
    def first(self) -> Tensor:
        """A tensor that lives where the cache does: the cache's first, or K's addresses."""
        return self.tensors[0] if self.pointers is None else self.pointers.k

    @property
    def second(self) -> Tensor | None:
        if self.pointers is not None:
            return self.pointers.v
        return self.tensors[1] if len(self.tensors) > 1 else None

    def check_count(self) -> None:
        """There are as many tensors as the layout has. The answer is kept with the spec: finding out hashes it."""
        if self.spec.__dict__.get("_num_tensors") != len(self.tensors):
            cache_tensors(self.tensors, self.spec)
            self.spec.__dict__["_num_tensors"] = len(self.tensors)

    @property
    def optional(self) -> tuple[Tensor | None, ...]:
        """Nothing, or scales and the counter of errors: OPTIONAL, in the order of the library's struct."""
        if self.scales is NO_SCALES and self.errors is None:
            return ()
        return *self.scales, self.errors


OPTIONAL = (*Scales._fields, "errors")
