"""KvxCache: transformers' cache of a whole model, stored in KVX blocks.

Layers of one kind share blocks and tables, so that a batch is reordered, cropped or copied once for all of them. Attention either
gets K and V gathered, as from any other cache, or with attn_implementation="kvx" a handle through which it reads the blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from kvx.adapters.transformers.batch_blocks import BatchBlocks
from kvx.adapters.transformers.caller import TWO_CACHES, Caller
from kvx.adapters.transformers.kinds import CHUNKS_WRONG, CachedLayer, cached_layers
from kvx.adapters.transformers.layer import KvxLayer
from kvx.adapters.transformers.state_layer import KvxHybridLayer, KvxStateLayer, empty_layer
from kvx.adapters.transformers.states import PagedStates, uncompiled
from kvx.errors import BadArgument, Unsupported, a_type
from kvx.spec.byte_size import byte_text
from kvx.spec.formats import Format, Granularity
from kvx.spec.shown import Shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "kvx"  # of the attention implementation


class KvxCache(Shown, Cache):
    """A paged and optionally quantised KV cache for Transformers: `model.generate(..., past_key_values=KvxCache(model))`.

    It works with generate() and forward() of decoders with full or sliding-window attention, and of hybrid models with recurrent
    layers. A cache belongs to one model; `reset()` empties it.
    """

    def __init__(
        self,
        config: PretrainedConfig | PreTrainedModel,  # a model, or its config
        *,
        format: str = "",  # format of K and V, such as "int8_per_token_head"; "": the model's dtype
        block_size: int = 16,  # tokens per block
        reserve: int = 0,  # tokens per sequence to allocate memory for at the start; the memory doubles whenever it is full
    ) -> None:
        if not isinstance(config, PretrainedConfig):
            config = getattr(config, "config", config)  # of a model, or of one that wraps it
        if not isinstance(config, PretrainedConfig):
            raise BadArgument(f"KvxCache(): config is {a_type(config)}; it takes a model or its config: KvxCache(model).")
        if format:
            _check_format(Format.named(format))
        if block_size < 1 or reserve < 0:
            raise BadArgument(
                f"KvxCache(): block_size is {block_size} and reserve is {reserve}; block_size must be 1 or more, reserve 0 or more."
            )
        try:
            self.config = config.get_text_config(decoder=True)
        except ValueError as error:  # several, of which it does not know the decoder's
            raise BadArgument(f"KvxCache(): {error} Give the decoder's own config.") from error
        self._has_encoder = bool(getattr(config, "is_encoder_decoder", False))
        found = cached_layers(self.config)
        windows = dict.fromkeys(layer.window for layer in found if layer.has_kv)
        kinds = {w: BatchBlocks(block_size=block_size, window=w, reserve=reserve) for w in windows}
        self._kinds = list(kinds.values())
        self._pads: NDArray[np.int64] | None = None  # padding of each sequence; None: nothing is stored yet
        self._caller = Caller(self.config)
        self._last_layer = -1  # that was updated
        self._keeps_past = False  # states are put aside before each forward
        self._updates: set[tuple[int, str]] = set()  # of the forward that runs, or ran last, where the past is kept
        self._forward_start = 0  # tokens before it
        super().__init__(layers=[_layer(i, layer, kinds, format) for i, layer in enumerate(found)])

    @property
    def kv_layers(self) -> list[KvxLayer]:
        """Those that keep K and V."""
        return [layer for layer in self.layers if isinstance(layer, KvxLayer)]

    @property
    def state_layers(self) -> list[KvxStateLayer]:
        """Those that keep states, alone or beside K and V."""
        return [layer for layer in self.layers if isinstance(layer, KvxStateLayer)]

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
        if not isinstance(layer, KvxLayer):
            keeps = "a state" if isinstance(layer, KvxStateLayer) else "nothing"
            raise BadArgument(f"KvxCache.update(): layer {layer_idx} keeps {keeps} by its config, and now K and V come of it.")
        if layer_idx <= self._last_layer or self._last_layer < 0:  # a forward begins
            is_twice = layer_idx == self._last_layer and len(self.kv_layers) > 1  # no other layer in between
            self._caller.check(layer_idx, layer.length, is_twice=is_twice)
        self._check_steps(layer)
        layer.check(key_states, value_states)
        self._last_layer = layer_idx
        if self._keeps_past:
            self._note_update(layer_idx, "kv")
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
        kv = self.kv_layers
        behind = kv[-1 if layer.index < kv[-1].index else 0]
        if layer.length > behind.length:
            back = f"crop({behind.length}) goes back to before it, reset() to the beginning." if behind.length else "reset() it."
            raise BadArgument(
                f"KvxCache.update(): layer {layer.index} has {layer.length} tokens, layer {behind.index} {behind.length}: the "
                f"forward before this did not finish. {back}"
            )

    @uncompiled
    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """The newest columns of a convolution; all that the next tokens need."""
        if self.config.model_type in CHUNKS_WRONG and conv_states.shape[-1] > 1 and self.has_previous_state(layer_idx, state_idx):
            raise Unsupported(
                f"KvxCache: {conv_states.shape[-1]} tokens of a {self.config.model_type} come on top of a state, and transformers "
                "computes them as if there were none. Run the whole prompt at once, then one token at a time. reset() the cache: "
                "some of its layers have these tokens."
            )
        self._before_states(layer_idx, conv_states, f"conv {state_idx}")
        updated: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        return updated

    @uncompiled
    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """A recurrence after the newest token."""
        self._before_states(layer_idx, recurrent_states, f"recurrent {state_idx}")
        updated: Tensor = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        return updated

    def _before_states(self, layer_idx: int, states: Tensor, what: str) -> None:
        layer = self.layers[layer_idx] if 0 <= layer_idx < len(self.layers) else None
        if not isinstance(layer, KvxStateLayer):
            raise BadArgument(f"KvxCache: a state of layer {layer_idx} comes; by its config the cache keeps none of it.")
        if torch.is_grad_enabled() and states.requires_grad:
            raise Unsupported(
                f"KvxCache: a state of layer {layer_idx} requires gradients, and states are changed in place. Run the model under "
                "torch.no_grad() or torch.inference_mode(); train with use_cache=False."
            )
        held = layer.tensors if not isinstance(layer, KvxLayer) else [t for t in layer.conv_states.values() if t is not None]
        if held and len(held[0]) != len(states):
            raise BadArgument(
                f"KvxCache: layer {layer_idx} got states of {len(states)} sequences; it has {len(held[0])}. Use reorder_cache(), "
                "batch_select_indices() or batch_repeat_interleave() to change them, or reset() for a new batch."
            )
        if self._keeps_past:
            self._note_update(layer_idx, what)
            layer.put_aside(self._forward_start)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """What a model may change in place, as they do for one token: it is put aside first."""
        self._before_a_look(layer_idx)
        found: Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return found

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._before_a_look(layer_idx)
        found: Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        return found

    def _before_a_look(self, layer_idx: int) -> None:
        layer = self.layers[layer_idx] if 0 <= layer_idx < len(self.layers) else None
        if self._keeps_past and isinstance(layer, KvxStateLayer):
            self._note_update(layer_idx, "look")
            layer.put_aside(self._forward_start)

    def _note_update(self, layer_idx: int, what: str) -> None:
        """Layers come in their order: where one before the last comes, the next forward begins, after the tokens that are here."""
        last = max((layer for layer, _ in self._updates), default=len(self.layers))
        is_again = len(self.layers) == 1 and (layer_idx, what) in self._updates
        if layer_idx < last or is_again:
            self._updates.clear()
            self._forward_start = min(kv.length for kv in self.kv_layers)
        self._updates.add((layer_idx, what))

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
        for layer, (key, value) in zip(self.kv_layers, likes, strict=True):
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
            for other in self.kv_layers:
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
        """Bytes of K, V, scales and states that are allocated."""
        states = (t for layer in self.state_layers for part in (layer.conv_states, layer.recurrent_states) for t in part.values())
        held: int = sum(t.numel() * t.element_size() for t in states if t is not None)
        return held + sum(layer.spec.cache_bytes for layer in self.kv_layers if layer.is_initialized)

    def shown(self) -> dict[str, str]:
        counts = {
            "K and V": sum(isinstance(layer, KvxLayer) for layer in self.layers),
            "states": sum(isinstance(layer, KvxStateLayer) for layer in self.layers),
        }
        tokens = max((layer.length for layer in self.kv_layers), default=0)
        waiting = [len(layer.waiting[0]) for layer in self.kv_layers if layer.waiting is not None]
        sequences = len(self._pads) if self._pads is not None else max(waiting, default=0)
        where = sorted({str(layer.device) for layer in self.kv_layers if layer.is_initialized})
        return {
            "model": self.config.model_type,
            "sequences": f"{sequences} of {tokens:,} tokens",
            "layers": f"{len(self.layers)}, " + ", ".join(f"{what} of {n}" for what, n in counts.items() if n),
            "format": self.kv_layers[0].format or "the model's dtype",
            "block size": f"{self._kinds[0].block_size} tokens",
            "allocated": byte_text(self.memory_bytes),
            **({"device": ", ".join(where)} if where else {}),
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> KvxCache:
        """A cache that goes its own way, for the same model: what is frozen or the model's is shared."""
        memo.update((id(config), config) for config in (self.config, self._caller.runs_by))
        memo.update((id(layer.spec), layer.spec) for layer in self.kv_layers if layer.is_initialized)
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
        seen = max((layer.length for layer in self.kv_layers), default=0)
        if -length > seen:
            raise BadArgument(f"KvxCache.crop(): {-length} tokens are to be taken back; there are {seen}.")
        new = min(seen, length) if length > 0 else seen + length
        if new == 0:
            return self.reset()
        started = [blocks for blocks in self._kinds if blocks.is_started]
        for blocks in started:  # all of them before any is changed
            blocks.check_crop(new)
        for state in self.state_layers:
            if why := state.why_not_cut(seen, new):
                raise Unsupported(f"KvxCache.crop(): to {new} of {seen} tokens: {why}. Nothing changed.")
        for state in self.state_layers:
            state.cut(seen, new)
        self._updates.clear()
        for blocks in started:
            blocks.crop(new)
            blocks.release_behind()
        for layer in self.kv_layers:
            layer.length = min(layer.length, new)
            layer.first_visible = layer.first_column(layer.length)

    def activate_past_recording(self) -> None:
        """Keep what leaves a window until the next crop, so that tokens can be taken back. transformers 5 calls it itself."""
        self._keeps_past = True
        for blocks in self._kinds:
            blocks.keeps_past = True
        for state in self.state_layers:
            state.record_past = True

    def reset(self) -> None:
        """No sequences; storage stays for the next ones."""
        for blocks in self._kinds:
            blocks.clear()
        for layer in self.kv_layers:
            layer.length, layer.first_visible, layer.waiting = 0, 0, None
        for state in self.state_layers:
            state.forget()
        self._updates.clear()
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
            raise BadArgument(
                f"KvxCache: sequences {rows.tolist()} are chosen of {count}; they must be 0 to {count - 1}, one or more."
            )
        for blocks in self._kinds:
            if blocks.is_started:
                blocks.select(rows)
        for layer in self.kv_layers:
            if layer.is_initialized:
                layer.batch_size = layer.max_batch_size = len(rows)
        for state in self.state_layers:
            state.select(torch.from_numpy(rows))
        self._pads = self._pads[rows]

    @property
    def num_sequences(self) -> int:
        """With what waited: it is stored by now."""
        self._settle_all()
        return 0 if self._pads is None else len(self._pads)

    def _settle_all(self) -> None:
        for layer in self.kv_layers:
            self.settle(layer)


def _layer(index: int, layer: CachedLayer, kinds: dict[int, BatchBlocks], format: str) -> Any:
    if layer.is_empty:
        return empty_layer()
    if not layer.has_kv:
        return KvxStateLayer(index, layer.num_states)
    if layer.num_states:
        return KvxHybridLayer(index, kinds[layer.window], format, layer.num_states)
    return KvxLayer(index, kinds[layer.window], format)


def _check_format(format: Format) -> None:
    computed = (Granularity.TOKEN_HEAD, Granularity.GROUP)  # by write; the others are given, and here are 1
    if format.scale is not None and format.granularity not in computed and format.element.name.startswith("int"):
        raise BadArgument(
            f"KvxCache(): format {format.name!r} has scales that must be measured first, and integer formats need them. "
            "Use int8_per_token_head, or another whose scales are computed for each token."
        )
