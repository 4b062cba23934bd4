"""llama.cpp for tests: the server of the xllamacpp wheel in this process, asked for token ids, with its slots as handovers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xllamacpp
from torch import Tensor

from kvx.adapters.llama_cpp import Slots, StateModel
from kvx.handover import Handover
from kvx.runner.gguf_file import GgufFile


class LlamaCpp:
    def __init__(
        self,
        gguf: Path,
        folder: Path,  # an empty one, for slot files
        *,
        format: str = "f32",  # of K and V
        flash: bool = False,  # K and V in rows; without it V is transposed, and attention computes in float32 throughout
        num_slots: int = 1,
        name: str = "",  # the model's in handovers; "": made of its geometry
    ) -> None:
        p = xllamacpp.CommonParams()
        p.model.path, p.slot_save_path, p.endpoint_slots = str(gguf), f"{folder}/", True
        p.n_ctx, p.n_parallel, p.n_gpu_layers, p.warmup, p.verbosity = 1024 * num_slots, num_slots, 0, False, 0
        p.cache_type_k = p.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{format.upper()}")
        on, off = (getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{x}ABLED") for x in ("EN", "DIS"))
        p.flash_attn_type = on if flash else off
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = torch.get_num_threads()
        p.cache_ram_mib = 0  # else it keeps prompts outside of its slots, and brings them back unasked
        self._server = xllamacpp.Server(p)
        self.model = StateModel.of_gguf(GgufFile(gguf).metadata, name)
        self.address, self.folder = self._server.listening_address, folder
        self.slots = Slots(self.address, folder, model=self.model, timeout_s=300)

    def prefill(self, ids: Sequence[int], *, slot: int = 0) -> Handover:
        """All of these tokens, computed here."""
        self.forget(slot)
        self._ask(ids, slot, n_predict=0)
        return self.slots.export_slot(slot)

    def decode(self, ids: Sequence[int], num_tokens: int, handover: Handover | None = None, *, slot: int = 0) -> list[int]:
        """Greedy, from nothing or from a handover; the last token of the prompt is always computed here."""
        return [int(t) for t in self.answer(ids, num_tokens, handover, slot=slot)["tokens"]]

    def answer(self, ids: Sequence[int], num_tokens: int, handover: Handover | None = None, *, slot: int = 0) -> dict[str, Any]:
        """All that the server says of it."""
        return self._continue(ids, handover, slot, n_predict=num_tokens)

    def logprobs(self, ids: Sequence[int], handover: Handover | None = None, *, slot: int = 0) -> Tensor:
        """Of the token after these, over the whole vocabulary."""
        found = self._continue(ids, handover, slot, n_predict=1, n_probs=1 << 20)["completion_probabilities"][0]["top_logprobs"]
        out = torch.empty(len(found), dtype=torch.float64)
        out[[t["id"] for t in found]] = torch.tensor([t["logprob"] for t in found], dtype=torch.float64)
        return out

    def forget(self, slot: int = 0) -> None:
        self.slots.post(f"/slots/{slot}?action=erase", {})

    def _continue(self, ids: Sequence[int], handover: Handover | None, slot: int, **how: Any) -> dict[str, Any]:
        self.forget(slot)
        if handover is not None:
            self.slots.import_slot(handover, slot)
        answer = self._ask(ids, slot, **how)
        used = 0 if handover is None else min(handover.num_tokens, len(ids) - 1)
        assert answer["timings"]["cache_n"] == used, f"{answer['timings']['cache_n']} tokens of {used} were not computed again"
        return answer

    def _ask(self, ids: Sequence[int], slot: int, **how: Any) -> dict[str, Any]:
        greedy = {"temperature": 0, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True, "return_tokens": True}
        return self.slots.post("/completion", {"prompt": list(ids), "id_slot": slot, "cache_prompt": True, **greedy, **how})
