"""A real model in bf16 says what transformers' says up to a near tie: where they part, rounding alone decides."""

from __future__ import annotations

import torch

from kvx.runner import Engine, Params, small_model
from tests.runner import smollm

pytestmark = smollm.needs_weights


class RoundedLinear(torch.nn.Module):
    """A bf16 layer by an f32 GEMM, rounded: the same up to the order of its sums, and fast on CPUs without 16-bit arithmetic."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.rows = linear.weight.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.float(), self.rows).to(x.dtype)


def reference(engine: Engine):
    model = smollm.model_of(engine.model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, RoundedLinear(layer))
    return model


@smollm.long
def test_texts_part_at_near_ties():
    n, length = 20, 64
    engine = Engine.load(small_model(), dtype="bf16", num_blocks=256, max_seqs=16)
    prompts, model = smollm.prompts(n), reference(engine)
    want = smollm.greedy(model, prompts, length, eos_id=2)
    got = [list(a[0].tokens) for a in engine.generate(prompts, Params(max_tokens=length))]
    parted = []  # (tokens before the first difference, by how much transformers preferred its own)
    for ids, ours, theirs in zip(prompts, got, want, strict=True):
        if ours != theirs:
            at = smollm.first_difference(ours, theirs)
            parted.append((at, smollm.gap(model, [*ids, *theirs[:at]], ours[at : at + 1])))
    print(
        f"\nbf16: {n - len(parted)} of {n} texts are transformers'. Others: tokens before they part, and its logits' gap: {parted}"
    )
    # Logits reach 30, where neighbours in bf16 are 1/8 apart: two of those.
    assert all(gap <= 0.25 for _, gap in parted)
