"""What the page's Size tab reads: known models, formats, GPUs, and what Transformers puts where a config.json says nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvx.spec.config_fields import DEFAULTS
from kvx.spec.models import MODELS

_CLASS_DEFAULTS = Path(__file__).parent / "class_defaults.json"  # written by tests/class_defaults.py
_GB, _GIB = 10**9, 2**30
# Memory as the device reports it, in the unit of its maker's data sheet: HBM in GB, graphics cards in GiB.
GPUS: dict[str, int] = {
    "NVIDIA B300 288 GB": 288 * _GB,
    "NVIDIA B200 192 GB": 192 * _GB,
    "NVIDIA H200 141 GB": 141 * _GB,
    "NVIDIA GH200 96 GB": 96 * _GB,
    "NVIDIA H100 80 GB": 80 * _GB,
    "NVIDIA A100 80 GB": 80 * _GB,
    "NVIDIA A100 40 GB": 40 * _GB,
    "NVIDIA RTX PRO 6000 96 GiB": 96 * _GIB,
    "NVIDIA L40S 48 GiB": 48 * _GIB,
    "NVIDIA RTX 5090 32 GiB": 32 * _GIB,
    "NVIDIA L4 24 GiB": 24 * _GIB,
    "NVIDIA RTX 4090 24 GiB": 24 * _GIB,
    "AMD MI355X 288 GB": 288 * _GB,
    "AMD MI325X 256 GB": 256 * _GB,
    "AMD MI300X 192 GB": 192 * _GB,
    "Intel Gaudi 3 128 GB": 128 * _GB,
}


_COLUMNS = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def size_data() -> dict[str, Any]:
    """Formats come with the page's own; config_reader.js makes configs and tables of these."""
    by_table: dict[str, list[str]] = {}
    for model_type, table in json.loads(_CLASS_DEFAULTS.read_text(encoding="utf-8")).items():
        by_table.setdefault(json.dumps(table), []).append(model_type)
    return {
        "models": [_row(name, config) for name, config in MODELS.items()],
        "published": DEFAULTS,
        "defaults": [[json.loads(table), " ".join(names)] for table, names in by_table.items()],
        "gpus": GPUS,
    }


def _row(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """A config with the fields that most have as columns; null: it has none. Lists that repeat themselves are said once."""
    more = {field: _cycle(value) if isinstance(value, list) else value for field, value in config.items() if field not in _COLUMNS}
    return {"name": name, **{field: config.get(field) for field in _COLUMNS}, "more": more}


def _cycle(values: list[Any]) -> Any:
    period = next((n for n in range(1, len(values) // 2 + 1) if all(v == values[i % n] for i, v in enumerate(values))), 0)
    return {"cycle": values[:period], "length": len(values)} if period else values
