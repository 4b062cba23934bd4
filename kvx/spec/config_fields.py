"""A model's config.json: where it comes from, its fields, and the sentences for those that are missing or wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvx.errors import BadArgument, Unsupported
from kvx.spec.models import MODELS, known

# Published configs of these leave out what equals the class's defaults.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    }
}
_ALSO = {  # older spellings
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "hidden_size": ("n_embd", "d_model"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
}
_MAX_LAYERS = 10_000


class ConfigFields:
    """The fields of the text model, those that are null taken as absent."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        while isinstance(config.get("text_config"), Mapping) and "num_hidden_layers" not in config:
            config = config["text_config"]
        self.name = name
        self.model_type = str(config.get("model_type", "?"))
        self.fields = {**DEFAULTS.get(self.model_type, {}), **{k: v for k, v in config.items() if v is not None}}

    @staticmethod
    def load(model: Any) -> ConfigFields:
        """Of a known model's name, a config.json or its folder, its fields, or a Transformers config."""
        if hasattr(model, "to_dict"):
            model = model.to_dict()
        if isinstance(model, Mapping):
            return ConfigFields(str(model.get("_name_or_path") or model.get("model_type") or "config"), model)
        if not isinstance(model, str | Path) or not str(model):
            raise BadArgument(
                f"size(): model is {model!r}; it takes a known model's name, a config.json, its folder, or its fields."
            )
        path = Path(model)
        if path.is_dir():
            path = path / "config.json"
        if not path.exists():
            if path.suffix == ".json":
                raise BadArgument(f"size(): {path} does not exist.")
            name = known(str(model))
            return ConfigFields(name, MODELS[name])
        try:
            config = json.loads(path.read_text())
        except OSError as error:
            raise BadArgument(f"size(): {path} cannot be read: {error.strerror}.") from None
        except (ValueError, RecursionError) as error:  # also text that is no UTF-8, and brackets without end
            raise BadArgument(f"size(): {path} is not JSON: {str(error)[:200]}.") from None
        if not isinstance(config, dict):
            raise BadArgument(f"size(): {path} holds no object; a Transformers config.json is one.")
        return ConfigFields(path.resolve().parent.name or str(path), config)

    def __contains__(self, field: str) -> bool:
        return field in self.fields

    def get(self, field: str, default: Any = None) -> Any:
        return self.fields.get(field, default)

    def int_of(self, field: str, default: int | None = None) -> int:
        """A whole number of 1 or more; where it has a default, 0 too."""
        least = 1 if default is None else 0
        for name in (field, *_ALSO.get(field, ())):
            value = self.fields.get(name)
            if value is not None:
                if type(value) is not int or value < least:
                    raise BadArgument(f"size(): {name} of {self.name} is {value!r}; it takes a whole number of {least} or more.")
                return value
        if default is None:
            raise self.missing(field, *_ALSO.get(field, ()))
        return default

    @property
    def num_layers(self) -> int:
        count = self.int_of("num_hidden_layers")
        if count > _MAX_LAYERS:
            raise BadArgument(f"size(): num_hidden_layers of {self.name} is {count}; it takes 1 to {_MAX_LAYERS}.")
        return count

    def list_of(self, field: str, count: int) -> list[Any]:
        """One entry a layer; more are those of draft layers."""
        value = self.fields[field]
        if not isinstance(value, list) or len(value) < count:
            raise BadArgument(f"size(): {field} of {self.name} does not list its {count} layers (num_hidden_layers).")
        return value[:count]

    def missing(self, field: str, *others: str) -> BadArgument:
        also = f" (nor {', '.join(others)})" if others else ""
        return BadArgument(f"size(): the config of {self.name} has no {field}{also}, which decides the cache's size. Add it.")

    def unsupported(self, what: str) -> Unsupported:
        return Unsupported(
            f"size(): {self.name} (model_type {self.model_type}) {what}. "
            "It counts the caches of full, sliding and chunked attention, of latents (MLA) and of DeepSeek-V4."
        )
