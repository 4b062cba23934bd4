"""Every architecture of transformers served by PagedModel: requests with a shared prefix, together on one cache, as each alone.

python -m tests.adapters.served_architectures                          # all of them, minutes on one core
python -m tests.adapters.served_architectures llama qwen3_next         # some
python -m tests.adapters.served_architectures --write docs/state.md    # the table of that page
"""

from __future__ import annotations

import argparse
import inspect
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

import kvx
from kvx.adapters.transformers import PagedModel, layer_groups
from kvx.cache.kinds import State
from kvx.errors import KvxError
from kvx.runner import Engine, Params
from tests.adapters.architectures import BEGIN, END, architectures, read_table, table
from tests.adapters.tiny_models import tiny_config, tiny_model

NEW = 6
SAME, DIFFERENT, REFUSED, NOT_RUN = (
    "as alone",
    "DIFFERENT",
    "refused",
    "not run: it fails alone, or does not shrink to a tiny model",
)


def prompts() -> list[list[int]]:
    """They share 17 tokens; the first comes twice."""
    ids = torch.Generator().manual_seed(5)
    shared = torch.randint(3, 100, (17,), generator=ids).tolist()
    asked = [shared + torch.randint(3, 100, (n,), generator=ids).tolist() for n in (1, 5, 11, 2)]
    return [*asked, asked[0]]


def make(name: str) -> Any:
    cls = getattr(transformers, name)
    kind = cls.config_class if isinstance(cls.config_class, type) else None
    return tiny_model(cls, tiny_config(architectures()[name] if kind is None else kind.model_type, kind))


@torch.no_grad()
def alone(model: Any, prompt: list[int]) -> list[int]:
    """One forward after the other with transformers' own cache, and positions as generate() gives them."""
    ids, new = list(prompt), prompt
    cache = transformers.DynamicCache(config=model.config.get_text_config(decoder=True))
    given = inspect.signature(model.forward).parameters
    counts = PagedModel.counts_padding(model.config)
    for _ in range(NEW):
        at = {"position_ids": torch.arange(len(ids) - len(new), len(ids))[None]} if "position_ids" in given and not counts else {}
        mask = torch.ones(1, len(ids), dtype=torch.long)
        out = model(input_ids=torch.tensor([new]), attention_mask=mask, past_key_values=cache, use_cache=True, **at)
        new = [int(out.logits[0, -1].argmax())]
        ids += new
    return ids[len(prompt) :]


def served(model: Any) -> list[list[int]]:
    groups = layer_groups(model.config, num_blocks=40, num_states=20, format="f32", block_size=4, state=State(snapshot_every=1))
    cache = kvx.PagedCache(groups, max_seqs=5, max_seq_len=64, max_tokens=128, block_size=4)
    engine = Engine(PagedModel(model, cache))
    answers = engine.generate(prompts(), Params(max_tokens=NEW, ignore_eos=True))
    cache.check()
    assert engine.scheduler.counts.reused_tokens == 4 * 16
    return [list(a.tokens) for (a,) in answers]


def summary(name: str) -> str:
    try:
        model = make(name)
    except Exception:  # of any kind: sizes that do not fit each other, a package that is not there
        return NOT_RUN
    try:
        got = served(model)
    except KvxError:
        return REFUSED
    except Exception as error:
        got = [[0], [hash(repr(error))]]  # wrong, unless the model fails alone too
    try:
        want = [alone(model, p) for p in prompts()]
    except Exception:  # it takes more than text
        return NOT_RUN
    return SAME if got == want else DIFFERENT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types or class names; none: all")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found: dict[str, str] = {}
    for name, model_type in architectures().items():
        if not given.types or {name, model_type} & set(given.types):
            found[name] = summary(name)
            print(f"{model_type} {name}: {found[name]}", flush=True)
    if given.write:
        text = given.write.read_text()
        if given.types:  # the other rows stay
            found = {**read_table(text), **found}
        head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
        given.write.write_text(f"{head}{BEGIN}\n{table(found)}\n{tail}")
    elif not given.types:
        print(table(found))


if __name__ == "__main__":
    main()
