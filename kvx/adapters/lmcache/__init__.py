"""LMCache: its storage on KVX's. These files translate; kvx/connector/ and kvx/tiers/ do the work.

What needs LMCache itself is in plugin.py and l2_adapter.py, imported when LMCache asks for their classes (docs/lmcache.md).
"""

from typing import Any

from kvx.adapters.lmcache.links import link
from kvx.adapters.lmcache.names import chunk_names

__all__ = ["chunk_names", "link"]
_OF_LMCACHE = {"KvxStoragePlugin": "plugin", "KvxL2Adapter": "l2_adapter"}


def __getattr__(name: str) -> Any:
    if name not in _OF_LMCACHE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_OF_LMCACHE[name]}"), name)
