"""A part of a handover: K and V of the layers of one kind, those that see all tokens or those of one window.

The neutral layout has a head's bytes of a block in one run, so that tensor parallel ranks take slices, and a block in one run, so
that tiers and wires move it whole. Rows of its blocks that stand for no token are padding, and under the digest too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from operator import index

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.handover.facts import NEUTRAL, NEUTRAL_LATENT, check_facts, negative
from kvx.handover.memory import new_buffers as new_buffers
from kvx.handover.padding import padding_block
from kvx.layout.buffers import memory_bytes
from kvx.layout.place import buffer_sizes
from kvx.layout.plan import plan
from kvx.ops.move.convert import convert
from kvx.ops.move.digest import Digest, digest
from kvx.spec import CacheSpec, Spec, StateSpec

NOT_SEALED = Digest()


@dataclass(frozen=True, eq=False)
class Part:
    spec: Spec  # of the blocks that are here; its layers are counted from 0
    layers: tuple[int, ...]  # of the model, in their order
    window: int  # positions a token of these layers sees; 0: all
    first_block: int  # blocks before it are behind the window, and not here
    buffers: tuple[Tensor, ...]  # as kvx.allocate_buffers(spec) makes them, in host memory
    content: Digest = NOT_SEALED
    first_token: int = -1  # tokens before it are not here: within the first block; -1: that block's first
    block_tokens: int = 0  # of entries: tokens that a block stands for. 0: K and V, whose spec says it, or a state, which has none

    def __post_init__(self) -> None:
        try:  # numbers of numpy are taken too; the manifest has plain ones
            numbers = {name: index(getattr(self, name)) for name in ("window", "first_block", "first_token", "block_tokens")}
            fields = {**numbers, "layers": tuple(map(index, self.layers)), "buffers": tuple(self.buffers)}
        except TypeError:
            raise BadArgument(
                f"Part: layers {str(self.layers)[:100]}, window {self.window!r}, first_block {self.first_block!r}, first_token "
                f"{self.first_token!r}; they must be whole numbers."
            ) from None
        if fields["first_token"] == -1:
            fields["first_token"] = numbers["first_block"] * self.spec.block_size
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        check_facts(self)
        _check_buffers(self)

    @property
    def kv(self) -> CacheSpec:
        """Its spec, where it is of K and V; Unsupported where its planes are others."""
        return self.spec.of_kv

    def digest(self, num_tokens: int) -> Digest:
        """Of the content as it is now: equal in every block size, and the sum of those of its shards.

        It counts every row of every block, less what padding makes: a byte that changed where no token stands shows too.
        """
        if isinstance(self.spec, StateSpec):  # every byte of its blocks: what no entry has is cleared
            return digest(list(self.buffers), self.spec, blocks=list(range(self.spec.num_blocks)))
        behind, bs = [-1] * self.first_block, self.spec.block_size
        total = digest(list(self.buffers), self.spec, blocks=[*behind, *range(self.spec.num_blocks)])
        last = self.spec.num_blocks - 1
        end = (self.first_block + self.spec.num_blocks) * bs
        for block, first, stop in ((0, self.first_block * bs, self.first_token), (last, num_tokens, end)):
            if first < stop:
                padding, spec = padding_block(self.spec, self.buffers, block)
                table = torch.tensor([[*behind, *[-1] * block, 0]], dtype=torch.int32)
                for sign, length in ((-1, stop), (1, first)):
                    rows = digest(padding, spec, blocks=table, seq_lens=torch.tensor([length], dtype=torch.int32))
                    total += rows if sign > 0 else negative(rows)
        return total

    def sealed(self, num_tokens: int) -> Part:
        return replace(self, content=self.digest(num_tokens))

    def cleared(self) -> Part:
        """With padding before its first token, whatever was copied there."""
        behind = self.first_token - self.first_block * self.spec.block_size
        if behind and not isinstance(self.spec, StateSpec):
            padding, spec = padding_block(self.spec, self.buffers, 0)
            ids, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([behind], dtype=torch.int32)
            convert(padding, list(self.buffers), plan=plan(spec, self.spec), src_blocks=ids, dst_blocks=ids, seq_lens=lens)
        return self


def neutral(spec: CacheSpec, *, num_blocks: int, block_size: int, format: str = "", model: str = "") -> CacheSpec:
    """The neutral spec of a cache of this geometry. `format` "": as it is. One geometry has one manifest, however it was said."""
    return replace(
        spec,
        layout=NEUTRAL if spec.num_planes == 2 else NEUTRAL_LATENT,
        num_blocks=num_blocks,
        block_size=block_size,
        format=format or spec.format,
        v_format="" if format or spec.v_format == spec.format else spec.v_format,
        v_head_dim=0 if spec.v_head_dim == spec.head_dim else spec.v_head_dim,
        model=model or spec.model,
        block_bytes=0,
    )


def _check_buffers(part: Part) -> None:
    sizes = [size for count, size in buffer_sizes(part.spec) for _ in range(count)]
    if len(part.buffers) != len(sizes):
        raise BadArgument(f"Part: {len(part.buffers)} buffers; its spec makes {len(sizes)}.")
    for n, (t, size) in enumerate(zip(part.buffers, sizes, strict=True)):
        if not isinstance(t, Tensor) or not t.is_cpu or not t.is_contiguous() or memory_bytes(t) != size:
            what = f"{list(t.shape)} {t.dtype} on {t.device}" if isinstance(t, Tensor) else type(t).__name__
            raise BadArgument(f"Part: buffer {n} is {what}; it has {size} bytes in a row, in host memory.")


def rank_specs(whole: Spec, tp_size: int) -> tuple[Spec, ...]:
    """One a rank. Where heads do not divide, the first ranks have one more; more ranks than heads share them."""
    if not isinstance(tp_size, int) or tp_size < 1:
        raise BadArgument(f"shard(): tp_size is {tp_size!r}; it must be 1 or more.")
    if isinstance(whole, StateSpec):
        return tuple(whole.shard(tp_size, r) for r in range(tp_size))
    spec = whole.of_kv
    heads = spec.num_kv_heads
    if tp_size > heads or heads % tp_size == 0:
        return tuple(spec.shard(tp_size, r) for r in range(tp_size))
    ends = [-(-heads * r // tp_size) for r in range(tp_size + 1)]
    return tuple(replace(spec, head_start=spec.head_start + a, num_kv_heads=b - a) for a, b in pairwise(ends))
