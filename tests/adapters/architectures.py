"""Every architecture of transformers that takes past_key_values, on a KvxCache: the same tokens, or refused with a reason.

    python -m tests.adapters.architectures               # all of them, ten minutes on one core; the table for docs/transformers.md
    python -m tests.adapters.architectures llama bart    # some, with every case
    python -m tests.adapters.architectures --write docs/transformers.md

test_transformers_architectures.py runs some of them, and holds the table in the docs to have all.
"""

from __future__ import annotations

import argparse
import inspect
import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache
from transformers.models.auto import modeling_auto

from kvx.adapters.transformers import KvxCache
from kvx.errors import KvxError
from tests.adapters.tiny_models import tiny_config, tiny_model

MAPPINGS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ")
BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"
EQUAL, ENCODER, NO_CACHE = (
    "equal",
    "equal, as the decoder's cache in an EncoderDecoderCache; refused alone",
    "takes no past_key_values",
)
OWN_ATTENTION = 'attends by itself, so there is no "kvx"'


def architectures() -> dict[str, str]:
    """Class name -> model type, of what transformers' auto classes for text make."""
    found: dict[str, str] = {}
    for mapping in MAPPINGS:
        for model_type, name in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).items():
            found.setdefault(name, model_type)
    return found


# ---- what is compared: each takes a model and a cache, and returns token ids or logits


def prompt(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Left-padded ids, with their mask."""
    longest = max(lengths)
    ids = torch.randint(2, 100, (len(lengths), longest), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for i, n in enumerate(lengths):
        ids[i, : longest - n] = mask[i, : longest - n] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(lengths: tuple[int, ...], **options: Any) -> Callable[..., torch.Tensor]:
    def run(model: Any, cache: Any) -> torch.Tensor:
        torch.manual_seed(0)
        given = {} if cache is None else {"past_key_values": cache}
        out = model.generate(
            **prompt(lengths), max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0, **given, **options
        )
        return out if isinstance(out, torch.Tensor) else out.sequences

    return run


def chunked(model: Any, cache: Any) -> torch.Tensor:
    """Logits of a prompt that comes in pieces."""
    ids, outs = prompt((17,))["input_ids"], []
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    more = {"input_ids": ids} if model.config.is_encoder_decoder else {}
    for start, end in ((0, 11), (11, 14), (14, 15), (15, 17)):
        out = model(**more, **{name: ids[:, start:end]}, past_key_values=cache, use_cache=True)
        outs.append(out.logits)
        cache = out.past_key_values
    return torch.cat(outs, 1)


CASES: dict[str, Callable[..., torch.Tensor]] = {
    "one": generated((11,)),
    "padded": generated((11, 6)),
    "beams": generated((11, 9), num_beams=2),
    "chunks": chunked,
}


def is_equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Tokens exactly. Logits within 2**-13 of the largest: some 2**10 roundings of float32, fewer than a tiny model has."""
    if got.shape != want.shape:
        return False
    return torch.equal(got, want) if not want.is_floating_point() else (got - want).abs().max() <= want.abs().max() * 2**-13


# ---- one architecture


def make(name: str) -> Any:
    """A tiny model, or its config alone where KvxCache refuses that: the model is then not needed."""
    cls = getattr(transformers, name)
    kind = cls.config_class if isinstance(cls.config_class, type) else None
    config = tiny_config(architectures()[name] if kind is None else kind.model_type, kind)
    KvxCache(config)
    return tiny_model(cls, config)


@torch.no_grad()
def results(model: Any) -> dict[tuple[str, str], str]:
    """(case, attention implementation) -> what came of it. A case that the model fails with its own cache is left out."""
    found: dict[tuple[str, str], str] = {}
    is_decoder = type(model).__name__ in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    for case in CASES if is_decoder else ("padded", "chunks"):  # the others decode by models that are in that mapping themselves
        run, want = CASES[case], None
        for implementation in ("eager", "sdpa", "kvx") if is_decoder else ("eager", "kvx"):
            if not choose(model, implementation):
                continue
            if implementation != "kvx":
                try:
                    want = run(model, own_cache(model))
                except Exception as error:  # whatever it is, it is not ours: there is nothing to compare with
                    found[case, implementation] = f"not run: {first_line(error)}"
                    continue
            if want is None:
                continue
            try:
                found[case, implementation] = EQUAL if is_equal(run(model, cache_for(model)), want) else "DIFFERENT"
                if model.config.is_encoder_decoder:
                    found[case, implementation] = ENCODER if is_refused_alone(model, run) else "DIFFERENT"
            except KvxError as error:
                found[case, implementation] = f"refused: {error}"
    return found


def choose(model: Any, implementation: str) -> bool:
    """Whether the decoder attends so now."""
    try:
        model.set_attn_implementation(implementation)
    except ValueError:  # some part of the model has no such
        return False
    return model.config.get_text_config(decoder=True)._attn_implementation == implementation


def own_cache(model: Any) -> Any:
    """Given, because some configs say use_cache=False; a model with an encoder makes its own."""
    return None if model.config.is_encoder_decoder else DynamicCache(config=model.config)


def cache_for(model: Any) -> Any:
    cache = KvxCache(model.config, block_size=4)
    return EncoderDecoderCache(cache, DynamicCache()) if model.config.is_encoder_decoder else cache


def is_refused_alone(model: Any, run: Callable[..., torch.Tensor]) -> bool:
    """By us; or by the model itself, if it refuses a DynamicCache alone in the same way."""
    try:
        run(model, KvxCache(model.config, block_size=4))
    except KvxError as error:
        return "EncoderDecoderCache" in str(error)
    except (AttributeError, NameError):  # T5Gemma asks any cache for its two, FSMT for what it knows of two alone
        try:
            run(model, DynamicCache(config=model.config))
        except (AttributeError, NameError):
            return True
    return False


def summary(name: str) -> str:
    """One line on an architecture. Whatever is DIFFERENT stays visible in it."""
    if "past_key_values" not in inspect.signature(getattr(transformers, name).forward).parameters:
        return NO_CACHE
    try:
        model = make(name)
    except KvxError as error:
        return f"refused: {reason(error)}"
    except ImportError:
        return "not run: it needs a package that is not installed"
    except Exception:  # of any kind: sizes that do not fit each other, fields that have no default
        return "not run: its config does not shrink to a tiny model"
    found = results(model)
    ran = {outcome for outcome in found.values() if not outcome.startswith("not run")}
    if not ran:
        return "not run: it fails with its own cache as well, as it takes more than text or does not shrink"
    ways = {how: {o for (_, h), o in found.items() if h == how} & ran for _, how in found}
    others = ran - ways.get("kvx", set())
    if len(others) == len(ways.get("kvx", ())) == 1 and others != ways["kvx"] and others <= {EQUAL, ENCODER}:
        (only,), (at_kvx,) = others, ways["kvx"]
        return f'{only}; "kvx" is {at_kvx.split(". ")[0]}' if at_kvx.startswith("refused") else f"MIXED {only}; kvx {at_kvx}"
    in_chunks = {o for (case, _), o in found.items() if case == "chunks"} & ran
    if ran - in_chunks == {EQUAL} and len(in_chunks) == 1 and next(iter(in_chunks)).startswith("refused"):
        return f"{EQUAL}; chunks are {next(iter(in_chunks)).split('. ')[0]}"
    if len(ran) > 1:
        return "MIXED " + "; ".join(f"{case}/{how} {outcome}" for (case, how), outcome in found.items())
    (only,) = ran
    return f"{only}; {OWN_ATTENTION}" if "kvx" not in ways else only


def reason(error: Exception) -> str:
    """What a refusal of a config says, without the numbers of the layers."""
    kinds = re.findall(r"are '(\w+)', which (.+?)(?=[;.] )", str(error))
    return "; ".join(f"{kind!r} {what}" for kind, what in kinds) if kinds else str(error).split(". ")[0]


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}" if str(error).strip() else type(error).__name__


# ---- the table


def table(found: dict[str, str]) -> str:
    types: dict[str, list[str]] = defaultdict(list)
    for name, outcome in found.items():
        types[outcome].append(name)
    rows = [f"| {outcome} | {', '.join(sorted(names))} |" for outcome, names in sorted(types.items(), key=lambda x: -len(x[1]))]
    return "\n".join(("| result | classes |", "|---|---|", *rows))


def read_table(text: str) -> dict[str, str]:
    """Class name -> result, of a page that `--write` wrote."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", text[text.index(BEGIN) : text.index(END)], re.MULTILINE)
    return {name: outcome for outcome, names in rows[1:] for name in names.split(", ")}


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
            for key, outcome in results(make(name)).items() if given.types and found[name].startswith("MIXED") else ():
                print("   ", *key, outcome, flush=True)
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
