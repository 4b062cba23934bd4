"""kvx bench tiers checks what came back, and says what it measured."""

from __future__ import annotations

from kvx.bench import tiers as bench


def test_rows(tmp_path):
    result = bench.measure("cpu", tmp_path, repeats=1, num_bytes=8 << 20)
    rows = result["rows"]
    assert [(r["tier"], r["way"]) for r in rows[:4]] == [(t, w) for t in ("host", "disk") for w in ("offload", "onboard")]
    assert len(rows) == 8
    for r in rows:
        assert r["tokens"] == 4 * 16
        assert r["bytes"] == 4 * (2 << 20) * (1 if r["format"] == "bf16" else 132 / 256)
        assert r["share"] == r["plain"]["p10_us"] / r["ours"]["p10_us"]
    assert "disk onboard block=16" in bench.show(result)
    assert len(result["fp8_times_bf16"]) == 4
    assert not list(tmp_path.iterdir())


def test_each_row_is_said_before_the_next_tier_is_opened(tmp_path, monkeypatch):
    events, opened = [], bench._open
    monkeypatch.setattr(bench, "_open", lambda name, *args: events.append(f"open {name}") or opened(name, *args))
    bench.measure("cpu", tmp_path, repeats=1, num_bytes=8 << 20, say=events.append)
    assert [" ".join(e.split()[:2]) for e in events] == [
        *("open host", "host offload", "host onboard", "open disk", "disk offload", "disk onboard") * 2
    ]
