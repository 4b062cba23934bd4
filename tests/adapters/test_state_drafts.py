"""Random drafts of 1 to 8 tokens on tiny models with states: the logits that follow are those of never having drafted, bit for bit.

Some drafts are right and stay, the others go. KvxCache crops to where the draft began, and what stays is run again; on a PagedCache
the draft runs on a fork, and the loser is released. KVX_TEST_EXAMPLES=6000 makes it 1,000 drafts for each model and way.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import settings

transformers = pytest.importorskip("transformers", minversion="5.0", reason="states were kept by classes of the models before")

import kvx  # noqa: E402
from kvx.adapters.transformers import KvxCache  # noqa: E402
from kvx.cache import Sequence  # noqa: E402
from kvx.cache.kinds import State  # noqa: E402
from kvx.spec import StateSpec, state_plane  # noqa: E402
from tests.adapters.test_transformers_states import logits, model, theirs  # noqa: E402

MODELS = ("Qwen3Next", "FalconH1", "Lfm2")
BLOCK, MAX_LEN = 4, 120


def num_drafts() -> int:
    """Of each model and way: of as many as random tests have of examples, a sixth."""
    return max(3, -(-settings.default.max_examples // 6))


class Plain:
    """A KvxCache, which never drafts or goes back by crop()."""

    def __init__(self, made: Any) -> None:
        self.made, self.cache, self.length = made, KvxCache(made.config), 0
        self.cache.activate_past_recording()

    def run(self, tokens: list[int]) -> torch.Tensor:
        found = logits(self.made, self.cache, torch.tensor([tokens]), start=self.length)
        self.length += len(tokens)
        return found

    def draft(self, tokens: list[int], stay: int) -> torch.Tensor | None:
        """What the model says of the tokens that stay, once they are run again; None: none do."""
        start = self.length
        self.run(tokens)
        self.cache.crop(start)
        self.length = start
        return self.run(tokens[:stay]) if stay else None


class Paged:
    """The same model with K, V and states in the blocks of a PagedCache, and transformers' cache made anew for each step."""

    def __init__(self, made: Any) -> None:
        self.made, self.template = made, theirs(made)
        logits(made, self.template, torch.tensor([[5]]))
        self.attends = [i for i, layer in enumerate(self.template.layers) if getattr(layer, "keys", None) is not None]
        self.keeps = [i for i, layer in enumerate(self.template.layers) if _states(layer)]
        key = self.template.layers[self.attends[0]].keys
        kv = kvx.CacheSpec(2 * MAX_LEN // BLOCK, BLOCK, num_kv_heads=key.shape[1], head_dim=key.shape[3], format="f32")
        groups = [kvx.LayerGroup("full", tuple(self.attends), kv)]
        planes = tuple(_plane(name, t) for name, t in _states(self.template.layers[self.keeps[0]]).items())
        groups.append(kvx.LayerGroup("states", tuple(self.keeps), StateSpec(6, planes), kind=State(snapshot_every=2)))
        self.cache = kvx.PagedCache(groups, max_seqs=2, max_seq_len=MAX_LEN)
        self.seq = self.cache.admit([])

    def run(self, tokens: list[int]) -> torch.Tensor:
        self.cache.extend(self.seq, tokens)
        found = self.step(self.seq, len(tokens))
        self.cache.commit(self.seq)
        return found

    def draft(self, tokens: list[int], stay: int) -> torch.Tensor | None:
        fork = self.cache.fork(self.seq)
        self.cache.extend(fork, tokens)
        found = self.step(fork, len(tokens))
        if stay == len(tokens):  # all of it was right: it is the sequence now
            self.cache.release(self.seq)
            self.seq = fork
            return found
        self.cache.release(fork)
        return self.run(tokens[:stay]) if stay else None

    def step(self, seq: Sequence, n: int) -> torch.Tensor:
        batch, start = self.cache.plan([(seq, n)]), seq.length - n
        block, table = int(batch.state_blocks(1)[0]), torch.from_numpy(self.cache.blocks(seq)).long()
        past = copy.deepcopy(self.template) if start else theirs(self.made)
        for i in self.attends if start else ():
            rows = [t[table].flatten(0, 1)[:start].transpose(0, 1)[None] for t in self.cache.layer(i).cache]
            past.layers[i].keys, past.layers[i].values = rows
        for i in self.keeps if start else ():
            for name, state in _states(past.layers[i]).items():
                state.copy_(self.cache.planes(i, 1).planes[name][block].reshape(state.shape))
        found = logits(self.made, past, batch.tokens[None].long(), start=start)
        slots = batch.slot_mapping(0).long()
        for i in self.attends:
            for rows, new in zip(self.cache.layer(i).cache, (past.layers[i].keys, past.layers[i].values), strict=True):
                rows.flatten(0, 1)[slots] = new[0, :, start:].transpose(0, 1)
        for i in self.keeps:
            for name, state in _states(past.layers[i]).items():
                plane = self.cache.planes(i, 1).planes[name]
                plane[block] = state.reshape(plane[block].shape)
        self.cache.check()
        return found


def _states(layer: Any) -> dict[str, torch.Tensor]:
    found = {"conv": getattr(layer, "conv_states", {}), "state": getattr(layer, "recurrent_states", {})}
    return {name: states[0] for name, states in found.items() if states.get(0) is not None}


def _plane(name: str, state: torch.Tensor) -> Any:
    axes = ("channel", "tap") if name == "conv" else ("head", "row", "column")
    return state_plane(name, "f32", **dict(zip(axes, state.shape[1:], strict=True)))


@pytest.mark.parametrize("way", [Plain, Paged], ids=["crop", "fork"])
@pytest.mark.parametrize("name", MODELS)
def test_drafts_that_go_leave_no_trace(name, way):
    rng, made = random.Random(f"{name} {way.__name__}"), model(name)

    def some(n: int) -> list[int]:
        return [rng.randrange(3, 128) for _ in range(n)]

    sides, length = [], MAX_LEN
    for i in range(num_drafts()):
        if length > MAX_LEN - 10:  # another text
            sides, prompt = [way(made), way(made)], some(rng.randint(1, 20))
            assert torch.equal(*(side.run(prompt) for side in sides))
            length = len(prompt)
        tried, never = sides
        tokens = some(rng.randint(1, 8))
        stay = (0, len(tokens), rng.randint(0, len(tokens)))[i % 3]
        found = tried.draft(tokens, stay)
        if stay:
            assert torch.equal(found, never.run(tokens[:stay]))
        after = some(1)
        assert torch.equal(tried.run(after), never.run(after))
        length += stay + 1
