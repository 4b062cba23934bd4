"""attention_decode_batched: attention over contiguous caches, one a sequence, that a table of addresses names.

The definition is attention_decode's over the same caches stacked, each a block as long as its capacity.
"""

from __future__ import annotations

from torch import Tensor

from kvx.layout.pointers import CachePointers
from kvx.ops.attention import body
from kvx.ops.attention.attention import default_scale
from kvx.ops.attention.body import Options, Queries
from kvx.ops.cache_view import CacheView, scales_of
from kvx.tables import cache_table

_CALL = "attention_decode_batched"


def attention_decode_batched(
    q: Tensor,  # [num_tokens, num_heads, head_dim] f16, bf16 or f32; num_tokens / sequences of them each
    caches: CachePointers,  # one contiguous cache a sequence
    *,
    seq_lens: Tensor,  # [batch] int32 or int64, on the caches' device; at most the capacity each
    cache_ids: Tensor | None = None,  # [batch] int32 or int64: the cache of each sequence; None: sequence s has cache s
    k_scale: Tensor | None = None,  # scales of the caches together: a block is a cache
    v_scale: Tensor | None = None,
    k_tensor_scale: Tensor | None = None,
    v_tensor_scale: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_seq_len: int = 0,
    workspace: Tensor | None = None,  # attention_workspace_bytes(q, caches, cache_table(caches, seq_lens), spec=caches.spec)
    planned: bool = False,
    errors: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one or a few query tokens a sequence, in one launch for all caches; options as in attention_decode.

    Addresses, lengths and cache_ids are read when the call runs on the device: a captured graph follows them, and caches may
    grow, move or be swapped outside of it. A sequence whose cache_ids is no cache, or whose address of K or V is 0, raises
    OutOfRange on the host; on a device it sees nothing and is counted in `errors`.
    """
    options = Options(default_scale(scale, q), causal, window, soft_cap, 0, max_seq_len, planned)
    table = cache_table(caches, seq_lens, cache_ids=cache_ids)
    view = CacheView.of(_CALL, caches, caches.spec, scales_of(k_scale, v_scale, k_tensor_scale, v_tensor_scale), errors)
    queries = Queries(q, None, out, lse, sinks, workspace)
    return body.attend(_CALL, queries, view, table, options, backend)
