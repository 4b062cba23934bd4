"""A llama-server's own HTTP calls. Nothing of it is patched, and nothing is kept here."""

from __future__ import annotations

import hashlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from kvx.errors import BadArgument, Incompatible, KvxError, Unsupported

Metadata = Callable[[Path], Mapping[str, Any]]
_SAMPLES, _SAMPLE_BYTES = 256, 4096
_FACTS_S = 30.0  # what it says of itself takes no computing


@dataclass(frozen=True)
class ServedModel:
    """Which model a server runs, as far as it says so."""

    name: str  # of its file
    identity: str  # others do not have it
    n_ctx: int  # of a slot
    head_dims: tuple[int, ...] = ()  # of K and V; none where the file is not to be read from here, or layers differ


class LlamaServer:
    def __init__(self, address: str, *, timeout_s: float = 60) -> None:
        self.address, self._timeout_s = address.rstrip("/"), timeout_s
        if not self.address.startswith(("http://", "https://")):
            raise BadArgument(f"the server's address is {address!r}; it begins with http://, like http://127.0.0.1:8080.")

    def get(self, path: str) -> dict[str, Any]:
        return self._call(path, None, min(self._timeout_s, _FACTS_S))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One of the server's own calls, with its answer."""
        return self._call(path, json.dumps(body).encode(), self._timeout_s)

    def model(self, metadata: Metadata | None = None) -> ServedModel:
        """`metadata`: reads the keys and values of a GGUF file; without it head_dims are not known."""
        props = self.get("/props")
        found = self.get("/v1/models").get("data") or [{}]
        meta = found[0].get("meta") or {}
        path = Path(str(props.get("model_path", "")))
        facts = [str(meta.get(key, "")) for key in ("n_params", "size", "n_vocab", "n_embd", "ftype")]
        digest = _sampled(path)
        identity = hashlib.blake2b("\n".join([digest or path.name, *facts]).encode(), digest_size=12).hexdigest()
        n_ctx = int(props.get("default_generation_settings", {}).get("n_ctx") or meta.get("n_ctx") or 0)
        return ServedModel(path.name, identity, n_ctx, _head_dims(path, metadata) if digest and metadata else ())

    def tokenize(self, text: str) -> list[int]:
        """As /completion does with a prompt."""
        return [int(t) for t in self.post("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]]

    def render(self, messages: Sequence[Any]) -> str:
        """The prompt that /v1/chat/completions makes of messages."""
        return str(self.post("/apply-template", {"messages": list(messages)})["prompt"])

    def compute(self, tokens: Sequence[int], slot: int) -> int:
        """The slot has these tokens afterwards; how many of them it had not to compute."""
        body = {"prompt": list(tokens), "n_predict": 0, "id_slot": slot, "cache_prompt": True}
        return int(self.post("/completion", body).get("timings", {}).get("cache_n", 0))

    def save_slot(self, slot: int, file: Path) -> bytes:
        """`file` stands in the server's slot_save_path, and is gone afterwards."""
        try:
            self.post(f"/slots/{slot}?action=save", {"filename": file.name})
            return file.read_bytes()
        except FileNotFoundError:
            raise BadArgument(
                f"the server saved {file.name}, and {file.parent} has no such file: it is not its folder for slots. Start "
                f"the server with --slot-save-path {file.parent.resolve()}/, or name the folder that it has."
            ) from None
        finally:
            file.unlink(missing_ok=True)

    def restore_slot(self, slot: int, file: Path, data: bytes) -> int:
        """The tokens that it has then. `file` as save_slot."""
        try:
            file.write_bytes(data)
            return int(self.post(f"/slots/{slot}?action=restore", {"filename": file.name}).get("n_restored", -1))
        finally:
            file.unlink(missing_ok=True)

    def _call(self, path: str, body: bytes | None, timeout_s: float) -> dict[str, Any]:
        request = urllib.request.Request(self.address + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            if "slot-save-path" in said:
                raise Unsupported(
                    f"llama.cpp at {self.address} keeps no slots in files. Start it again with --slot-save-path DIR/, and give "
                    "that DIR here."
                ) from None
            raise Incompatible(f"llama.cpp at {self.address} refused {path}: {error.code}, {said}") from None
        except OSError as error:
            why = getattr(error, "reason", error)
            said = f"did not answer {path} within {timeout_s:g} s" if isinstance(why, TimeoutError) else f"cannot be reached: {why}"
            raise BadArgument(
                f"llama.cpp at {self.address} {said}. Start llama-server there, or name the address that it listens at."
            ) from None
        except (HTTPException, ValueError) as error:
            raise Incompatible(
                f"what answers at {self.address} is no llama-server: {path} gave {error}. Name the address that llama-server "
                "listens at."
            ) from None


def _sampled(path: Path) -> str:
    """Of pieces all over a model's file: another checkpoint differs everywhere. "" where it is not to be read from here."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.blake2b(str(size).encode(), digest_size=16)
            for n in range(_SAMPLES):
                file.seek(n * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError:  # the server runs elsewhere: it is known by what it says then
        return ""
    return digest.hexdigest()


def _head_dims(path: Path, metadata: Metadata) -> tuple[int, ...]:
    try:
        facts = metadata(path)
        kind = facts["general.architecture"]
        heads = facts[f"{kind}.attention.head_count"]
        most = max(heads) if isinstance(heads, list) else heads
        k = facts.get(f"{kind}.attention.key_length") or facts[f"{kind}.embedding_length"] // most
        v = facts.get(f"{kind}.attention.value_length") or k
        same = all(facts.get(f"{kind}.attention.{n}_length_swa", dim) == dim for n, dim in (("key", k), ("value", v)))
        return (int(k), int(v)) if same else ()
    except (KvxError, OSError, KeyError, TypeError, ValueError, ZeroDivisionError):  # no attention, or none that KVX reads
        return ()
