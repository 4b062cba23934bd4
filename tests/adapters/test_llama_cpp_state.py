"""llama.cpp's states and slot files: bytes that the engine saved, and bytes of a writer of this file's own."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import kvx
from kvx.adapters import llama_cpp
from kvx.adapters.llama_cpp import StateKind, StateModel, export_slot_file, export_state, import_slot_file, import_state
from kvx.handover import Handover
from kvx.layout import engine
from kvx.layout.buffers import allocate_buffers

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "llama_cpp.json").read_text())
TINY = StateModel("tiny", **GOLDEN["model"])
NUMPY = {"f32": ("<f4", 0), "f16": ("<f2", 1), "bf16": ("<u2", 30)}
LAYERS, CELLS, HEADS, DIM = 3, 21, 2, 8


# ---- a writer of its own: what the engine writes, from arrays


@dataclass(frozen=True)
class Case:
    """A sequence's numbers, [layer, cell, head, dim]: small and whole, so that every format holds them."""

    rope: str = "interleaved"
    cells: int = CELLS

    def __str__(self) -> str:
        return f"{self.rope}-{self.cells}"

    @property
    def model(self) -> StateModel:
        return StateModel("m", LAYERS, HEADS, DIM, rope=self.rope)

    @property
    def tokens(self) -> list[int]:
        return list(range(100, 100 + self.cells))

    @property
    def k(self) -> np.ndarray:
        """As Transformers has it."""
        return np.random.default_rng(1).integers(0, 251, (LAYERS, self.cells, HEADS, DIM)).astype("<f4")

    @property
    def v(self) -> np.ndarray:
        return np.random.default_rng(2).integers(0, 251, (LAYERS, self.cells, HEADS, DIM)).astype("<f4")

    def state(self, kind: StateKind, *, magic: bool = True, order: np.ndarray | None = None, stream: int = 0) -> bytes:
        """`order`: of positions in cells."""
        order = np.arange(self.cells) if order is None else order
        k = self.k[:, order]
        if self.rope == "interleaved":  # 0 4 1 5 2 6 3 7
            k = k[..., [d // 2 + d % 2 * (DIM // 2) for d in range(DIM)]]
        out = struct.pack("<Ii", 0xAF143CD8, 5) if magic else b""
        out += struct.pack("<I", kind.num_streams) + struct.pack("<I", 0) * stream + struct.pack("<I", self.cells)
        out += b"".join(struct.pack("<iIi", int(p), 1, 5) for p in order)
        out += struct.pack("<II", kind.is_v_transposed, LAYERS)
        out += struct.pack("<II", 0, 0) if kind.version >= 4 else b""
        type_ = NUMPY[kind.format][1]
        for rows in k:
            data = encoded(rows, kind.format)
            out += struct.pack("<iQ", type_, len(data) // self.cells) + data
        for rows in self.v[:, order]:
            rows = rows.reshape(self.cells, -1)
            if kind.is_v_transposed:
                data = encoded(rows.T, kind.format)
                head = struct.pack("<iII", type_, len(data) // rows.size, rows.shape[1])
            else:
                data = encoded(rows, kind.format)
                head = struct.pack("<iQ", type_, len(data) // self.cells)
            out += head + data
        return out + struct.pack("<I", 0) * (kind.num_streams - 1 - stream)

    def slot_file(self, kind: StateKind, *, packed: bool = True) -> bytes:
        words = [-1, 1, self.cells, *self.tokens, 0] if packed else self.tokens
        head = struct.pack(f"<III{len(words)}i", 0x67677371, kind.version, len(words), *words)
        return head + self.state(kind, magic=False)


def encoded(x: np.ndarray, format: str) -> bytes:
    if format == "bf16":
        return (np.ascontiguousarray(x).view("<u4") >> 16).astype("<u2").tobytes()
    return x.astype(NUMPY[format][0]).tobytes()


def planes(handover: Handover) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, [layer, head, token, dim] in f32."""
    s = handover.spec
    spec = engine("transformers").spec(
        num_layers=s.num_layers, num_blocks=1, block_size=handover.num_tokens, num_kv_heads=s.num_kv_heads, head_dim=s.head_dim,
        format="f32",
    )  # fmt: skip
    buffers = allocate_buffers(spec)
    handover.write(0, buffers, spec, [0])
    k, v = (torch.stack(buffers[i::2]).view(torch.float32) for i in (0, 1))
    shape = (s.num_layers, s.num_kv_heads, handover.num_tokens, -1)
    return k.view(shape), v.view(shape)


CASES = [Case(), Case("half"), Case(cells=1), Case(cells=16)]
KINDS = [
    StateKind("f32"),
    StateKind("f32", is_v_transposed=True),
    StateKind("f16"),
    StateKind("bf16", is_v_transposed=True),
    StateKind("f32", num_streams=3),
    StateKind("f16", version=2),
]


def kind_id(kind: StateKind) -> str:
    return f"{kind.format}{'-transposed' * kind.is_v_transposed}-{kind.num_streams}-version{kind.version}"


case = pytest.mark.parametrize("case", CASES, ids=str)
kind = pytest.mark.parametrize("kind", KINDS, ids=kind_id)


# ---- what the engine saved


@pytest.mark.parametrize("name", GOLDEN["files"])
def test_slot_files_of_the_engine_have_transformers_numbers(name: str) -> None:
    data = bytes.fromhex(GOLDEN["files"][name])
    handover = export_slot_file(data, model=TINY)
    assert handover.tokens.tolist() == GOLDEN["tokens"]
    # K and V of the first layer see no attention: their error is that of their own rounding. f16 has 11 bits.
    close = 2e-3 if name == "f16" else 1e-5
    for ours, theirs in zip(planes(handover), (GOLDEN["k"], GOLDEN["v"]), strict=True):
        want = torch.tensor(theirs)
        assert (ours - want)[0].abs().max() <= close * want[0].abs().max()
        assert (ours - want)[1].abs().max() <= 2e-3 * want[1].abs().max()  # flash attention computes in f16 here and there


@pytest.mark.parametrize("name", GOLDEN["files"])
def test_slot_files_of_the_engine_come_back_as_they_were(name: str) -> None:
    data = bytes.fromhex(GOLDEN["files"][name])
    back = import_slot_file(export_slot_file(data, model=TINY, block_size=4), model=TINY, like=data)
    if name == "f32_two_slots":  # we write the first stream, and number sequences from 0
        assert len(back) == len(data)
        assert export_slot_file(back, model=TINY).parts[0].content == export_slot_file(data, model=TINY).parts[0].content
    else:
        assert back == data


# ---- our own bytes


@case
@kind
def test_export_reads_every_number(case: Case, kind: StateKind) -> None:
    handover = export_state(case.state(kind), case.tokens, model=case.model, version=kind.version)
    k, v = planes(handover)
    assert torch.equal(k, torch.from_numpy(case.k).transpose(1, 2))
    assert torch.equal(v, torch.from_numpy(case.v).transpose(1, 2))
    assert (handover.model, handover.tokens.tolist()) == ("m", case.tokens)


@case
@kind
@pytest.mark.parametrize("other", KINDS[:4], ids=kind_id)
def test_import_writes_what_the_engine_would(case: Case, kind: StateKind, other: StateKind) -> None:
    handover = export_state(case.state(other), case.tokens, model=case.model)
    ours = import_state(handover, model=case.model, like=kind)
    assert without_sequences(ours, case.cells) == without_sequences(case.state(kind), case.cells)


def without_sequences(data: bytes, cells: int) -> bytes:
    """A state with 0 for the sequence, which readers ignore, in the header and in every cell."""
    out = bytearray(data)
    struct.pack_into("<i", out, 4, 0)
    for cell in range(cells):
        struct.pack_into("<i", out, 16 + 12 * cell + 8, 0)
    return bytes(out)


@kind
def test_a_state_tells_the_kind(kind: StateKind) -> None:
    case = Case()
    handover = export_state(case.state(KINDS[0]), case.tokens, model=case.model)
    like = Case(cells=2).state(kind)
    assert import_state(handover, model=case.model, like=like, version=kind.version) == import_state(
        handover, model=case.model, like=kind
    )


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@kind
def test_slot_files_with_packed_and_plain_tokens(kind: StateKind, packed: bool) -> None:
    case = Case()
    data = case.slot_file(kind, packed=packed)
    handover = export_slot_file(data, model=case.model)
    assert handover.tokens.tolist() == case.tokens
    back = import_slot_file(handover, model=case.model, like=data)
    assert len(back) == len(data)
    assert back[: 12 + 4 * (case.cells + 4 * packed)] == data[: 12 + 4 * (case.cells + 4 * packed)]
    assert export_slot_file(back, model=case.model).parts[0].content == handover.parts[0].content


def test_slot_files_by_their_path(tmp_path: Path) -> None:
    case, path = Case(), tmp_path / "slot0.bin"
    data = case.slot_file(KINDS[0])
    path.write_bytes(data)
    want = export_slot_file(data, model=case.model)
    for there in (path, str(path)):
        assert export_slot_file(there, model=case.model).to_json() == want.to_json()
        assert import_slot_file(want, model=case.model, like=there) == import_slot_file(want, model=case.model, like=data)


@pytest.mark.parametrize("transposed", [False, True])
def test_cells_in_any_order_are_read_by_position(transposed: bool) -> None:
    case, kind = Case(), StateKind("f32", transposed)
    order = np.random.default_rng(3).permutation(case.cells)
    handover = export_state(case.state(kind, order=order), case.tokens, model=case.model)
    assert handover.parts[0].content == export_state(case.state(kind), case.tokens, model=case.model).parts[0].content


def test_the_sequence_may_be_in_any_stream() -> None:
    case, kind = Case(), StateKind("f32", num_streams=3)
    handovers = [export_state(case.state(kind, stream=s), case.tokens, model=case.model) for s in range(3)]
    assert len({str(h.parts[0].content) for h in handovers}) == 1


def test_formats_convert_on_the_way() -> None:
    case = Case()
    handover = export_state(case.state(KINDS[0]), case.tokens, model=case.model, block_size=8, format="bf16")
    assert (handover.spec.format, handover.block_size) == ("bf16", 8)
    assert without_sequences(import_state(handover, model=case.model, like=KINDS[1]), case.cells) == without_sequences(
        case.state(KINDS[1]), case.cells
    )


# ---- refusals


def edited(data: bytes, at: int, code: str, *values: int) -> bytes:
    out = bytearray(data)
    struct.pack_into("<" + code, out, at, *values)
    return bytes(out)


PLAIN = Case()
STATE = PLAIN.state(StateKind("f32"))
AFTER_CELLS = 16 + 12 * CELLS
FIRST_ROW = AFTER_CELLS + 16
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no bytes": (lambda: read("slot0.bin"), kvx.BadArgument, "data is a str; it must be a state's bytes"),
    "no file": (lambda: file("no-such.bin"), kvx.BadArgument, "no-such.bin cannot be read: No such file or directory"),
    "a folder": (lambda: file(Path(__file__).parent), kvx.BadArgument, "cannot be read: Is a directory"),
    "a number": (lambda: file(5), kvx.BadArgument, "it got int; it takes a slot file's bytes, or its path"),
    "streams": (lambda: read(edited(STATE, 0, "I", 0x1234567)), kvx.BadArgument, "begins with 0x1234567"),
    "no cells": (lambda: read(struct.pack("<II", 1, 0)), kvx.BadArgument, "no cells"),
    "two streams": (lambda: read(two_streams()), kvx.Unsupported, "stream 1 has 21 cells"),
    "shared cell": (lambda: read(edited(STATE, 16 + 12 * 4 + 4, "I", 2)), kvx.Unsupported, "cell 4 is of 2 sequences"),
    "position": (lambda: read(edited(STATE, 16, "i", 40)), kvx.Unsupported, "21 cells have positions 1 to 40"),
    "V order": (lambda: read(edited(STATE, AFTER_CELLS, "I", 7)), kvx.BadArgument, "V order is 7"),
    "layers": (lambda: read(edited(STATE, AFTER_CELLS + 4, "I", 4)), kvx.Incompatible, "4 layers; model 'm' has 3"),
    "rotated": (lambda: read(edited(STATE, AFTER_CELLS + 8, "I", 64)), kvx.Unsupported, "K and V were rotated by 64 and 0"),
    "q8_0": (lambda: read(edited(STATE, FIRST_ROW, "i", 8)), kvx.Unsupported, r"K of layer 0 is q8_0 \(ggml type 8\)"),
    "type": (lambda: read(edited(STATE, FIRST_ROW, "i", 77)), kvx.BadArgument, "K of layer 0 has ggml type 77"),
    "row": (lambda: read(edited(STATE, FIRST_ROW + 4, "Q", 65)), kvx.Incompatible, r"K of layer 0 in f32 has sizes \[65\]"),
    "smaller type": (lambda: read(edited(STATE, FIRST_ROW, "i", 1)), kvx.Incompatible, r"f16 has sizes \[64\]; .* are \[32\]"),
    "mixed types": (lambda: read(mixed()), kvx.Unsupported, "K and V are f16 and f32; they must be of one type"),
    "more": (lambda: read(STATE + b"1234"), kvx.Unsupported, "4 bytes are left after 3 layers"),
    "version": (lambda: read(STATE, version=2), kvx.KvxError, "K of layer 0"),
    "unknown version": (lambda: read(STATE, version=5), kvx.Unsupported, "version is 5; KVX reads 2, 3, 4"),
    "heads": (lambda: read(STATE, model=replace(PLAIN.model, num_kv_heads=4)), kvx.Incompatible, r"\[64\]; .* \[128\]"),
    "tokens": (lambda: export_state(STATE, [1, 2], model=PLAIN.model), kvx.BadArgument, "21 cells, one per token"),
    "elements": (lambda: read(edited(TURNED, TURNED_V + 8, "I", 15)), kvx.Incompatible, r"V of layer 0 in f32 has sizes \[4, 15\]"),
    "element": (lambda: read(edited(TURNED, TURNED_V + 4, "I", 2)), kvx.Incompatible, r"\[2, 16\]; this model's are \[4, 16\]"),
    "magic": (lambda: file(edited(FILE, 0, "I", 0x6767736E)), kvx.BadArgument, "begins with 0x6767736e"),
    "file version": (lambda: file(edited(FILE, 4, "I", 5)), kvx.Incompatible, "version is 5; KVX reads 2, 3, 4"),
    "words": (lambda: file(edited(FILE, 8, "I", 2**30)), kvx.BadArgument, "1073741824 words of tokens"),
    "packed version": (lambda: file(edited(FILE, 16, "i", 2)), kvx.Incompatible, "packed in version 2"),
    "packed count": (lambda: file(edited(FILE, 20, "i", 400)), kvx.BadArgument, "400 tokens in 21 words"),
    "media": (lambda: file(edited(FILE, 24 + 4 * CELLS, "i", 1)), kvx.Unsupported, "1 media chunks"),
}  # fmt: skip
FILE = PLAIN.slot_file(StateKind("f32"))
TURNED = PLAIN.state(StateKind("f32", is_v_transposed=True))
TURNED_V = FIRST_ROW + LAYERS * (12 + CELLS * HEADS * DIM * 4)


def read(data: bytes, *, model: StateModel = PLAIN.model, version: int = 4) -> Handover:
    return export_state(data, PLAIN.tokens, model=model, version=version)


def file(data: bytes) -> Handover:
    return export_slot_file(data, model=PLAIN.model)


def mixed() -> bytes:
    """K in f32, V in f16."""
    narrow = PLAIN.state(StateKind("f16"))
    rows = LAYERS * (12 + CELLS * HEADS * DIM * 2)
    return STATE[: len(STATE) - LAYERS * (12 + CELLS * HEADS * DIM * 4)] + narrow[len(narrow) - rows :]


def two_streams() -> bytes:
    body = STATE[12:]
    return struct.pack("<I", 2) + body + body


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_was_found(name: str) -> None:
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call()


def test_every_shorter_file_is_refused() -> None:
    small = Case(cells=2)
    data = small.slot_file(StateKind("f16"))
    assert export_slot_file(data, model=small.model).num_tokens == 2
    for size in range(len(data)):
        with pytest.raises(kvx.KvxError):
            export_slot_file(data[:size], model=small.model)


def test_changed_headers_are_refused_or_read_never_worse() -> None:
    small = Case(cells=2)
    data = small.slot_file(StateKind("f16", is_v_transposed=True))
    rng = np.random.default_rng(0)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= int(rng.integers(1, 256))
        with contextlib.suppress(kvx.KvxError):
            export_slot_file(bytes(changed), model=small.model)


# ---- handovers that do not fit


def test_another_models_handover_is_refused_by_name() -> None:
    handover = read(STATE)
    for field, other in (
        ("model", replace(PLAIN.model, name="other")),
        ("num_layers", replace(PLAIN.model, num_layers=4)),
        ("num_kv_heads", replace(PLAIN.model, num_kv_heads=1)),
        ("head_dim", replace(PLAIN.model, head_dim=4)),
    ):
        with pytest.raises(kvx.Incompatible, match=field):
            import_state(handover, model=other, like=StateKind("f32"))


def test_one_ranks_shard_is_refused() -> None:
    with pytest.raises(kvx.Incompatible, match="num_kv_heads is 1"):
        import_state(read(STATE).shard(2)[1], model=PLAIN.model, like=StateKind("f32"))


def test_a_damaged_handover_is_refused() -> None:
    handover = read(STATE)
    handover.parts[0].buffers[1][5] ^= 1
    with pytest.raises(kvx.Damaged):
        import_state(handover, model=PLAIN.model, like=StateKind("f32"))


def test_kinds_and_models_check_themselves() -> None:
    with pytest.raises(kvx.Unsupported, match="format is 'q8_0'"):
        StateKind("q8_0")
    with pytest.raises(kvx.Unsupported, match="version is 5"):
        StateKind(version=5)
    with pytest.raises(kvx.BadArgument, match="rope"):
        StateModel("m", 1, 1, 8, rope="neox")


# ---- geometry of a GGUF

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.embedding_length": 576,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.vocab_size": 49152,
}


def test_model_of_gguf() -> None:
    assert llama_cpp.Model is StateModel
    assert StateModel.of_gguf(METADATA) == StateModel("llama-30x576-kv3x64-v49152", 30, 3, 64)
    qwen = {name.replace("llama.", "qwen3."): value for name, value in METADATA.items()} | {"general.architecture": "qwen3"}
    assert StateModel.of_gguf(qwen, "mine").rope == "half"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"general.architecture": "mamba"}, "general.architecture is 'mamba'"),
        ({"llama.attention.head_count_kv": [3, 1]}, "layers have the same heads"),
        ({"llama.attention.value_length": 32}, "V's head_dim 32"),
        ({"llama.vocab_size": 0}, "tokenizer.ggml.tokens"),
        ({"llama.attention.head_count": 0}, "ZeroDivisionError"),
    ],
)
def test_model_of_gguf_refuses(edit: dict[str, object], words: str) -> None:
    with pytest.raises(kvx.KvxError, match=words):
        StateModel.of_gguf(METADATA | edit)
