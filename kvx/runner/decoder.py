"""Decoder: what an Engine runs: kvx.runner.model.Model, or kvx.adapters.transformers.PagedModel for any of transformers' models."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvx.cache.batch import Batch
from kvx.cache.paged import PagedCache


class DecoderConfig(Protocol):
    """The shape of a model, as far as an engine asks."""

    @property
    def family(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...


class Decoder(Protocol):
    """A model over the batches of one cache."""

    @property
    def config(self) -> DecoderConfig: ...
    @property
    def cache(self) -> PagedCache: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def is_one_pass(self) -> bool:
        """A step's tokens go through it together: every layer writes all of them before any attends. Then a sequence may find what
        another writes in the same step."""
        ...

    def forward(self, batch: Batch) -> Tensor:
        """[num_seqs, vocab] f32: logits after each sequence's last token of this step."""
        ...
