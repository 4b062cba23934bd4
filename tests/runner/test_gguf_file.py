"""Damaged GGUF files, and those of a model the runner does not compute, are refused in a sentence."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kvx import BadArgument, KvxError, Unsupported
from kvx.runner.checkpoint import GgufWeights
from kvx.runner.config import config_of_gguf
from kvx.runner.gguf_file import GgufFile
from kvx.runner.open import open_model

gguf = pytest.importorskip("gguf")


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("words", ["one", "zwei", "três"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_float32("f", 0.5)
    writer.add_bool("b", True)
    rows = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("plain", rows)
    writer.add_tensor("half", rows.astype(np.float16))
    writer.add_tensor("coded", gguf.quantize(rows, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_reads_what_the_package_reads(path):
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents()
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(ours.read(tensor.name), gguf.dequantize(tensor.data, tensor.tensor_type))


def read_all(path) -> None:
    file = GgufFile(path)
    for name in file.tensors:
        file.read(name)


def test_every_shorter_file_is_refused(path):
    whole = path.read_bytes()
    for n in range(1, len(whole) - 64, 37):
        path.write_bytes(whole[:n])
        with pytest.raises(BadArgument, match=r"breaks off|ends inside|starts with"):
            read_all(path)


@pytest.mark.parametrize(
    ("at", "what"), [(0, b"GGML"), (4, struct.pack("<I", 1)), (8, b"\xff" * 8), (16, b"\xff" * 8), (24, b"\xff" * 8)]
)
def test_lying_headers_are_refused(path, at, what):
    whole = bytearray(path.read_bytes())
    whole[at : at + len(what)] = what
    path.write_bytes(whole)
    with pytest.raises(BadArgument, match=r"damaged|starts with"):
        GgufFile(path)


META = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.block_count": 1,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.context_length": 128,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": 32,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 7,
}


def test_every_end_of_text_counts():
    assert config_of_gguf(META, frozenset()).eos_ids == (2, 7)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"llama.expert_count": 8}, "the GGUF's llama.expert_count is 8; the runner does not know this key"),
        ({"llama.attention.sliding_window": 64}, "sliding_window is 64"),
        ({"llama.logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"llama.attention.causal": False}, "causal is False"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8; the runner's is head_dim, 16 here"),
        ({"llama.attention.value_length": 32}, "value_length is 32"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn'"),
        ({"llama.attention.head_count_kv": [2, 4]}, r"num_kv_heads is \[2, 4\]"),
        ({"llama.attention.head_count_kv": 3}, "4 query heads and 3 KV heads"),
        ({"general.architecture": "gemma3"}, "general.architecture is 'gemma3'"),
    ],
)
def test_metadata_the_runner_does_not_compute_is_refused(fields, words):
    with pytest.raises(KvxError, match=words):
        config_of_gguf({**META, **fields}, frozenset())


def write_model(path, **changes) -> None:
    """A llama of one layer; `changes` of its tensors' shapes, None: left out."""
    shapes = {"token_embd": (32, 64), "output_norm": (64,), "blk.0.attn_norm": (64,), "blk.0.ffn_norm": (64,)}
    shapes |= {"blk.0.attn_q": (64, 64), "blk.0.attn_k": (32, 64), "blk.0.attn_v": (32, 64), "blk.0.attn_output": (64, 64)}
    shapes |= {"blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64), "blk.0.ffn_down": (64, 96)}
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in META.items():
        if key != "general.architecture":
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(key, value)
    for name, shape in (shapes | changes).items():
        if shape is not None:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_tensors_are_checked_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(GgufFile, "read", lambda *a: pytest.fail("a tensor was read"))
    path = tmp_path / "model.gguf"
    write_model(path)
    assert isinstance(open_model(path).tensors, GgufWeights)
    for changes, error, words in (
        ({"blk.0.attn_q": (32, 64)}, BadArgument, r"blk.0.attn_q.weight is \[32, 64\]; by its metadata it is \[64, 64\]"),
        ({"blk.0.ffn_up": None}, BadArgument, "has no blk.0.ffn_up.weight"),
        ({"blk.0.attn_sinks": (4,)}, Unsupported, "1 tensors that the runner's llama does not read: blk.0.attn_sinks.weight"),
    ):
        write_model(path, **changes)
        with pytest.raises(error, match=words):
            open_model(path)


def test_a_type_the_package_does_not_read_is_refused(path):
    file = GgufFile(path)
    file.check_type("coded")
    file.tensors["coded"] = type(file.tensors["coded"])((2, 32), 9999, 0)
    with pytest.raises(Unsupported, match="coded has GGML type 9999"):
        file.check_type("coded")
