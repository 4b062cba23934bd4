"""The runner hands over and takes over: SmolLM2's text, begun by one engine, goes on in another, token for token."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvx import BadArgument, CacheSpec, Damaged, Incompatible, LayerGroup, OutOfBlocks, PackedTable, PagedCache, gather
from kvx import handover as handovers
from kvx.handover import Handover
from kvx.handover.paged_cache import read_sequence, write_sequence
from kvx.runner import Engine, Params, export_sequence, import_sequence, resume
from kvx.runner.handover import add_request, name_of
from kvx.runner.model import Model, kv_format_of, layer_groups
from tests.runner import smollm

TOKENS = 64
ANSWER = Params(max_tokens=TOKENS, ignore_eos=True)
FP8 = "fp8_e4m3_per_token_head"


def engine(
    *, block_size: int = 16, kv_format: str = "f32", num_tokens: int = 4096, prefix: bool = True, max_seqs: int = 12
) -> Engine:
    """On the shared weights."""
    old = smollm.base()
    groups = layer_groups(
        old.model.config, num_blocks=num_tokens // block_size, block_size=block_size, kv_format=kv_format_of(kv_format, "f32")
    )
    cache = PagedCache(groups, max_seqs=12, max_seq_len=1024, max_tokens=64, prefix=prefix)
    return Engine(Model(old.model.config, old.model.weights, cache, torch.float32), old.tokenizer, max_batch_tokens=64)


def prompt() -> list[int]:
    return smollm.prompts(1)[0]


@functools.cache
def alone() -> tuple[int, ...]:
    """What one engine says by itself."""
    return engine().generate([prompt()], ANSWER)[0][0].tokens


@functools.cache
def theirs() -> Any:
    made = smollm.reference()
    made.generation_config.eos_token_id = None
    return made


@functools.cache
def of_transformers() -> Handover:
    from transformers import DynamicCache

    from kvx.adapters.transformers import export_cache

    cache = DynamicCache(config=theirs().config)
    with torch.inference_mode():
        theirs()(torch.tensor([prompt()]), past_key_values=cache)
    return export_cache(cache, prompt(), model=theirs().config)


@functools.cache
def of_engine(block_size: int) -> Handover:
    return export_sequence(engine(block_size=block_size), prompt())


def through_file(tmp_path_factory: Any) -> Handover:
    path = tmp_path_factory.mktemp("handover") / "kept"
    handovers.save(path, of_engine(16))
    return handovers.load(path, model=of_engine(16).model)


# Where a text may have come from: block sizes, ranks, a file and formats on the way. SmolLM2 has three KV heads.
WAYS: dict[str, Callable[[Any], Handover]] = {
    "transformers": lambda _: of_transformers(),
    "kvx": lambda _: of_engine(16),
    "kvx_32": lambda _: of_engine(32),
    "kvx_128": lambda _: of_engine(128),
    "tp_1_3_1": lambda _: handovers.join([r.convert(block_size=32) for r in reversed(of_engine(16).shard(3))]),
    "file": through_file,
    "fp8": lambda _: of_transformers().convert(format=FP8),
}


def decode(to: Engine, ways: dict[str, Handover]) -> dict[str, tuple[int, ...]]:
    """What the engine says after each of these handovers, all of them at once."""
    numbers = {add_request(to, h, params=ANSWER): name for name, h in ways.items()}
    said: dict[str, list[int]] = {name: [] for name in ways}
    while not to.scheduler.is_idle:
        for piece in to.step():
            said[numbers[piece.request]].append(piece.token)
    to.cache.check()
    return {name: tuple(tokens) for name, tokens in said.items()}


@pytest.fixture(scope="module")
def into_16(tmp_path_factory) -> dict[str, tuple[int, ...]]:
    """Of one engine without a prefix cache: nothing is shared between them."""
    to = engine(prefix=False)
    said = decode(to, {name: make(tmp_path_factory) for name, make in WAYS.items()})
    assert to.scheduler.counts.computed_tokens == len(WAYS) * TOKENS, "of each prompt its last token alone"
    return said


@smollm.needs_weights
@pytest.mark.parametrize("way", [w for w in WAYS if w != "fp8"])
def test_goes_on_as_if_alone(into_16, way):
    """SmolLM2, float32, greedy, 64 tokens."""
    assert into_16[way] == alone()


@smollm.needs_weights
@pytest.mark.parametrize("block_size", [32, 128])
def test_into_other_blocks(block_size):
    to = engine(block_size=block_size, prefix=False)
    said = decode(to, {"transformers": of_transformers(), "kvx": of_engine(16)})
    assert said == {"transformers": alone(), "kvx": alone()}
    assert to.scheduler.counts.computed_tokens == 2 * TOKENS


@smollm.needs_weights
def test_into_transformers():
    from kvx.adapters.transformers import import_cache

    ids, model = torch.tensor([prompt()]), theirs()
    cache = import_cache(of_engine(16), model.config, tokens=ids[0])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=TOKENS, do_sample=False
        )
    assert tuple(out[0, ids.shape[1] :].tolist()) == alone(), "transformers by itself says the same: test_greedy"


@smollm.needs_weights
def test_through_fp8_the_text_departs_where_the_report_says(into_16):
    """fp8 is not exact: how far off it is is told. What can be derived is the error of each number."""
    exact, coded = of_transformers(), of_transformers().convert(format=FP8)
    back = coded.convert(format="f32")
    for a, b in zip(exact.parts[0].buffers, back.parts[0].buffers, strict=True):
        x, y = a.view(torch.float32).double().view(-1, 64), b.view(torch.float32).double().view(-1, 64)
        step = x.abs().amax(1, keepdim=True) / 448  # a row's scale: the largest e4m3 is 448
        # Three bits of mantissa: half a step is 1/16 of a number, and 2**-10 of the scale below 2**-6. Sums in float32.
        bound = torch.maximum(x.abs() / 16, step * 2.0**-10) * (1 + 2.0**-18)
        assert bool(((x - y).abs() <= bound).all())
    assert coded.num_bytes < exact.num_bytes / 3.7
    largest = float((last_logits(exact) - last_logits(coded)).abs().max())
    same = smollm.first_difference(into_16["fp8"], alone())
    print(f"\nfp8: the first {same} of {TOKENS} tokens are the same; the first token's logits differ by at most {largest:.3f}")
    assert same >= 1
    assert 0 < largest < float("inf")


def last_logits(handover: Handover) -> torch.Tensor:
    """Of the token after the prompt."""
    to = engine(prefix=False)
    add_request(to, handover, params=ANSWER)
    (seq,) = to.cache.sequences
    to.cache.extend(seq, 1)
    return to.model.forward(to.cache.plan([(seq, 1)]))[0].clone()


# ---- what the engine finds afterwards


@smollm.needs_weights
@pytest.mark.parametrize("block_size", [16, 32])
def test_imported_blocks_are_found(block_size):
    to = engine(block_size=block_size)
    n = len(prompt()) // block_size * block_size
    assert n
    assert import_sequence(to, of_transformers()) == n
    assert to.cache.num_seqs == 0
    to.cache.check()
    answer = to.generate([prompt()], Params(max_tokens=12, ignore_eos=True))[0][0]
    assert answer.num_cached == n
    assert answer.tokens == alone()[:12]
    assert import_sequence(to, of_transformers()) == n, "again, onto what is there"
    to.cache.check()


@smollm.needs_weights
def test_a_running_request_moves():
    one, two = engine(), engine(block_size=32)
    number, said = one.add(prompt(), ANSWER), []
    while len(said) < 9:
        said += [piece.token for piece in one.step()]
    handover = export_sequence(one, number)
    assert handover.tokens.tolist() == prompt() + said[:-1]
    one.reset()
    (answer,) = resume(two, handover, prompt() + said, Params(max_tokens=9, ignore_eos=True))
    assert answer.num_cached == handover.num_tokens
    assert tuple(said) + answer.tokens == alone()[:18]
    with pytest.raises(BadArgument, match=r"request 7 is not in the cache; those that run are \[\]"):
        export_sequence(one, 7)


@smollm.needs_weights
def test_several_answers_go_on_from_one_handover():
    answers = resume(engine(), of_engine(16), params=Params(max_tokens=8, ignore_eos=True, n=3))
    assert [a.tokens for a in answers] == [alone()[:8]] * 3


@smollm.needs_weights
@pytest.mark.parametrize("kv_format", ["bf16", "int8", "fp8"])
def test_formats(kv_format):
    """Of one format: the same bytes. Of another: those of a conversion."""
    one = engine(kv_format=kv_format, block_size=32)
    handover = export_sequence(one, prompt(), block_size=8)
    assert handover.spec.format == kv_format_of(kv_format, "f32")
    same = engine(kv_format=kv_format)
    import_sequence(same, handover)
    again = export_sequence(same, prompt()[:-1], block_size=8)
    full = len(prompt()) // 16 * 16
    assert again.cut(full).parts[0].content == handover.cut(full).parts[0].content
    plain = engine()
    import_sequence(plain, handover)
    again = export_sequence(plain, prompt()[:-1], block_size=8).cut(full)
    assert again.parts[0].content == handover.cut(full).convert(format="f32").parts[0].content


@smollm.needs_weights
def test_what_is_refused_changes_nothing():
    to, handover = engine(), of_engine(16)
    bad = copy.deepcopy(handover)
    bad.parts[0].buffers[1][5] ^= 4
    cases = (
        (lambda: import_sequence(to, handover, model="other"), Incompatible, "here it is 'other'"),
        (lambda: resume(to, handover, model="other"), Incompatible, "here it is 'other'"),
        (lambda: import_sequence(to, bad), Damaged, "part 0"),
        (lambda: resume(to, bad), Damaged, "part 0"),
        (lambda: import_sequence(to, handover.shard(3)[1]), Incompatible, "num_kv_heads is 1; here it is 3"),
        (lambda: resume(to, handover, [*prompt()[:20], 5, *prompt()[21:]]), Incompatible, "token 20 is 5; of the handover"),
        (lambda: resume(to, handover, prompt() + [1] * 2000), BadArgument, "the context is 1024"),
        (lambda: export_sequence(to, []), BadArgument, "there are 0 tokens; tokens are one row of int32 ids, 1 or more"),
        (lambda: export_sequence(to, [1, 10**6]), BadArgument, "1 to 1000000"),
        (lambda: export_sequence(to, [1, 2.5]), BadArgument, r"export_sequence\(\): tokens\[1\] is 2.5"),
        (lambda: import_sequence(engine(prefix=False), handover), BadArgument, "no prefix cache"),
    )
    for call, error, says in cases:
        with pytest.raises(error, match=says):
            call()
    assert to.cache.num_seqs == to.cache.prefix.num_blocks == 0
    to.cache.check()
    small = engine(num_tokens=32)
    calls = ((import_sequence, OutOfBlocks), (resume, BadArgument), (lambda e, h: export_sequence(e, prompt()), OutOfBlocks))
    for call, error in calls:
        with pytest.raises(error, match=r"block|context"):
            call(small, handover)
        assert small.cache.num_seqs == 0
        small.cache.check()


@smollm.needs_weights
def test_names_are_made_alike():
    from kvx.adapters.transformers import handover as adapter

    assert adapter.name_of(theirs().config) == name_of(smollm.base().model.config) == "llama-30x576-kv3x64-v49152"


# ---- groups with windows, without a model


WINDOW = 7


def windowed(block_size: int, format: str = "f32") -> PagedCache:
    spec = CacheSpec(64, block_size, 2, 16, format=format)
    groups = [LayerGroup("full", (1, 3), spec), LayerGroup("sliding", (0, 2, 4), spec, window=WINDOW)]
    return PagedCache(groups, max_seqs=4, max_seq_len=256)


def filled(cache: PagedCache, tokens: list[int]):
    """A sequence with random K and V, computed one by one, so that windows give blocks back."""
    seq = cache.admit(tokens)
    generator = torch.Generator().manual_seed(2)
    for _ in tokens:
        cache.extend(seq, 1)
        for group in range(2):
            at = int(cache.blocks(seq, group)[-1]), (seq.length - 1) % cache.block_size
            for i in cache.groups[group].layers:
                for plane in cache.layer(i).cache:
                    plane[at] = torch.randn(2, 16, generator=generator)
    return seq


def seen(cache: PagedCache, seq: Any, layer: int) -> torch.Tensor:
    """K and V that the sequence's next token sees."""
    handle = cache.layer(layer)
    first = max(0, seq.length + 1 - handle.window) if handle.window else 0
    blocks = cache.blocks(seq, handle.group)
    table = torch.from_numpy(np.maximum(blocks, 0))[None]
    k, v = gather(
        handle.cache, PackedTable(table, torch.tensor([seq.length], dtype=torch.int32)), spec=handle.spec, max_seq_len=seq.length
    )
    assert (blocks[first // cache.block_size :] >= 0).all()
    return torch.stack((k[0, first:], v[0, first:]))


@pytest.mark.parametrize(("a", "b", "neutral"), [(4, 4, 4), (4, 16, 8), (16, 4, 8), (8, 4, 32)])
@pytest.mark.parametrize("n", [5, 31, 32, 33])
def test_windows(a, b, neutral, n):
    one, two = windowed(a), windowed(b)
    tokens = list(range(1, n + 1))
    seq = filled(one, tokens)
    handover = read_sequence(one, seq, model="m", block_size=neutral)
    assert [part.layers for part in handover.parts] == [(1, 3), (0, 2, 4)]
    there = two.admit([*tokens, 99])
    write_sequence(two, there, handover, model="m")
    assert there.length == n
    for layer in range(5):
        assert torch.equal(seen(two, there, layer), seen(one, seq, layer))
    two.check()
    # Of the blocks with names each is whole: a sequence that shares some sees what the first one computed, or computes it.
    for shared in range(1, n + 1):
        other = two.admit([*tokens[:shared], 98, 97])
        if other.length:
            for layer in (0, 1):
                start = max(0, other.length + 1 - WINDOW) if layer == 0 else 0
                want = seen_from(one, seq, layer, start, other.length)
                assert torch.equal(seen(two, other, layer), want), f"{shared} shared, layer {layer}"
        two.release(other)
    two.extend(there, 1)
    two.commit(there)  # goes on as any other
    two.check()
    two.release(there)
    two.check()


def seen_from(cache: PagedCache, seq: Any, layer: int, start: int, end: int) -> torch.Tensor:
    """K and V of some tokens, as `filled` drew them."""
    fresh = windowed(cache.block_size)
    again = filled_whole(fresh, seq.tokens.tolist())
    handle = fresh.layer(layer)
    table = PackedTable(torch.from_numpy(fresh.blocks(again, handle.group))[None], torch.tensor([again.length], dtype=torch.int32))
    k, v = gather(handle.cache, table, spec=handle.spec, max_seq_len=again.length)
    return torch.stack((k[0, start:end], v[0, start:end]))


def filled_whole(cache: PagedCache, tokens: list[int]):
    """As `filled`, with all blocks kept."""
    seq = cache.admit(tokens)
    cache.extend(seq, len(tokens))
    generator = torch.Generator().manual_seed(2)
    for n in range(len(tokens)):
        for group in range(2):
            at = int(cache.blocks(seq, group)[n // cache.block_size]), n % cache.block_size
            for i in cache.groups[group].layers:
                for plane in cache.layer(i).cache:
                    plane[at] = torch.randn(2, 16, generator=generator)
    return seq


def test_a_window_that_is_not_there_is_refused():
    one, two = windowed(4), windowed(4)
    tokens = list(range(1, 31))
    handover = read_sequence(one, filled(one, tokens), model="m", block_size=4)
    for layers, window, says in (
        (
            [(1, 3), (0, 2, 4)],
            12,
            r"layer 0 \(window 12\) sees from token 19; the handover, of window 7, has 20 to 29",
        ),
        ([(0, 3), (1, 2, 4)], 7, r"layer 0 \(window none\) sees from token 0"),
        ([(1, 3), (0, 2)], 7, "num_layers of the handover is 5; here it is 4"),
        ([(1, 3), (0, 2, 5)], 7, "has layer 4 of the model, and this cache does not"),
    ):
        groups = [LayerGroup(f"{w}", layer, two.groups[0].spec, window=w) for layer, w in zip(layers, (0, window), strict=True)]
        cache = PagedCache(groups, max_seqs=2, max_seq_len=64)
        seq = cache.admit([*tokens, 1])
        with pytest.raises(Incompatible, match=says):
            write_sequence(cache, seq, handover, model="m")
        assert seq.length == cache.prefix.num_blocks == 0
    with pytest.raises(Incompatible, match=r"after 25 tokens layer 0 .* sees from token 19; .* It has what token 30 sees"):
        write_sequence(two, two.admit(tokens[:26]), handover, model="m")
    seq = two.admit(tokens)
    write_sequence(two, seq, handover, model="m")
    assert seq.length == 29, "the last may be computed again"
