"""A directory of llama.cpp's slots: checkpoints along prompts, each with the rows since the one before it.

    kvx-llama.json          that it is one, and of which version
    NAME.part               a slot file whose first K/V cache has the rows of positions `first` to `num_tokens` alone
    NAME.json               what it is of: written after it, so that without one a .part is nothing

A checkpoint is its chain of parts from the beginning: prompts that begin alike share them, and a chain's rows are stored once.
Windows and recurrent states, which cannot be cut, are in every part. NAME follows from model, K/V types and tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvx.adapters.llama_cpp.ggml_rows import CONVERTED, QUANTISED, rotation_of
from kvx.adapters.llama_cpp.memory import KvKind, Memory, join_rows, read_memory, write_memory
from kvx.adapters.llama_cpp.server import ServedModel
from kvx.adapters.llama_cpp.slot_file import read_slot_file, write_slot_file
from kvx.errors import BadArgument, Damaged, Incompatible, Unsupported

MARK, VERSION = "kvx-llama.json", 1
_NAME = re.compile(r"[0-9a-f]{24}")
_GRACE_S = 600.0  # an unfinished file this old has no writer any more
Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class SavedSlot:
    name: str
    model: ServedModel
    kinds: tuple[KvKind, ...]
    num_tokens: int
    first: int  # tokens of the checkpoint before it
    parent: str  # that one's name; "" with first 0
    is_cuttable: bool
    tokens_digest: str
    bytes: int
    digest: str  # of the part
    saved_s: float
    used_s: float = 0.0  # the file's own time, not in it

    @property
    def types(self) -> str:
        return self.kinds[0].name if self.kinds else "-"


class SlotStore:
    def __init__(self, folder: str | Path, *, is_made: bool = False) -> None:
        self.folder = Path(folder)
        mark = self.folder / MARK
        if is_made and self.folder.is_dir() and not mark.exists():
            _write(mark, json.dumps({"kvx_llama": VERSION}).encode())
        try:
            version = json.loads(mark.read_text()).get("kvx_llama")
        except FileNotFoundError:
            what = "has no " + MARK if self.folder.is_dir() else "is no folder"
            raise BadArgument(
                f"{self.folder} {what}: `kvx llama save` has not written to it. Name the "
                "server's --slot-save-path that was saved into."
            ) from None
        except (ValueError, AttributeError, OSError) as error:
            raise Damaged(
                f"{mark} cannot be read: {error}. The checkpoints beside it are whole: remove it and save once more."
            ) from None
        if version != VERSION:
            raise Incompatible(f"{mark} is of version {version}; this KVX knows {VERSION}. Upgrade KVX, or name another directory.")

    def entries(self) -> list[SavedSlot]:
        """By tokens. Raises for one that cannot be read: `problems` names all."""
        out = []
        for path in self._manifests():
            entry = self._entry(path)
            if entry is not None:
                out.append(entry)
        return sorted(out, key=lambda e: (e.num_tokens, e.name))

    @property
    def num_checkpoints(self) -> int:
        """With those that cannot be read."""
        return len(self._manifests())

    def put(self, memory: Memory, tokens: Sequence[int] | Tokens, model: ServedModel) -> tuple[SavedSlot, bool]:
        """A checkpoint after all these tokens, and whether it is new."""
        ids = np.asarray(tokens, np.int32)
        if memory.num_tokens != len(ids):
            raise BadArgument(f"SlotStore.put(): {len(ids)} tokens and a state after {memory.num_tokens}. Save the slot again.")
        kinds = tuple(c.kind for c in memory.caches)
        name = _name(model, kinds, ids)
        entries = self.entries()
        known = next((e for e in entries if e.name == name), None)
        if known is not None:
            self.touch(known, entries)
            return known, False
        parent = None
        if memory.has_all_cells:
            digests = _digests(ids, {e.num_tokens for e in entries})
            fits = [e for e in entries if e.model.identity == model.identity and e.kinds == kinds and e.num_tokens < len(ids)]
            parent = next((e for e in reversed(fits) if e.tokens_digest == digests[e.num_tokens]), None)
        first = parent.num_tokens if parent else 0
        part = memory.rows(first, len(ids)) if first else memory
        return self._write(part, ids, model, name, first, parent.name if parent else "", memory.is_cuttable), True

    def match(self, tokens: Sequence[int], model: ServedModel) -> tuple[SavedSlot, int] | None:
        """The deepest checkpoint that a prompt can go on from, and the tokens to take of it. One token at least is left over."""
        ids, entries = np.asarray(tokens, np.int32), self.entries()
        ours = [e for e in entries if e.model.identity == model.identity]
        digests = _digests(ids, {e.num_tokens for e in ours})
        best: tuple[SavedSlot, int] | None = None
        for e in ours:
            is_whole = e.num_tokens <= len(ids) and digests.get(e.num_tokens) == e.tokens_digest
            common = e.num_tokens if is_whole else 0
            if e.is_cuttable and not is_whole:
                common = _common(ids, self._tokens(e))
            usable = min(common, len(ids) - 1) if e.is_cuttable else common
            if 0 < usable < len(ids) and (best is None or usable > best[1]):
                best = (e, usable)
        return best

    def get(self, entry: SavedSlot, entries: Sequence[SavedSlot] | None = None) -> tuple[Memory, Tokens]:
        """The whole memory, each part of the chain held against its digest."""
        by_name = {e.name: e for e in (self.entries() if entries is None else entries)}
        chain = [entry]
        while chain[0].parent:
            before = by_name.get(chain[0].parent)
            if before is None or before.num_tokens != chain[0].first:
                raise Damaged(
                    f"checkpoint {entry.name} needs {chain[0].parent}, which is not there. `kvx llama prune` removes what needs it."
                )
            chain.insert(0, before)
        parts = [self.part(e) for e in chain]
        return join_rows([memory for memory, _ in parts]), parts[-1][1]

    def part(self, entry: SavedSlot) -> tuple[Memory, Tokens]:
        path = self._path(entry.name, ".part")
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise Damaged(
                f"checkpoint {entry.name}: {path.name} is not there. `kvx llama prune` removes what is left of it."
            ) from None
        if len(data) != entry.bytes or _digest(data) != entry.digest:
            raise Damaged(
                f"checkpoint {entry.name}: {path} has {len(data)} bytes of digest {_digest(data)}; {entry.bytes} of "
                f"{entry.digest} were written. It was changed or cut, and was not used: remove it with `kvx llama prune "
                "--damaged`, and save anew."
            )
        file = read_slot_file(data)
        if _tokens_digest(file.tokens) != entry.tokens_digest or len(file.tokens) != entry.num_tokens:
            raise Damaged(f"checkpoint {entry.name}: its tokens are not those of {entry.name}.json. It was not used.")
        return read_memory(file.state, version=file.version)[0], file.tokens

    def touch(self, entry: SavedSlot, entries: Sequence[SavedSlot]) -> None:
        """It and those before it were used now."""
        by_name, at = {e.name: e for e in entries}, entry
        while True:
            os.utime(self._path(at.name, ".json"))
            if at.parent not in by_name:
                return
            at = by_name[at.parent]

    def remove(self, entry: SavedSlot) -> None:
        self._path(entry.name, ".json").unlink(missing_ok=True)  # first: without it the rest is nothing
        self._path(entry.name, ".part").unlink(missing_ok=True)

    def prune(self, *, keep_bytes: int | None = None, older_s: float | None = None, damaged: bool = False) -> list[SavedSlot]:
        """Checkpoints that no other goes on from, the one that was used longest ago first. With what killed writers left."""
        gone: list[SavedSlot] = []
        if damaged:
            for name, _ in self.problems():
                self._path(name, ".json").unlink(missing_ok=True)
                self._path(name, ".part").unlink(missing_ok=True)
        entries = self.entries()
        names = {e.name for e in entries}
        for e in entries:  # by tokens: those before come first
            if e.parent and e.parent not in names:
                names.discard(e.name)
                self.remove(e)
                gone.append(e)
        left = {e.name: e for e in entries if e.name in names}
        now, total = time.time(), sum(e.bytes for e in left.values())
        while left:
            needed = {e.parent for e in left.values()}
            oldest = min((e for e in left.values() if e.name not in needed), key=lambda e: (e.used_s, -e.num_tokens))
            is_old = older_s is not None and now - oldest.used_s > older_s
            if not is_old and (keep_bytes is None or total <= keep_bytes):
                break
            self.remove(oldest)
            gone.append(left.pop(oldest.name))
            total -= oldest.bytes
        self._sweep(now)
        return gone

    def convert_to(self, target: SlotStore, k: str, v: str, head_dim: int = 0) -> Iterator[SavedSlot]:
        """Every checkpoint there, in other K/V types. As they are made."""
        for name in (k, v):
            if name not in CONVERTED:
                raise Unsupported(f"convert: {name!r} is no type that KVX makes; it makes {', '.join(CONVERTED)}.")
        renamed: dict[str, str] = {}
        for e in self.entries():
            memory, tokens = self.part(e)
            kinds = tuple(_as(c.kind, k, v, e.model.head_dims or (head_dim, head_dim)) for c in memory.caches)
            if e.parent and e.parent not in renamed:
                raise Damaged(f"checkpoint {e.name} needs {e.parent}, which is not there. Run `kvx llama prune` first.")
            name = _name(e.model, kinds, tokens)
            renamed[e.name] = name
            yield target._write(memory.to(kinds), tokens, e.model, name, e.first, renamed.get(e.parent, ""), e.is_cuttable)

    def problems(self) -> list[tuple[str, str]]:
        """Names of what is not as it was written, with what is wrong."""
        found: list[tuple[str, str]] = []
        good: dict[str, SavedSlot] = {}
        for path in self._manifests():
            try:
                entry = self._entry(path)
                if entry is not None:
                    self.part(entry)
                    good[entry.name] = entry
            except (Damaged, BadArgument, Incompatible, Unsupported) as error:
                found.append((path.stem, str(error)))
        for e in sorted(good.values(), key=lambda e: e.num_tokens):
            before = good.get(e.parent)
            if e.parent and (before is None or before.num_tokens != e.first):
                found.append((e.name, f"checkpoint {e.name} needs {e.parent}, which is missing or damaged."))
                del good[e.name]
        return found

    def temporary(self) -> Path:
        """For the server to write or read: it knows file names alone."""
        return self.folder / f"kvx-{uuid.uuid4().hex}.slot"

    def _write(
        self, part: Memory, ids: Tokens, model: ServedModel, name: str, first: int, parent: str, is_cuttable: bool
    ) -> SavedSlot:
        data = write_slot_file(ids, write_memory(part), version=part.version)
        kinds = tuple(c.kind for c in part.caches)
        entry = SavedSlot(
            name, model, kinds, len(ids), first, parent, is_cuttable, _tokens_digest(ids), len(data), _digest(data), time.time()
        )
        _write(self._path(name, ".part"), data)
        facts = {f.name: getattr(entry, f.name) for f in fields(entry) if f.name not in ("used_s", "model", "kinds")}
        facts |= {"model": asdict(model), "kinds": [asdict(k) for k in kinds]}
        _write(self._path(name, ".json"), json.dumps({"kvx_llama": VERSION, **facts}, indent=1).encode())
        return entry

    def _path(self, name: str, suffix: str) -> Path:
        return self.folder / (name + suffix)

    def _manifests(self) -> list[Path]:
        return sorted(p for p in self.folder.glob("*.json") if _NAME.fullmatch(p.stem))

    def _entry(self, path: Path) -> SavedSlot | None:
        try:
            facts: dict[str, Any] = json.loads(path.read_text())
            used = path.stat().st_mtime
        except FileNotFoundError:  # removed by another process just now
            return None
        except (OSError, ValueError) as error:
            raise Damaged(f"{path} cannot be read: {error}. Remove it with `kvx llama prune --damaged`.") from None
        version = facts.pop("kvx_llama", None) if isinstance(facts, dict) else None
        if version != VERSION:
            raise Incompatible(f"{path} is of version {version}; this KVX knows {VERSION}. Upgrade KVX, or name another directory.")
        try:
            model = dict(facts.pop("model"))
            model["head_dims"] = tuple(model["head_dims"])
            kinds = tuple(KvKind(**k) for k in facts.pop("kinds"))
            entry = SavedSlot(model=ServedModel(**model), kinds=kinds, used_s=used, **facts)
            if entry.name != path.stem or not 0 <= entry.first < entry.num_tokens:
                raise ValueError(f"name {entry.name}, {entry.first} to {entry.num_tokens}")
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{path} is no checkpoint's: {error}. Remove it with `kvx llama prune --damaged`.") from None
        return entry

    def _tokens(self, entry: SavedSlot) -> Tokens:
        """Without the rows behind them."""
        try:
            with open(self._path(entry.name, ".part"), "rb") as file:
                return read_slot_file(file.read(12 + 4 * (entry.num_tokens + 4))).tokens
        except FileNotFoundError:
            return np.zeros(0, np.int32)

    def _sweep(self, now: float) -> None:
        for path in self.folder.iterdir():
            is_left = path.suffix == ".part" and _NAME.fullmatch(path.stem) and not self._path(path.stem, ".json").exists()
            is_left = is_left or path.suffix == ".partial" or re.fullmatch(r"kvx-[0-9a-f]{32}\.slot", path.name) is not None
            if is_left and now - path.stat().st_mtime > _GRACE_S:
                path.unlink(missing_ok=True)


def _as(kind: KvKind, k: str, v: str, head_dims: tuple[int, ...]) -> KvKind:
    """In other types, rotated as the server does with them."""
    if not head_dims[0] and any(t in QUANTISED and t != old for t, old in ((k, kind.k), (v, kind.v))):
        raise BadArgument(
            "convert: the model's file was not to be read when these were saved, and how rows are rotated follows from its "
            "head_dim. Give --head-dim: attention.key_length of the GGUF. `kvx llama restore` needs none: it converts to what "
            "the server has."
        )
    turns = [
        old_turn if t == old else rotation_of(t, dim, is_k=is_k)
        for t, old, old_turn, dim, is_k in (
            (k, kind.k, kind.k_rotation, head_dims[0], True),
            (v, kind.v, kind.v_rotation, head_dims[-1], False),
        )
    ]
    is_transposed = kind.is_v_transposed and v not in QUANTISED  # those need flash attention
    return replace(kind, k=k, v=v, k_rotation=turns[0], v_rotation=turns[1], is_v_transposed=is_transposed)


def _name(model: ServedModel, kinds: Sequence[KvKind], ids: Tokens) -> str:
    facts = json.dumps([model.identity, [asdict(k) for k in kinds]], sort_keys=True).encode()
    return hashlib.blake2b(facts + b"\n" + ids.astype("<i4").tobytes(), digest_size=12).hexdigest()


def _digests(ids: Tokens, lengths: set[int]) -> dict[int, str]:
    """Of each beginning of these lengths, in one pass."""
    out, state, at = {}, hashlib.blake2b(digest_size=16), 0
    for n in sorted(lengths):
        if n <= len(ids):
            state.update(ids[at:n].astype("<i4").tobytes())
            out[n], at = state.copy().hexdigest(), n
    return out


def _tokens_digest(ids: Tokens) -> str:
    return _digests(ids, {len(ids)})[len(ids)]


def _common(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return n if same.all() else int(same.argmin())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Whole, or not there."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
