"""Writers of a store that are killed at any moment, and what they left. Each is made in a process of its own (forked.py).

What a writer has been told is kept it tells on, in a file that outlives it. Content follows from a number, so that it can be judged
by whoever reads it.
"""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import Any

BATCH = 8  # blocks or pages that are put together
MODEL = "killed-writers"


def tell(told: str, n: int) -> None:
    fd = os.open(told, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.write(fd, f"{n}\n".encode())
    os.close(fd)


def told_by(folder: Path) -> list[int]:
    return [int(line) for path in sorted(folder.glob("*.told")) for line in path.read_text().split()]


class TierWriter:
    """Blocks of a DiskTier; several such processes share a directory, and two of them write the same names."""

    def __init__(self, folder: str) -> None:
        from kvx.tiers import BlockKind, DiskTier

        self._kind = BlockKind({"model": MODEL, "layout": "block | token", "head_start": 0}, (60_000, 17))
        self._tier = DiskTier(folder, self._kind, 10**11, threads=2)

    def write_on(self, told: str, first: int) -> None:
        from tests.tiers.blocks import block, key

        n = first
        while True:
            keys = [key(n + i) for i in range(BATCH)]
            self._tier.put(keys, [block(k, self._kind) for k in keys]).result()
            tell(told, n)
            n += BATCH

    def verify(self, told: list[int]) -> dict[str, int]:
        """Of what was told: lost. Of all that is there: wrong, and right."""
        from tests.tiers.blocks import block, key

        kept = self._tier.names()
        lost = len({key(n + i) for n in told for i in range(BATCH)} - set(kept))
        wrong = right = 0
        for start in range(0, len(kept), 64):
            some = kept[start : start + 64]
            for name, found in zip(some, self._tier.get(some).result(), strict=True):
                want = block(name, self._kind)
                same = found is not None and all((a == b).all() for a, b in zip(found.buffers, want.buffers, strict=True))
                right, wrong = right + same, wrong + (not same)
        return {"lost": lost, "wrong": wrong + self._tier.stats.refused, "right": right}


def key_of(n: int) -> str:
    return hashlib.sha256(str(n).encode()).hexdigest()


class SglangWriter:
    """Pages by SGLang's storage backend."""

    def __init__(self, folder: str, layout: str = "page_first_direct") -> None:
        import torch

        from tests.engines import sglang_pools as sgl

        torch.set_num_threads(1)
        self._pool = sgl.mha_pool(layout)
        self._store = sgl.backend(folder, self._pool)
        self._where = self._pool.alloc(BATCH * 4)

    def _fill(self, pool: Any, n: int, page: int) -> None:
        """What page `n` holds, and nothing else does."""
        import torch

        here = pool.kv_buffer[:, page]
        here.copy_(torch.arange(here.numel()).reshape(here.shape) % 31 + n % 97)

    def write_on(self, told: str, first: int) -> None:
        n = first
        while True:
            for page in range(BATCH):
                self._fill(self._pool, n + page, int(self._where[page * 4]) // 4)
            if all(self._store.batch_set_v1([key_of(n + page) for page in range(BATCH)], self._where)):
                tell(told, n)
            n += BATCH

    def verify(self, told: list[int]) -> dict[str, int]:
        """The pages that were told, and those after them, which a writer was killed in."""
        import torch

        from tests.engines import sglang_pools as sgl

        want = sgl.mha_pool("page_first_direct")
        lost = wrong = right = 0
        for n in sorted({*told, *(n + BATCH for n in told)}):
            found = self._store.batch_get_v1([key_of(n + page) for page in range(BATCH)], self._where)
            lost += found.count(False) if n in told else 0
            for page in (page for page, ok in enumerate(found) if ok):
                self._fill(want, n + page, 0)
                here = self._pool.kv_buffer[:, int(self._where[page * 4]) // 4]  # page_head: kv, head, token, layer, dim
                same = torch.equal(here.permute(0, 3, 2, 1, 4), want.kv_buffer[:, 0])
                right, wrong = right + same, wrong + (not same)
        return {"lost": lost, "wrong": wrong, "right": right}


def prompt_of(n: int) -> list[int]:
    rng = random.Random(n)
    return [rng.randrange(3, 256) for _ in range(200)]


class VllmWriter:
    """Prompts that vLLM answers: by then its connector has kept their blocks."""

    def __init__(self, model: str, folder: str) -> None:
        from tests.engines.vllm_process import ServedLlm, kvx_connector

        told = kvx_connector([f"disk:{folder}"], model=MODEL, block_size=16) if folder else None
        self._llm = ServedLlm(model, told, {"enable_prefix_caching": False})

    def write_on(self, told: str, first: int) -> None:
        n = first
        while True:
            self._llm.answer([prompt_of(n)], 2)
            tell(told, n)
            n += 1

    def answer(self, numbers: list[int]) -> dict[str, Any]:
        return self._llm.answer([prompt_of(n) for n in numbers], 8)
