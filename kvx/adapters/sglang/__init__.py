"""SGLang: its third tier of pages on KVX's. These files translate; kvx/connector/ and kvx/tiers/ do the work.

What needs SGLang itself is in storage.py only, which its `dynamic` storage backend loads (docs/sglang.md).
"""

from kvx.adapters.sglang.links import link
from kvx.adapters.sglang.names import page_names

__all__ = ["link", "page_names"]
