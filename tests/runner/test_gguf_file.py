"""Damaged GGUF files are refused in a sentence."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kvx import BadArgument
from kvx.runner.gguf_file import GgufFile

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
