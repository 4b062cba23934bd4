"""The picture of `kvx size --plot`: requests that fit against their context, a line a format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvx.errors import BadArgument
from kvx.spec.size import Size


def draw(path: Path, sizes: Sequence[Size], memory: str, memory_bytes: int, shared_prefix: int) -> None:
    """From a thousand tokens to where the smallest format fits a single request."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadArgument("size: --plot needs matplotlib: pip install matplotlib.") from None
    longest = max(s.fit_context(memory_bytes) or 2**20 for s in sizes)  # also where any length fits
    contexts = [1024]
    while contexts[-1] <= shared_prefix:
        contexts = [contexts[-1] * 2]
    while contexts[-1] * 2 <= longest and len(contexts) < 24:
        contexts.append(contexts[-1] * 2)
    if not any(s.fit_requests(memory_bytes, contexts[0], shared_prefix) for s in sizes):
        raise BadArgument(f"size: --plot: no request of {contexts[0]:,} tokens fits in {memory}, so there is nothing to draw.")
    figure = Figure(figsize=(8, 5), layout="constrained")  # not pyplot: no window, whatever the machine has
    axes = figure.subplots()
    for s in sizes:
        points = [(c, fit) for c in contexts if (fit := s.fit_requests(memory_bytes, c, shared_prefix))]
        axes.plot([c for c, _ in points], [fit for _, fit in points], marker="o", markersize=3, label=s.format)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{c >> 20}M" if c >= 1 << 20 else f"{c >> 10}k" for c in contexts])
    ranks = f", each of {sizes[0].tp} ranks" if sizes[0].tp > 1 else ""
    axes.set(title=f"{sizes[0].model}: requests that fit in {memory} of cache{ranks}", xlabel="context, tokens", ylabel="requests")
    axes.grid(True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # no such folder; no such kind of picture
        raise BadArgument(f"size: --plot {path}: {error}.") from None
