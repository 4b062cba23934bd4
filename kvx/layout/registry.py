"""The registry: every engine layout KVX knows, as data for other projects. `kvx layouts --json` writes it.

Its form has a number of its own, which grows when a field changes its meaning or goes; new fields may come without.
registry.schema.json, beside this file, is its JSON Schema; docs/layouts.md says how to use it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kvx
from kvx.errors import BadArgument
from kvx.layout.axes import Layout
from kvx.layout.engine_row import ENGINE_NAMES, EngineRow
from kvx.layout.engines import ENGINES
from kvx.layout.state_rows import STATE_ROWS, StateRow
from kvx.spec.formats import FORMATS, Format
from kvx.spec.state_spec import state_plane

FORM = 1
SCHEMA = Path(__file__).with_name("registry.schema.json")

# What the engines themselves call these layouts, in settings and in code.
_OWN_NAMES = {
    "vllm.0.22.flash_attn.hnd": ("HND",),
    "vllm.0.22.flashinfer_hnd": ("HND",),
    "vllm.0.23": ("NHD",),
    "vllm.0.23.hnd": ("HND",),
    "vllm.0.26.nhd": ("NHD",),
    "vllm.0.26.hnd": ("HND",),
    "vllm.lbnhc": ("LBNHC", "NHD"),
    "vllm.lbhnc": ("LBHNC", "HND"),
    "vllm.lhbnc": ("LHBNC",),
    "vllm.blhnc": ("BLHNC",),
    "vllm.blnhc": ("BLNHC",),
    "vllm.bhlnc": ("BHLNC",),
    "sglang.hnd": ("HND",),
    "sglang.vectorized_5d": ("vectorized_5d",),
    "sglang.layer_first": ("layer_first",),
    "sglang.page_first": ("page_first",),
    "sglang.page_first_direct": ("page_first_direct",),
    "sglang.page_head": ("page_head",),
    "sglang.page_unified": ("page_unified", "page-unified-v1"),
    "sglang.page_unified.mla": ("page_unified", "page-unified-v1"),
    "sglang.page_first_kv_split": ("page_first_kv_split",),
    "lmcache.2ltd": ("KV_2LTD",),
    "lmcache.t2d": ("KV_T2D",),
    "lmcache.2td": ("KV_2TD",),
    "lmcache.mla": ("KV_MLA_FMT",),
    "dynamo.universal": ("UniversalTP",),
    "dynamo.universal.pp": ("UniversalPP",),
    "dynamo.operational.nhd": ("OperationalNHD",),
    "dynamo.operational.hnd": ("OperationalHND",),
    "flexkv.layerfirst": ("LAYERFIRST",),
    "flexkv.blockfirst": ("BLOCKFIRST",),
    "flexkv.layerblock": ("LAYERBLOCK",),
    "aibrix.ncld": ("NCLD",),
    "aibrix.lcnd": ("LCND",),
}
# LMCache's EngineKVFormat spells the shape of the tensors an engine hands it; `_X_` is a level of lists. By the layout.
_LMCACHE = {
    "layer | kv block token head dim": "NL_X_TWO_NB_BS_NH_HS",
    "layer | kv block head token dim": "NL_X_TWO_NB_NH_BS_HS",
    "layer | block kv token head dim": "NL_X_NB_TWO_BS_NH_HS",
    "layer | block kv head token dim": "NL_X_NB_TWO_NH_BS_HS",
    "layer | block token head (kv dim)": "NL_X_NB_BS_NH_CS",
    "layer | block head token (kv dim)": "NL_X_NB_NH_BS_CS",
    "layer | block token head dim": "NL_X_NB_BS_HS",
    "block layer kv token head dim": "NB_NL_TWO_BS_NH_HS",
    "block layer kv head token dim": "NB_NL_TWO_NH_BS_HS",
    "kv layer | (block token) head dim": "TWO_X_NL_X_NBBS_NH_HS",
    "layer | (block token) head dim": "NL_X_NBBS_ONE_HS",
    "layer kv | block token head dim": "NL_X_TWO_X_NB_BS_NH_HS",
}


def registry() -> dict[str, Any]:
    """All of it, as JSON would have it."""
    return {
        "form": FORM,
        "kvx": kvx.__version__,
        "engines": [engine_facts(row) | {"formats": _formats(row)} for row in ENGINES.values()],
        "states": [state_facts(row) for row in STATE_ROWS.values()],
        "formats": [format_facts(row) for row in FORMATS.values()],
    }


def schema() -> dict[str, Any]:
    """The JSON Schema of `registry()`."""
    found: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return found


def engine_facts(row: EngineRow) -> dict[str, Any]:
    """A row of the registry, without the formats its layout can hold."""
    names = [{"project": row.engine, "name": name} for name in _OWN_NAMES.get(row.name, ())]
    if row.layout in _LMCACHE:
        names.append({"project": "LMCache", "name": _LMCACHE[row.layout]})
    layout = Layout.parse(row.layout)
    return {
        "name": row.name,
        "engine": row.engine,
        "versions": row.versions,
        "layout": row.layout,
        "registered": row.registered or None,
        "planes": list(layout.planes),
        "types": row.dtypes or None,
        "constraints": {
            "block_size": _block_rule(row.block_size),
            "num_kv_heads": row.num_kv_heads or None,
            "splits": {
                name: {plane: where.split_of(name) for plane, where in layout.planes.items() if where.split_of(name)}
                for name in ("token", "head", "dim")
                if any(where.split_of(name) for where in layout.planes.values())
            },
        },
        "other_names": names,
        "notes": row.notes,
    }


def _formats(row: EngineRow) -> list[str]:
    """Those whose bytes the layout can hold: what a CacheSpec takes, at sizes that every split and group divides."""
    found = []
    for name in FORMATS:
        try:
            row.spec(num_layers=1, num_blocks=1, block_size=256, num_kv_heads=row.num_kv_heads or 8, head_dim=256, format=name)
        except BadArgument:
            continue
        found.append(name)
    return found


def _block_rule(text: str) -> dict[str, Any] | None:
    """The engine's rule, in its words, and as a number where it is one."""
    if not text:
        return None
    if rule := re.fullmatch(r"multiple of (\d+)", text):
        return {"text": text, "multiple_of": int(rule[1])}
    if re.fullmatch(r"[\d, ]+", text):
        return {"text": text, "one_of": [int(n) for n in text.split(", ")]}
    return {"text": text, "power_of_two": True} if text == "power of two" else {"text": text}


def state_facts(row: StateRow) -> dict[str, Any]:
    """A state's layout depends on the planes a model has; these are those of a delta rule and of Mamba2."""
    conv = state_plane("conv", "f32", channel=4, tap=3)
    examples = {kind: row.layout([conv, state_plane(kind, "f32", head=1, row=2, column=2)]) for kind in ("delta", "ssm")}
    return {
        "name": row.name,
        "engine": ENGINE_NAMES[row.name.split(".")[0]],
        "versions": row.versions,
        "layouts": examples,
        "orders": {"conv": row.conv, "delta": row.delta, "ssm": row.ssm},
        "notes": row.notes,
    }


def format_facts(row: Format) -> dict[str, Any]:
    return {
        "name": row.name,
        "element": row.element.name,
        "element_bits": row.element.bits,
        "granularity": row.granularity.name.lower(),
        "scale": row.scale.name if row.scale is not None else None,
        "scale_bits": row.scale.bits if row.scale is not None else 0,
        "group_size": row.group_size,
        "is_inline": row.is_inline,
        "has_tensor_scale": row.has_tensor_scale,
    }
