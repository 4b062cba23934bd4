"""Slots of a llama.cpp server that runs, by its own HTTP calls: a sequence out of a slot, or into one.

The server has `slot_save_path` set to a folder that both see: `llama-server --slot-save-path FOLDER`, or of the xllamacpp wheel
`CommonParams.slot_save_path`, with `Server.listening_address` as the address.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from kvx.adapters.llama_cpp.handover import export_slot_file, import_slot_file, require_fit
from kvx.adapters.llama_cpp.kinds import StateKind
from kvx.adapters.llama_cpp.model import StateModel
from kvx.adapters.llama_cpp.server import LlamaServer
from kvx.errors import InternalError
from kvx.handover import Handover


class Slots:
    def __init__(
        self,
        address: str,  # http://127.0.0.1:8080
        folder: str | Path,  # the server's slot_save_path
        *,
        model: StateModel,
        kind: StateKind | None = None,  # None: as the first file that it saves says
        timeout_s: float = 60,
    ) -> None:
        self._server, self._folder = LlamaServer(address, timeout_s=timeout_s), Path(folder)
        self._model = model
        self._like: StateKind | bytes | None = kind

    def export_slot(self, slot: int = 0, *, block_size: int = 16, format: str = "") -> Handover:
        """All tokens that the slot has. It keeps them."""
        return export_slot_file(self._saved(slot), model=self._model, block_size=block_size, format=format)

    def import_slot(self, handover: Handover, slot: int = 0) -> None:
        """The slot forgets what it had. Requests that begin with the handover's tokens, and name the slot, continue from them."""
        data = import_slot_file(handover, model=self._model, like=self._like or self._learn(handover, slot))
        restored = self._server.restore_slot(slot, self._path(), data)
        if restored != handover.num_tokens:
            raise InternalError(f"import_slot(): the server restored {restored} tokens of {handover.num_tokens}.")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One of the server's own calls, with its answer."""
        return self._server.post(path, body)

    def _saved(self, slot: int) -> bytes:
        return self._server.save_slot(slot, self._path())

    def _learn(self, handover: Handover, slot: int) -> bytes:
        """How the server writes states, from one of one token: an empty slot's says nothing."""
        require_fit(handover, self._model)  # else the slot would be gone for nothing
        self.post("/completion", {"prompt": handover.tokens[:1].tolist(), "n_predict": 0, "id_slot": slot, "cache_prompt": True})
        self._like = self._saved(slot)
        return self._like

    def _path(self) -> Path:
        return self._folder / f"kvx-{uuid.uuid4().hex}.slot"
