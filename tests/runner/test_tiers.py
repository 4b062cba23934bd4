"""An engine on tiers says what it says without; what was computed once is brought back, in this process and in the next."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest

import kvx
from kvx.cli import main
from kvx.runner import Engine, Params
from kvx.runner.identity import identity
from kvx.runner.tiers import EngineTiers, kept_format
from kvx.tiers import TierOption
from tests.engines.small_models import make_plain
from tests.runner import smollm

PROMPTS, TOKENS = 4, 20


@functools.cache
def wanted() -> list[tuple[int, ...]]:
    """What an engine with room for all and no tiers says; test_greedy holds that to transformers."""
    return said(smollm.engine())


def said(engine, n: int = PROMPTS) -> list[tuple[int, ...]]:
    answers = engine.generate(smollm.prompts(n), Params(max_tokens=TOKENS))
    engine.cache.check()
    assert engine.cache.num_seqs == 0
    return [a[0].tokens for a in answers]


def engine(*tiers: str, format: str = "", model: str = "smollm", **options):
    """As smollm.engine, on tiers."""
    made = smollm.engine(**options)
    format = format or made.cache.groups[0].spec.format
    made.tiers = EngineTiers(made.cache, [TierOption.parse(t) for t in tiers], format=format, model=model)
    return made


@smollm.needs_weights
def test_the_next_engine_finds_what_the_first_computed(tmp_path):
    with engine("host:4MB", f"disk:{tmp_path}") as first:
        assert said(first) == wanted()
        computed = first.scheduler.counts.computed_tokens
        assert first.scheduler.counts.brought_tokens == 0
    assert first.stats()["tiers"]["failed"] == first.stats()["tiers"]["dropped"] == 0
    with engine("host:4MB", f"disk:{tmp_path}") as second:
        assert said(second) == wanted()
        counts = second.scheduler.counts
        assert counts.brought_tokens >= 48
        assert counts.computed_tokens == computed - counts.brought_tokens
        assert dict(second.stats()["tiers"]["hits"])["disk"] == counts.brought_tokens // 16
    with engine(f"disk:{tmp_path}", model="another") as other:  # in a folder of its own
        assert said(other, 1) == wanted()[:1]
        assert other.scheduler.counts.brought_tokens == 0


@smollm.needs_weights
def test_preempted_requests_come_back_from_the_host():
    def tight(*tiers: str):
        options = {"num_blocks": 10, "max_batch_tokens": 40}
        made = engine(*tiers, **options) if tiers else smollm.engine(**options)
        made.scheduler.reserve_blocks = 0
        return made

    with tight("host:400MB") as made:
        assert said(made) == wanted()
        counts, stats = made.scheduler.counts, made.stats()["tiers"]
        made.cache.check()
    plain = tight()
    assert said(plain) == wanted()
    assert counts.preemptions > 0
    assert counts.brought_tokens > 0
    assert stats["offloaded"] > 0
    assert stats["onboarded"] * 16 == counts.brought_tokens
    assert counts.computed_tokens < plain.scheduler.counts.computed_tokens


@smollm.needs_weights
def test_quantised_on_the_way(tmp_path):
    """f32 in the cache, fp8 on disk: a quarter of the bytes. Texts may differ; here all that is asked is that they are texts."""
    with engine(f"disk:{tmp_path}", format="fp8_e4m3_per_token_head") as first:
        assert said(first, 2) == wanted()[:2]
    assert first.stats()["tiers"]["format"] == "fp8_e4m3_per_token_head_inline"
    size = max(f.stat().st_size for f in tmp_path.glob("*/??/*"))
    assert size < 16 * first.stats()["kv_bytes_per_token"] / 3.5
    with engine(f"disk:{tmp_path}", format="fp8_e4m3_per_token_head") as second:
        texts = said(second, 2)
        assert second.scheduler.counts.brought_tokens >= 32
    assert all(1 <= len(t) <= TOKENS for t in texts)


@smollm.needs_weights
def test_an_interrupted_step_leaves_nothing_wrong_behind(tmp_path, monkeypatch):
    with engine(f"disk:{tmp_path}", num_blocks=10, max_batch_tokens=40) as made:
        made.scheduler.reserve_blocks = 0
        forward, steps = made._forward, []

        def interrupted(work):
            steps.append(work)
            if len(steps) == 12:
                raise KeyboardInterrupt
            return forward(work)

        monkeypatch.setattr(made, "_forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.generate(smollm.prompts(PROMPTS), Params(max_tokens=TOKENS))
        made.cache.check()
        assert made.cache.num_seqs == 0
    with engine(f"disk:{tmp_path}") as again:
        assert said(again) == wanted()


@smollm.needs_weights
def test_a_second_run_of_the_same_command(tmp_path, monkeypatch, capsys):
    command = ("--prompt", "What is 2+2?", "--max-tokens", "4", "--blocks", "32", "--device", "cpu", "--json")
    monkeypatch.setattr(sys, "argv", ["kvx", "generate", *command, "--tier", "host:1GB", "--tier", f"disk:{tmp_path}:1GB"])
    runs = []
    for _ in range(2):
        with pytest.raises(SystemExit) as exit:
            main.main()
        assert not exit.value.code
        runs.append(json.loads(capsys.readouterr().out))
    first, second = runs
    assert first["answers"] == second["answers"]
    assert first["stats"]["brought_tokens"] == 0
    assert second["stats"]["brought_tokens"] >= 96
    assert second["stats"]["computed_tokens"] == first["stats"]["computed_tokens"] - second["stats"]["brought_tokens"]


def test_parse_tier():
    assert TierOption.parse("host:2GB") == TierOption("host", 2 * 10**9)
    assert TierOption.parse("host:1.5GiB") == TierOption("host", 3 * 2**29)
    assert TierOption.parse("disk:/a/b:50MB") == TierOption("disk", 50 * 10**6, Path("/a/b"))
    assert TierOption.parse("disk:/a:b/").path == TierOption.parse("disk:/a:b:2GB").path == Path("/a:b")
    assert TierOption.parse("disk:/a:b/c") == TierOption("disk", 32 * 10**9, Path("/a:b/c"))
    assert TierOption.parse("disk:here").path == Path("here")
    assert TierOption.parse("nixl:10.0.0.7:5700:2GB") == TierOption("nixl", 2 * 10**9, address="10.0.0.7:5700")
    assert TierOption.parse("mooncake:store.lan:50051") == TierOption("mooncake", 0, address="store.lan:50051")
    assert TierOption.parse("mooncake:fe80::7:50051:1GB") == TierOption("mooncake", 10**9, address="fe80::7:50051")
    assert TierOption.parse("nixl:h:5700:2GB").share(1, 4).capacity_bytes == 5 * 10**8
    assert TierOption.parse("mooncake:h:5700:2GB").share(1, 4).capacity_bytes == 2 * 10**9  # of a process, whatever it keeps
    assert [TierOption.parse(t).is_host for t in ("host:1GB", "disk:/a", "nixl:h:1:1GB", "mooncake:h:1")] == [True] + [False] * 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, 'tier "None" is none: it is host:SIZE, disk:DIR, disk:DIR:SIZE'),
        (5, 'tier "5" is none'),
        ("disk::5GB", 'tier "disk::5GB" is none'),
        ("disk:/x:y", 'the size is "y"; .* A folder with a colon in its name ends in a slash: disk:/x:y/\\.$'),
        ("disk:/x:", 'the size is ""; .* A folder with a colon'),
        ("disk:/x:5kilo", r'the size is "5kilo"; .* like 80GB\.$'),
        ("host:0.1B", 'the size is "0.1B", less than a byte'),
        ("disk:/x:0", 'the size is "0", less than a byte'),
        ("nixl:10.0.0.7:5700", "how much of that memory it takes is not said; it is nixl:10.0.0.7:5700:SIZE"),
        ("nixl:10.0.0.7:5700:20", "20 reads as a port; a size has a unit, like 20GB"),
        ("nixl:10.0.0.7:5700:2GX", 'the size is "2GX"'),
        ("mooncake:here", "tier \"mooncake:here\": 'here' is no HOST:PORT"),
        ("mooncake:5700", "'5700' is no HOST:PORT"),
        ("mooncake:here:99999", "'here:99999' is no HOST:PORT"),
        ("mooncake:here:1GB", "'here' is no HOST:PORT"),
    ],
)
def test_what_is_no_tier(text, words):
    with pytest.raises(kvx.BadArgument, match=words):
        TierOption.parse(text)


WRONG = {
    "unknown": (("--tier", "tape:2GB"), 'tier "tape:2GB" is none: it is host:SIZE, disk:DIR, disk:DIR:SIZE'),
    "no_size": (("--tier", "host:"), 'tier "host:" is none'),
    "bad_size": (("--tier", "host:2 apples"), 'tier "host:2 apples": the size is "2 apples"'),
    "bad_disk_size": (("--tier", "disk:/x:5kilo"), 'the size is "5kilo"'),
    "no_names": (("--tier", "host:2GB", "--no-prefix"), "prefix=False"),
    "unknown_format": (("--tier", "host:2GB", "--tier-format", "int7"), 'KV format "int7" does not exist'),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tiers_are_one_sentence(name, monkeypatch, capsys):
    args, words = WRONG[name]
    monkeypatch.setattr(sys, "argv", ["kvx", "generate", *args, "--model", "README.md"])
    with pytest.raises(SystemExit) as exit:
        main.main()
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert words in error
    assert error.count("\n") == 1


def test_kept_formats_have_their_scales_inline():
    assert kept_format("bf16") == "bf16"
    assert kept_format("int8_per_token_head") == "int8_per_token_head_inline"
    assert kept_format("int4_per_token_head_inline") == "int4_per_token_head_inline"
    with pytest.raises(kvx.BadArgument, match='tiers keep no "mxfp8"'):
        kept_format("mxfp8")


@smollm.needs_weights
def test_other_weights_have_another_name(tmp_path):
    config = smollm.base().model.config
    files = [tmp_path / "a.gguf", tmp_path / "b.gguf", tmp_path / "c.gguf"]
    for file, content in zip(files, (b"1" * 300000, b"1" * 299999 + b"2", b"1" * 300000), strict=True):
        file.write_bytes(content)
    a, b, c = (identity(f, config, "f32") for f in files)
    assert a == c != b
    assert identity(files[0], config, "bf16") != a


@smollm.needs_weights
def test_models_that_differ_in_one_tensor_have_other_names(tmp_path):
    config = smollm.engine().model.config
    names = []
    for n, value in enumerate((0, 1)):
        data = bytearray(8 << 20)
        data[1 << 20 : 2 << 20] = bytes([value]) * (1 << 20)
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "model.safetensors").write_bytes(data)
        names.append(identity(tmp_path / str(n), config, "f32"))
    assert names[0] != names[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    pytest.importorskip("transformers", reason="makes the tiny model")
    return make_plain(tmp_path_factory.mktemp("tiny") / "model")


def kinds_in(folder) -> list[dict]:
    return [json.loads(path.read_text())["manifest"] for path in sorted(folder.glob("*/manifest.json"))]


def test_engines_with_other_blocks_find_each_other(tiny, tmp_path):
    """Blocks of 16 and of 48 tokens on one directory, by a name that both are given; a third, of another name, finds none."""
    prompt, params = [n * 7 % 250 + 3 for n in range(150)], Params(max_tokens=8, ignore_eos=True)
    said, cached = [], []
    for size, name in ((16, "mine"), (48, "mine"), (32, "another")):
        with Engine.load(tiny, block_size=size, num_blocks=16, tiers=[f"disk:{tmp_path}"], tier_model=name) as one:
            ((answer,),) = one.generate([prompt], params)
        said.append(answer.tokens)
        cached.append(answer.num_cached)
    assert cached == [0, 144, 0]
    assert said[0] == said[1] == said[2]
    assert {kind["model"] for kind in kinds_in(tmp_path)} == {"mine", "another"}


@pytest.mark.parametrize(
    ("kv", "tier", "model"),
    [
        ("auto", "auto", "mine"),
        ("auto", "fp8", "mine"),
        ("fp8", "auto", "mine-fp8_e4m3_per_token_head"),
        ("bf16", "bf16", "mine-bf16"),
    ],
)
def test_rounded_caches_have_a_name_of_their_own(tiny, tmp_path, kv, tier, model):
    """What is rounded on its way to the tiers is what any engine keeps in that format; what a rounded cache computed is not."""
    with Engine.load(tiny, kv_format=kv, tiers=[f"disk:{tmp_path}"], tier_format=tier, tier_model="mine", num_blocks=16) as one:
        one.generate([[*range(3, 40)]], Params(max_tokens=1))
    (kind,) = kinds_in(tmp_path)
    assert kind["model"] == model
