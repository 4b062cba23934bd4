"""Golden bytes of llama.cpp's slot files of older versions, out of older wheels of xllamacpp: one wheel a run.

    pip install --target OLD --no-deps xllamacpp==2026.8.10566        version 2; 2026.9.11063 writes version 3
    PYTHONPATH=OLD:. python tests/golden/make_slot_versions.py        adds to tests/golden/slot_versions.json

Models are those of tests/engines/tiny_gguf.py, made by the newest wheel before and named by their paths: NAME=PATH ... Of Qwen3.5
the file is cut before its recurrent state, which is large and the same in every version.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import struct
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp

OUT = Path(__file__).with_name("slot_versions.json")
TOKENS = [72, 101, 108, 108, 111]
CASES = [("llama", "f16"), ("llama", "q8_0"), ("lfm2", "f16"), ("qwen35", "f16")]


def saved(gguf: Path, type: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        p = xllamacpp.CommonParams()
        p.model.path, p.slot_save_path, p.endpoint_slots = str(gguf), f"{folder}/", True
        p.n_ctx, p.n_parallel, p.n_gpu_layers, p.warmup, p.verbosity, p.cache_ram_mib = 256, 1, 0, False, 0, 0
        p.cache_type_k = p.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{type.upper()}")
        p.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
        server = xllamacpp.Server(p)

        def post(path: str, body: dict[str, Any]) -> None:
            request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode())
            urllib.request.urlopen(request).read()

        post("/completion", {"prompt": TOKENS, "n_predict": 0, "id_slot": 0, "cache_prompt": True})
        post("/slots/0?action=save", {"filename": "x"})
        return (Path(folder) / "x").read_bytes()


def main() -> None:
    models = dict(given.split("=", 1) for given in sys.argv[1:])
    found = json.loads(OUT.read_text()) if OUT.exists() else {"tokens": TOKENS, "cases": []}
    for name, type in CASES:
        data = saved(Path(models[name]), type)
        if name == "qwen35":
            data = data[: data.rindex(struct.pack("<IiIII", 1, len(TOKENS) - 1, 0, 0, 4))]
        wheel = importlib.metadata.version("xllamacpp")
        found["cases"].append({"model": name, "type": type, "wheel": wheel, "data": base64.b64encode(data).decode()})
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
