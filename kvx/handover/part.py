"""A part of a handover: K and V of the layers of one kind, those that see all tokens or those of one window.

The neutral layout has a head's bytes of a block in one run, so that tensor parallel ranks take slices, and a block in one run, so
that tiers and wires move it whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.layout.buffers import allocate_buffers
from kvx.layout.place import buffer_sizes, num_cache_buffers
from kvx.ops.digest import Digest, digest
from kvx.spec import CacheSpec

NEUTRAL = "block | head layer kv token dim"
NEUTRAL_LATENT = "block | layer token head dim"  # MLA: one latent row a token
NOT_SEALED = Digest()


@dataclass(frozen=True, eq=False)
class Part:
    spec: CacheSpec  # of the blocks that are here; its layers are counted from 0
    layers: tuple[int, ...]  # of the model, in their order
    window: int  # positions a token of these layers sees; 0: all
    first_block: int  # blocks before it are behind the window, and not here
    buffers: tuple[Tensor, ...]  # as kvx.allocate_buffers(spec) makes them, in host memory
    content: Digest = NOT_SEALED

    def __post_init__(self) -> None:
        if self.spec.num_layers != len(self.layers) or self.spec.layer_start:
            raise BadArgument(
                f"Part: spec has layers {self.spec.layer_start} to {self.spec.layer_start + self.spec.num_layers - 1} for "
                f"{len(self.layers)} layers of the model; it has as many, counted from 0."
            )

    def digest(self, num_tokens: int) -> Digest:
        """Of the content as it is now."""
        held = torch.tensor([num_tokens - self.first_block * self.spec.block_size], dtype=torch.int32)
        here = torch.arange(self.spec.num_blocks, dtype=torch.int32).view(1, -1)
        return digest(list(self.buffers), self.spec, blocks=here, seq_lens=held)

    def sealed(self, num_tokens: int) -> Part:
        return replace(self, content=self.digest(num_tokens))


def neutral(spec: CacheSpec, *, num_blocks: int, block_size: int, format: str = "", model: str = "") -> CacheSpec:
    """The neutral spec of a cache of this geometry. `format` "": as it is."""
    return replace(
        spec,
        layout=NEUTRAL if spec.num_planes == 2 else NEUTRAL_LATENT,
        num_blocks=num_blocks,
        block_size=block_size,
        format=format or spec.format,
        v_format="" if format else spec.v_format,
        model=model or spec.model,
        block_bytes=0,
    )


def new_buffers(spec: CacheSpec, device: str | torch.device = "cpu") -> tuple[Tensor, ...]:
    """As kvx.allocate_buffers, with all blocks in one allocation: one registration for a wire, one copy for a link."""
    sizes = [size for count, size in buffer_sizes(spec) for _ in range(count)][: num_cache_buffers(spec)]
    arena = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    scales = allocate_buffers(spec, device)[num_cache_buffers(spec) :] if has_scales(spec) else []
    return (*arena.split(sizes), *scales)


def has_scales(spec: CacheSpec) -> bool:
    """Scales that stand apart from the rows."""
    return sum(count for count, _ in buffer_sizes(spec)) > num_cache_buffers(spec)
