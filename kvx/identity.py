"""Which model K and V belong to: names of models, and which of them tell two checkpoints apart.

K and V follow from every weight, from the config, and from the type that computes. What others find again, in a directory or at a
peer, is named by all of it: `weights_identity`. A name of the geometry (`model_name`) is enough between two engines that a person
has set up with one model, and not there: a fine-tune has the same geometry.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvx.errors import BadArgument
from kvx.ops import native

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Beside config.json: what says how weights were quantised, adapters, Mistral's own config; and code that a model brings with it.
_FACTS = ("adapter_config.json", "hf_quant_config.json", "params.json", "quant_config.json", "quantize_config.json")
# Of config.json: who wrote it, and what follows from the type that computes.
_IDLE = {"_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype", "use_cache"}
_CHUNK_BYTES = 16 << 20  # a whole number of words, hashed on a thread each
_TICK_NS = 1_000_000_000  # a file that changed just now may change again without another time
_GEOMETRY = re.compile(r".+-\d+x\d+-kv\d+x\d+-v\d+")  # of model_name


class _Stat(NamedTuple):
    """A file that has all of these again was not written to: the system sets the time of change itself."""

    device: int
    inode: int
    size: int
    changed_ns: int
    written_ns: int


_known: dict[_Stat, bytes] = {}  # digests of this process: an engine asks for its model's name in several places


def model_name(
    kind: str,  # llama, qwen3, ...
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    hidden_size: int,
    vocab_size: int,
) -> str:
    """A name for a model that has none: its geometry. Two models of one geometry share it, so a name of your own is better."""
    return f"{kind}-{num_layers}x{hidden_size}-kv{num_kv_heads}x{head_dim}-v{vocab_size}"


def weights_identity(
    path: str | Path,  # a folder with *.safetensors or *.bin, or one file such as a .gguf
    *,
    dtype: str = "",  # that computes: "f32", "bf16", "f16"
    settings: Mapping[str, str] | None = None,  # what else K and V hang on: overrides of the config, quantisation while loading
) -> str:
    """A name that other weights, another config, another dtype and other settings do not have.

    Every byte of the weight files is read: one changed norm, one row of an embedding make another name. 128 bits of XXH3 find any
    accident, and are not made against people who look for collisions. The names of the files do not count.
    """
    path = Path(path)
    facts: dict[str, Any] = {"dtype": dtype, "settings": {k: v for k, v in sorted((settings or {}).items()) if v}}
    try:
        if not path.exists():
            raise BadArgument(f"weights_identity(): {path} does not exist. Give a folder with weight files, or one such file.")
        files = [path]
        if path.is_dir():
            files = sorted(f for f in path.iterdir() if f.suffix in _WEIGHTS and f.is_file())
            facts |= _facts_of(path)
        if not files:
            raise BadArgument(f"weights_identity(): {path} has no weight files; they end in {', '.join(_WEIGHTS)}.")
        digests = sorted(_digest(f) for f in files)
    except OSError as error:
        raise BadArgument(f"weights_identity(): {path} cannot be read: {error}.") from error
    state = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16)
    for digest in digests:
        state.update(digest)
    return "-".join(filter(None, ("weights", state.hexdigest(), dtype)))


def has_identity(model: object) -> bool:
    """Whether this name can tell two checkpoints of one geometry apart."""
    return bool(model) and not _GEOMETRY.fullmatch(str(model))


def require_identity(call: str, model: object) -> None:
    if has_identity(model):
        return
    got = f"{model!r}, the geometry alone" if model else "not named"
    raise BadArgument(
        f"{call}: others find its blocks again, and the model is {got}: a fine-tune would be given this model's K and V. "
        'Give a name that only these weights have, CacheSpec(model=...) or model=...: kvx.weights_identity(folder, dtype="bf16") '
        "makes one of the weight files."
    )


def _facts_of(folder: Path) -> dict[str, Any]:
    """What a folder says beside the weights."""
    found: dict[str, Any] = {}
    for file in sorted(folder.iterdir()):
        if file.name in _FACTS or file.suffix == ".py":
            found[file.name] = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    config = folder / "config.json"
    if config.is_file():
        data = config.read_bytes()
        try:
            found["config.json"] = _without_idle(json.loads(data))
        except (ValueError, RecursionError):  # whoever loads the model will say what is wrong with it
            found["config.json"] = hashlib.blake2b(data, digest_size=16).hexdigest()
    return found


def _without_idle(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_idle(v) for k, v in value.items() if k not in _IDLE}
    return [_without_idle(v) for v in value] if isinstance(value, list) else value


def _digest(path: Path) -> bytes:
    """Of all bytes of a file: of its size, and of the hash of each chunk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        before, began_ns = _stat(fd), time.time_ns()
        if before in _known:
            return _known[before]
        starts = range(0, before.size, _CHUNK_BYTES)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            chunks = list(pool.map(lambda at: _hash_chunk(fd, at, min(_CHUNK_BYTES, before.size - at)), starts))
        if _stat(fd) != before:
            raise BadArgument(f"weights_identity(): {path} was written to while it was read. Try again when it is whole.")
    finally:
        os.close(fd)
    state = hashlib.blake2b(before.size.to_bytes(8, "little"), digest_size=16)
    for chunk in chunks:
        state.update(chunk)
    if began_ns - before.changed_ns > _TICK_NS:
        _known[before] = state.digest()
    return state.digest()


def _hash_chunk(fd: int, at: int, size: int) -> bytes:
    data = bytearray(-(-size // 4) * 4)  # words: the library hashes tokens
    view, done = memoryview(data)[:size], 0
    while done < size:
        n = os.preadv(fd, [view[done:]], at + done)
        if not n:
            raise BadArgument(f"weights_identity(): a file ends {size - done} bytes early. Try again when it is whole.")
        done += n
    return _hash(data)


def _hash(data: bytearray) -> bytes:
    """XXH3 of 16 zeros and the data, by the package xxhash or by libkvx, which is slower; BLAKE2b without either."""
    try:
        from xxhash import xxh3_128
    except ImportError:
        if native.LIB is None:
            return hashlib.blake2b(data, digest_size=16).digest()
        out = np.empty(16, np.uint8)
        status = native.entry("kvx_hash_blocks")(3, bytes(16), bytes(data), 1, len(data) // 4, out.ctypes.data)
        if status:
            native.raise_status(status)
        return out.tobytes()
    state = xxh3_128(bytes(16))
    state.update(data)
    digest: bytes = state.digest()
    return digest


def _stat(fd: int) -> _Stat:
    s = os.fstat(fd)
    return _Stat(s.st_dev, s.st_ino, s.st_size, s.st_ctime_ns, s.st_mtime_ns)
