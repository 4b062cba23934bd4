"""Latents (MLA): attention over what DeepSeek's models cache, instead of the K and V they expand it to.

transformers 5.22 caches a latent and a rotary part a token, and expands all of them to K and V of every head at every step.
Multiplied into the query and out of the result instead, the same weights are used on the new tokens only, and kvx.attention_mla
reads the cache as it lies. 5.8 and older cache expanded K and V: there is nothing to do, and `read_latents` finds no layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvx.adapters.transformers.layer import KvxLayer
from kvx.adapters.transformers.states import PagedStates
from kvx.errors import BadArgument, a_type
from kvx.ops.attention.mla import attention_mla

# More queries than these are a prompt: scores over latents then cost more than expanding does (DeepSeek: 576 + 512 for 192 + 128).
MANY_QUERIES = 32


@dataclass(frozen=True)
class Latents:
    """Stands in for a module's `expand_kv`: handles pass unexpanded, other tensors as before."""

    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # the module's own
    project: nn.Linear  # latent -> heads x (key without rotary part, value)
    key_dim: int  # of a key without its rotary part

    def __call__(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(latent, PagedStates) and isinstance(rotary, PagedStates):
            return latent, rotary
        return self.expand(latent, rotary)

    def weights(self, num_heads: int) -> tuple[Tensor, Tensor]:
        """[heads, key_dim, latent] and [heads, value dim, latent]: views."""
        each = self.project.weight.detach().view(num_heads, -1, self.project.in_features)
        return each[:, : self.key_dim], each[:, self.key_dim :]


def read_latents(model: nn.Module) -> int:
    """Have a model's MLA layers attend over latents where attention is "kvx" and the cache a KvxCache; how many do.

    A layer qualifies by what its `expand_kv` computes, which is tried on random numbers.
    """
    if not isinstance(model, nn.Module):
        raise BadArgument(f"read_latents(): model is {a_type(model)}; it must be a torch module.")
    count = 0
    for module in model.modules():
        if isinstance(vars(module).get("expand_kv"), Latents):
            count += 1
        elif (found := _latents(module)) is not None:
            module.expand_kv = found  # type: ignore[assignment]
            count += 1
    return count


def latents_of(module: nn.Module) -> Latents | None:
    found = vars(module).get("expand_kv")
    return found if isinstance(found, Latents) else None


def attend_latents(latents: Latents, query: Tensor, layer: KvxLayer, options: dict[str, Any]) -> Tensor:
    """[batch, queries, heads, value dim]."""
    batch, heads, n, _ = query.shape
    key, value = latents.weights(heads)
    plain, rotary = query.detach().split([latents.key_dim, query.shape[3] - latents.key_dim], dim=3)
    through = torch.einsum("bhnd,hdl->bnhl", plain, key.to(query.dtype))
    q = torch.cat((through, rotary.transpose(1, 2)), dim=3).view(batch * n, heads, -1)
    out, _ = attention_mla(
        q, layer.storage.cache, layer.blocks.table(), spec=layer.spec, max_seq_len=layer.length, **options, **layer.storage.scales()
    )
    return torch.einsum("thl,hvl->thv", out, value.to(out.dtype)).view(batch, n, heads, -1)


@torch.no_grad()
def _latents(module: nn.Module) -> Latents | None:
    expand, project, key_dim = (getattr(module, name, None) for name in ("expand_kv", "kv_b_proj", "qk_nope_head_dim"))
    if expand is None or type(project) is not nn.Linear or project.bias is not None or not isinstance(key_dim, int):
        return None
    found = Latents(expand, project, key_dim)
    like: dict[str, Any] = {"dtype": project.weight.dtype, "device": project.weight.device}
    latent = torch.randn(1, 1, 2, project.in_features, **like)
    rotary = torch.randn(1, 1, 2, int(module.qk_rope_head_dim), **like)
    keys, values = expand(latent, rotary)
    key, value = found.weights(keys.shape[1])
    want = (
        torch.cat((torch.einsum("bonl,hdl->bhnd", latent, key), rotary.expand(-1, keys.shape[1], -1, -1)), dim=3),
        torch.einsum("bonl,hdl->bhnd", latent, value),
    )
    pairs = zip((keys, values), want, strict=True)
    return found if all(a.shape == b.shape and torch.allclose(a, b, rtol=2e-2, atol=2e-2) for a, b in pairs) else None
