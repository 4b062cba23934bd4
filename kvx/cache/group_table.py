"""GroupTable: a layer group at work. Its blocks, as a BlockTable has them, and the storage of its layers."""

from __future__ import annotations

import torch
from torch import Tensor

from kvx.cache.block_table import BlockTable
from kvx.cache.blocks import BlockAllocator
from kvx.cache.groups import AnyLayer, Layer, LayerGroup, PlanesLayer, make_layer
from kvx.cache.guard import Guard

_MOST_BLOCKS = 1024  # whose views are kept: 40 KB each where there are 72 planes


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
        handles = [layer for layer in self.layers.values() if isinstance(layer, PlanesLayer)]
        self._planes = [_wide(plane) for layer in handles for plane in layer.planes.values()]
        self._blocks: dict[int, list[Tensor]] = {}  # of each that was copied or cleared: the block in all planes of all layers

    def copy_block(self, source: int, destination: int) -> None:
        for layer in self.layers.values():
            if isinstance(layer, Layer):
                layer.copy_block(source, destination, self._backend)
        if self._planes:
            torch._foreach_copy_(self._block(destination), self._block(source))

    def clear_block(self, block: int) -> None:
        """Of planes other than K and V: zeros. Of K and V what nobody wrote, nobody reads."""
        if self._planes:
            torch._foreach_zero_(self._block(block))

    def _block(self, block: int) -> list[Tensor]:
        """Views are made once: 72 planes, as Qwen3-Next has, take longer to index than their bytes to copy."""
        found = self._blocks.get(block)
        if found is None:
            if len(self._blocks) == _MOST_BLOCKS:
                self._blocks.clear()
            found = self._blocks[block] = [plane[block] for plane in self._planes]
        return found


def _wide(plane: Tensor) -> Tensor:
    """The same bytes in elements as wide as they can be, [num_blocks, ...]: planes of one type are copied by one launch."""
    size, inside = plane.element_size(), list(zip(plane.shape[1:], plane.stride()[1:], strict=True))
    num_elements = 1 + sum((n - 1) * step for n, step in inside)
    if not plane.numel() or num_elements != plane[0].numel():  # other bytes are between those of a block
        return plane
    flat = plane.as_strided((len(plane), num_elements), (plane.stride(0), 1))
    for dtype in (torch.int64, torch.int32, torch.int16):
        places = (num_elements, flat.stride(0), flat.storage_offset())
        if size <= dtype.itemsize and all(n * size % dtype.itemsize == 0 for n in places):
            return flat.view(dtype)
    return flat
