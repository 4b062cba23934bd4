"""Hugging Face transformers on KVX: KvxCache for `past_key_values`, and attention that reads its blocks.

    model.set_attn_implementation("kvx")           # or from_pretrained(..., attn_implementation="kvx"); optional
    model.generate(**inputs, past_key_values=KvxCache(model.config))

    cache = kvx.PagedCache(layer_groups(model.config, num_blocks=256, num_states=32), max_seqs=8, max_seq_len=512)
    kvx.runner.Engine(PagedModel(model, cache))    # many requests at once, prefixes found again

Importing this registers "kvx" with transformers' AttentionInterface and AttentionMaskInterface. docs/transformers.md has the rest.
"""

from kvx.errors import Unsupported

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise Unsupported(
        f"kvx.adapters.transformers: transformers 4.56 or newer is needed ({error}). pip install 'transformers>=4.56'"
    ) from error

from kvx.adapters.transformers.attention import attend
from kvx.adapters.transformers.cache import NAME, KvxCache
from kvx.adapters.transformers.handover import export_cache, import_cache
from kvx.adapters.transformers.latents import read_latents
from kvx.adapters.transformers.layer import KvxLayer
from kvx.adapters.transformers.mask import make_mask
from kvx.adapters.transformers.paged_model import PagedModel
from kvx.cache.layer_groups import layer_groups

AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)

__all__ = [
    "KvxCache",
    "KvxLayer",
    "PagedModel",
    "attend",
    "export_cache",
    "import_cache",
    "layer_groups",
    "make_mask",
    "read_latents",
]
