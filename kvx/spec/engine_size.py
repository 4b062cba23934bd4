"""Engine sizes: what an engine really takes for a request, with the padding and copies of its own. `kvx.size` counts the contents.

Each engine's rules are written down once, as read in its source of 2026: vLLM 0.32 (equal pages, groups of as many layers), SGLang
0.5.23 (a slot of states a request), llama.cpp (cells of 256, states in f32), Transformers 5.22 (the tensors of a DynamicCache).
Whether an engine runs the model at all is not said here. DeepSeek-V4 has sizes of its own: kvx/cache/hybrid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvx.errors import BadArgument
from kvx.spec.config_fields import ConfigFields
from kvx.spec.formats import FORMATS, Granularity
from kvx.spec.layer_kinds import LayerKind, layer_kinds
from kvx.spec.size import STATE_FORMATS, kv_bytes, plain_format, plane_sizes
from kvx.spec.state_planes import StatePlane

_OF_BLOCKS = (Granularity.BLOCK, Granularity.BLOCK_HEAD)
_VLLM_BLOCK = 16  # on CUDA; the CPU platform has 128
_VLLM_MLA_BLOCK = 128  # the least of a latent beside states
_LLAMA_PAD = 256  # cells of a context, and of a window
_LLAMA_UBATCH = 512  # tokens a window holds besides, by default
_SGLANG_RADIX_SLOTS = 3  # a request's own and two that its prefix is copied to; the pool has 3 to 5 a running request


@dataclass(frozen=True)
class EngineSize:
    engine: str
    setting: str  # what else it depends on; "" where nothing
    block_size: int  # tokens of a block of the layers that keep all of them, as the engine chose it; 0: there are none
    token_bytes: float  # one more token of a long request
    state_bytes: int  # of a request's states, with their padding and copies
    request_bytes: int  # of a request of so many tokens, all of it
    content_bytes: int  # what of it holds tokens and one state, in the engine's dtypes
    note: str = ""
    state_format: str = ""  # of recurrent matrices; "" where there are none

    @property
    def padding(self) -> float:
        """What it takes over its contents, as a share of them."""
        return self.request_bytes / self.content_bytes - 1

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "padding": self.padding}


@dataclass(frozen=True)
class _Layers:
    """Layers of one engine that it keeps alike: of a kind with K, V and a state there are two of these."""

    count: int
    token_bytes: int = 0  # one layer's
    window: int = 0
    is_chunked: bool = False
    state_bytes: int = 0  # one layer's
    state_name: str = ""

    def tokens(self, context: int) -> int:
        return min(context, self.window or context)


def engine_sizes(
    model: str | Path | Mapping[str, Any],  # as kvx.size takes it
    format: str = "bf16",
    *,
    context: int,  # tokens of a request
    tp: int = 1,
    block_size: int = 0,  # vLLM's, before it grows; 0: 16
    state_format: str = "",  # of recurrent matrices in vLLM and SGLang, which let one choose; "": their default
) -> tuple[EngineSize, ...]:
    """What Transformers, vLLM, SGLang and llama.cpp take for one request, on each of `tp` ranks.

    Transformers and llama.cpp are left out where they have no such format, or with more ranks than one. Empty for DeepSeek-V4, and
    for formats with a scale a block, which none of them has.
    """
    config = ConfigFields.load(model)
    kinds = layer_kinds(config)
    if type(context) is not int or context < 1:
        raise BadArgument(f"engine_sizes(): context is {context!r}; it takes a whole number of 1 or more.")
    if any(kind.ring_tokens for kind in kinds) or (format in FORMATS and FORMATS[format].granularity in _OF_BLOCKS):
        return ()

    model_format, is_plain = plain_format(format), format in STATE_FORMATS
    matrix = next((plane for kind in kinds for plane in kind.planes if not plane.is_conv), None)
    dtypes = {  # of convolutions, and of matrices
        "transformers": (model_format, ""),
        "vllm": (model_format, state_format or _vllm_dtype(config, kinds) or model_format),
        "sglang": ("bf16", state_format or _said_dtype(config, "mamba_ssm_dtype") or "f32"),
        "llama.cpp": ("f32", "f32"),
    }
    found: list[EngineSize] = []
    for engine, (convs, matrices) in dtypes.items():
        layers = _layers(kinds, format, tp, convs, matrices, engine == "transformers")
        if engine == "vllm":
            sizes = _vllm(layers, context, block_size or _VLLM_BLOCK, "kv_lora_rank" in config)
        elif engine == "sglang":
            sizes = _sglang(layers, context)
        elif is_plain and tp == 1:
            sizes = [(_transformers if engine == "transformers" else _llama_cpp)(layers, context)]
        else:
            continue
        found += [replace(s, state_format=matrix.format(model_format, matrices) if matrix else "") for s in sizes]
    return tuple(found)


def _layers(kinds: tuple[LayerKind, ...], format: str, tp: int, convs: str, matrices: str, of_transformers: bool) -> list[_Layers]:
    found: Counter[_Layers] = Counter()
    for kind in kinds:
        if kind.rows:
            one = _Layers(1, kv_bytes(kind, format, tp), kind.window, kind.is_chunked)
            found[one] += kind.num_layers
        if kind.planes:
            sizes = plane_sizes(kind, convs, matrices, tp)
            total = sum(size.num_bytes for size in sizes)
            if of_transformers:
                total += sum(
                    s.num_bytes // _taps(p) * p.num_unused for s, p in zip(sizes, kind.planes, strict=True) if p.num_unused
                )
            name = kind.name.split(" + ")[-1]
            found[_Layers(1, state_bytes=total, state_name=name)] += kind.num_layers
    return [replace(one, count=count) for one, count in found.items()]


def _taps(plane: StatePlane) -> int:
    return dict(plane.axes)["tap"]


def _sums(layers: list[_Layers], context: int) -> tuple[int, int, int]:
    """Bytes of a token in layers that keep all, of a request's tokens, of its states: contents alone."""
    return (
        sum(x.count * x.token_bytes for x in layers if not x.window),
        sum(x.count * x.token_bytes * x.tokens(context) for x in layers),
        sum(x.count * x.state_bytes for x in layers),
    )


def _transformers(layers: list[_Layers], context: int) -> EngineSize:
    """A DynamicCache: every token of full layers, of windows one fewer than they are long."""
    token, _, states = _sums(layers, context)
    tokens = sum(x.count * x.token_bytes * (min(context, x.window - 1) if x.window else context) for x in layers)
    return EngineSize("transformers", "", 0, token, states, tokens + states, tokens + states)


def _vllm(layers: list[_Layers], context: int, block: int, is_latent: bool) -> list[EngineSize]:
    """Pages of all layers are made equal, and layers are put into groups of as many: a request has blocks of each group."""
    kv, states = [x for x in layers if x.token_bytes], [x for x in layers if x.state_bytes]
    if states and is_latent:
        block = max(block, _VLLM_MLA_BLOCK)
    before = block
    largest = max((x.token_bytes for x in kv), default=0)
    content = max((x.state_bytes for x in states), default=0)
    if kv and states:
        block *= -(-content // (block * largest))
    page = max(block * largest, content)
    token, tokens, state_sum = _sums(layers, context)
    if len({(x.window, x.is_chunked) for x in kv}) == 1 and not states:  # one kind of attention: one group, each layer its own page
        num_blocks = _window_blocks(kv[0], block, context)
        taken = num_blocks * block * sum(x.count * x.token_bytes for x in kv)
        return [EngineSize("vllm", "", 0 if kv[0].window else block, token, 0, taken, tokens)]
    counts = [x.count for x in layers]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = {x: -(-x.count // size) for x in layers}
    one = size * page  # bytes of a block, whatever group it is of
    found: list[EngineSize] = []
    pages = {x: block * x.token_bytes for x in kv}
    blocks = {x: block * page // pages[x] if page % pages[x] == 0 else block for x in kv}  # longer, or padded
    places = sum(groups.values()) * size
    sentences = [f"pages of {page:,} bytes, {size} layers per group, {sum(groups.values())} group{'s' * (places > size)}"]
    if states and kv:
        sentences += [f"a state of {content:,} bytes is padded to a page"] if page > content else []
        sentences += [f"attention's block grew from {before} to {block} tokens, to hold a state"] if block > before else []
    sentences += [f"{places - sum(counts)} of {places} layer slots are unused"] if places > sum(counts) else []
    for setting in ("prefix caching off", "prefix caching on") if states else ("",):
        copies = {x: 1 if setting.endswith("off") else 3 if x.state_name == "Mamba-2" else 2 for x in states}
        state = sum(one * groups[x] * copies[x] for x in states)
        full = [x for x in kv if not x.window]
        taken = state + sum(one * groups[x] * _window_blocks(x, blocks[x], context) for x in kv)
        grows = sum(one * groups[x] / blocks[x] for x in full)
        note = f"{max(copies.values())} state blocks per request" if found else "; ".join(sentences)
        found.append(EngineSize("vllm", setting, blocks[full[0]] if full else 0, grows, state, taken, tokens + state_sum, note))
    return found


def _window_blocks(x: _Layers, block: int, context: int) -> int:
    """Blocks of a request at the most, once its prompt is computed."""
    whole = -(-context // block)
    if not x.window:
        return whole
    return min(whole, -(-x.window // block) if x.is_chunked and x.window % block == 0 else -(-(x.window - 1) // block) + 1)


def _sglang(layers: list[_Layers], context: int) -> list[EngineSize]:
    """Pages of one token and slots of states, neither padded; a radix cache takes more slots."""
    token, tokens, states = _sums(layers, context)
    content, page = tokens + states, 1 if tokens else 0
    if not states:
        return [EngineSize("sglang", "", page, token, 0, content, content)]
    more = _SGLANG_RADIX_SLOTS
    note = f"{more} state slots per request: its own, and two for the ends of cached prefixes"
    return [
        EngineSize("sglang", "radix cache off", page, token, states, content, content),
        EngineSize("sglang", "radix cache on", page, token, more * states, tokens + more * states, content, note),
    ]


def _llama_cpp(layers: list[_Layers], context: int) -> EngineSize:
    """A context of cells, padded to 256; a window holds a ubatch besides. States are one cell a sequence, in f32."""
    token, tokens, states = _sums(layers, context)
    cells = _pad(context)
    taken = sum(x.count * x.token_bytes * (_pad(min(cells, x.window + _LLAMA_UBATCH)) if x.window else cells) for x in layers)
    pad, note = (_LLAMA_PAD, "the whole context is allocated up front") if tokens else (0, "")
    return EngineSize("llama.cpp", "", pad, token, states, taken + states, tokens + states, note)


def _pad(cells: int) -> int:
    return -(-cells // _LLAMA_PAD) * _LLAMA_PAD


def _said_dtype(config: ConfigFields, field: str) -> str:
    """What a config asks its engines to keep matrices in; "": nothing."""
    return {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(str(config.get(field)).removeprefix("torch."), "")


def _vllm_dtype(config: ConfigFields, kinds: tuple[LayerKind, ...]) -> str:
    """KDA is in f32, and two families say their own; elsewhere ("") matrices have the model's dtype."""
    if any(kind.name == "KDA" for kind in kinds):
        return "f32"
    if config.model_type == "nemotron_h":
        return _said_dtype(config, "mamba_ssm_cache_dtype") or "f32"
    return _said_dtype(config, "mamba_ssm_dtype") if config.model_type.startswith("qwen3_5") else ""
