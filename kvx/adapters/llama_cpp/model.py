"""StateModel: of which model a sequence state is. Its bytes do not say: rows are counted in bytes, and nothing tells the pairs of a
rotation, which layers have a window, or what the planes of a recurrent state are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvx.errors import BadArgument, Unsupported
from kvx.handover import model_name
from kvx.spec import PlaneSpec
from kvx.spec.layer_specs import LayerSpecs, layer_specs

# By general.architecture. Interleaved where the converter of llama.cpp permutes the rows of Q and K, else as Transformers has them.
_ROPES = {
    **dict.fromkeys(("arcee", "granite", "internlm2", "llama", "minicpm", "olmo", "smollm3"), "interleaved"),
    **dict.fromkeys(("qwen2", "qwen2moe", "qwen3", "qwen3moe"), "half"),
}
# Architectures whose layers differ, with Transformers' name of each. All have their pairs as Transformers has them.
_HYBRIDS = {"falcon-h1": "falcon_h1", "gemma4": "gemma4_text", "lfm2": "lfm2"}


@dataclass(frozen=True)
class LayerRows:
    """The layers of one K/V cache of a state: those that see all tokens, or those with a window."""

    layers: tuple[int, ...]  # of the model, in their order
    num_kv_heads: int
    head_dim: int
    window: int = 0  # tokens that one of these layers sees, its own among them; 0: all


@dataclass(frozen=True)
class StateModel:
    """Of which model a state is. `of_gguf` reads it from a file's metadata."""

    name: str  # both sides of a handover say the same: kvx.handover.model_name(...), or one of your own
    num_layers: int  # of the model, those without K and V too
    num_kv_heads: int  # of a hybrid model the most that a layer has, and so head_dim
    head_dim: int
    # How the rotated pairs of K lie: "interleaved", 2d and 2d + 1, or "half", d and d + head_dim / 2, as in Transformers.
    rope: str = "interleaved"
    rows: tuple[LayerRows, ...] = ()  # of a hybrid model its K/V caches, that of the window last; (): one, of all layers
    state_layers: tuple[int, ...] = ()  # layers with a recurrent state or a convolution
    planes: tuple[PlaneSpec, ...] = ()  # that each of these keeps, in f32

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.num_kv_heads, self.head_dim)
        if not self.name or min(sizes) < 1 or self.rope not in ("interleaved", "half"):
            raise BadArgument(
                f"StateModel: {self}; name is not empty, num_layers, num_kv_heads and head_dim are 1 or more, "
                'and rope is "interleaved" or "half".'
            )
        if bool(self.state_layers) != bool(self.planes) or (self.state_layers and not self.rows):
            raise BadArgument(
                f"StateModel: layers {self.state_layers} have states of {len(self.planes)} planes, and there are {len(self.rows)} "
                "K/V caches; layers with states have planes, and the others are in `rows`."
            )

    @staticmethod
    def of_gguf(
        metadata: Mapping[str, Any],  # the file's keys and values, whoever read them
        name: str = "",  # "": kvx.handover.model_name of the geometry
    ) -> StateModel:
        kind = metadata.get("general.architecture", "")
        if kind not in (*_ROPES, *_HYBRIDS):
            raise Unsupported(
                f"StateModel.of_gguf(): general.architecture is {kind!r}; known are {', '.join((*_ROPES, *_HYBRIDS))}. Give "
                "StateModel(...)."
            )
        return _hybrid(kind, metadata, name) if kind in _HYBRIDS else _plain(kind, metadata, name)

    @property
    def row_elements(self) -> int:
        """Of a cell, in K and in V."""
        return self.num_kv_heads * self.head_dim

    @property
    def is_plain(self) -> bool:
        """Whether every layer keeps the same K and V of all tokens."""
        return not self.rows


def _plain(kind: str, metadata: Mapping[str, Any], name: str) -> StateModel:
    try:
        heads, hidden = metadata[f"{kind}.attention.head_count"], metadata[f"{kind}.embedding_length"]
        sizes = {
            "num_layers": metadata[f"{kind}.block_count"],
            "num_kv_heads": metadata.get(f"{kind}.attention.head_count_kv", heads),
            "head_dim": metadata.get(f"{kind}.attention.key_length", hidden // heads),
        }
        vocab = _vocab(kind, metadata)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise _missing(error, "a decoder of one geometry") from None
    v_dim = metadata.get(f"{kind}.attention.value_length", sizes["head_dim"])
    if not all(isinstance(n, int) for n in sizes.values()) or v_dim != sizes["head_dim"]:
        raise Unsupported(
            f"StateModel.of_gguf(): {sizes}, V's head_dim {v_dim}; layers have the same heads, and K and V the same dim."
        )
    name = name or model_name(kind, **sizes, hidden_size=hidden, vocab_size=vocab)
    return StateModel(name, **sizes, rope=_ROPES[kind])


def _hybrid(kind: str, metadata: Mapping[str, Any], name: str) -> StateModel:
    try:
        fields = _config(kind, metadata)
        vocab = _vocab(kind, metadata)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise _missing(error, f"a {kind}") from None
    layers = layer_specs(fields, "f32", state_format="f32")
    rows = _rows(kind, layers)
    states = [n for n, layer in enumerate(layers) if layer.planes]
    kinds = {tuple(p.spec("f32", "f32") for p in sorted(layers[n].planes, key=lambda p: p.name)) for n in states}
    if len(kinds) > 1:
        raise Unsupported(f"StateModel.of_gguf(): a {kind} whose layers keep {len(kinds)} kinds of states; one is handed over.")
    most = {"num_kv_heads": max(r.num_kv_heads for r in rows), "head_dim": max(r.head_dim for r in rows)}
    name = name or model_name(
        fields["model_type"], num_layers=len(layers), **most, hidden_size=fields["hidden_size"], vocab_size=vocab
    )
    planes = next(iter(kinds), ())
    return StateModel(name, len(layers), **most, rope="half", rows=rows, state_layers=tuple(states), planes=planes)


def _rows(kind: str, layers: Sequence[LayerSpecs]) -> tuple[LayerRows, ...]:
    """A cache for layers that see all tokens, then one for those with a window."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for n, layer in enumerate(layers):
        if layer.kv is not None:
            found.setdefault((layer.window, layer.kv.num_kv_heads, layer.kv.head_dim), []).append(n)
    made = [LayerRows(tuple(same), heads, dim, window) for (window, heads, dim), same in sorted(found.items())]
    if not made or len(made) != len({bool(r.window) for r in made}):
        raise Unsupported(
            f"StateModel.of_gguf(): a {kind} with {len(made)} kinds of K and V, {[(r.num_kv_heads, r.head_dim) for r in made]}; "
            "a state has one of layers that see all tokens and at most one of layers with a window."
        )
    return tuple(made)


def _config(kind: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Transformers' config that say what layers keep."""

    def of(key: str, *default: Any) -> Any:
        return metadata.get(f"{kind}.{key}", *default) if default else metadata[f"{kind}.{key}"]

    count, heads = of("block_count"), of("attention.head_count")
    kv = of("attention.head_count_kv", heads)
    each = list(kv) if isinstance(kv, Sequence) else [kv] * count
    head = max(heads) if isinstance(heads, Sequence) else heads
    fields = {
        "model_type": _HYBRIDS[kind], "num_hidden_layers": count, "hidden_size": of("embedding_length"),
        "num_attention_heads": head, "num_key_value_heads": max(each),
    }  # fmt: skip
    dim = of("attention.key_length", fields["hidden_size"] // head)
    if of("attention.value_length", dim) != dim:
        raise Unsupported(f"StateModel.of_gguf(): heads of {dim} in K, {of('attention.value_length')} in V; they have one size.")
    if kind == "lfm2":
        types = ["full_attention" if n else "conv" for n in each]
        return fields | {"head_dim": dim, "layer_types": types, "conv_L_cache": of("shortconv.l_cache")}
    if kind == "falcon-h1":
        inner, mamba_heads = of("ssm.inner_size"), of("ssm.time_step_rank")
        return fields | {
            "head_dim": dim, "mamba_d_ssm": inner, "mamba_n_heads": mamba_heads, "mamba_d_head": inner // mamba_heads,
            "mamba_d_state": of("ssm.state_size"), "mamba_n_groups": of("ssm.group_count"), "mamba_d_conv": of("ssm.conv_kernel"),
        }  # fmt: skip
    windowed = [bool(x) for x in of("attention.sliding_window_pattern")]
    narrow = of("attention.key_length_swa", dim)
    own = {str(n): {"head_dim": narrow if windowed[n] else dim, "num_key_value_heads": each[n]} for n in range(count)}
    return fields | {
        "head_dim": dim, "layer_types": ["sliding_attention" if w else "full_attention" for w in windowed],
        "sliding_window": of("attention.sliding_window"), "num_kv_shared_layers": of("attention.shared_kv_layers", 0),
        "per_layer_config": own,
    }  # fmt: skip


def _vocab(kind: str, metadata: Mapping[str, Any]) -> int:
    return int(metadata.get(f"{kind}.vocab_size") or len(metadata["tokenizer.ggml.tokens"]))


def _missing(error: Exception, what: str) -> BadArgument:
    return BadArgument(f"StateModel.of_gguf(): {type(error).__name__} {error}; the metadata of {what} has it.")
