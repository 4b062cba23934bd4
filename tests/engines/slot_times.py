"""A conversation of 2,000 tokens after a server's restart, with `kvx llama` and with llama.cpp's own slot file: what is computed
again, bytes and times, as docs/llama_cpp.md has them.

    python -m tests.engines.slot_times lfm2 gemma3
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.engines.test_llama_cpp_checkpoints import IDS, Llama, run
from tests.engines.tiny_gguf import make_gguf

NUM_TOKENS, EVERY, TIMES = 2000, 500, 5
NEXT = {  # what is asked after the restart
    "goes on for 50 tokens": IDS[:2050],
    "parts after 1,700": IDS[:1700] + IDS[2000:2300],
    "parts after 700": IDS[:700] + IDS[2000:2300],
}


def measured(architecture: str, path: Path) -> dict[str, str]:
    gguf = make_gguf(architecture, path / f"{architecture}.gguf")
    theirs, ours = path / "theirs", path / "ours"
    theirs.mkdir()
    ours.mkdir()
    prompt, asked = path / "prompt.json", path / "next.json"
    prompt.write_text(json.dumps(IDS[:NUM_TOKENS]))
    found = {"all 2,000 tokens computed": _ms(lambda: Llama(gguf, theirs), lambda llama: llama.compute(IDS[:NUM_TOKENS], 0))}

    server = Llama(gguf, theirs)
    server.compute(IDS[: NUM_TOKENS - 1], 0)
    found["llama.cpp's save"] = _ms(lambda: server, lambda s: s.post("/slots/0?action=save", {"filename": "slot"}))
    found["llama.cpp's file"] = f"{(theirs / 'slot').stat().st_size / 1000:.0f} kB"
    found["llama.cpp's restore"] = _ms(
        lambda: Llama(gguf, theirs), lambda s: s.post("/slots/0?action=restore", {"filename": "slot"})
    )  # fmt: skip
    server = Llama(gguf, ours)
    out = run("save", ours, "--server", server.address, "--tokens", prompt, "--every", EVERY)
    found["kvx llama save, with four steps computed"] = _said(out)
    found["kvx llama's directory, four checkpoints"] = f"{sum(p.stat().st_size for p in ours.glob('*.part')) / 1000:.0f} kB"
    for what, ids in NEXT.items():
        asked.write_text(json.dumps(ids))
        fresh = Llama(gguf, theirs)
        fresh.post("/slots/0?action=restore", {"filename": "slot"})
        alone, (by_file, said) = Llama(gguf, theirs).ask(ids)[1], fresh.ask(ids)
        fresh = Llama(gguf, ours)
        out = run("restore", ours, "--server", fresh.address, "--tokens", asked)
        by_kvx, same = fresh.ask(ids)
        assert said == same == alone
        found[f"{what}: computed with llama.cpp's file, with kvx llama"] = f"{len(ids) - by_file:,}, {len(ids) - by_kvx:,}"
        found[f"{what}: kvx llama restore"] = _said(out)
    return found


def _ms(make: Callable[[], Llama], call: Callable[[Llama], object]) -> str:
    times = []
    for _ in range(TIMES):
        llama = make()
        begin = time.perf_counter()
        call(llama)
        times.append(time.perf_counter() - begin)
    return f"{statistics.median(times) * 1000:.1f} ms"


def _said(out: str) -> str:
    """The time that the command itself says."""
    found = re.search(r"in ([\d.,]+ m?s)\b", out)
    assert found is not None, out
    return found[1]


def main() -> None:
    for architecture in sys.argv[1:] or ["lfm2", "gemma3"]:
        with tempfile.TemporaryDirectory() as path:
            for what, value in measured(architecture, Path(path)).items():
                print(f"{architecture}: {what}: {value}", flush=True)


if __name__ == "__main__":
    main()
