"""Handovers of the runner: a prompt's K and V out of an engine's cache, and into another's, which goes on from there.

    handover = export_sequence(one, prompt)
    answers = resume(other, handover, prompt, Params(max_tokens=64))

`import_sequence` instead puts whole blocks into the prefix cache, for any request that begins with these tokens. `resume` takes
the last, partial block too.
"""

from __future__ import annotations

from kvx.cache.sequence import Sequence
from kvx.cache.tokens import token_ids
from kvx.errors import BadArgument
from kvx.handover import Handover, model_name
from kvx.handover.paged_cache import read_sequence, write_sequence
from kvx.runner.decoder import DecoderConfig
from kvx.runner.engine import Answer, Engine, Prompt
from kvx.runner.request import Completion, Params


def export_sequence(
    engine: Engine,
    prompt: Prompt | int,  # a text or its token ids; or the number of a request that is running
    *,
    model: str = "",  # its name; "": made of its geometry, name_of()
    block_size: int = 0,  # of the handover; 0: the engine's
    format: str = "",  # of the handover; "": as the cache has it
) -> Handover:
    """A prompt's K and V, computed as far as the prefix cache does not have them. Of a running request: all that is computed."""
    guard = engine.guard
    with guard.lock:
        try:
            made = _export(engine, prompt, model, block_size, format)
        finally:  # gives back what begun has; first said, then done: Ctrl-C may come as soon as something is called
            guard.is_torn = True
            guard.mend()
    return made


def _export(engine: Engine, prompt: Prompt | int, model: str, block_size: int, format: str) -> Handover:
    if isinstance(prompt, int):
        seq = _running(engine, prompt)
    else:
        seq = _prefill(engine, _ids(engine, "export_sequence", prompt))
    name, size = model or name_of(engine.model.config), block_size or engine.cache.block_size
    return read_sequence(engine.cache, seq, model=name, block_size=size, format=format)


def import_sequence(engine: Engine, handover: Handover, *, model: str = "") -> int:
    """Put a handover's whole blocks where the next request that begins with its tokens finds them; how many tokens they have.

    Blocks that the cache has already stay. They may be evicted as any others, once nobody uses them.
    """
    cache = engine.cache
    if cache.prefix is None:
        raise BadArgument("import_sequence(): the engine has no prefix cache, where it would be found. Use resume().")
    guard = engine.guard
    with guard.lock:
        try:
            seq = cache.admit(handover.tokens, out=engine.scheduler.begun)
            write_sequence(cache, seq, handover, model=model or name_of(engine.model.config), is_last_left=False)
            return handover.num_tokens // cache.block_size * cache.block_size
        finally:  # as in export_sequence()
            guard.is_torn = True
            guard.mend()


def resume(
    engine: Engine,
    handover: Handover,
    prompt: Prompt | None = None,  # begins with the handover's tokens; None: is those
    params: Params | None = None,
    *,
    model: str = "",
) -> list[Answer]:
    """The answers to a prompt whose K and V, as far as they are in the handover, are not computed. Other requests go on as well."""
    mine: set[int] = set()
    try:
        requests = _add(engine, handover, prompt, params or Params(), model, mine)
        while not all(c.finish for c in requests):
            engine.step()
    except BaseException:
        for request in mine:
            engine.cancel(request)
        raise
    return [Answer(c.text, tuple(c.generated), c.finish, max(0, c.num_cached)) for c in requests]


def add_request(
    engine: Engine, handover: Handover, prompt: Prompt | None = None, params: Params | None = None, *, model: str = ""
) -> int:
    """As `resume`, for whoever calls Engine.step(): the request's number."""
    return _add(engine, handover, prompt, params or Params(), model, set())[0].request


def name_of(config: DecoderConfig) -> str:
    """A name made of a model's geometry. Two models of one geometry share it, so a name of your own is better."""
    return model_name(
        config.family, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        hidden_size=config.hidden_size, vocab_size=config.vocab_size,
    )  # fmt: skip


def _prefill(engine: Engine, ids: list[int]) -> Sequence:
    """A sequence whose tokens are all in the cache, until the call ends."""
    cache = engine.cache
    seq = cache.admit(ids, out=engine.scheduler.begun)
    while left := len(ids) - seq.length:
        n = cache.until_snapshot(seq, min(left, engine.scheduler.max_batch_tokens))
        cache.extend(seq, n)
        engine.model.forward(cache.plan([(seq, n)]))
        cache.commit(seq)
    return seq


def _running(engine: Engine, request: int) -> Sequence:
    found = [c.seq for c in engine.scheduler.running if c.request == request and c.seq is not None and c.seq.length]
    if not found:
        numbers = sorted({c.request for c in engine.scheduler.running})
        raise BadArgument(f"export_sequence(): request {request} is not in the cache; those that run are {numbers}.")
    return found[0]


def _add(engine: Engine, handover: Handover, prompt: Prompt | None, params: Params, model: str, mine: set[int]) -> list[Completion]:
    """The request's answers; `mine` gets its number first."""
    ids = handover.tokens.tolist() if prompt is None else _ids(engine, "resume", prompt)
    guard, scheduler = engine.guard, engine.scheduler
    with guard.lock:
        try:
            requests = engine.add_completions(ids, params, mine=mine)
            seq = engine.cache.admit(ids, out=scheduler.begun)
            write_sequence(engine.cache, seq, handover, model=model or name_of(engine.model.config))
            # Where the scheduler puts one that it admits, with more of its tokens in the cache already.
            one = requests[0]
            one.seq, one.num_cached = seq, seq.length
            scheduler.running.append(one)
            scheduler.waiting.remove(one)
            scheduler.begun.clear()
        except BaseException:
            guard.is_torn = True
            for request in mine:
                engine.cancel(request)
            guard.mend()
            raise
        scheduler.counts.prompt_tokens += one.num_prompt
        scheduler.counts.reused_tokens += seq.length
        return requests


def _ids(engine: Engine, call: str, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        if engine.tokenizer is None:
            raise BadArgument(f"{call}(): the model has no tokenizer; give the prompt as token ids.")
        prompt = engine.tokenizer.encode(prompt)
    ids: list[int] = token_ids(f"{call}()", prompt, least=1).tolist()
    if max(ids) >= engine.model.config.vocab_size:
        raise BadArgument(
            f"{call}(): token ids are {min(ids)} to {max(ids)}; the model has 0 to {engine.model.config.vocab_size - 1}."
        )
    return ids
