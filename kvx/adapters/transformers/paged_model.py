"""PagedModel: any transformers decoder that runs over a kvx.PagedCache: prefixes found again, forks, many sequences in a step.

    cache = kvx.PagedCache(layer_groups(model.config, num_blocks=256, num_states=32, format="f32"), max_seqs=8, max_seq_len=512)
    engine = Engine(PagedModel(model, cache))                 # kvx.runner: streams, answers to one prompt, preemption
    logits = PagedModel(model, cache).forward(cache.plan(work))   # or step by step

Weights and everything between layers are transformers'; what a layer caches lies in the cache's blocks (paged_step.py). The tokens
of a step go through the model in one forward for each number of new tokens a sequence.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from kvx.adapters.transformers.layer import FORMATS
from kvx.adapters.transformers.layer_plan import MAKE_GROUPS, USE_GENERATE, LayerPlan, layer_plans
from kvx.adapters.transformers.paged_step import PagedRows, PagedStep
from kvx.cache.batch import Batch
from kvx.cache.paged import PagedCache
from kvx.errors import BadArgument, Unsupported, a_type

# Model types that count positions by themselves, padding too.
_COUNTS_PADDING = {
    *("camembert", "data2vec-text", "git", "moss_transcribe_diarize", "roberta", "roberta-prelayernorm", "xlm-roberta"),
    *("xlm-roberta-xl",),
}


@dataclass(frozen=True)
class PagedConfig:
    """What an engine asks of a model, in the words of kvx.runner."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int  # of the first layer with K and V
    head_dim: int
    max_seq_len: int
    eos_ids: tuple[int, ...]


class PagedModel:
    """A model of transformers that runs on a `kvx.PagedCache`, many requests at once. `kvx.runner.Engine` serves it.

    The tokens are those of `generate()`. `layer_groups(model.config, ...)` makes the groups of the cache.
    """

    is_one_pass = False  # a step may be several forwards: nobody reads what another writes in the same step

    def __init__(self, model: Any, cache: PagedCache) -> None:
        takes = _check_model(model)
        if not isinstance(cache, PagedCache):
            raise BadArgument(f"PagedModel(): cache is {a_type(cache)}; it must be a kvx.PagedCache. {MAKE_GROUPS}")
        self.model, self.cache, self.dtype = model, cache, model.dtype
        where = {p.device for p in model.parameters()}
        if where != {cache.device} and not (len(where) == 1 and _is_same(next(iter(where)), cache.device)):
            raise BadArgument(
                f"PagedModel(): the model is on {', '.join(sorted(map(str, where)))}, the cache on {cache.device}; both are on one "
                f'device. Move the model, model.to("{cache.device}"), or make the cache there, PagedCache(device=).'
            )
        config = model.config.get_text_config(decoder=True)
        self._plans = layer_plans(config, cache, self.dtype)
        self._counts_padding = self.counts_padding(model.config)
        self._takes = {"logits_to_keep", *(() if self._counts_padding else ("position_ids",))} & takes
        self.config = _config(model, config, self._plans, cache)

    @staticmethod
    def counts_padding(config: PretrainedConfig) -> bool:
        """Whether a model of this config takes positions of nobody: then sequences go together only where they are equally long."""
        return not _COUNTS_PADDING.isdisjoint((config.model_type, config.get_text_config(decoder=True).model_type))

    @torch.no_grad()
    def forward(self, batch: Batch, *, of_all: bool = False) -> Tensor:
        """[num_seqs, vocab] f32: logits after each sequence's last token of this step; `of_all`: after every token of it."""
        if self.model.training:
            raise BadArgument("PagedModel.forward(): the model is in training mode, where dropout changes answers; model.eval().")
        ends, lengths = (np.asarray(t.tolist(), np.int64) for t in (batch.cu_seqlens, batch.seq_lens))
        counts = np.diff(ends)
        num = batch.num_tokens if of_all else batch.num_seqs
        out = torch.zeros(num, self.config.vocab_size, dtype=torch.float32, device=batch.tokens.device)
        together: dict[tuple[int, bool, int], list[int]] = {}
        for row, (count, length) in enumerate(zip(counts.tolist(), lengths.tolist(), strict=True)):
            if count:  # or it fills the batch up
                together.setdefault((count, length > count, length if self._counts_padding else 0), []).append(row)
        for (count, *_), seqs in together.items():
            rows = PagedRows(batch, seqs, ends[seqs], lengths[seqs], count)
            logits = self._forward(rows, of_all)
            out[rows.at if of_all else rows.rows] = logits if of_all else logits[:, -1]
        return out

    def _forward(self, rows: PagedRows, of_all: bool) -> Tensor:
        """[sequences, tokens or 1, vocab]."""
        batch, mask, step = rows.batch, rows.mask, PagedStep(self._plans, rows)
        given: dict[str, Any] = {"input_ids": batch.tokens[rows.at], "past_key_values": step, "use_cache": True}
        given |= {"position_ids": batch.positions[rows.at]} if "position_ids" in self._takes else {}
        given |= {"logits_to_keep": 1} if "logits_to_keep" in self._takes and not of_all else {}
        logits: Tensor = self.model(**given, attention_mask=mask).logits
        step.finish()
        return logits.float()


def _check_model(model: Any) -> frozenset[str]:
    """The names that its forward takes."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig) or not callable(getattr(model, "forward", None)):
        raise BadArgument(f"PagedModel(): model is a {name}; it must be a transformers model, such as an AutoModelForCausalLM.")
    takes = frozenset(inspect.signature(model.forward).parameters)
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(f"PagedModel(): a {name} is an encoder and a decoder, with a cache for each. {USE_GENERATE}")
    if not {"input_ids", "past_key_values", "attention_mask"} <= takes or model.get_output_embeddings() is None:
        raise Unsupported(
            f"PagedModel(): a {name} gives no next token from input_ids, attention_mask and past_key_values, as "
            "AutoModelForCausalLM's classes do. Load it with AutoModelForCausalLM; one of states alone runs by its own generate()."
        )
    kind = model.dtype
    if kind not in FORMATS:
        raise Unsupported(f"PagedModel(): the model is {kind}; it must be float32, bfloat16 or float16: model.float().")
    if model.training:
        raise BadArgument("PagedModel(): the model is in training mode, where dropout changes answers; call model.eval().")
    return takes


def _is_same(a: torch.device, b: torch.device) -> bool:
    """cuda is cuda:0."""
    return a.type == b.type and (a.index or 0) == (b.index or 0)


def _config(model: Any, config: PretrainedConfig, plans: list[LayerPlan], cache: PagedCache) -> PagedConfig:
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    eos = found if found is not None else getattr(config, "eos_token_id", None)
    spec = next(p.kv.spec for p in plans if p.kv is not None)
    return PagedConfig(
        family=config.model_type,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_seq_len=getattr(config, "max_position_embeddings", None) or cache.max_seq_len,
        eos_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
    )
