"""`kvx view` and attach(): the page, events, metrics; who may look."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import kvx
from kvx.cli.view import view
from kvx.errors import BadArgument
from kvx.tiers import CacheTiers
from kvx.view.metrics import Metrics
from kvx.view.server import NoSource, PageServer
from tests.interrupts import ctrl_c

ROOT = Path(__file__).resolve().parent.parent.parent
KV = kvx.CacheSpec(num_blocks=8, block_size=4, num_kv_heads=1, head_dim=8, format="f32")


def make() -> kvx.PagedCache:
    return kvx.PagedCache([kvx.LayerGroup("all", (0,), KV)], max_seqs=4, max_seq_len=32)


def request(cache: kvx.PagedCache, tokens: list[int]) -> None:
    seq = cache.admit(tokens)
    cache.extend(seq, len(tokens) - seq.length)
    cache.commit(seq)
    cache.release(seq)


def ask(url: str, **headers: str) -> tuple[int, dict[str, str], str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()


def events(text: str) -> list[dict[str, Any]]:
    return [record for part in re.findall(r"^data: (\[.*\])$", text, re.M) for record in json.loads(part)]


def test_the_page_events_and_the_end():
    cache = make()
    with kvx.view.attach(cache, port=0) as seen:
        code, headers, page = ask(seen.url)
        assert code == 200
        assert '"live":true' in page
        assert headers["X-Content-Type-Options"] == "nosniff"
        stream = urllib.request.urlopen(f"{seen.url}events", timeout=10)
        assert stream.headers["Content-Type"] == "text/event-stream"
        first = events(stream.readline().decode())
        assert [r["type"] for r in first[:2]] == ["header", "snapshot"]
        request(cache, list(range(13)))
        assert ask(f"{seen.url}nothing")[0] == 404
        assert "BrowserView(http://127.0.0.1:" in repr(seen)
    last = events(stream.read().decode())
    assert last[-1]["type"] == "end"
    assert sum(len(r.get("admitted", ())) for r in last) == 1


def test_another_site_that_names_this_machine_is_refused():
    with kvx.view.attach(make(), port=0) as seen:
        assert ask(seen.url, Host="evil.example:80")[0] == 403
        assert ask(f"{seen.url}events", Host="evil.example")[0] == 403
        assert ask(seen.url, Host="localhost")[0] == 200


def test_another_address_wants_a_token():
    with kvx.view.attach(make(), host="0.0.0.0", port=0) as seen:
        assert f"token={seen.token}" in seen.url
        home = f"http://127.0.0.1:{seen.url.split(':')[2].split('/')[0]}/"
        for path in ("", "events", "metrics", "?token=wrong"):
            code, _, text = ask(home + path)
            assert (code, "token" in text) == (403, True)
        assert ask(f"{home}?token={seen.token}")[0] == 200
        assert ask(f"{home}metrics", Authorization=f"Bearer {seen.token}")[0] == 200


def test_a_port_that_is_taken_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cache = make()
        with pytest.raises(BadArgument, match=rf"port {port} of 127\.0\.0\.1 is taken\. Give another with --port"):
            kvx.view.attach(cache, port=port)
        assert not cache.prefix.has_listeners
    with pytest.raises(BadArgument, match="port is 99999; it must be 0"):
        kvx.view.attach(make(), port=99999)


OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def values(url: str) -> dict[tuple[str, ...], float]:
    """Read by prometheus_client's own parsers, in both forms, which say the same."""
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
    from prometheus_client.openmetrics import parser as openmetrics

    found = []
    for parse, accept in (
        (parser.text_string_to_metric_families, "text/plain"),
        (openmetrics.text_string_to_metric_families, OPENMETRICS),
    ):
        code, headers, text = ask(f"{url}metrics", Accept=accept)
        assert code == 200
        assert ("openmetrics" in headers["Content-Type"]) == (accept == OPENMETRICS)
        samples = [s for family in parse(text) for s in family.samples]
        found.append({(s.name, *(f"{k}={v}" for k, v in sorted(s.labels.items()))): s.value for s in samples})
    assert found[0] == found[1]
    return found[0]


def test_metrics_are_the_caches_own_numbers():
    cache = make()
    with CacheTiers(cache, host="1MB") as tiers, kvx.view.attach(cache, port=0) as seen:
        for tokens in (list(range(13)), list(range(13)), [*range(9), 50, 51, 52, 53], [60] * 29, [61] * 29, list(range(13))):
            request(cache, tokens)
        kept = cache.admit(list(range(13)))
        cache.extend(kept, 1)
        cache.release(cache.fork(kept), is_preempted=True)
        tiers.movers[0].settle()
        seen.look()
        found, stats = values(seen.url), cache.stats()
        group = stats.groups[0]
        states = {state: found["kvx_blocks", "group=all", f"state={state}"] for state in ("free", "kept", "used", "shared")}
        assert states == {"free": group.num_free, "kept": group.num_idle, "used": group.num_used, "shared": 0}
        assert found["kvx_sequences",] == 1
        assert found["kvx_tokens",] == 13
        assert found["kvx_prefix_queries_total",] == stats.prefix.queries
        assert found["kvx_prefix_hits_total",] == stats.prefix.hits
        assert found["kvx_prefix_tokens_hit_total",] == stats.prefix.tokens_hit
        assert found["kvx_prefix_tokens_brought_total",] == stats.prefix.tokens_brought > 0
        assert found["kvx_evictions_total", "group=all"] == stats.prefix.evicted > 0
        assert found["kvx_eviction_age_seconds_count",] == stats.prefix.evicted
        assert found["kvx_eviction_age_seconds_bucket", "le=+Inf"] == stats.prefix.evicted
        assert found["kvx_preemptions_total",] == 1
        assert found["kvx_prefix_misses_total", "reason=never"] == 3
        assert found["kvx_prefix_misses_total", "reason=differs"] == 1
        assert found["kvx_requests_total", "reason=all"] == 3
        assert found["kvx_hit_age_seconds_count",] == 4
        tier = cache.prefix.backing.tiers_of(0)[0][0].stats
        assert found["kvx_tier_bytes_total", "direction=to", "tier=0 host"] == tier.bytes_in > 0
        assert found["kvx_tier_bytes_total", "direction=from", "tier=0 host"] == tier.bytes_out > 0


def test_the_dashboard_names_metrics_that_exist():
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    metrics = Metrics()
    metrics.read({"type": "header", "groups": [{"name": "all", "blocks": 1}], "states": ["free"], "tier_counts": ["bytes_in"]})
    metrics.read({"type": "changes", "counts": {"reasons": {"never": 1}, "evictions": [1]}, "tiers": {"0 host": [1]}})
    text = metrics.text()[1].decode()
    there = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    dashboard = json.loads((ROOT / "docs/grafana/kvx.json").read_text())
    named = {name for panel in dashboard["panels"] for t in panel["targets"] for name in re.findall(r"\bkvx_\w+", t["expr"])}
    assert named <= there, named - there
    shown = {name for name in there if not name.endswith(("_created", "_sum", "_count"))}
    assert len(named) >= 12
    assert shown - named <= {"kvx_prefix_hits_total", "kvx_prefix_queries_total", "kvx_put_off_total", "kvx_tier_blocks_total"}


def test_without_prometheus_client_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.exposition", None)
    server = PageServer(NoSource(), "page", port=0)
    try:
        code, _, text = ask(f"{server.url}metrics")
        assert (code, text) == (501, "/metrics needs prometheus_client: pip install 'kvx[view]'.\n")
    finally:
        server.close()


# --- the command ------------------------------------------------------------------------------------------------------------


def start(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvx", "view", *args]
    with ctrl_c():  # and so does the process
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_kvx_view_replays_a_file_until_ctrl_c(tmp_path):
    cache, path = make(), tmp_path / "run.jsonl"
    with kvx.view.record(cache, path):
        request(cache, list(range(13)))
        request(cache, list(range(13)))
    server = start(str(path), "--port", "0")
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip().removesuffix("#live")
        assert server.stdout.readline() == "Ctrl-C ends it.\n"
        with urllib.request.urlopen(f"{url}events", timeout=10) as stream:
            told = events(stream.read().decode())
        assert [told[0]["type"], told[1]["type"], told[-1]["type"]] == ["header", "snapshot", "end"]
        assert values(url)["kvx_prefix_hits_total",] == 1
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=20)
        assert (server.returncode, out.strip(), err) == (0, "", "")
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("name", "why"),
    [("wrong.jsonl", "does not say that it is a recording"), ("empty.jsonl", "it is empty"), ("no", "No such file")],
)
def test_kvx_view_tells_wrong_files_in_a_sentence(tmp_path, name, why):
    (tmp_path / "wrong.jsonl").write_text('{"hello": 1}\n')
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(BadArgument, match=why) as told:  # which the command line says on one line
        view(tmp_path / name, "127.0.0.1", 0)
    assert "\n" not in str(told.value)
