"""A model's config.json: where it comes from, its fields, and the sentences for those that are missing or wrong."""

from __future__ import annotations

import copy
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
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "hidden_size": ("n_embd", "d_model"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
}
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
_MAX_LAYERS = 10_000
# What a config.json may leave out, to be looked up in Transformers' class. null is not left out: it says that there is none.
_LOOKED_UP: tuple[str, ...] = (
    "num_key_value_heads",
    "head_dim",
    "v_head_dim",
    "sliding_window",
    "layer_types",
    "layers_block_type",
    "per_layer_config",
)
_OF_LAYERS = _LOOKED_UP[4:]  # which the rules below say too
# Sizes of states, by all their names: kvx/spec/state_planes.py reads them.
_LOOKED_UP += (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
    *("linear_num_heads", "linear_head_dim", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "mamba_d_head", "mamba_head_dim"),
    *("mamba_d_state", "ssm_state_size", "state_size", "mamba_n_groups", "mamba_ngroups", "n_groups", "mamba_d_conv"),
    *(
        "conv_kernel",
        "mamba_d_ssm",
        "mamba_expand",
        "expand",
        "conv_L_cache",
        "lru_width",
        "conv1d_width",
        "cca_time0",
        "cca_time1",
    ),
    *("conv_kernel_size", "swa_num_key_value_heads", "swa_head_dim", "short_conv_kernel_size"),
)
# Fields that say what a layer is, in place of layer_types. Classes do not know all of them.
LAYER_RULES = (
    *("hybrid_layer_pattern", "block_types", "attn_layer_period", "attn_layer_indices", "full_attn_idxs", "layers_block_type"),
    *("full_attention_interval", "attn_type_list", "linear_attn_config", "hybrid_override_pattern", "block_configs"),
)


def _left_out(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    wanted = [f for f in _LOOKED_UP if f not in config and not (f in _OF_LAYERS and any(r in config for r in LAYER_RULES))]
    count = next((config[n] for n in ("num_hidden_layers", *_ALSO["num_hidden_layers"]) if config.get(n) is not None), 1)
    if type(count) is not int or not 0 < count <= _MAX_LAYERS:  # a class would list them all
        return {}

    def says(field: str) -> bool:
        return any(name in config for name in (field, *_ALSO.get(field, ())))

    has_heads = says("num_attention_heads") or "state_size" in config
    if not has_heads or not (says("hidden_size") or "head_dim" in config):  # too little to be a model's
        return {}
    if not wanted or model_type == "deepseek_v4":  # whose class's default schedule is no published model's
        return {}
    try:
        from transformers import CONFIG_MAPPING
        from transformers.utils import logging
    except ImportError:
        return {}
    if model_type not in CONFIG_MAPPING:
        return {}
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        whole = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(config))).to_dict()
    except Exception:  # it validates more than a size hangs on; what is read here is checked here
        return {}
    finally:
        logging.set_verbosity(before)
    return {f: whole[f] for f in wanted if whole.get(f) is not None}


class ConfigFields:
    """The fields of the text model, those that are null taken as absent."""

    def __init__(self, name: str, config: Mapping[str, Any], *, complete: bool = False) -> None:
        """`complete`: what config.json leaves out and a size hangs on has the value of Transformers' class, where it is there."""
        while "num_hidden_layers" not in config:  # the decoder of a model that sees or hears
            inner = next((config[n] for n in _INNER if isinstance(config.get(n), Mapping)), None)
            if inner is None:
                break
            config = inner
        self.name = name
        self.model_type = str(config.get("model_type", "?"))
        left_out = _left_out(self.model_type, config) if complete else {}
        given = {k: v for k, v in config.items() if v is not None}
        self.fields = {**DEFAULTS.get(self.model_type, {}), **left_out, **given}

    @staticmethod
    def load(model: Any) -> ConfigFields:
        """Of a known model's name, a config.json or its folder, its fields, or a Transformers config."""
        is_whole = hasattr(model, "to_dict")
        if is_whole:
            model = model.to_dict()
        if isinstance(model, Mapping):
            name = str(model.get("_name_or_path") or model.get("model_type") or "config")
            return ConfigFields(name, model, complete=not is_whole)
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
        return ConfigFields(path.resolve().parent.name or str(path), config, complete=True)

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
        if self.model_type == "longcat_flash" and "num_hidden_layers" not in self:
            count *= 2  # two attentions in each of its num_layers
        if count > _MAX_LAYERS:
            raise BadArgument(f"size(): num_hidden_layers of {self.name} is {count}; it takes 1 to {_MAX_LAYERS}.")
        return count

    def list_of(self, field: str, count: int, *, whole: bool = False) -> list[Any]:
        """One entry a layer; more are those of draft layers. `whole`: a list of `count` or more, all of it."""
        value = list(self.fields[field]) if isinstance(self.fields[field], tuple) else self.fields[field]
        if not isinstance(value, list) or len(value) < count:
            of = f"does not list its {count} layers (num_hidden_layers)" if not whole else f"is {value!r}; it takes a list"
            raise BadArgument(f"size(): {field} of {self.name} {of}.")
        return value if whole else value[:count]

    def missing(self, field: str, *others: str) -> BadArgument:
        also = f" (nor {', '.join(others)})" if others else ""
        return BadArgument(f"size(): the config of {self.name} has no {field}{also}, which decides the cache's size. Add it.")

    def unsupported(self, what: str) -> Unsupported:
        return Unsupported(
            f"size(): {self.name} (model_type {self.model_type}) {what}. "
            "It counts the caches of full, sliding and chunked attention, of latents (MLA), of recurrent layers and of DeepSeek-V4."
        )
