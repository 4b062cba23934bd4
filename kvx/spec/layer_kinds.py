"""Layer kinds: which rows the layers of a model store. Layers that store the same rows for the same tokens are one kind.

What each layer is comes from kvx/spec/layer_types.py; bytes are left to kvx/spec/size.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvx.errors import BadArgument
from kvx.spec.config_fields import ConfigFields
from kvx.spec.formats import FORMATS, ROW_FORMATS
from kvx.spec.layer_types import FULL, INDEXED, ModelLayer, layers, notes, window_of
from kvx.spec.state_planes import StatePlane

RECORDS = ("fp8_ds_mla", "nvfp4_ds_mla")  # vLLM's names of rows that are made for a model


@dataclass(frozen=True)
class StoredRow:
    """What a layer stores of one token, or of one compressed entry."""

    name: str
    num_heads: int
    dims: tuple[int, ...]  # elements, in parts that have scales of their own
    index_format: str = ""  # of an indexer's keys: their own format, where the cache is quantised
    records: tuple[tuple[str, int], ...] = ()  # bytes in formats that are made for this row only

    def __str__(self) -> str:
        return f"{self.name} {self.num_heads} x {'+'.join(map(str, self.dims))}"


@dataclass(frozen=True)
class LayerKind:
    name: str
    num_layers: int
    rows: tuple[StoredRow, ...]  # stored in blocks
    planes: tuple[StatePlane, ...] = ()  # of a recurrent layer's state, which a request has once
    ratio: int = 1  # tokens a row stands for
    window: int = 0  # tokens that are kept; 0: all
    is_chunked: bool = False  # the window starts anew every `window` tokens, in place of sliding
    # DeepSeek-V4: beside the blocks, each request has a ring of its last tokens' rows and a compressor's unfinished sums.
    ring: tuple[StoredRow, ...] = ()
    ring_tokens: int = 0
    state_floats: int = 0  # the sums as engines keep them: rings of whole windows
    tight_floats: int = 0  # the least that gives the same entries
    resume_floats: int = 0  # what of it a shared prefix keeps for those who go on from it


def layer_kinds(config: ConfigFields) -> tuple[LayerKind, ...]:
    return described(config)[0]


def described(config: ConfigFields) -> tuple[tuple[LayerKind, ...], tuple[str, ...]]:
    """The kinds, and what is said beside them: what is not counted, and fields that are not understood."""
    if "compress_ratios" in config or config.model_type == "deepseek_v4":
        return tuple(_compressed(config)), ()
    kept = layers(config)
    same = Counter(replace(layer, also="") for layer in kept if layer.type or layer.state)
    return tuple(layer_kind(config, layer, count) for layer, count in same.items()), notes(config, kept)


def layer_kind(config: ConfigFields, layer: ModelLayer, count: int = 1) -> LayerKind:
    if layer.state is None:
        return _attention(config, layer, count)
    if not layer.type:
        return LayerKind(layer.state.name, count, (), layer.state.planes)
    kind = _attention(config, replace(layer, state=None), count)
    return replace(kind, name=f"{kind.name} + {layer.state.name}", planes=layer.state.planes)


def _attention(config: ConfigFields, layer: ModelLayer, count: int) -> LayerKind:
    if "kv_lora_rank" in config and layer.type in (*FULL, *INDEXED):
        rows = _latent_rows(config)
        return LayerKind("latent" if len(rows) == 1 else "latent + index", count, rows)
    if "kv_lora_rank" in config or layer.type not in (*FULL, "sliding_attention", "chunked_attention"):
        raise config.unsupported(f"has layers of type {layer.type}{' beside latents' if 'kv_lora_rank' in config else ''}")
    rows = (StoredRow("K", layer.kv_heads, (layer.k_dim,)), StoredRow("V", layer.kv_heads, (layer.v_dim,)))
    if layer.type == "sliding_attention":
        window = layer.window or window_of(config) or config.int_of("sliding_window")
        return LayerKind("sliding", count, rows, window=window)
    if layer.type == "chunked_attention":
        return LayerKind("chunked", count, rows, window=config.int_of("attention_chunk_size"), is_chunked=True)
    return LayerKind("full", count, rows)


def _latent_rows(config: ConfigFields) -> tuple[StoredRow, ...]:
    latent, rope = config.int_of("kv_lora_rank"), config.int_of("qk_rope_head_dim")
    row = StoredRow("latent", 1, (latent, rope), records=_latent_records(latent, rope))
    if "index_head_dim" not in config:
        return (row,)
    return row, StoredRow("index", 1, (config.int_of("index_head_dim"),), index_format="fp8_e4m3_per_128")


def _latent_records(latent: int, rope: int) -> tuple[tuple[str, int], ...]:
    """vLLM's two: 512 fp8 + 4 scales + 64 bf16 are 656 bytes; 512 e2m1 + 32 scales + 64 fp8 without a scale are 352."""
    if latent % 128:
        return ()
    nvfp4 = FORMATS["nvfp4"]
    return (
        ("fp8_ds_mla", FORMATS["fp8_e4m3_per_128_inline"].row_bytes(latent) + FORMATS["bf16"].row_bytes(rope)),
        ("nvfp4_ds_mla", nvfp4.row_bytes(latent) + nvfp4.scale_bytes(latent) + FORMATS["fp8_e4m3"].row_bytes(rope)),
    )


def _compressed(config: ConfigFields) -> Iterator[LayerKind]:
    """DeepSeek-V4: a window of rows everywhere, and entries that stand for 4 tokens (CSA, with an indexer) or 128 (HCA)."""
    ratios, dim, window = compress_ratios(config), config.int_of("head_dim"), config.int_of("sliding_window")
    rope = config.int_of("qk_rope_head_dim", 0) or 64  # configs that leave it out rotate the last 64 too
    row = StoredRow("KV", 1, (dim,), records=_v4_records(dim, rope))
    for ratio in sorted(set(ratios)):
        count = ratios.count(ratio)
        if ratio <= 1:
            yield LayerKind("SWA", count, (), ring=(row,), ring_tokens=window)
        elif ratio == 4:
            index = StoredRow("index", 1, (config.int_of("index_head_dim"),), index_format="mxfp4")
            numbers = 2 * (dim + index.dims[0])  # a value and a score for each channel, of entries and of their index keys
            yield LayerKind(
                "CSA",
                count,
                (row, index),
                ratio=ratio,
                ring=(row,),
                ring_tokens=window,
                # Entries overlap by a window: each token has a half for its own entry and one for the next entry. A ring
                # holds two windows of both halves; what is needed is this window's both and the last one's second.
                state_floats=8 * 2 * numbers,
                tight_floats=(4 * 2 + 4) * numbers,
                resume_floats=4 * numbers,
            )
        elif ratio == 128:
            # A ring holds a value and a score of each token; online the sums are a maximum, a sum and a value.
            yield LayerKind(
                "HCA", count, (row,), ratio=ratio, ring=(row,), ring_tokens=window, state_floats=128 * 2 * dim, tight_floats=3 * dim
            )
        else:
            raise config.unsupported(f"compresses {ratio} tokens into one; 4 (CSA) and 128 (HCA) are known here")


def compress_ratios(config: ConfigFields) -> list[int]:
    """Of DeepSeek-V4's layers: tokens an entry stands for; 0 or 1 for a window alone."""
    count = config.num_layers
    if "compress_ratios" in config:
        ratios = config.list_of("compress_ratios", count)
    elif "layer_types" in config:
        rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128, "sliding_attention": 0}
        if isinstance(config.get("compress_rates"), dict):
            rates |= config.get("compress_rates")
        ratios = [rates.get(str(t), t) for t in config.list_of("layer_types", count)]
    else:  # the class's default schedule is no published model's
        raise config.missing("compress_ratios", "layer_types")
    for i, ratio in enumerate(ratios):
        if type(ratio) is not int or ratio < 0:
            raise BadArgument(f"size(): layer {i} of {config.name} has compress ratio {ratio!r}; it takes 0, 4 or 128.")
    return ratios


def _v4_records(dim: int, rope: int) -> tuple[tuple[str, int], ...]:
    """448 fp8 + 7 power-of-two scales padded to 8 bytes + 64 bf16 are 584 bytes. The scales stand at the block's end."""
    if dim <= rope or (dim - rope) % 64:
        return ()
    row = ROW_FORMATS["fp8_v4"]
    return (("fp8_ds_mla", row.row_bytes(dim - rope) + row.scale_bytes(dim - rope) + FORMATS["bf16"].row_bytes(rope)),)
