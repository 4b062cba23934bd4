"""What is said of a handover's parts, and whether it holds together. Checked before any memory is taken for their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvx.errors import BadArgument
from kvx.ops.move.digest import Digest
from kvx.spec import CacheSpec, Spec, StateSpec

NEUTRAL = "block | head layer kv token dim"
NEUTRAL_LATENT = "block | layer token head dim"  # MLA: one latent row a token


class Facts(Protocol):
    """Of a part: those of a Part, or those that a manifest states."""

    @property
    def spec(self) -> Spec: ...
    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def window(self) -> int: ...
    @property
    def first_block(self) -> int: ...
    @property
    def first_token(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...


class PartFacts(NamedTuple):
    """What a manifest says of a part, before its bytes are there."""

    spec: Spec
    layers: tuple[int, ...]
    window: int
    first_block: int
    first_token: int
    content: Digest
    block_tokens: int = 0


def check_facts(part: Facts) -> None:
    """BadArgument unless what is said of a part holds together."""
    spec, layers = part.spec, part.layers
    if (
        not isinstance(layers, tuple)
        or any(type(n) is not int or not 0 <= n < 2**31 for n in layers)
        or list(layers) != sorted(set(layers))
    ):
        raise BadArgument(
            f"Part: layers are {str(layers)[:100]}; they must be numbers of the model's layers, from 0 up, in a tuple."
        )
    if spec.num_layers != len(layers) or spec.layer_start:
        raise BadArgument(
            f"Part: spec has layers {spec.layer_start} to {spec.layer_start + spec.num_layers - 1} for {len(layers)} layers of the "
            "model; it has as many, counted from 0."
        )
    for name in ("window", "first_block", "first_token", "block_tokens"):
        value = getattr(part, name)
        if type(value) is not int or not 0 <= value < 2**31:
            raise BadArgument(f"Part: {name} is {value!r}; it must be a whole number of 0 to {2**31 - 1}.")
    if isinstance(spec, StateSpec):
        if part.window or part.first_block or part.first_token:
            raise BadArgument(
                f"Part: window {part.window}, first_block {part.first_block}, first_token {part.first_token} of planes "
                f"{', '.join(p.name for p in spec.planes)}; all are 0: what is not K and V is there from its first block on."
            )
        layout = spec.block_layout
    else:
        _check_window(part, spec.of_kv)
        layout = NEUTRAL if spec.num_planes == 2 else NEUTRAL_LATENT
    if spec.layout != layout or spec.block_bytes or not spec.model:
        raise BadArgument(
            f"Part: layout is {spec.layout!r}, block_bytes {spec.block_bytes}, model {spec.model!r}; a handover is {layout!r}, not "
            "padded, of a model with a name."
        )


def _check_window(part: Facts, spec: CacheSpec) -> None:
    if part.first_token // spec.block_size != part.first_block or (part.first_token and not part.window):
        raise BadArgument(
            f"Part: first_token is {part.first_token}, first_block {part.first_block}, in blocks of {spec.block_size}, with "
            f"a window of {part.window}. The token is in that block; without a window both are 0."
        )
    if part.block_tokens:
        raise BadArgument(f"Part: block_tokens is {part.block_tokens} of K and V; their spec says it, {spec.block_size}.")


def check_parts(num_tokens: int, parts: Sequence[Facts]) -> None:
    """BadArgument unless these are the parts of one handover of so many tokens."""
    for is_state in (False, True):  # a layer may have K and V, or entries, and a state beside them
        layers = [n for part in parts if is_state_part(part) == is_state for n in part.layers]
        if len(set(layers)) != len(layers):
            raise BadArgument(f"Handover: layers of its parts are {str(layers)[:200]}; each layer is in one part.")
    model, sizes = parts[0].spec.model, [tokens_of(part) for part in parts if tokens_of(part)]
    for part in parts:
        bs = tokens_of(part)
        if part.spec.model != model or (bs and bs != sizes[0]):
            raise BadArgument(
                f"Handover: a part has blocks of {bs}, model {part.spec.model!r}; the first has blocks of {max(sizes, default=0)}, "
                f"model {model!r}."
            )
        if isinstance(part.spec, StateSpec):
            least, most = (num_tokens // bs, -(-num_tokens // bs)) if bs else (1, 1)
            if not least <= part.spec.num_blocks <= most:
                raise BadArgument(
                    f"Handover: a part of {', '.join(p.name for p in part.spec.planes)} has {part.spec.num_blocks} blocks; "
                    f"{num_tokens} tokens make {least} to {most}."
                )
            if not bs and part.spec.positions not in ((), (num_tokens,)):
                raise BadArgument(
                    f"Handover: a state of layers {few(part.layers)} is one after {part.spec.positions[0]} tokens; the handover "
                    f"has {num_tokens}. A state holds at one position."
                )
            continue
        blocks = -(-num_tokens // bs) - part.first_block
        if part.spec.num_blocks != blocks:
            raise BadArgument(
                f"Handover: a part has {part.spec.num_blocks} blocks of {bs}, model {part.spec.model!r}; "
                f"{num_tokens} tokens after block {part.first_block} make {blocks}, and the first part has blocks of {sizes[0]}, "
                f"model {model!r}."
            )
        seen = first_seen(num_tokens, part.window)
        if part.first_token > seen:
            raise BadArgument(
                f"Handover: after {num_tokens} tokens layers {few(part.layers)} see from token {seen} (window "
                f"{part.window}), and have them from {part.first_token}."
            )


def tokens_of(part: Facts) -> int:
    """Tokens of a part's blocks; 0: its only block is a state, which stands where the handover's tokens end."""
    return part.block_tokens if isinstance(part.spec, StateSpec) else part.spec.block_size


def is_state_part(part: Facts) -> bool:
    return isinstance(part.spec, StateSpec) and not part.block_tokens


def first_seen(num_tokens: int, window: int) -> int:
    """The first token that the one after so many sees through a window; a token of its own at least is held."""
    return max(0, min(num_tokens - 1, num_tokens + 1 - window)) if window else 0


def few(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers if len(layers) <= 6 else layers[:5])) + (f", ... {layers[-1]}" if len(layers) > 6 else "")


def negative(d: Digest) -> Digest:
    """What takes it away again: digests are sums."""
    return Digest(-d.first & (1 << 64) - 1, -d.second & (1 << 64) - 1)
