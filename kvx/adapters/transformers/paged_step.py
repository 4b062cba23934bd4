"""PagedStep: one forward of a transformers model over sequences of a PagedCache, as `past_key_values`.

Its sequences have equally many new tokens. What they have before differs, so columns are counted by the longest: sequence s has the
last of them, after `pads[s]` columns that nobody sees. K and V are written into blocks and read back left-padded; states are copied
out of each sequence's block, changed by the model as transformers lays them out, and copied back by finish().
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvx.adapters.transformers.layer_plan import LayerPlan
from kvx.adapters.transformers.state_layer import LINEAR, empty_layer
from kvx.cache.batch import Batch
from kvx.errors import BadArgument
from kvx.ops.append.gather import gather
from kvx.ops.append.write import write
from kvx.spec.state_planes import StatePlane
from kvx.tables import PackedTable


class PagedRows:
    """Sequences of a batch that go through the model together."""

    def __init__(self, batch: Batch, rows: list[int], starts: NDArray[np.int64], lengths: NDArray[np.int64], count: int) -> None:
        device = batch.tokens.device
        self.batch, self.count = batch, count  # new tokens of each sequence
        self.lengths, self.columns = lengths, int(lengths.max())  # with the new tokens
        self.pads = self.columns - lengths
        self.seen = self.columns - count  # columns before the new ones
        self.rows = torch.tensor(rows, device=device)
        self.at = torch.from_numpy(starts[:, None] + np.arange(count)).to(device)  # [sequences, count]: of the batch's tokens
        self.has_past = bool((lengths > count).any())

    @property
    def mask(self) -> Tensor | None:
        """[sequences, columns]: 1 but for padding; None where there is none."""
        if not self.pads.any():
            return None
        return torch.from_numpy(np.arange(self.columns) >= self.pads[:, None]).to(self.at.device, torch.long)

    def state_blocks(self, group: int) -> Tensor:
        return self.batch.state_blocks(group)[self.rows].long()

    def slots(self, group: int) -> Tensor:
        return self.batch.slot_mapping(group)[self.at.reshape(-1)]


class PagedKvLayer(CacheLayerMixin):
    """K and V of one layer."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, plan: LayerPlan, rows: PagedRows) -> None:
        assert plan.kv is not None
        assert plan.kind is not None
        self.plan, self.rows, self.kv, self.kind = plan, rows, plan.kv, plan.kind
        self.is_sliding = plan.window > 0
        self.length = rows.seen  # columns
        self.is_initialized = True
        self.first = max(rows.seen - plan.window + 1, 0) if self.is_sliding else 0  # that the new tokens may see

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the blocks are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens; all columns that they may see, [sequences, heads, columns, dim]."""
        spec, rows = self.kv.spec, self.rows
        has = (len(rows.lengths), spec.num_kv_heads, rows.count, spec.kv[0].head_dim, spec.kv[1].head_dim)
        got = (*key_states.shape, value_states.shape[-1])
        if got != has:
            raise BadArgument(
                f"PagedModel: layer {self.plan.index} gives K and V of (sequences, heads, tokens, key dim, value dim) {got}; by "
                f"the model's config they are {has}, and so are the cache's. This model cannot run on it."
            )
        k, v = (x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (key_states, value_states))
        write(self.kv.cache, k, v, slot_mapping=rows.slots(self.kv.group), spec=spec, **self.kv.scales)
        self.length = rows.columns
        return self._read(key_states.dtype)

    def _read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows, size = self.rows, self.kv.spec.block_size
        begin = np.asarray(self.kind.first_block(rows.lengths - rows.count, size), np.int64)  # blocks before it may be given back
        lengths, device = rows.lengths - begin * size, rows.at.device
        table = rows.batch.table(self.kv.group).block_table[rows.rows]
        width = -(-int(lengths.max()) // size)
        blocks = np.minimum(begin[:, None] + np.arange(width), table.shape[1] - 1)  # past a sequence's end nothing is read
        found = PackedTable(table.gather(1, torch.from_numpy(blocks).to(device)), torch.from_numpy(lengths).to(device, torch.int32))
        num_rows = width * size
        out = [
            torch.empty(len(lengths), num_rows, self.kv.spec.num_kv_heads, p.head_dim, dtype=dtype, device=device)
            for p in self.kv.spec.kv
        ]
        gather(self.kv.cache, found, spec=self.kv.spec, max_seq_len=num_rows, out=(out[0], out[1]), **self.kv.scales)
        # Padding, and what was given back, is a token that the mask hides.
        place = self.first - rows.pads - begin * size
        index = np.clip(place[:, None] + np.arange(rows.columns - self.first), 0, num_rows - 1)
        picked = torch.from_numpy(index).to(device)[:, :, None, None]
        k, v = (x.take_along_dim(picked, 1).transpose(1, 2).contiguous() for x in out)
        return k, v

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(columns, first column). transformers 4 gives cache positions, 5 their number."""
        return self.rows.columns - self.first, self.first

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.plan.window or -1

    get_max_cache_shape = get_max_length  # its name in transformers 4


class PagedStateLayer(LINEAR):
    """States of one layer."""

    device: Any
    dtype: Any

    def __init__(self, plan: LayerPlan, rows: PagedRows) -> None:
        convs = [(i, p) for i, p in enumerate(plan.planes) if p[0].is_conv]
        LINEAR.__init__(self, number_of_states=max(1, len(convs), len(plan.planes) - len(convs)))
        self.plan, self.rows = plan, rows
        assert plan.states is not None
        self.states = plan.states
        if rows.has_past:
            self._load()

    def _load(self) -> None:
        """As they stand after the tokens before this forward's."""
        states = self.states
        blocks = self.rows.state_blocks(states.group)
        for plane, dtype, index, kept, begun in self._places():
            sizes = [size for axis, size in plane.axes if (axis, size) != ("column", 1)]  # as transformers has it
            held = states.planes[plane.name][blocks].to(dtype).reshape(len(blocks), *sizes)
            if plane.num_unused:
                held = torch.nn.functional.pad(held, (plane.num_unused, 0))
            kept[index], begun[index] = held, True
            if plane.is_conv:
                self.conv_kernel_size[index] = held.shape[-1]
        for i in range(self.number_of_states):
            self.has_previous_state[i] = True
        self.device, self.dtype = blocks.device, held.dtype

    def finish(self) -> None:
        """Into each sequence's block."""
        states = self.states
        blocks = self.rows.state_blocks(states.group)
        for plane, _, index, kept, _ in self._places():
            held, place = kept[index], states.planes[plane.name]
            want = [size + (plane.num_unused if axis == "tap" else 0) for axis, size in plane.axes if (axis, size) != ("column", 1)]
            got = None if held is None else list(held.shape[1:])
            if got != want:
                raise BadArgument(
                    f"PagedModel: layer {self.plan.index} keeps a {plane.name} of {got}; by the model's config it is {want}, and "
                    "so is the cache's. This model cannot run on it."
                )
            place[blocks] = held[..., plane.num_unused :].to(place.dtype).reshape(len(blocks), *place.shape[1:])

    def _places(self) -> list[tuple[StatePlane, torch.dtype, int, dict[int, Any], dict[int, bool]]]:
        """Each plane with its type, and where transformers has it: its number among conv or recurrent states."""
        counts, found = {True: 0, False: 0}, []
        for plane, dtype in self.plan.planes:
            parts = (
                (self.conv_states, self.is_conv_states_initialized)
                if plane.is_conv
                else (self.recurrent_states, self.is_recurrent_states_initialized)
            )
            found.append((plane, dtype, counts[plane.is_conv], *parts))
            counts[plane.is_conv] += 1
        return found


class PagedBothLayer(PagedKvLayer, PagedStateLayer):
    """K and V of a layer, and its states beside them (Falcon-H1, Zamba2)."""

    device: Any
    dtype: Any

    def __init__(self, plan: LayerPlan, rows: PagedRows) -> None:
        PagedStateLayer.__init__(self, plan, rows)
        PagedKvLayer.__init__(self, plan, rows)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of states alone."""
        LINEAR.lazy_initialization(self, **kwargs)


class PagedStep(Cache):
    """Good for one forward."""

    def __init__(self, plans: list[LayerPlan], rows: PagedRows) -> None:
        super().__init__(layers=[_layer(plan, rows) for plan in plans])

    def finish(self) -> None:
        """After the forward: states into their blocks."""
        for layer in self.layers:
            if isinstance(layer, PagedStateLayer):
                layer.finish()


def _layer(plan: LayerPlan, rows: PagedRows) -> Any:
    if plan.kv is None:
        return empty_layer() if plan.states is None else PagedStateLayer(plan, rows)
    return PagedKvLayer(plan, rows) if plan.states is None else PagedBothLayer(plan, rows)
