"""Layer kinds: which layers of a model store what, read from its config. Bytes are left to kvx/spec/size.py.

Layers that store the same rows for the same tokens are one kind. Configs come in two ages: new ones list `layer_types`, in
older ones the model's name and a few numbers say which layers have a window. Both are read as Transformers reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvx.errors import BadArgument
from kvx.spec.config_fields import ConfigFields
from kvx.spec.dtypes import DTYPES
from kvx.spec.formats import FORMATS, Format, Granularity

RECORDS = ("fp8_ds_mla", "nvfp4_ds_mla")  # vLLM's names of rows that are made for a model


@dataclass(frozen=True)
class Row:
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
    rows: tuple[Row, ...]  # stored in blocks
    ratio: int = 1  # tokens a row stands for
    window: int = 0  # tokens that are kept; 0: all
    is_chunked: bool = False  # the window starts anew every `window` tokens, in place of sliding
    # DeepSeek-V4: beside the blocks, each request has a ring of its last tokens' rows and a compressor's unfinished sums.
    ring: tuple[Row, ...] = ()
    ring_tokens: int = 0
    state_floats: int = 0  # the sums as engines keep them: rings of whole windows
    tight_floats: int = 0  # the least that gives the same entries
    resume_floats: int = 0  # what of it a shared prefix keeps for those who go on from it


# Without layer_types: every n-th layer sees everything, the others a window.
_PATTERN = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4}
# Fields that only models with recurrent layers have.
_RECURRENT = (
    "attn_layer_period",
    "attn_type_list",
    "full_attention_interval",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "linear_num_key_heads",
    "mamba_d_state",
    "mamba_expand",
    "ssm_state_size",
    "state_size",
    "time_step_rank",
)
_FULL = ("full_attention", "attention")
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")


def layer_kinds(config: ConfigFields) -> tuple[LayerKind, ...]:
    _refuse_what_is_no_kv_cache(config)
    if "compress_ratios" in config or config.model_type == "deepseek_v4":
        return tuple(_compressed(config))
    types = _layer_types(config)
    types = types[: max(0, len(types) - config.int_of("num_kv_shared_layers", 0))]  # the last ones read the KV of earlier ones
    if not types:
        raise BadArgument(f"size(): num_kv_shared_layers of {config.name} leaves no layer that stores anything.")
    return tuple(_kind(config, kind, types.count(kind)) for kind in dict.fromkeys(types))


def _refuse_what_is_no_kv_cache(config: ConfigFields) -> None:
    recurrent = next((field for field in _RECURRENT if config.get(field)), None)
    if recurrent is not None:
        raise config.unsupported(f"has recurrent layers ({recurrent}), whose state is no KV cache")
    if config.get("is_encoder_decoder"):
        raise config.unsupported("is an encoder and a decoder, and caches cross attention too")
    if "global_head_dim" in config:
        raise config.unsupported("has layers of different head_dim (global_head_dim)")


def _kind(config: ConfigFields, layer_type: str, count: int) -> LayerKind:
    if "kv_lora_rank" in config and layer_type in (*_FULL, *_INDEXED):
        rows = _latent_rows(config)
        return LayerKind("latent" if len(rows) == 1 else "latent + index", count, rows)
    if "kv_lora_rank" in config or layer_type not in (*_FULL, "sliding_attention", "chunked_attention"):
        raise config.unsupported(f"has layers of type {layer_type}{' beside latents' if 'kv_lora_rank' in config else ''}")
    heads, dim = _kv_heads(config), _head_dim(config)
    rows = (Row("K", heads, (dim,)), Row("V", heads, (config.int_of("v_head_dim", 0) or dim,)))
    if layer_type == "sliding_attention":
        return LayerKind("sliding", count, rows, window=config.int_of("sliding_window"))
    if layer_type == "chunked_attention":
        return LayerKind("chunked", count, rows, window=config.int_of("attention_chunk_size"), is_chunked=True)
    return LayerKind("full", count, rows)


def _kv_heads(config: ConfigFields) -> int:
    # Falcon's older models and GPT-BigCode share one head, whatever their other fields say.
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return config.int_of("num_key_value_heads", 0) or config.int_of("num_attention_heads")


def _head_dim(config: ConfigFields) -> int:
    return config.int_of("head_dim", 0) or config.int_of("hidden_size") // config.int_of("num_attention_heads")


def _layer_types(config: ConfigFields) -> list[str]:
    """One type a layer, in the words of Transformers' `layer_types`."""
    count = config.num_layers
    if "layer_types" in config:
        types = [str(t) for t in config.list_of("layer_types", count)]
    elif config.model_type == "llama4_text":
        types = _llama4_types(config, count)
    else:
        types = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in _windowed(config, count)]
    # A window as long as the longest context hides nothing: such layers are full ones.
    window, longest = config.int_of("sliding_window", 0), config.int_of("max_position_embeddings", 0)
    if not window or 0 < longest <= window:
        types = ["full_attention" if t == "sliding_attention" else t for t in types]
    return types


def _windowed(config: ConfigFields, count: int) -> list[bool]:
    if "sliding_window" not in config or config.get("use_sliding_window") is False:
        return [False] * count
    if isinstance(config.get("sliding_window_pattern"), str):
        raise config.unsupported("spells sliding_window_pattern in letters; add layer_types, one a layer")
    pattern = config.int_of("sliding_window_pattern", _PATTERN.get(config.model_type, 0))
    if pattern:
        return [(i + 1) % pattern != 0 for i in range(count)]
    if "use_sliding_window" in config and config.model_type != "qwen3_moe":  # Qwen: the upper layers
        return [i >= config.int_of("max_window_layers", 28) for i in range(count)]
    return [True] * count


def _llama4_types(config: ConfigFields, count: int) -> list[str]:
    """Layers with rotary embedding see their own chunk, the others everything."""
    interval = config.int_of("no_rope_layer_interval", 4) or 4
    has_rope = (
        config.list_of("no_rope_layers", count) if config.get("no_rope_layers") else [(i + 1) % interval for i in range(count)]
    )
    chunked = "chunked_attention" if config.int_of("attention_chunk_size", 0) else "full_attention"
    return [chunked if rotary else "full_attention" for rotary in has_rope]


def _latent_rows(config: ConfigFields) -> tuple[Row, ...]:
    latent, rope = config.int_of("kv_lora_rank"), config.int_of("qk_rope_head_dim")
    row = Row("latent", 1, (latent, rope), records=_latent_records(latent, rope))
    if "index_head_dim" not in config:
        return (row,)
    return row, Row("index", 1, (config.int_of("index_head_dim"),), index_format="fp8_e4m3_per_128")


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
    row = Row("KV", 1, (dim,), records=_v4_records(dim, rope))
    for ratio in sorted(set(ratios)):
        count = ratios.count(ratio)
        if ratio <= 1:
            yield LayerKind("SWA", count, (), ring=(row,), ring_tokens=window)
        elif ratio == 4:
            index = Row("index", 1, (config.int_of("index_head_dim"),), index_format="mxfp4")
            numbers = 2 * (dim + index.dims[0])  # a value and a score for each channel, of entries and of their index keys
            yield LayerKind(
                "CSA",
                count,
                (row, index),
                ratio,
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
                "HCA", count, (row,), ratio, ring=(row,), ring_tokens=window, state_floats=128 * 2 * dim, tight_floats=3 * dim
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
    fp8 = Format("e4m3 per 64", DTYPES["fp8_e4m3"], Granularity.GROUP, DTYPES["e8m0"], group_size=64)
    scales = -(-fp8.scale_bytes(dim - rope) // 8) * 8
    return (("fp8_ds_mla", fp8.row_bytes(dim - rope) + scales + FORMATS["bf16"].row_bytes(rope)),)
