"""Out of an engine: its blocks, as they lie in memory, become a handover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from kvx.errors import BadArgument
from kvx.handover.handover import Handover, moved
from kvx.handover.part import Part, neutral, new_buffers
from kvx.layout.plan import plan
from kvx.ops.convert import convert
from kvx.spec import CacheSpec


@dataclass(frozen=True, eq=False)
class Source:
    """An engine's paged cache of one kind of layers, or one rank's or stage's part of it."""

    buffers: Sequence[Tensor]  # every buffer, as the spec says; on any device
    spec: CacheSpec  # in the engine's own layout
    blocks: Sequence[int]  # the sequence's, in order; -1 where one is behind the window
    layers: Sequence[int] = ()  # of the model; (): spec.layer_start and on
    window: int = 0  # positions a token of these layers sees; 0: all
    first_token: int = 0  # tokens before it are not there: behind the window
    rope: str = "half"  # how rotated pairs of K lie: "half" a row apart, or "interleaved"

    @property
    def model_layers(self) -> tuple[int, ...]:
        return tuple(self.layers) or tuple(range(self.spec.layer_start, self.spec.layer_start + self.spec.num_layers))


def export_blocks(
    tokens: ArrayLike,  # ids whose K and V are in the blocks
    sources: Sequence[Source],  # ranks and stages of one kind of layers are joined
    *,
    model: str = "",  # whose KV it is; "": as the specs say
    block_size: int = 16,
    format: str = "",  # "": as it is
) -> Handover:
    """A sequence's K and V out of an engine's memory, converted, sealed with the digest of its content. Waits for the device."""
    ids = np.asarray(tokens, np.int64)
    if ids.ndim != 1 or not ids.size or ids.min() < 0 or ids.max() >= 2**31:
        raise BadArgument(f"export_blocks(): tokens are {list(ids.shape)}; they are a row of ids, one or more, 0 to {2**31 - 1}.")
    model = model or (sources[0].spec.model if sources else "")
    if not sources or not model:
        raise BadArgument(
            f"export_blocks(): {len(sources)} sources of model {model!r}; there is one or more, and the model has a name, so that "
            "nobody reads it as another's: model=."
        )
    kinds: dict[tuple[int, int], list[Source]] = {}
    for s in sources:
        if -(-ids.size // s.spec.block_size) > len(s.blocks) or len(s.model_layers) != s.spec.num_layers:
            raise BadArgument(
                f"export_blocks(): a source has {len(s.blocks)} blocks of {s.spec.block_size} for {ids.size} tokens, and "
                f"{s.spec.num_layers} layers for {len(s.model_layers)} of the model."
            )
        kinds.setdefault((s.window, s.spec.head_dim), []).append(s)
    parts = [_part(ids.size, same, model, block_size, format) for same in kinds.values()]
    return Handover(ids.astype(np.int32), tuple(parts))


def _part(num_tokens: int, sources: list[Source], model: str, block_size: int, format: str) -> Part:
    one = sources[0]
    layers = tuple(sorted({n for s in sources for n in s.model_layers}))
    specs = []
    for s in sources:  # layers counted within the part
        start = layers.index(s.model_layers[0])
        if layers[start : start + s.spec.num_layers] != s.model_layers:
            raise BadArgument(
                f"export_blocks(): a source has layers {s.model_layers} and others of its kind stand between them: {layers}. "
                "Give each run of layers as a source of its own."
            )
        if list(s.blocks) != list(one.blocks) or s.first_token != one.first_token or s.rope != one.rope:
            raise BadArgument("export_blocks(): ranks of one cache have the same blocks, first_token and rope.")
        specs.append(replace(s.spec, layer_start=start, model=model))
    head = min(s.head_start for s in specs)
    heads = max(s.head_start + s.num_kv_heads for s in specs) - head
    first, blocks = one.first_token // block_size, -(-num_tokens // block_size)
    base = replace(specs[0], layer_start=0, num_layers=len(layers), head_start=head, num_kv_heads=heads)
    spec = neutral(base, num_blocks=blocks - first, block_size=block_size, format=format, model=model)
    device = one.buffers[0].device
    made = new_buffers(spec, device)
    need = -(-num_tokens // one.spec.block_size)
    convert(
        list(made),
        [t for s in sources for t in s.buffers],
        plan=plan(specs, spec, rope=(one.rope, "half")),
        src_blocks=torch.tensor([list(one.blocks[:need])], dtype=torch.int32),
        dst_blocks=torch.tensor([[-1] * first + list(range(blocks - first))], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
    )
    return Part(spec, layers, one.window, first, tuple(moved(made, torch.device("cpu")))).sealed(num_tokens)
