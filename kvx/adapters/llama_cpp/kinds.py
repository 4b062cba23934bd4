"""What a sequence state needs besides its bytes: the model's geometry, and how the engine at hand writes states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvx.errors import BadArgument, Unsupported
from kvx.handover import model_name

# ggml_type numbers. Rows of the others are quantised, and the engine rotates them before it does.
FORMATS = {0: "f32", 1: "f16", 30: "bf16"}
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
_QUANTISED = {2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl"}
# 2: llama.cpp of 2026-08, by its source. 4: of 2026-10, which says whether K and V were rotated. 3 was not seen.
VERSIONS = (2, 4)
# By general.architecture. Interleaved where the converter of llama.cpp permutes the rows of Q and K, else as Transformers has them.
_ROPES = {
    **dict.fromkeys(("arcee", "granite", "internlm2", "llama", "minicpm", "olmo", "smollm3"), "interleaved"),
    **dict.fromkeys(("qwen2", "qwen2moe", "qwen3", "qwen3moe"), "half"),
}


@dataclass(frozen=True)
class StateModel:
    """Of which model a state is. Its bytes do not say: rows are counted in bytes, and nothing tells the pairs of a rotation."""

    name: str  # both sides of a handover say the same: kvx.handover.model_name(...), or one of your own
    num_layers: int
    num_kv_heads: int
    head_dim: int
    # How the rotated pairs of K lie: "interleaved", 2d and 2d + 1, or "half", d and d + head_dim / 2, as in Transformers.
    rope: str = "interleaved"

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.num_kv_heads, self.head_dim)
        if not self.name or min(sizes) < 1 or self.rope not in ("interleaved", "half"):
            raise BadArgument(
                f"StateModel: {self}; name is not empty, num_layers, num_kv_heads and head_dim are 1 or more, "
                'and rope is "interleaved" or "half".'
            )

    @staticmethod
    def of_gguf(
        metadata: Mapping[str, Any],  # the file's keys and values, whoever read them
        name: str = "",  # "": kvx.handover.model_name of the geometry
    ) -> StateModel:
        kind = metadata.get("general.architecture", "")
        if kind not in _ROPES:
            raise Unsupported(
                f"StateModel.of_gguf(): general.architecture is {kind!r}; known are {', '.join(_ROPES)}. Give StateModel(...)."
            )
        try:
            heads, hidden = metadata[f"{kind}.attention.head_count"], metadata[f"{kind}.embedding_length"]
            sizes = {
                "num_layers": metadata[f"{kind}.block_count"],
                "num_kv_heads": metadata.get(f"{kind}.attention.head_count_kv", heads),
                "head_dim": metadata.get(f"{kind}.attention.key_length", hidden // heads),
            }
            vocab = metadata.get(f"{kind}.vocab_size") or len(metadata["tokenizer.ggml.tokens"])
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise BadArgument(
                f"StateModel.of_gguf(): {type(error).__name__} {error}; the metadata of a decoder of one geometry has it."
            ) from None
        v_dim = metadata.get(f"{kind}.attention.value_length", sizes["head_dim"])
        if not all(isinstance(n, int) for n in sizes.values()) or v_dim != sizes["head_dim"]:
            raise Unsupported(
                f"StateModel.of_gguf(): {sizes}, V's head_dim {v_dim}; layers have the same heads, and K and V the same dim."
            )
        name = name or model_name(kind, **sizes, hidden_size=hidden, vocab_size=vocab)
        return StateModel(name, **sizes, rope=_ROPES[kind])

    @property
    def row_elements(self) -> int:
        """Of a cell, in K and in V."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class StateKind:
    """How one running engine writes its states; it reads no other. A state that it saved says all of it."""

    format: str = "f16"  # cache_type_k and cache_type_v
    is_v_transposed: bool = False  # the engine runs without flash attention
    num_streams: int = 1  # sequences that have a part of the cache each: n_parallel, or 1 with kv_unified
    version: int = VERSIONS[-1]  # of the file format

    def __post_init__(self) -> None:
        if self.format not in ITEM_BYTES:
            raise Unsupported(f"StateKind: format is {self.format!r}; KVX writes {', '.join(ITEM_BYTES)}.")
        if self.version not in VERSIONS or self.num_streams < 1:
            raise Unsupported(
                f"StateKind: version is {self.version} with {self.num_streams} streams; KVX writes versions "
                f"{' and '.join(map(str, VERSIONS))}, and there is a stream or more."
            )


def format_of(call: str, what: str, type_: int) -> str:
    """KVX's name of a ggml_type."""
    if type_ in FORMATS:
        return FORMATS[type_]
    if type_ in _QUANTISED:
        raise Unsupported(
            f"{call}: {what} is {_QUANTISED[type_]} (ggml type {type_}); quantised rows are not read. "
            f"Run the engine with cache_type_k and cache_type_v of {', '.join(ITEM_BYTES)}."
        )
    raise BadArgument(f"{call}: {what} has ggml type {type_}; types are {', '.join(f'{n} {f}' for n, f in FORMATS.items())}.")


def type_of(format: str) -> int:
    return next(number for number, name in FORMATS.items() if name == format)
