"""GroupTable: a layer group at work. Its blocks, as a BlockTable has them, and the storage of its layers."""

from __future__ import annotations

import torch

from kvx.cache.block_table import BlockTable
from kvx.cache.blocks import BlockAllocator
from kvx.cache.groups import AnyLayer, LayerGroup, make_layer
from kvx.cache.guard import Guard


class GroupTable(BlockTable):
    def __init__(
        self,
        group: LayerGroup,
        index: int,
        shape: tuple[int, int, int],  # max_seqs, max_blocks, block_size
        device: str | torch.device,
        backend: str,
        guard: Guard,
    ) -> None:
        super().__init__(group.blocks_of, BlockAllocator(group.spec.num_blocks, name=group.name, guard=guard), index, shape)
        self.group, self._backend = group, backend
        self.layers: dict[int, AnyLayer] = {i: make_layer(group, m.spec, index, device) for m in group.members for i in m.layers}

    def copy_block(self, source: int, destination: int) -> None:
        for layer in self.layers.values():
            layer.copy_block(source, destination, self._backend)
