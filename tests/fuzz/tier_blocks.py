"""A disk tier whose directory anybody may change between two calls: python -m tests.fuzz.tier_blocks --cases 100000

Block files, the manifest and the folders are changed in every way a disk or a person can: bits flipped, files cut, spliced, swapped
and renamed, headers with other fields under a checksum made anew, links, pipes, sockets and folders in place of files, dates of any
year. Then the tier is used. Whatever it finds, a call ends within a second and with an answer or one of KVX's own errors; what it
hands out is what was put; and what lies outside of its directory stays as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import resource
import shutil
import socket
import stat
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import kvx
from kvx.tiers import BlockKind, DiskTier
from kvx.tiers.block_file import _HEAD, CHECKSUMS, checksum, file_bytes
from kvx.tiers.directory import read_manifest
from tests.tiers.blocks import KIND, block, is_right, key

MOST_SECONDS, MOST_BYTES = 1.0, 256 << 20
NUM_BLOCKS, ROOM = 6, 8
OTHER = BlockKind({**KIND.manifest, "model": "large"}, KIND.buffer_bytes)
NUMBERS = [0, 1, 2, 3, 4, 63, 64, 65, 0xFFFF, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1, (1 << 31) - 1, (1 << 32) - 1, (1 << 64) - 1]
TEXTS = [
    "", "{", "[]", "null", "0", '"x"', "{}", '{"manifest": {}, "buffer_bytes": []}', '{"manifest": [], "buffer_bytes": [1]}',
    '{"manifest": {"model": "small"}, "buffer_bytes": [Infinity]}', '{"manifest": {"model": NaN}, "buffer_bytes": [1]}',
    '{"manifest": {"model": "\\ud800"}, "buffer_bytes": [1]}', '{"manifest": {"a": {}}, "buffer_bytes": [-1]}', "[" * 3000,
    '{"manifest": {"a": ' * 500, '{"manifest": {}, "buffer_bytes": [' + "9" * 4400 + "]}", '{"manifest": 1, "buffer_bytes": null}',
    '{"manifest": "ab", "buffer_bytes": "12"}', '{"manifest": [["model", "small"]], "buffer_bytes": [300, 17]}', OTHER.text,
]  # fmt: skip


@dataclass
class Scene:
    """A directory with some blocks in it, and a folder beside it that is somebody else's."""

    work: Path
    rng: random.Random
    root: Path = field(init=False)
    beside: Path = field(init=False)

    def __post_init__(self) -> None:
        self.root, self.beside = self.work / "tier", self.work / "beside"

    def path(self, n: int) -> Path:
        name = key(n).hex()
        return self.root / name[:2] / f"{name}.kvx"

    def any_path(self) -> Path:
        return self.path(self.rng.randrange(NUM_BLOCKS))

    def build(self, golden: dict[str, bytes]) -> None:
        for folder in (self.root, self.beside):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
        for at, data in golden.items():
            path = f"{self.root}/{at}"
            with suppress(FileExistsError):
                os.mkdir(os.path.dirname(path), 0o700)
            with open(path, "wb", buffering=0) as file:
                file.write(data)
        for n in range(2):
            (self.beside / self.path(n).name).write_bytes(golden[str(self.path(n).relative_to(self.root))])

    def seen_beside(self) -> dict[str, tuple[bytes, int, int]]:
        """Every name, date and mode there, and what files hold."""
        found, folders = {}, [str(self.beside)]
        for folder in folders:
            for entry in os.scandir(folder):
                s, data = entry.stat(follow_symlinks=False), b""
                if stat.S_ISDIR(s.st_mode):
                    folders.append(entry.path)
                elif stat.S_ISREG(s.st_mode) and s.st_size < 1 << 20:
                    with open(entry.path, "rb", buffering=0) as file:
                        data = file.read()
                found[entry.path] = data, s.st_mtime_ns, s.st_mode
        return found


# ---- what may happen to the bytes of a file


def flipped(data: bytearray, s: Scene) -> None:
    for _ in range(s.rng.choice([1, 1, 2, 8])):
        at = s.rng.randrange(len(data)) if s.rng.random() < 0.5 else s.rng.choice([*range(300), *range(4096, len(data))])
        data[at % len(data)] ^= 1 << s.rng.randrange(8)


def cut(data: bytearray, s: Scene) -> None:
    del data[s.rng.randrange(len(data)) :]


def longer(data: bytearray, s: Scene) -> None:
    data += s.rng.randbytes(s.rng.choice([1, 4, 4096]))


def spliced(data: bytearray, s: Scene) -> None:
    other = s.any_path()
    if other.is_file() and other.stat().st_size < 1 << 20:
        a, b = sorted(s.rng.randrange(len(data) + 1) for _ in range(2))
        data[a:b] = other.read_bytes()[a:b]


def moved(data: bytearray, s: Scene) -> None:
    a, b = sorted(s.rng.randrange(len(data) + 1) for _ in range(2))
    part = data[a:b]
    del data[a:b]
    at = s.rng.randrange(len(data) + 1)
    data[at:at] = part


def field_changed(data: bytearray, s: Scene) -> None:
    """Another header over the same payload, its checksum made anew."""
    if len(data) < 4096:
        return
    fields = list(_HEAD.unpack_from(data))
    n = s.rng.randrange(1, len(fields))
    fields[n] = s.rng.randbytes(len(fields[n])) if isinstance(fields[n], bytes) else s.rng.choice(NUMBERS)
    if n == 7:  # the payload's checksum: it would be found, as the payload's own damage is
        fields[n] = bytes(16)
    with suppress(struct.error):  # a number that the field has no room for
        data[: _HEAD.size] = _HEAD.pack(*fields)
    reseal(data)


def text_changed(data: bytearray, s: Scene) -> None:
    """Another manifest in the header, as a block of another kind has it."""
    if len(data) < 4096:
        return
    text = s.rng.choice(TEXTS).encode("utf-8", "surrogatepass")[: 4096 - _HEAD.size - 16]
    fields = list(_HEAD.unpack_from(data))
    fields[4], fields[6] = len(text), s.rng.randbytes(16)
    data[: _HEAD.size] = _HEAD.pack(*fields)
    data[_HEAD.size : 4080] = text.ljust(4080 - _HEAD.size, b"\0")
    reseal(data)


def reseal(data: bytearray) -> None:
    number = struct.unpack_from("<H", data, 10)[0]
    if number in CHECKSUMS:
        data[4080:4096] = checksum(number, [bytes(data[:4080])])


BYTES: list[Callable[[bytearray, Scene], None]] = [flipped, cut, longer, spliced, moved, field_changed, text_changed]


# ---- what may stand in a file's or a folder's place


def removed(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replaced(path: Path, s: Scene) -> None:
    """By what is no file of a tier's."""
    removed(path)
    path.parent.mkdir(exist_ok=True)
    what = s.rng.choice(["link", "loop", "zeros", "pipe", "socket", "folder", "full folder", "sparse", "empty", "nothing", "here"])
    if what == "link":
        path.symlink_to(s.rng.choice([s.beside, s.beside / s.path(0).name, s.beside / "none"]))
    elif what == "loop":
        path.symlink_to(path.name)
    elif what == "zeros":
        path.symlink_to("/dev/zero")
    elif what == "here":
        path.symlink_to(s.any_path())
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "socket":
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:  # a socket's path is short
            made.bind(path.name)
    elif what in ("folder", "full folder"):
        path.mkdir()
        if what == "full folder":
            (path / path.name).write_bytes(b"in it")
    elif what in ("sparse", "empty"):
        with path.open("wb") as file:
            file.truncate((1 << 40) if what == "sparse" else 0)


def block_changed(s: Scene) -> None:
    path = s.any_path()
    if not path.is_file() or path.is_symlink() or path.stat().st_size > 1 << 20:
        return
    data = bytearray(path.read_bytes())
    if data:
        s.rng.choice(BYTES)(data, s)
        path.write_bytes(data)


def block_replaced(s: Scene) -> None:
    replaced(s.any_path(), s)


def blocks_swapped(s: Scene) -> None:
    a, b = s.any_path(), s.any_path()
    with suppress(OSError):  # one of them is gone, or no file any more
        if s.rng.random() < 0.5:
            os.replace(a, b)
        elif a.lstat().st_size < 1 << 20:  # a sparse one would become whole
            shutil.copyfile(a, b, follow_symlinks=False)


def block_dated(s: Scene) -> None:
    when = s.rng.choice([-(10**9), -1, 0, 1, 10**10, 2**33, time.time() + 3500, time.time() + 3700])
    with suppress(OSError):
        os.utime(s.any_path(), (when, when), follow_symlinks=False)


def folder_changed(s: Scene) -> None:
    folder = s.any_path().parent
    what = s.rng.choice(["replaced", "link", "renamed", "closed", "other names"])
    if what == "replaced":
        replaced(folder, s)
    elif what == "link":
        removed(folder)
        folder.symlink_to(s.beside)
    elif what == "renamed":
        with suppress(OSError):
            folder.rename(s.root / s.rng.choice(["zz", "ab", "00", "..x", "AB"]))
    elif what == "closed":
        with suppress(OSError):
            os.chmod(folder, s.rng.choice([0o000, 0o755, 0o777, 0o100]))
    elif folder.is_dir():
        names = [".partial", "x.partial", f".{folder.name}12.9.1.partial", f"{folder.name}.kvx", "g.kvx", ".kvx", "\udcff.kvx"]
        name = folder / s.rng.choice(names)
        with suppress(OSError):
            name.write_bytes(b"x")
            os.utime(name, (s.rng.choice([1, time.time()]),) * 2)


def manifest_changed(s: Scene) -> None:
    path = s.root / "manifest.json"
    if not path.is_file() or path.stat().st_size > 1 << 20 or s.rng.random() < 0.4:
        replaced(path, s)
    elif s.rng.random() < 0.5:
        path.write_bytes(s.rng.choice(TEXTS).encode("utf-8", "surrogatepass"))
    else:
        data = bytearray(path.read_bytes()) or bytearray(b"x")
        s.rng.choice([flipped, cut, longer, moved])(data, s)
        path.write_bytes(data)


def root_changed(s: Scene) -> None:
    removed(s.root)
    if s.rng.random() < 0.5:
        s.root.mkdir(mode=0o700)
        if s.rng.random() < 0.3:
            (s.root / "manifest.json").write_text(OTHER.text)


CHANGES = [block_changed] * 10 + [block_replaced] * 4 + [blocks_swapped] * 2 + [block_dated, folder_changed, folder_changed]
CHANGES += [manifest_changed, manifest_changed, root_changed]


# ---- a case


def use(tier: DiskTier, s: Scene, seen: Counter[str]) -> None:
    """Some calls, most of them on this thread. AssertionError where one hands out what was not put."""
    is_here = s.rng.random() < 0.9
    for _ in range(s.rng.randrange(1, 5)):
        what, n = s.rng.choice(["get", "get", "get all", "put", "drop", "has", "count"]), s.rng.randrange(NUM_BLOCKS)
        try:
            if what in ("get", "get all"):
                keys = [key(n)] if what == "get" else [key(i) for i in range(NUM_BLOCKS)]
                for k, got in zip(keys, tier.get_now(keys) if is_here else tier.get(keys).result(), strict=True):
                    assert got is None or is_right(k, got), f"block {k.hex()} is not what was put"
                    seen["missed" if got is None else "right"] += 1
            elif what == "put":
                new = [key(n)], [block(key(n))]
                seen["put"] += sum(tier.put_now(*new) if is_here else tier.put(*new).result())
            elif what == "drop":
                tier._drop([key(n)]) if is_here else tier.drop([key(n)]).result()
            elif what == "has":
                tier.has_now([key(n)])
            else:
                assert tier.num_blocks <= ROOM + NUM_BLOCKS
        except kvx.KvxError:
            seen["refused"] += 1


def case(number: int, work: Path, golden: dict[str, bytes], seen: Counter[str]) -> float:
    """How long its slowest part took. The number alone makes it again."""
    s = Scene(work, random.Random(number))
    s.build(golden)
    slowest = 0.0

    def change() -> None:
        with suppress(OSError):  # an earlier one left nothing to change
            s.rng.choice(CHANGES)(s)

    def timed(call: Callable[[], object]) -> None:
        nonlocal slowest
        before, start = s.seen_beside(), time.perf_counter()
        try:
            call()
        except kvx.KvxError:
            seen["refused"] += 1
        slowest = max(slowest, time.perf_counter() - start)
        after = s.seen_beside()
        assert after == before, f"what lies beside the tier has changed: {sorted(after)}"

    def opened() -> None:
        tier = DiskTier(s.root, KIND, ROOM * file_bytes(KIND), threads=1, refresh_s=0.0)
        tiers.append(tier)
        use(tier, s, seen)

    tiers: list[DiskTier] = []
    if s.rng.random() < 0.5:
        for _ in range(s.rng.choice([1, 1, 2, 4])):
            change()
        timed(lambda: read_manifest(s.root))
    timed(opened)
    for tier in tiers:  # none where it was refused
        for _ in range(s.rng.choice([0, 1, 3])):
            change()
            timed(partial(use, tier, s, seen))
        timed(tier.close)
    return slowest


def run(cases: int, seed: int, *, say: bool = False) -> Counter[str]:
    """What calls came to. AssertionError at the first case that ends otherwise than it may."""
    work = Path(tempfile.mkdtemp(prefix="kvx-tier-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    limits, seen, slowest = resource.getrlimit(resource.RLIMIT_AS), Counter[str](), 0.0
    try:
        golden = _golden(work / "golden")
        case(seed, work, golden, Counter())  # threads are there, modules are loaded
        own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own + MOST_BYTES, limits[1]))
        for n in range(seed, seed + cases):
            if (n - seed) % 100 == 0:  # a thread is made for it
                faulthandler.dump_traceback_later(600, exit=True)
            took = MOST_SECONDS
            for _ in range(3):  # a machine may be busy with others; a case that hangs does so every time
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", kvx.KvxWarning)
                        took = min(took, case(n, work, golden, seen))
                except Exception as error:
                    raise AssertionError(f"case {n}: {type(error).__name__}: {str(error)[:300]}") from error
                if took < MOST_SECONDS:
                    break
            assert took < MOST_SECONDS, f"case {n} took {took:.1f} s"
            slowest = max(slowest, took)
            if say and (n - seed) % 1_000 == 999:
                print(n + 1 - seed, json.dumps(seen), f"slowest call {slowest:.3f} s", flush=True)
        return seen
    finally:
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, limits)
        for path in work.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(work, ignore_errors=True)


def _golden(folder: Path) -> dict[str, bytes]:
    with DiskTier(folder, KIND, ROOM * file_bytes(KIND), threads=1) as tier:
        tier.put([key(n) for n in range(NUM_BLOCKS)], [block(key(n)) for n in range(NUM_BLOCKS)]).result()
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each case is made by its number alone")
    options = parser.parse_args()
    begin = time.perf_counter()
    seen = run(options.cases, options.seed, say=True)
    print(f"{options.cases:,} cases in {time.perf_counter() - begin:.0f} s; calls: {dict(sorted(seen.items()))}")


if __name__ == "__main__":
    sys.exit(main())
