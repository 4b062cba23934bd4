"""Files, folders and manifests, changed in every way a disk, a wire or a person can: python -m tests.fuzz.files --cases 1000000

Of each the same is asked. Whatever bytes it holds, it is read within a second and 256 MB, or refused with one of KVX's own errors;
and what is taken and passes its check is exactly what was sealed. Seals are not cryptographic: none is forged here.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import kvx
from kvx import handover
from kvx.handover import from_manifest
from tests.handover.caches import small
from tests.ops import layouts

MOST_SECONDS, MOST_BYTES = 1.0, 256 << 20
SPECS = [
    {"layout": "layer | block token head (kv dim)", "num_layers": 2},
    {"layout": "block | head layer kv token dim", "num_layers": 2, "format": "f32"},
    {"layout": "layer kv | block token head dim", "format": "int8_per_token_head", "model": "m"},
    {"layout": "kv | block head token dim", "format": "fp8_e4m3_per_head", "v_format": "bf16", "v_head_dim": 8},
    {"layout": "kv | block head token dim", "format": "nvfp4", "head_dim": 32},
    {"layout": "layer | block token head dim", "num_kv_heads": 1, "head_dim": 24},
    {"layout": "layer kv[K: | block head dim/x token dim%x; V: | block head dim token]", "num_layers": 2},
    {"layout": "layer | block kv token head dim", "block_bytes": 1024, "head_start": 2, "layer_start": 3},
    {"layout": "kv | block token head dim", "format": "int4_per_token_head_inline"},
]
NUMBERS = [0, 1, -1, 2, 3, 7, 2**16, 2**28, 2**30, 2**31, 2**33, 2**60, 2**63, 2**64, 10**300, 10**4000, 1.0, 0.5, -0.0]
RAW = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "9" * 4400,
    "[" * 3000,
    '{"a":' * 3000,
    '"\\ud800"',
    "01",
    "'x'",
    "",
    "null",
]
WORDS = ["", "x", "\ud800", "\0", "a" * 5000, "bf16", "f16", "fp8_e5m2", "é", "kv | block token head dim", "block | " * 400]
WORDS += ["kv[K:" + ";" * 3000, "layer | block token head (kv dim)", "dim/" + "9" * 5000, "block layer kv | token head dim", "{}"]


@dataclass
class Sealed:
    """What was written, and how to tell it again."""

    kind: str  # file, folder, spec or manifest
    data: bytes  # of the file that is changed; of a folder, the one that is its turn
    name: str  # of that file
    truth: object  # a CacheFile's spec and bytes, a manifest's text
    folder: Path | None = None
    masks: list[torch.Tensor] = field(default_factory=list)  # of a file: bytes that are content


def originals(folder: Path) -> list[Sealed]:
    made = []
    for n, fields in enumerate(SPECS):
        spec = kvx.CacheSpec(**{"num_blocks": 3, "block_size": 4, "num_kv_heads": 2, "head_dim": 16, **fields})
        buffers, path = layouts.random_buffers(spec, n), folder / f"{n}.kvx"
        kvx.save(path, buffers, spec)
        masks = [torch.ones(t.numel(), dtype=torch.bool) for t in buffers]
        if spec.block_bytes:  # padding is no content, and under no seal
            masks = [torch.zeros(t.numel(), dtype=torch.bool) for t in buffers]
            for plane in range(spec.num_planes):
                for buffer, byte in zip(*(x.reshape(-1).tolist() for x in layouts.element_bytes(spec, plane)), strict=True):
                    masks[buffer][byte : byte + spec.plane(plane).unit_bytes] = True
        made.append(Sealed("file", path.read_bytes(), path.name, (spec, buffers), masks=masks))
        made.append(Sealed("spec", kvx.to_json(spec).encode(), "", spec))
    for n, form in enumerate(("bf16", "int8_per_token_head", "fp8_e4m3_per_head")):
        given, where = small(random.Random(n), num_tokens=6, format=form), folder / f"handover{n}"
        handover.save(where, given)
        for path in sorted(where.iterdir()):
            made.append(Sealed("folder", path.read_bytes(), path.name, given.to_json(), folder=where))
        made.append(Sealed("manifest", given.to_json().encode(), "", given))
    return made


# ---- changes


def change(one: Sealed, others: list[Sealed], rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return edited(one, rng)
    data = bytearray(one.data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1) if rng.random() < 0.5 else rng.randrange(min(len(data) + 1, 600))
        size = rng.choice((1, 2, 8, 16, 64, 4096, len(data)))
        match rng.randrange(8):
            case 0 | 1 if data:
                data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + size]
            case 4:
                other = others[rng.randrange(len(others))].data
                start = rng.randrange(len(other))
                data[at : at + size * rng.randrange(2)] = other[start : start + size]
            case 5:
                data[at:at] = rng.randbytes(min(size, 300))
            case 6:
                data[at : at + size] = bytes([rng.choice((0, 255, 32, 34, 91, 123))]) * min(size, len(data) - at)
            case _:
                data[:8] = rng.choice(NUMBERS[:14]).to_bytes(16, "little", signed=True)[:8] if rng.random() < 0.3 else data[:8]
                data[at : at + size] = data[at : at + size][::-1]
    return bytes(data)


def edited(one: Sealed, rng: random.Random) -> bytes:
    """A field of its JSON changed, all else as it was: lengths and digests are right again where nobody needs a seal for them."""
    if one.name.endswith((".kvx", ".safetensors")):
        length = int.from_bytes(one.data[:8], "little")
        header = json.loads(one.data[8 : 8 + length])
        inside = header["__metadata__"]
        if rng.random() < 0.5:
            inside["kvx_manifest"] = edited_spec(inside["kvx_manifest"], rng)
            text = json.dumps(header)
        else:
            text = edited_text(header, rng)
        data = text.encode(errors="surrogatepass")
        if rng.random() < 0.7:
            data = data.ljust(length)
        return len(data).to_bytes(8, "little") + data + one.data[8 + length :]
    body = json.loads(one.data)
    if one.kind == "spec":
        return edited_spec(one.data.decode(), rng, keep=True).encode(errors="surrogatepass")
    if isinstance(body, dict) and rng.random() < 0.4:
        part = rng.choice(body["parts"])
        part["manifest"] = edited_spec(part["manifest"], rng)
        text = json.dumps(body)
    else:
        text = edited_text(body, rng)
    if isinstance(body, dict) and rng.random() < 0.7:  # the manifest's own digest: whoever changes it can make it
        try:
            body = json.loads(text)
            del body["digest"]
            plain = json.dumps(body, sort_keys=True, separators=(",", ":"))
            text = json.dumps({**body, "digest": hashlib.blake2b(plain.encode(), digest_size=16).hexdigest()})
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # no JSON any more, or without the field: as it is
    return text.encode(errors="surrogatepass")


def edited_spec(text: str, rng: random.Random, *, keep: bool = False) -> str:
    """`keep`: with the digest it had; else without one, or with one that is right."""
    fields = json.loads(text)
    name = rng.choice(list(fields))
    old = fields[name]
    fields[name] = rng.choice(WORDS) if isinstance(old, str) == (rng.random() < 0.9) else rng.choice(NUMBERS)
    if isinstance(old, int) and rng.random() < 0.3:
        fields[name] = old + rng.choice((-1, 1, old))
    if not keep:
        del fields["digest"]
        if rng.random() < 0.5:
            try:
                return kvx.to_json(kvx.from_json(json.dumps(fields)))
            except kvx.KvxError:
                pass  # no spec: as it is, without a digest
    return json.dumps(fields) if rng.random() < 0.9 else replaced(json.dumps(fields), rng)


def edited_text(body: object, rng: random.Random) -> str:
    """One value anywhere in it, or one field more, or less, or twice."""
    at, key = body, None
    while isinstance(at, dict | list) and at:
        parent, key = at, rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
        at = at[key]
        if rng.random() < 0.2:
            break
    if key is not None:
        match rng.randrange(4):
            case 0:
                del parent[key]
            case 1:
                parent[key] = rng.choice((*NUMBERS, *WORDS, [], {}, None, True, [[]] * 1000, {"a": [1]}))
            case 2 if isinstance(parent, dict):
                parent[rng.choice(("x", "kvx_manifest", "digest", "cache.00000", "cache.99999", "k_scale"))] = at
            case _ if isinstance(at, int) and not isinstance(at, bool):
                parent[key] = at + rng.choice((-1, 1, 4, at))
            case _:
                parent[key] = "MARK"
                return json.dumps(body).replace('"MARK"', rng.choice(RAW), 1)
    return json.dumps(body)


def replaced(text: str, rng: random.Random) -> str:
    """A value that is no JSON, or a field twice."""
    at = text.find(":", rng.randrange(len(text))) + 1
    return text[:at] + rng.choice(RAW) + text[at:] if rng.random() < 0.7 else "{" + text[1:-1] + ", " + text[1:]


# ---- what is asked


def read(one: Sealed, data: bytes, work: Path) -> str:
    """ "refused", "as it was", or a lie that was taken."""
    if one.kind == "file":
        path = work / "file.kvx"
        path.write_bytes(data)
        file = kvx.load(path, verify=False)
        sum(int(t[-1]) for t in file.buffers)  # what is mapped is there
        file.check()
        spec, buffers = one.truth
        if file.spec != spec:
            return f"another spec: {file.spec}"
        same = all(torch.equal(a[m], b[m]) for a, b, m in zip(file.buffers, buffers, one.masks, strict=True))
        return "as it was" if same else "other bytes"
    if one.kind == "folder":
        (one.folder / one.name).write_bytes(data)
        try:
            got = handover.load(one.folder)
            return "as it was" if got.to_json() == one.truth else "another handover"
        finally:
            (one.folder / one.name).write_bytes(one.data)
    text = data.decode(errors="surrogateescape")
    if one.kind == "spec":
        spec = kvx.from_json(text)
        if spec == one.truth or "digest" not in json.loads(text):  # a manifest by hand is anybody's
            return "as it was"
        return f"another spec: {spec}"
    got = from_manifest(text, [p.buffers for p in one.truth.parts])
    got.check()
    return "as it was" if got.to_json() == one.truth.to_json() else "another handover"


def timed(one: Sealed, data: bytes, work: Path, clock: Callable[[], float], n: int) -> tuple[str, float]:
    begin = clock()
    try:
        what = read(one, data, work)
    except kvx.KvxError:
        what = "refused"
    except Exception as error:
        raise AssertionError(f"case {n} ({one.kind} {one.name}): {type(error).__name__}: {str(error)[:300]}") from error
    return what, clock() - begin


def run(cases: int, seed: int, *, say: bool = False) -> Counter[str]:
    """How many were refused and how many are as they were. AssertionError at the first that is neither."""
    torch.set_num_threads(1)
    work = Path(tempfile.mkdtemp(prefix="kvx-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        known = originals(work)
        for one in known:
            assert read(one, one.data, work) == "as it was", one.name
        files = [one for one in known if one.kind == "file"]
        own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own + MOST_BYTES, limits[1]))
        seen: Counter[str] = Counter()
        for n in range(seed, seed + cases):
            rng = random.Random(n)  # one number makes a case again
            one = files[rng.randrange(len(files))] if rng.random() < 0.6 else known[rng.randrange(len(known))]
            data = change(one, known, rng)
            if n % 1000 == 0:
                faulthandler.dump_traceback_later(600, exit=True)  # who hangs says where
            what, took = timed(one, data, work, time.perf_counter, n)
            if took > MOST_SECONDS:  # on a busy machine that says little: once more, by the processor's time
                what, took = timed(one, data, work, time.process_time, n)
            assert what in ("refused", "as it was"), f"case {n} ({one.kind} {one.name}) was taken: {what[:300]}"
            assert took < MOST_SECONDS, f"case {n} ({one.kind} {one.name}) took {took:.1f} s"
            seen[f"{one.kind} {what}"] += 1
            if say and (n - seed) % 20_000 == 19_999:
                print(n + 1 - seed, dict(seen), flush=True)
        return seen
    finally:
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, limits)
        shutil.rmtree(work, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each case is made by its number alone")
    options = parser.parse_args()
    begin = time.perf_counter()
    seen = run(options.cases, options.seed, say=True)
    print(f"{sum(seen.values()):,} cases in {time.perf_counter() - begin:.0f} s: {dict(sorted(seen.items()))}")


if __name__ == "__main__":
    sys.exit(main())
