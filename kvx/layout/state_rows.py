"""How engines keep recurrent states, a row each: what `kvx/layout/engines.py` is for K and V.

A state's planes are `conv` (`channel` by `tap`, with a number behind where a layer has several), `ssm` (`head` by `row` by
`column`: head dim by state size; `channel` by `column` where there are no heads) and `delta` (the same three: key by value).
Engines differ in which of these axes is outermost, in whether a layer's planes share a page, and in how many taps they keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvx.errors import BadArgument
from kvx.spec.cache_spec import PlaneSpec
from kvx.spec.state_spec import StateSpec


@dataclass(frozen=True)
class StateRow:
    name: str
    versions: str
    outside: str  # of all planes
    inside: str  # of each plane, before its own axes; with a bar, planes are apart
    conv: str  # the order of a convolution's axes
    delta: str  # of a delta rule's matrix
    ssm: str = "head row column"
    is_matrix_first: bool = False  # matrices stand before convolutions
    notes: str = ""

    def layout(self, planes: Sequence[PlaneSpec]) -> str:
        """The layout of these planes in this engine."""
        names, axes = self._names(planes), {p.name: p.sizes for p in planes}
        parts = "; ".join(f"{name}: {self.inside}{self.order(name, axes[name])}" for name in names)
        return f"{self.outside}plane[{parts}]"

    def shapes(self, planes: Sequence[PlaneSpec]) -> list[tuple[int, ...]]:
        """Of each plane as the engine says it, in its order; a vector is no matrix of one column there."""
        axes = {p.name: p.sizes for p in planes}
        return [
            tuple(size for a in self.order(name, axes[name]).split() if (size := axes[name][a]) and (a, size) != ("column", 1))
            for name in self._names(planes)
        ]

    def _names(self, planes: Sequence[PlaneSpec]) -> list[str]:
        names = sorted(p.name for p in planes)
        if self.is_matrix_first:
            names.sort(key=lambda name: name.startswith("conv"))  # several convolutions keep their order
        return names

    def order(self, name: str, axes: dict[str, int]) -> str:
        """A plane's own axes in this engine, outermost first."""
        kind = name.rstrip("0123456789")
        orders = {"conv": self.conv, "delta": self.delta, "ssm": self.ssm}
        if kind not in orders:
            raise BadArgument(
                f"state row {self.name!r}: plane {name!r} is not known; the planes are conv, ssm and delta, or conv2 and so on."
            )
        return orders[kind] if kind == "conv" or "head" in axes else " ".join(axes)

    def spec(self, planes: Sequence[PlaneSpec], *, num_blocks: int, num_layers: int = 1, block_bytes: int = 0) -> StateSpec:
        """States of this engine. `block_bytes` is the page of engines that pad it."""
        return StateSpec(num_blocks, tuple(planes), layout=self.layout(planes), num_layers=num_layers, block_bytes=block_bytes)


_ROWS = [
    StateRow(
        "transformers", "5.22", "layer ", "| block ", "channel tap+1", "head row column",
        notes="[batch, channels, kernel]: the oldest column is never read. A block is a row of the batch.",
    ),
    StateRow(
        "vllm.sd", "0.32", "layer | block ", "", "tap channel", "head column row",
        notes="One int8 page a block: convolution, then matrix, then padding (block_bytes). The default.",
    ),
    StateRow(
        "vllm.ds", "0.32", "layer | block ", "", "channel tap", "head column row",
        notes="VLLM_SSM_CONV_STATE_LAYOUT=DS.",
    ),
    StateRow(
        "sglang", "0.5.23", "", "| layer block ", "channel tap", "head column row",
        notes="MambaPool: [layers, slots + 1, ...], a tensor for each plane. Of all its rows the engine's own bytes were compared.",
    ),
    StateRow(
        "sglang.kimi", "0.5.23", "", "| layer block ", "tap channel", "head column row",
        notes="KimiLinear's convolution has its taps outside, and Inkling's.",
    ),
    StateRow(
        "sglang.host", "0.5.23", "block ", "layer ", "channel tap", "head column row", is_matrix_first=True,
        notes="MambaPoolHost, page_first: of a page the matrices of all layers, then the convolutions.",
    ),
    StateRow(
        "sglang.kimi.host", "0.5.23", "block ", "layer ", "tap channel", "head column row", is_matrix_first=True,
        notes="The same of pools whose convolutions have their taps outside.",
    ),
    StateRow(
        "llama_cpp", "2026-10", "layer ", "| block ", "channel tap", "head column row",
        notes="R and S, one row per cell, f32. Of Qwen3-Next, Mamba2, Mamba and LFM2 the engine's own bytes were compared.",
    ),
]  # fmt: skip
STATE_ROWS: dict[str, StateRow] = {row.name: row for row in _ROWS}


def state_row(name: str) -> StateRow:
    try:
        return STATE_ROWS[name]
    except (KeyError, TypeError):
        raise BadArgument(f"state_row(): {name!r} is not known; the rows are {', '.join(STATE_ROWS)}.") from None
