"""States of recurrent and convolution layers in a KvxCache, behind transformers' interface of such layers.

A sequence has one state of each plane, at the position of its newest token: a row of a tensor [batch, ...], as transformers lays
them out. What transformers leaves undone is done here: a state goes with its sequence when a batch is reordered, selected or
repeated, and when tokens are taken back it is put back as it was, or that is refused. A recurrent state cannot be cut: with
activate_past_recording() it is put aside before each forward, and a crop goes back to where one began.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import cache_utils

from kvx.adapters.transformers.batch_blocks import BatchBlocks
from kvx.adapters.transformers.layer import KvxLayer
from kvx.errors import Unsupported

# Of transformers 5; before, states were kept by classes of the models.
LINEAR: Any = getattr(cache_utils, "LinearAttentionLayer", object)


class Aside(NamedTuple):
    """A layer's states before a forward."""

    length: int  # tokens they stand after
    conv: dict[int, Tensor]
    recurrent: dict[int, Tensor]
    has_previous: dict[int, bool]


def empty_layer() -> Any:
    """Of a layer that keeps nothing. Before transformers 5.23 that is a state which stays empty."""
    made = getattr(cache_utils, "DummyLayer", LINEAR)
    return made()


class KvxStateLayer(LINEAR):
    """States alone: of a recurrent layer, or of a convolution."""

    device: Any  # None before the first state, as transformers has it
    dtype: Any

    def __init__(self, index: int, number_of_states: int = 1) -> None:
        LINEAR.__init__(self, number_of_states=number_of_states)
        self.index = index
        self.aside: list[Aside] = []  # the newest last; empty unless the past is recorded

    @property
    def is_filled(self) -> bool:
        return any(self.is_conv_states_initialized.values()) or any(self.is_recurrent_states_initialized.values())

    @property
    def has_recurrence(self) -> bool:
        return any(self.is_recurrent_states_initialized.values())

    @property
    def tensors(self) -> list[Tensor]:
        """All of its states, [batch, ...]."""
        return [t for states in (self.conv_states, self.recurrent_states) for t in states.values() if t is not None]

    def put_aside(self, length: int) -> None:
        """Before the forward of the tokens from `length` on."""
        if self.aside and self.aside[-1].length >= length:
            return
        copies = [
            {i: t.clone() for i, t in states.items() if t is not None} for states in (self.conv_states, self.recurrent_states)
        ]
        self.aside = [*self.aside[-1:], Aside(length, copies[0], copies[1], dict(self.has_previous_state))]

    def why_not_cut(self, length: int, new: int) -> str:
        """Why a state after `length` tokens cannot be put back to where it stood after `new`; "" where it can."""
        if new == length or not self.is_filled or any(a.length == new for a in self.aside):
            return ""
        if not self.has_recurrence and self.record_past:
            return ""
        stands = ", ".join(str(a.length) for a in self.aside)
        if not self.record_past:
            return f"layer {self.index} keeps a state, which has moved on; activate_past_recording() before the tokens are run"
        return f"layer {self.index} keeps a recurrent state, which goes back to {stands or 'nowhere'} and not to any other length"

    def cut(self, length: int, new: int) -> None:
        """Put it back to where it stood after `new` tokens; why_not_cut() was asked."""
        found = next((a for a in self.aside if a.length == new), None)
        if new == length:
            for i, kept in self.conv_kernel_size.items():
                if self.record_past and self.conv_states[i] is not None and kept:
                    self.conv_states[i] = self.conv_states[i][..., -kept:]
        elif found is not None:
            for states, copies in ((self.conv_states, found.conv), (self.recurrent_states, found.recurrent)):
                for i, t in states.items():
                    if t is not None:
                        states[i] = copies[i].clone() if i in copies else torch.zeros_like(t)
            self.has_previous_state.update(found.has_previous)
        elif self.is_filled:
            LINEAR.crop(self, new - length)
        self.aside = [a for a in self.aside if a.length <= new]

    def select(self, rows: Tensor) -> None:
        """Sequence i goes on as what sequence rows[i] was."""
        for states in (self.conv_states, self.recurrent_states):
            for i, t in states.items():
                if t is not None:
                    states[i] = t.index_select(0, rows.to(t.device))
        self.aside = []  # of sequences that are elsewhere now

    def forget(self) -> None:
        """As before the first token, for a batch of any size."""
        for i in range(self.number_of_states):
            self.conv_states[i] = self.recurrent_states[i] = None
            self.is_conv_states_initialized[i] = self.is_recurrent_states_initialized[i] = False
            self.has_previous_state[i] = False
        self.device = self.dtype = None
        self.aside = []

    def crop(self, tokens_to_remove: int) -> None:
        raise Unsupported("KvxStateLayer.crop(): layers are cropped together: KvxCache.crop().")


class KvxHybridLayer(KvxLayer, KvxStateLayer):
    """K and V of a layer in blocks, and its states beside them (Falcon-H1, Zamba2)."""

    device: Any
    dtype: Any

    def __init__(self, index: int, blocks: BatchBlocks, format: str, number_of_states: int = 1) -> None:
        KvxStateLayer.__init__(self, index, number_of_states)
        KvxLayer.__init__(self, index, blocks, format)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of K and V by two tensors; of states by their names, as update_conv_state and update_recurrent_state call it."""
        if kwargs:
            device, dtype = self.device, self.dtype
            self.device = None
            LINEAR.lazy_initialization(self, **kwargs)
            if device is not None:
                self.device, self.dtype = device, dtype
        else:
            KvxLayer.lazy_initialization(self, *args)

    @property
    def tensors(self) -> Any:
        """K and V; then their scales, where those stand apart. States are `conv_states` and `recurrent_states`."""
        return KvxLayer.tensors.fget(self)  # type: ignore[attr-defined]

    def forget(self) -> None:
        device, dtype = self.device, self.dtype
        KvxStateLayer.forget(self)
        if self.is_initialized:
            self.device, self.dtype = device, dtype
