"""LMCache's chunks and names without LMCache: what its memory is to KVX, and what others make of its hashes."""

from __future__ import annotations

import pytest
import torch

import kvx
from kvx.adapters.engine_names import namer_of, said
from kvx.adapters.lmcache import chunk_names, link
from kvx.adapters.lmcache.chunks import WHOLE, ChunkForm, LmcacheStore, Worker, part_of, read_chunk
from kvx.adapters.lmcache.config import StoreConfig
from kvx.adapters.lmcache.names import chunk_namer, name_of, names_field, none_hash
from kvx.errors import BadArgument, Unsupported
from kvx.handover import NEUTRAL, names
from kvx.handover.model_parts import ModelPart
from kvx.spec import CacheSpec
from kvx.tiers import BlockKind, TierOption

MODEL, L, H, D, C = "weights-of-a-test", 3, 4, 8, 16
BF16 = (torch.bfloat16,)
FORMS = {
    "KV_2LTD": ChunkForm(((2, L, C, H * D),), BF16, "KV_2LTD"),
    "KV_T2D": ChunkForm(((C, 2, H * D),), BF16, "KV_T2D", 1),
    "KV_2TD": ChunkForm(((2, C, H * D),), BF16, "KV_2TD", 2),
    "KV_MLA_FMT": ChunkForm(((1, L, C, 40),), BF16, "KV_MLA_FMT"),
    "KV_MLA_FMT without an outer axis": ChunkForm(((L, C, 40),), BF16, "KV_MLA_FMT"),
    "KV_MLA_FMT by layer": ChunkForm(((C, 40),), BF16, "KV_MLA_FMT", 2),
}


def described(form: ChunkForm, worker: Worker | None = None, chunk_size: int = C, head_dim: int = 0):
    head_dim = head_dim or (40 if form.format == "KV_MLA_FMT" else D)
    return read_chunk(form, model=MODEL, chunk_size=chunk_size, head_dim=head_dim, worker=worker or Worker())


@pytest.mark.parametrize("name", FORMS)
def test_a_spec_says_where_each_number_of_a_chunk_is(name):
    """K and V of each token, layer and head, taken out of LMCache's tensor by its axes and out of the bytes by KVX."""
    form = FORMS[name]
    spec, facts = described(form)
    assert facts == {}
    chunk = torch.randn(form.shapes[0]).bfloat16()
    order = {"KV_2LTD": (1, 0, 2, 3), "KV_T2D": (1, 0, 2), "KV_2TD": (0, 1, 2)}  # to layer, K or V, token, row
    if form.format == "KV_MLA_FMT":
        want = [t.reshape(1, C, 1, 40) for t in chunk.reshape(-1, C, 40)]
        plain = spec.replaced(layout="layer | block token head dim")
    else:
        want = [t.reshape(1, C, H, D) for t in chunk.permute(order[form.format]).reshape(-1, C, H * D)]
        plain = spec.replaced(layout="layer kv | block token head dim")
    out = kvx.allocate_buffers(plain)
    kvx.convert([chunk.view(torch.uint8).reshape(-1)], out, plan=kvx.plan(spec, plain))
    assert all(torch.equal(a.view(torch.bfloat16).reshape(b.shape), b) for a, b in zip(out, want, strict=True))
    assert (spec.layer_start, spec.num_layers) == ((0, L) if form.layer == WHOLE else (form.layer, 1))


@pytest.mark.parametrize("shape", [(L, C, H * 2 * D), (1, L, C, H * 2 * D)], ids=str)
def test_k_and_v_of_a_head_side_by_side(shape):
    """As LMCache's server takes them from vLLM on a GPU: told from a latent by the number of heads alone."""
    form, chunk = ChunkForm((shape,), BF16, "KV_MLA_FMT"), torch.randn(shape).bfloat16()
    assert described(form, head_dim=D)[0] is None
    assert described(form, Worker(num_kv_heads=2 * H), head_dim=D)[0] is None  # SGLang's K without V would have as many
    spec, facts = described(form, Worker(num_kv_heads=H), head_dim=D)
    assert (spec.num_kv_heads, facts) == (H, {})
    plain = spec.replaced(layout="layer kv | block token head dim")
    out = kvx.allocate_buffers(plain)
    kvx.convert([chunk.view(torch.uint8).reshape(-1)], out, plan=kvx.plan(spec, plain))
    want = chunk.reshape(L, C, H, 2, D).permute(0, 3, 1, 2, 4).reshape(-1, C, H, D)
    assert all(torch.equal(a.view(torch.bfloat16).reshape(b.shape), b) for a, b in zip(out, want, strict=True))
    half = ChunkForm(((L, C, H * D),), BF16, "KV_MLA_FMT")  # of two ranks
    assert [described(half, Worker(r, 2, H), head_dim=D)[0].head_start for r in range(2)] == [0, 2]
    kv = ModelPart(layers=tuple(range(L)), num_kv_heads=H, head_dim=D)
    assert part_of(form, [kv], 1) is part_of(half, [kv], 2) is kv
    assert part_of(form, [kv], 2) is part_of(half, [kv], 1) is None


@pytest.mark.parametrize(
    "form",
    [
        ChunkForm(((2, L, C, 32), (1, 1, C, 8)), (torch.bfloat16, torch.float32), "KV_2LTD"),  # two groups of layers
        ChunkForm(((2, L, C, 32),), (torch.float8_e4m3fn,), "KV_2LTD"),
        ChunkForm(((2, L, C // 2, 32),), BF16, "KV_2LTD"),  # fewer slots than tokens
        ChunkForm(((2, L, C, 33),), BF16, "KV_2LTD"),
        ChunkForm(((1, L, C, 32),), BF16, "KV_2LTD"),
        ChunkForm(((C, 32),), BF16, "EC_TD"),
    ],
    ids=str,
)
def test_what_has_no_words_goes_whole(form, tmp_path):
    spec, facts = described(form, Worker(1, 2))
    assert spec is None
    assert facts["memory_format"] == form.format
    assert facts["worker"] == "1/2"
    store = LmcacheStore(
        form, [TierOption.parse(f"disk:{tmp_path}")], (spec, facts), model=MODEL, names="lmcache:blake3", chunk_size=C
    )
    chunk, back = torch.randint(0, 255, (form.num_bytes,), dtype=torch.uint8), torch.empty(form.num_bytes, dtype=torch.uint8)
    store.put([b"a"], store.stage([chunk]))
    store.load(store.fetch([b"a"]), [back])
    assert torch.equal(chunk, back)
    store.close()


def test_workers_share_heads_where_the_user_says_so():
    half = ChunkForm(((2, L, C, H * D // 2),), BF16, "KV_2LTD")
    assert [described(half, Worker(r, 2, H))[0].head_start for r in range(2)] == [0, 2]
    assert described(half, Worker(1, 2))[1] == {"worker": "1/2"}
    one = ChunkForm(((2, L, C, D),), BF16, "KV_2LTD")
    assert [described(one, Worker(r, 8, H))[0].head_start for r in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]  # two of them hold each
    assert described(FORMS["KV_MLA_FMT"], Worker(1, 2, 1)) == described(FORMS["KV_MLA_FMT"])
    with pytest.raises(BadArgument, match="worker 1 of 2 has 4 of them"):
        described(FORMS["KV_2LTD"], Worker(1, 2, H))


def test_memory_of_another_size_is_refused(tmp_path):
    form = FORMS["KV_2LTD"]
    store = LmcacheStore(
        form, [TierOption.parse(f"disk:{tmp_path}")], described(form), model=MODEL, names="lmcache:blake3", chunk_size=C
    )
    with pytest.raises(BadArgument, match=rf"has 7 bytes; one of \[2, 3, 16, 32\] has {form.num_bytes}"):
        store.stage([torch.zeros(7, dtype=torch.uint8)])
    store.close()


# --- names -------------------------------------------------------------------------------------------------------------------


def test_names_by_vllms_hashes():
    """By the hashing module of vLLM 0.32, of tokens 0 to 31 in chunks of 16 with PYTHONHASHSEED=0."""
    for algorithm, want in (
        ("sha256_cbor", ["7913e9343b88bdf9", "17c587bb83dc4528"]),
        ("sha256", ["fcac779b0b7a89c0", "8ee1ed6b119795a4"]),
    ):
        assert [n.hex() for n in chunk_names(range(40), 16, algorithm=algorithm, python_hash_seed="0")] == want
        root = none_hash(algorithm, "0")
        assert [n.hex() for n in namer_of(names_field(algorithm, root))(range(32), 16)] == want


def test_names_by_pythons_hash_are_fixed():
    """Python's hash of numbers and tuples is the same in every process and version since 3.8, on 64 bits."""
    found = chunk_names(range(32), 16, algorithm="builtin", root=0)
    assert [n.hex() for n in found] == ["e591ed5642480290", "44f2b6c6f61bea69"]
    assert chunk_namer("lmcache:builtin:0000000000000000")(range(32), 16) == found
    assert chunk_namer(names_field("builtin", -5))(range(32), 16) == chunk_names(range(32), 16, algorithm="builtin", root=-5)


def test_names_that_nobody_here_makes():
    for names_ in ("lmcache:segments", "lmcache:server:sha256_cbor", "lmcache:xxhash:0011223344556677", "other"):
        assert namer_of(names_) is None
    assert (said(""), said("sglang"), said("lmcache:blake3")) == ("KVX's", "SGLang's", "LMCache's (blake3)")


def test_without_blake3(monkeypatch):
    """Its names are of a package that an engine may not have: its chunks are then left alone, and said so."""
    monkeypatch.setitem(__import__("sys").modules, "blake3", None)
    with pytest.raises(Unsupported, match="pip install blake3"):
        chunk_names(range(32), 16)


def test_a_salt_is_part_of_a_name():
    plain = name_of(b"x" * 32)
    assert plain == b"x" * 32
    assert (
        len({plain, name_of(b"x" * 32, "a"), name_of(b"x" * 32, "b"), name_of(b"x" * 32, "a", "b"), name_of(b"x" * 31 + b"a")}) == 5
    )
    assert name_of(-1) == b"\xff" * 8


def test_links_of_blocks_that_are_there(tmp_path):
    tokens, spec = list(range(64)), CacheSpec(1, 8, H, D, layout=NEUTRAL, num_layers=L, model=MODEL)
    kind = BlockKind.of(spec)
    with TierOption.parse(f"disk:{tmp_path}").open(kind) as tier:
        tier.put(names(tokens, 8, MODEL)[:7], [kind.block(kvx.allocate_buffers(spec)) for _ in range(7)]).result()
    mine = names_field("builtin", 0)
    assert link(tokens, tmp_path, model=MODEL, chunk_size=16, names=mine) == 3
    form = FORMS["KV_2LTD"]
    store = LmcacheStore(form, [TierOption.parse(f"disk:{tmp_path}")], described(form), model=MODEL, names=mine, chunk_size=C)
    assert store.has(chunk_names(tokens, 16, algorithm="builtin", root=0)) == [True] * 3 + [False]
    store.close()


def test_the_config_of_both_modes():
    told = {"tiers": ["disk:/x"], "model": MODEL}
    assert StoreConfig.read(told).timeout_s == 5.0
    with pytest.raises(BadArgument, match="chunk_size"):
        StoreConfig.read({**told, "block_size": 16})
    with pytest.raises(BadArgument, match="num_kv_heads is '8'"):
        StoreConfig.read({**told, "num_kv_heads": "8"})
