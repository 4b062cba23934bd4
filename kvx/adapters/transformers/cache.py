"""KvxCache: transformers' cache of a whole model, stored in KVX blocks.

Layers of one kind share blocks and tables, so that a batch is reordered, cropped or copied once for all of them. Attention either
gets K and V gathered, as from any other cache, or with attn_implementation="kvx" a handle through which it reads the blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from kvx.adapters.transformers.batch_blocks import BatchBlocks
from kvx.adapters.transformers.caller import TWO_CACHES, Caller
from kvx.adapters.transformers.kinds import windows
from kvx.adapters.transformers.layer import KvxLayer
from kvx.adapters.transformers.states import PagedStates, uncompiled
from kvx.errors import BadArgument, Unsupported
from kvx.spec.formats import Format, Granularity

NAME = "kvx"  # of the attention implementation


class KvxCache(Cache):
    """`past_key_values` of any generate() or forward() of a decoder whose layers attend to all tokens or to a window of them."""

    def __init__(
        self,
        config: PretrainedConfig,  # the model's: model.config
        *,
        format: str = "",  # of K and V, a row of kvx.FORMATS; "": the model's own type
        block_size: int = 16,
        reserve: int = 0,  # tokens a sequence room is made for at once; past them, or with 0, storage doubles when it is full
    ) -> None:
        if not isinstance(config, PretrainedConfig):
            raise BadArgument(f"KvxCache(): config is a {type(config).__name__}; it is a model's config: KvxCache(model.config).")
        if format:
            _check_format(Format.named(format))
        if block_size < 1 or reserve < 0:
            raise BadArgument(f"KvxCache(): block_size is {block_size} and reserve {reserve}; they are 1 or more, and 0 or more.")
        try:
            self.config = config.get_text_config(decoder=True)
        except ValueError as error:  # several, of which it does not know the decoder's
            raise BadArgument(f"KvxCache(): {error} Give the decoder's own config.") from error
        self._has_encoder = bool(getattr(config, "is_encoder_decoder", False))
        found = windows(self.config)
        kinds = {w: BatchBlocks(block_size=block_size, window=w, reserve=reserve) for w in dict.fromkeys(found)}
        self._kinds = list(kinds.values())
        self._pads: NDArray[np.int64] | None = None  # padding of each sequence; None: nothing is stored yet
        self._caller = Caller(self.config)
        self._last_layer = -1  # that was updated
        super().__init__(layers=[KvxLayer(i, kinds[w], format) for i, w in enumerate(found)])

    # ---- a step

    @uncompiled
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new K and V of a layer; all of its K and V, gathered, or handles where the model attends through "kvx"."""
        if not 0 <= layer_idx < len(self.layers):
            raise BadArgument(
                f"KvxCache.update(): layer {layer_idx}; the config it was made from has {len(self.layers)} layers with a cache. "
                "A cache belongs to one model."
            )
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise Unsupported(
                f"KvxCache.update(): K or V of layer {layer_idx} require gradients, and writing into blocks in place has none. "
                "Run the model under torch.no_grad() or torch.inference_mode(); train with use_cache=False or a DynamicCache."
            )
        layer = self.layers[layer_idx]
        if layer_idx <= self._last_layer or self._last_layer < 0:  # a forward begins
            is_twice = layer_idx == self._last_layer and len(self.layers) > 1  # no other layer in between
            self._caller.check(layer_idx, layer.length, is_twice=is_twice)
        self._check_steps(layer)
        layer.check(key_states, value_states)
        self._last_layer = layer_idx
        self.settle(layer)
        is_direct = getattr(self._caller.runs_by, "_attn_implementation", None) == NAME
        layer.first_visible = layer.first_column(layer.length)
        layer.length += key_states.shape[2]
        layer.waiting = key_states, value_states
        if not (is_direct and self._pads is None):
            self.settle(layer)
        return PagedStates.pair(self, layer, key_states, value_states) if is_direct else layer.read()

    def _check_steps(self, layer: KvxLayer) -> None:
        """Refuse a layer that is ahead of the last: the forward before did not reach that, so some layers alone have its tokens."""
        behind = self.layers[-1 if layer.index < len(self.layers) - 1 else 0]
        if layer.length > behind.length:
            back = f"crop({behind.length}) goes back to before it, reset() to the beginning." if behind.length else "reset() it."
            raise BadArgument(
                f"KvxCache.update(): layer {layer.index} has {layer.length} tokens, layer {behind.index} {behind.length}: the "
                f"forward before this did not finish. {back}"
            )

    @property
    def _is_user_defined(self) -> bool:
        """generate() of transformers 5 sets it on the cache that it is given: the first moment to say that one is not enough."""
        return bool(vars(self).get("_is_given", False))

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        if self._has_encoder:
            raise Unsupported(f"generate(): past_key_values is a KvxCache of an encoder-decoder model. {TWO_CACHES}")
        self._is_given = value

    def settle(self, layer: KvxLayer, pads: NDArray[np.int64] | None = None) -> None:
        """Write what waits in a layer. `pads` counts where nothing is stored yet: from then on it is fixed."""
        if layer.waiting is None:
            return
        (key, value), layer.waiting = layer.waiting, None
        if self._pads is None:
            self._pads = np.zeros(key.shape[0], np.int64) if pads is None else pads.copy()
        blocks = layer.blocks = self._blocks_on(key.device, layer)
        if not blocks.is_started:
            blocks.start(self._pads, key.device)
        self._prepare(layer, blocks, key, value)
        layer.store(key, value, blocks.slots(layer.length - key.shape[2], key.shape[2]))

    def make_room(self, num_tokens: int, likes: Sequence[tuple[Tensor, Tensor]]) -> None:
        """One sequence of so many tokens in an empty cache, whose K and V someone else writes into the blocks of the layers.

        `likes` has the keys and values of each layer, [1, heads, any number of tokens, dim].
        """
        self.reset()
        self._pads = np.zeros(1, np.int64)
        for layer, (key, value) in zip(self.layers, likes, strict=True):
            layer.check(key, value)
            blocks = layer.blocks = self._blocks_on(key.device, layer)
            if not blocks.is_started:
                blocks.start(self._pads, key.device)
            layer.length = num_tokens
            layer.first_visible = layer.first_column(num_tokens)
            self._prepare(layer, blocks, key, value)

    def _prepare(self, layer: KvxLayer, blocks: BatchBlocks, key: Tensor, value: Tensor) -> None:
        """Storage for the layer's columns."""
        if layer.length > blocks.length:
            moves = blocks.extend(layer.length - blocks.length)
            for other in self.layers:
                if other.blocks is blocks and moves.resized is not None:
                    other.resize(moves.resized)
                if other.blocks is blocks and moves.copies:
                    other.copy(moves.copies)
        if not layer.is_initialized:
            layer.lazy_initialization(key, value)
        layer.batch_size = layer.max_batch_size = key.shape[0]

    def _blocks_on(self, device: torch.device, layer: KvxLayer) -> BatchBlocks:
        """The layer's blocks, or others of their kind: layers may be spread over devices, and tables lie where layers do."""
        if not layer.blocks.is_started or layer.blocks.device == device:
            return layer.blocks
        same = [b for b in self._kinds if b.window == layer.window]
        found = next((b for b in same if b.is_started and b.device == device), None)
        if found is None:
            found = BatchBlocks(block_size=same[0].block_size, window=layer.window, reserve=same[0].reserve)
            found.keeps_past = same[0].keeps_past
            self._kinds.append(found)
        return found

    @property
    def pads(self) -> NDArray[np.int64] | None:
        """Columns of padding at the left of each sequence, which are not stored; None before the first token is."""
        return self._pads

    @property
    def memory_bytes(self) -> int:
        """Bytes of K, V and scales that are allocated."""
        return sum(layer.spec.cache_bytes for layer in self.layers if layer.is_initialized)

    def __deepcopy__(self, memo: dict[int, Any]) -> KvxCache:
        """A cache that goes its own way, for the same model: what is frozen or the model's is shared."""
        memo.update((id(config), config) for config in (self.config, self._caller.runs_by))
        memo.update((id(layer.spec), layer.spec) for layer in self.layers if layer.is_initialized)
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(vars(self), memo))
        return made

    def __copy__(self) -> KvxCache:
        raise BadArgument("copy.copy(): two KvxCaches would write into the same blocks. Use copy.deepcopy(cache).")

    def __getstate__(self) -> dict[str, Any]:
        """For pickle."""
        self._settle_all()
        return {**vars(self)}

    # ---- sequences

    def crop(self, length: int) -> None:
        """Keep `length` tokens, or take back -length. 0 takes back none. Blocks that a window left are given back as well."""
        length = int(length)  # generate() of some versions counts in tensors
        self._settle_all()
        seen = max((layer.length for layer in self.layers), default=0)
        if -length > seen:
            raise BadArgument(f"KvxCache.crop(): {-length} tokens are to be taken back; there are {seen}.")
        new = min(seen, length) if length > 0 else seen + length
        if new == 0:
            return self.reset()
        started = [blocks for blocks in self._kinds if blocks.is_started]
        for blocks in started:  # all of them before any is changed
            blocks.check_crop(new)
        for blocks in started:
            blocks.crop(new)
            blocks.release_behind()
        for layer in self.layers:
            layer.length = min(layer.length, new)
            layer.first_visible = layer.first_column(layer.length)

    def activate_past_recording(self) -> None:
        """Keep what leaves a window until the next crop, so that tokens can be taken back. transformers 5 calls it itself."""
        for blocks in self._kinds:
            blocks.keeps_past = True

    def reset(self) -> None:
        """No sequences; storage stays for the next ones."""
        for blocks in self._kinds:
            blocks.clear()
        for layer in self.layers:
            layer.length, layer.first_visible, layer.waiting = 0, 0, None
        self._pads, self._last_layer = None, -1
        self._caller.forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: sequence i goes on as what sequence beam_idx[i] was. Blocks are shared until a beam writes."""
        self._select(np.asarray(beam_idx.tolist(), np.int64))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(np.arange(self.num_sequences)[np.asarray(indices.tolist())])  # numbers or booleans

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(np.arange(self.num_sequences).repeat(repeats))

    def _select(self, rows: NDArray[np.int64]) -> None:
        self._settle_all()
        count = self.num_sequences
        if self._pads is None or np.array_equal(rows, np.arange(count)):
            return
        if rows.size == 0 or rows.min() < 0 or rows.max() >= count:
            raise BadArgument(f"KvxCache: sequences {rows.tolist()} are chosen of {count}; they are 0 to {count - 1}, one or more.")
        for blocks in self._kinds:
            if blocks.is_started:
                blocks.select(rows)
        for layer in self.layers:
            if layer.is_initialized:
                layer.batch_size = layer.max_batch_size = len(rows)
        self._pads = self._pads[rows]

    @property
    def num_sequences(self) -> int:
        """With what waited: it is stored by now."""
        self._settle_all()
        return 0 if self._pads is None else len(self._pads)

    def _settle_all(self) -> None:
        for layer in self.layers:
            self.settle(layer)


def _check_format(format: Format) -> None:
    computed = (Granularity.TOKEN_HEAD, Granularity.GROUP)  # by write; the others are given, and here are 1
    if format.scale is not None and format.granularity not in computed and format.element.name.startswith("int"):
        raise BadArgument(
            f"KvxCache(): format {format.name!r} has scales that must be measured first, and integers are nothing without. "
            "Use int8_per_token_head, or another whose scales are computed for each token."
        )
