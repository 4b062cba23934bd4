"""How the engine at hand writes sequence states: types, orders and versions. Whose states they are is in model.py."""

from __future__ import annotations

from dataclasses import dataclass

from kvx.errors import BadArgument, Unsupported

# ggml_type numbers. Rows of the others are quantised, and the engine rotates them before it does.
FORMATS = {0: "f32", 1: "f16", 30: "bf16"}
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
_QUANTISED = {2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl"}
# 2: llama.cpp of 2026-06 to 2026-08. 3: of 2026-09, with a token in cells of several axes. 4: of 2026-10, which says whether K and
# V were rotated.
VERSIONS = (2, 3, 4)


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
                f"{', '.join(map(str, VERSIONS))}, and there is a stream or more."
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
