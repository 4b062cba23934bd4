"""PagedStates: K or V of a layer, not read out of its blocks yet.

It has the shape, type and device of what gather would return, and no memory. The attention function "kvx" takes the layer from it
and reads the blocks. Any other op that meets it gets the gathered tensor, so code in between need not know about it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from kvx.adapters.transformers.cache import KvxCache
    from kvx.adapters.transformers.layer import KvxLayer


P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """As it is in a torch.compile'd model too: handles and blocks are Python's. The graph breaks here, not at each line inside."""
    apart = torch.compiler.disable(function)  # 3 us a call, so only where there is a graph

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return apart(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return call


class PagedStates(Tensor):
    """One plane, 0 for K and 1 for V, of a layer as it is when the handle is made: use it before the next update."""

    cache: KvxCache
    layer: KvxLayer
    plane: int
    gathered: list[Tensor]  # both planes, once one was asked for; shared by the pair

    @staticmethod
    def pair(cache: KvxCache, layer: KvxLayer, key: Tensor, value: Tensor) -> tuple[PagedStates, PagedStates]:
        """Handles of a layer's K and V; `key` and `value` are the newest tokens, for heads, dims and type."""
        gathered: list[Tensor] = []
        made = []
        for plane, new in enumerate((key, value)):
            shape = (*new.shape[:2], layer.length - layer.first_visible, new.shape[3])
            handle = Tensor._make_wrapper_subclass(PagedStates, shape, dtype=new.dtype, device=new.device)
            handle.cache, handle.layer, handle.plane, handle.gathered = cache, layer, plane, gathered
            made.append(handle)
        return made[0], made[1]

    def read(self) -> Tensor:
        """The tensor itself."""
        if not self.gathered:
            self.cache.settle(self.layer)
            self.gathered.extend(self.layer.read())  # contiguous, as the handle has told: ops chose their way by its strides
        return self.gathered[self.plane]

    # Ops are met in dispatch, whoever calls them.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(PagedStates, PagedStates.read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PagedStates({'kv'[self.plane]} of layer {self.layer.index}, {list(self.shape)}, {self.dtype})"
