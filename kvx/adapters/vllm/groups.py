"""vLLM's KV cache groups, read. Plain facts in: vLLM is not imported here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvx.connector.groups import Group
from kvx.errors import BadArgument, Unsupported

FORMATS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_FULL, _WINDOW, _LATENT = ("FullAttentionSpec",), ("SlidingWindowSpec",), ("MLAAttentionSpec",)
_WHY_NOT = {
    "MambaSpec": "a state does not hold one row per token, so a prefix cannot be cut out of it",
    "ChunkedLocalAttentionSpec": "which blocks a chunk still needs is not a window",
    "CircularBufferSpec": "a ring of one request has no blocks with names",
    "SlidingWindowMLASpec": "its rows are records of another format",
    "CrossAttentionSpec": "its rows are of the encoder's input, not of the tokens",
}


@dataclass(frozen=True)
class GroupFacts:
    """What vLLM says of one group: the fields of its KVCacheSpec, and that class's name."""

    kind: str
    layer_names: tuple[str, ...]
    block_size: int
    num_kv_heads: int  # of this rank
    head_size: int  # of MLA: of the latent row
    dtype: str  # "float32"
    head_size_v: int = 0  # 0: as K
    window: int = 0  # 0: all tokens
    unusual: Mapping[str, str] = field(default_factory=dict)  # fields that change what the bytes mean, with their values


def read_groups(facts: Sequence[GroupFacts]) -> list[Group]:
    """Every group, or Unsupported with the first that cannot be read."""
    return [_read(n, f) for n, f in enumerate(facts)]


def require_block_size(block_size: int, groups: Sequence[Group]) -> None:
    """A tier's block and vLLM's fit into each other."""
    for g in groups:
        if block_size < 1 or (block_size % g.block_size and g.block_size % block_size):
            raise BadArgument(
                f"KvxConnector: block_size is {block_size} in the tiers and {g.block_size} in vLLM; one divides the other. "
                f'Give "block_size": {g.block_size} in the extra config, or another --block-size to vLLM.'
            )


def _read(index: int, f: GroupFacts) -> Group:
    if f.kind not in _FULL + _WINDOW + _LATENT:
        why = _WHY_NOT.get(f.kind, "this adapter has not learned to read it")
        raise Unsupported(
            f"KvxConnector: group {index} ({_few(f.layer_names)}) has a {f.kind}: {why}. "
            f"It reads {', '.join(_FULL + _WINDOW + _LATENT)}. Run this model without the connector."
        )
    if f.unusual:
        name, value = next(iter(f.unusual.items()))
        raise Unsupported(
            f"KvxConnector: group {index} ({_few(f.layer_names)}) has {name}={value}, which changes what its bytes mean. "
            "It was not read."
        )
    if f.dtype not in FORMATS:
        raise Unsupported(
            f"KvxConnector: group {index} holds {f.dtype}; its scales are not among what vLLM registers. It reads "
            f"{', '.join(FORMATS)}: kv_cache_dtype=auto. In the tiers blocks can be smaller by the extra config's format."
        )
    if (f.kind in _WINDOW) != bool(f.window):
        raise Unsupported(f"KvxConnector: group {index} is a {f.kind} with a window of {f.window} tokens.")
    is_latent = f.kind in _LATENT
    if is_latent and f.num_kv_heads != 1:
        raise Unsupported(f"KvxConnector: group {index} has latent rows of {f.num_kv_heads} heads; a latent row belongs to none.")
    return Group(
        index=index,
        layer_names=f.layer_names,
        layers=tuple(_layer_of(name) for name in f.layer_names),
        block_size=f.block_size,
        num_kv_heads=f.num_kv_heads,
        head_dim=f.head_size,
        v_head_dim=0 if is_latent or f.head_size_v in (0, f.head_size) else f.head_size_v,
        format=FORMATS[f.dtype],
        window=f.window,
        is_latent=is_latent,
    )


def _layer_of(name: str) -> int:
    """vLLM's names of layers have their number in them: model.layers.12.self_attn.attn."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    if len(numbers) != 1:
        raise Unsupported(f"KvxConnector: layer {name!r} has {len(numbers)} numbers in its name; which layer of the model is it?")
    return int(numbers[0])


def _few(names: Sequence[str]) -> str:
    return f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}" if names else "no layers"
