"""What a hybrid cache of DeepSeek-V4 allocates: pages are padded, and larger blocks lose less by it."""

from __future__ import annotations

from typing import Any

from kvx.cache.hybrid.schema import HybridSchema

BLOCKS = (128, 256, 512)


def hybrid_facts(model: str, context: int) -> list[dict[str, Any]]:
    """A line a block size: payload and allocated bytes of a token, of a request beside its tokens, and of all of a request."""
    facts = []
    for block in BLOCKS:
        schema = HybridSchema.of(model, block_tokens=block)
        whole = schema.memory_bytes(-(-context // block), 1)
        facts.append(
            {
                "block_size": block,
                "rows": schema.layers[0].entry_rows,
                "token_bytes": schema.token_bytes[0],
                "token_bytes_allocated": schema.token_bytes[1],
                "padding": schema.token_bytes[1] / schema.token_bytes[0] - 1,
                "fixed_bytes": schema.request_bytes.payload,
                "fixed_bytes_allocated": schema.request_bytes.allocated,
                "request_bytes": whole.payload,
                "request_bytes_allocated": whole.allocated,
            }
        )
    return facts
