"""What Transformers' config classes put where a config.json says nothing, as kvx/page/class_defaults.json has it for the page.

`python -m tests.class_defaults` writes the file from the Transformers that is installed. Each field of a model_type has a number,
"=heads" (num_attention_heads), "=dim" (hidden_size / num_attention_heads) or "?": the class works it out from more than that, and
the page asks for it. What is not named is read the same with and without the class. Seen on configs with fields left out at random.
"""

from __future__ import annotations

import copy
import json
import random
import warnings
from pathlib import Path
from typing import Any

from kvx.errors import KvxError
from kvx.spec.config_fields import _LOOKED_UP, ConfigFields
from kvx.spec.layer_kinds import described
from kvx.spec.models import CHECKED_TYPES

FILE = Path(__file__).parent.parent / "kvx" / "page" / "class_defaults.json"
_SIZES = ((12, 8, 1024), (24, 16, 4096), (30, 32, 8192), (6, 4, 768))
_OF_LAYERS = ("layer_types", "layers_block_type", "per_layer_config")


def trimmed(model_type: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Configs of this class as JSON has them, with some of the fields left out that a size hangs on, and other sizes in some."""
    from tests.spec.test_size_families import BY_HAND, OUTER, config_of

    if model_type in BY_HAND | set(OUTER):
        return []
    chance, found = random.Random(f"{model_type} {seed}"), []
    whole = json.loads(json.dumps(config_of(model_type).to_dict(), default=str))
    for _ in range(count):
        config = {k: v for k, v in whole.items() if k not in _LOOKED_UP or chance.random() < 0.6}
        config["model_type"] = model_type
        if not any(name in config for name in _OF_LAYERS) and chance.random() < 0.7:
            for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
                if name in config:
                    config[name] = (
                        chance.choice((4, 7, 12)) if name == "num_hidden_layers" else config[name] * chance.choice((1, 2))
                    )
        for name in _LOOKED_UP:
            if type(config.get(name)) is int and chance.random() < 0.3:
                config[name] *= 2
        for name, values in (
            ("sliding_window", (64, 4096, None)),
            ("use_sliding_window", (True, False)),
            ("max_window_layers", (2,)),
        ):
            if name in config and chance.random() < 0.4:
                config[name] = chance.choice(values)
        if is_taken(config):
            found.append(config)
    return found


def is_taken(config: dict[str, Any]) -> bool:
    """Whether the class takes it: of others nothing is left out that the class could say."""
    from transformers import CONFIG_MAPPING

    try:
        CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
    except Exception:  # classes raise errors of every kind
        return False
    return True


def read(config: dict[str, Any], table: dict[str, Any] | None) -> Any:
    """The kinds of layers, by the class where `table` is None; an error's type where it is refused."""
    try:
        if table is None:
            return described(ConfigFields("x", config, complete=True))[0]
        return described(ConfigFields("x", {**filled(config, table), **config}))[0]
    except KvxError as error:
        return type(error).__name__


def filled(config: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    from kvx.spec.config_fields import LAYER_RULES

    found = {}
    heads, hidden = config.get("num_attention_heads") or config.get("n_head"), config.get("hidden_size") or config.get("n_embd")
    for field, value in table.items():
        if field in config or (field in _OF_LAYERS and any(rule in config for rule in LAYER_RULES)) or value == "?":
            continue
        if value == "=heads" and heads:
            found[field] = heads
        elif value == "=dim" and heads and hidden:
            found[field] = hidden // heads
        elif not isinstance(value, str):
            found[field] = value
    return found


def guessed(model_type: str) -> dict[str, Any]:
    from kvx.spec.config_fields import _left_out

    rows = [
        _left_out(model_type, {"model_type": model_type, "num_hidden_layers": n, "num_attention_heads": h, "hidden_size": s})
        for n, h, s in _SIZES
    ]
    rows = [row for row in rows if row]
    found: dict[str, Any] = {}
    for field in {name for row in rows for name in row} - set(_OF_LAYERS):
        values = [row.get(field) for row in rows]
        sizes = [size for size, row in zip(_SIZES, rows, strict=False) if row]
        if values == [h for _, h, _ in sizes]:
            found[field] = "=heads"
        elif values == [s // h for _, h, s in sizes]:
            found[field] = "=dim"
        elif type(values[0]) is int and values == values[:1] * len(values):
            found[field] = values[0]
    return found


def defaults_of(model_type: str, count: int = 60) -> dict[str, Any]:
    """The table of one class: what reads every trimmed config as the class does, the fewest fields asked for."""
    table = guessed(model_type)
    for config in trimmed(model_type, count):
        absent = [f for f in _LOOKED_UP if f not in config]
        want = read(config, None)
        if isinstance(want, str) or any(table.get(f) == "?" for f in absent) or read(config, table) == want:
            continue
        for field in absent:  # the first field that, said, makes it the same
            by_class = ConfigFields("x", config, complete=True).fields
            if field in by_class and read({**config, field: by_class[field]}, table) == want:
                table[field] = "?"
                break
        else:
            for field in absent:
                if field in ConfigFields("x", config, complete=True).fields:
                    table[field] = "?"
    return dict(sorted(table.items()))


def write() -> None:
    warnings.simplefilter("ignore")
    tables = {model_type: defaults_of(model_type) for model_type in sorted(CHECKED_TYPES)}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(table, separators=(',', ':'))}" for name, table in tables.items())
    FILE.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    write()
