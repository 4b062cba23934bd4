"""vLLM's KV cache groups, read. Plain facts in: vLLM is not imported here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvx.adapters.vllm.states import read_planes
from kvx.connector.groups import Group
from kvx.errors import BadArgument, Unsupported
from kvx.spec.state_planes import StatePlane

FORMATS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
FP8 = ("fp8_e4m3", "fp8_e5m2")  # with a scale for each layer's K and V
STATES, CHUNKED = "MambaSpec", "ChunkedLocalAttentionSpec"
_FULL, _WINDOW, _LATENT = ("FullAttentionSpec",), ("SlidingWindowSpec", CHUNKED), ("MLAAttentionSpec",)
_READ = (*_FULL, *_WINDOW, *_LATENT, STATES)
_WHY_NOT = {
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
    dtype: str  # "float32"; of quantised ones the name of KVX's format
    head_size_v: int = 0  # 0: as K
    window: int = 0  # 0: all tokens
    unusual: Mapping[str, str] = field(default_factory=dict)  # fields that change what the bytes mean, with their values
    states: tuple[tuple[tuple[int, ...], str], ...] = ()  # of a state the shapes and types of this rank's planes, in their order
    keeps_states: bool = False  # a state at the end of a block stays in it: prefix caching is on


@dataclass(frozen=True)
class ModelFacts:
    """What the model's config says, where its groups do not."""

    num_layers: int = 0
    dtype: str = "bfloat16"  # that it computes in
    planes: Mapping[int, tuple[StatePlane, ...]] = field(default_factory=dict)  # of layers with states
    num_ranks: int = 1


_NOTHING_KNOWN = ModelFacts()


def read_groups(facts: Sequence[GroupFacts], model: ModelFacts = _NOTHING_KNOWN) -> list[Group]:
    """Every group, or Unsupported with the first that cannot be read."""
    return [_read_states(n, f, model) if f.kind == STATES else _read(n, f, model) for n, f in enumerate(facts)]


def require_block_size(block_size: int, groups: Sequence[Group]) -> None:
    """A tier's block and vLLM's fit into each other. A state without prefix caching has one block, as long as a request can be."""
    for g in groups:
        if g.planes and not g.keeps_states:
            continue
        if block_size < 1 or (block_size % g.block_size and g.block_size % block_size):
            raise BadArgument(
                f"KvxConnector: block_size is {block_size} in the tiers and {g.block_size} in vLLM; one divides the other. "
                f'Give "block_size": {g.block_size} in the extra config, or another --block-size to vLLM.'
            )


def _read(index: int, f: GroupFacts, model: ModelFacts) -> Group:
    if f.kind not in _READ:
        why = _WHY_NOT.get(f.kind, "this adapter has not learned to read it")
        raise Unsupported(
            f"KvxConnector: group {index} ({_few(f.layer_names)}) has a {f.kind}: {why}. "
            f"It reads {', '.join(_READ)}. Run this model without the connector."
        )
    _require_usual(index, f)
    if f.dtype not in FORMATS and (f.dtype not in FP8 or f.kind in _LATENT):
        raise Unsupported(
            f"KvxConnector: group {index} ({_few(f.layer_names)}) holds {f.dtype}{' latents' * (f.kind in _LATENT)}; it reads "
            f"{', '.join(FORMATS)} and, of K and V, {' and '.join(FP8)}: kv_cache_dtype auto, fp8 or fp8_e5m2. In the tiers "
            "blocks can be smaller by the extra config's format."
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
        format=FORMATS.get(f.dtype, f.dtype),
        # Its scales are vLLM's and stand apart. 8 bits of a bf16's mantissa give back every code of fp8 under the same scale.
        tier_format="" if f.dtype in FORMATS else "f32" if model.dtype == "float32" else "bf16",
        window=f.window,
        is_latent=is_latent,
        is_chunked=f.kind == CHUNKED,
    )


def _read_states(index: int, f: GroupFacts, model: ModelFacts) -> Group:
    _require_usual(index, f)
    # Falcon-H1 counts its states after its attention: model.2.mixer is layer 0 of two.
    layers = tuple(n - model.num_layers if n >= model.num_layers else n for n in map(_layer_of, f.layer_names))
    odd = next((dtype for _, dtype in f.states if dtype not in FORMATS), None)
    if odd is not None:
        raise Unsupported(
            f"KvxConnector: group {index} ({_few(f.layer_names)}) keeps states in {odd}; it reads {', '.join(FORMATS)}."
        )
    shapes = [(shape, FORMATS[dtype]) for shape, dtype in f.states]
    planes = read_planes(f.layer_names[0], layers, shapes, model.planes, model.num_ranks)
    return Group(
        index, f.layer_names, layers, f.block_size, 0, 0, 0, shapes[0][1], 0, is_latent=False, planes=planes,
        keeps_states=f.keeps_states,
    )  # fmt: skip


def _require_usual(index: int, f: GroupFacts) -> None:
    if f.unusual:
        name, value = next(iter(f.unusual.items()))
        raise Unsupported(
            f"KvxConnector: group {index} ({_few(f.layer_names)}) has {name}={value}, which changes what its bytes mean. "
            "It was not read."
        )


def _layer_of(name: str) -> int:
    """vLLM's names of layers have their number in them: model.layers.12.self_attn.attn."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    if len(numbers) != 1:
        raise Unsupported(f"KvxConnector: layer {name!r} has {len(numbers)} numbers in its name; which layer of the model is it?")
    return int(numbers[0])


def _few(names: Sequence[str]) -> str:
    return f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}" if names else "no layers"
