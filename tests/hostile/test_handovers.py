"""Hostile manifests of handovers, from a peer or a file: refused with a sentence, before memory is taken for what they claim."""

from __future__ import annotations

import hashlib
import json
import random
import resource
from dataclasses import replace

import pytest
import torch

import kvx
from kvx.handover import from_manifest, join
from kvx.spec import from_json, to_json
from tests.handover.caches import small


@pytest.fixture
def body():
    fields = json.loads(small(random.Random(0), num_tokens=14).to_json())
    del fields["digest"]
    return fields


def sealed(body: object) -> str:
    """With a digest of the manifest that is right: whoever sends it can make one."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return json.dumps({**body, "digest": digest} if isinstance(body, dict) else body)


def refuse(text: object, words: str, kind: type[Exception] = kvx.KvxError) -> None:
    with pytest.raises(kind, match=words):
        from_manifest(text)


@pytest.mark.parametrize(
    "text",
    ["", "x", "[]", "{}", "null", "1", '"a"', "[" * 100_000, '{"a":' * 100_000, "1" * 10_000, "NaN", '{"kvx_handover": true}',
     '{"kvx_handover": 2}', '{"kvx_handover": 1}', '{"kvx_handover": "1"}', '{"kvx_handover": 1.0}', None, 7, b"\xff"],
    ids=range(19),
)  # fmt: skip
def test_no_manifest(text):
    refuse(text, "handover: ")


def test_sealed_as_it_should_be(body):
    """The helper makes what is taken: so that what follows is refused for its own reason."""
    assert from_manifest(sealed(body)).num_tokens == 14


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens": []}, "tokens are"),
        ({"tokens": "abc"}, "tokens of the manifest is a str"),
        ({"tokens": {"0": 1}}, "tokens of the manifest is a dict"),
        ({"tokens": [1.0] * 14}, "not all whole"),
        ({"tokens": [True] * 14}, "not all whole"),
        ({"tokens": [[1]] * 14}, "not all whole"),
        ({"tokens": [-1] * 14}, "tokens are"),
        ({"tokens": [2**31] * 14}, "tokens are"),
        ({"tokens": [10**400] * 14}, "tokens are|row of int32 ids"),
        ({"tokens": [1] * 13}, "has content|13 tokens|read as"),
        ({"tokens": [1] * 99}, "99 tokens after block 0 make"),
        ({"parts": []}, "0 parts"),
        ({"parts": [1]}, "a part of the manifest"),
        ({"parts": "p"}, "parts of the manifest is a str"),
        ({"seals": []}, "0 seals"),
        ({"seals": ["x"]}, "32 digits"),
        ({"seals": [5]}, "32 digits"),
        ({"seals": ["+" + "0" * 31]}, "32 digits"),
        ({"seals": ["F" * 32]}, "32 digits"),
        ({"whole": ["0" * 32] * 2}, "2 digests of wholes"),
        ({"whole": [[]]}, "32 digits"),
        ({"whole": None}, "whole of the manifest is None"),
        ({"more": 1}, "other fields"),
    ],
)
def test_fields(body, fields, words):
    if fields.get("tokens") == [1] * 13:  # as many blocks: the bytes tell
        with pytest.raises(kvx.Damaged, match=words):
            from_manifest(sealed({**body, **fields})).check()
        return
    refuse(sealed({**body, **fields}), words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layers": "012"}, "layers of the manifest is a str"),
        ({"layers": ["0", "1", "2"]}, "layers are"),
        ({"layers": [0, 1, 1]}, "layers are"),
        ({"layers": [-1, 0, 1]}, "layers are"),
        ({"layers": [0, 1]}, "for 2 layers"),
        ({"layers": [True, 2, 3]}, "layers are"),
        ({"layers": list(range(1000))}, "for 1000 layers"),
        ({"layers": None}, "layers of the manifest is None"),
        ({"window": -5}, "window is -5"),
        ({"window": "8"}, "window is '8'"),
        ({"window": 2**40}, "window is"),
        ({"window": 1.5}, "window is 1.5"),
        ({"window": True}, "window is True"),
        ({"first_block": 1}, "first_token is 0, first_block 1"),
        ({"first_block": -1}, "first_block is -1"),
        ({"first_block": 2**62, "first_token": 2**64, "window": 3}, "first_block is"),
        ({"first_block": None}, "first_block is None"),
        ({"first_token": 2}, "without a window"),
        ({"first_token": 2, "window": 14}, "see from token 1 .*from 2"),
        ({"first_token": -1}, "first_token is -1"),
        ({"manifest": {}}, "manifest is a dict"),
        ({"manifest": "{}"}, "kvx_manifest"),
        ({"manifest": "[" * 20_000}, "not JSON"),
        ({"content": "0" * 32}, "other fields"),
    ],
)
def test_fields_of_a_part(body, fields, words):
    body["parts"][0].update(fields)
    refuse(sealed(body), words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_blocks": 2**22}, "has 4194304 blocks"),
        ({"num_blocks": 3}, "has 3 blocks"),
        ({"block_size": 2**29, "num_blocks": 1}, "bytes; max_bytes is"),
        ({"head_dim": 2**29, "num_kv_heads": 2**10}, "bytes; max_bytes is"),
        ({"num_kv_heads": 2**29}, "bytes; max_bytes is"),
        ({"layout": "block | layer head kv token dim"}, "a handover is"),
        ({"layout": "block | layer token head dim"}, "has content|bytes|read"),
        ({"model": ""}, "of a model with a name"),
        ({"layer_start": 1}, "counted from 0"),
        ({"layout": "layer | block kv token head dim", "block_bytes": 4096}, "a handover is"),
    ],
)
def test_specs(body, fields, words):
    """Of their own, whole: what is wrong is what they claim."""
    part = body["parts"][0]
    part["manifest"] = to_json(replace(from_json(part["manifest"]), **fields))
    if fields == {"layout": "block | layer token head dim"}:  # a latent cache of four heads: half as large, and not what it was
        with pytest.raises(kvx.Damaged):
            from_manifest(sealed(body)).check()
        return
    refuse(sealed(body), words)


def test_specs_that_are_none(body):
    part = body["parts"][0]
    fields = json.loads(part["manifest"])
    del fields["digest"]
    for name, value, words in (
        ("num_blocks", -1, "num_blocks is -1"),
        ("num_blocks", 2**200, "addresses end"),
        ("num_blocks", 1.5, "num_blocks is 1.5"),
        ("num_blocks", "4", "num_blocks is '4'"),
        ("head_dim", 0, "head_dim is 0"),
        ("head_dim", None, "head_dim is None"),
        ("format", "x", "does not exist"),
        ("layout", ["a"], "layout is"),
        ("num_layers", 2**31, "num_layers is"),
        ("head_start", -1, "head_start is -1"),
        ("model", 5, "model is 5"),
    ):
        part["manifest"] = json.dumps({**fields, name: value})
        refuse(sealed(body), words)


def test_no_memory_is_taken_for_a_lie(body):
    """A peak of a few MB more for a claim of 64 TB, and for one under the default that the caller bounds."""
    part = body["parts"][0]
    spec = from_json(part["manifest"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    part["manifest"] = to_json(replace(spec, head_dim=2**28, num_kv_heads=2**10))
    refuse(sealed(body), "max_bytes is 17,179,869,184")
    part["manifest"] = to_json(replace(spec, head_dim=2**16))
    with pytest.raises(kvx.BadArgument, match="max_bytes is 1,000"):
        from_manifest(sealed(body), max_bytes=1000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_parts_that_repeat(body):
    body["parts"] *= 2
    body["seals"] *= 2
    refuse(sealed(body), "each layer is in one part")


def test_buffers_that_do_not_fit():
    h = small(random.Random(0), num_tokens=14)
    text, buffers = h.to_json(), list(h.parts[0].buffers)
    for lie, words in (
        ([], "buffers of 0 parts"),
        ([buffers, buffers], "buffers of 2 parts"),
        ([buffers[:-1]], "3 buffers; its spec makes 4"),
        ([[*buffers[:-1], buffers[0][:-1]]], "buffer 3 is"),
        ([[*buffers[:-1], torch.cat([buffers[0], buffers[0]])]], "buffer 3 is"),
        ([[*buffers[:-1], torch.cat([buffers[0], buffers[0]])[::2]]], "buffer 3 is"),
        ([[*buffers[:-1], buffers[0].to("meta")]], "on meta"),
        ([[*buffers[:-1], "x" * buffers[0].numel()]], "is str"),
    ):
        with pytest.raises(kvx.BadArgument, match=words):
            from_manifest(text, lie)


def test_a_shard_that_claims_another_whole():
    h = small(random.Random(0), num_tokens=14)
    a, b = (json.loads(s.to_json()) for s in h.shard(2))
    for body in (a, b):
        del body["digest"]
        body["whole"] = ["0" * 32]
    shards = [from_manifest(sealed(x), [s.parts[0].buffers]) for x, s in zip((a, b), h.shard(2), strict=True)]
    with pytest.raises(kvx.Damaged, match="part 0"):
        join(shards)
