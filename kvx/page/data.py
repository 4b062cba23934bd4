"""What is embedded in the page: the facts the library has, so that the page has none of its own."""

from __future__ import annotations

from typing import Any

import kvx
from kvx.layout.engines import ENGINES
from kvx.layout.registry import engine_facts, format_facts, state_facts
from kvx.layout.state_rows import STATE_ROWS
from kvx.page.size_data import size_data
from kvx.spec.formats import FORMATS


def page_data() -> dict[str, Any]:
    """By name; each tab reads what it needs."""
    return {
        "version": kvx.__version__,
        "engines": [_shown(engine_facts(row)) for row in ENGINES.values()],
        "states": [state_facts(row) for row in STATE_ROWS.values()],
        "formats": [format_facts(row) for row in FORMATS.values()],
        "size": size_data(),
    }


def _shown(facts: dict[str, Any]) -> dict[str, Any]:
    """What of an engine's row the page shows; the registry has more."""
    kept = {name: facts[name] for name in ("name", "engine", "versions", "layout", "other_names", "notes")}
    return kept | {"constraints": {"num_kv_heads": facts["constraints"]["num_kv_heads"]}}
