"""Whose K and V vLLM's are: found in its config and the weight files, or refused. The config is a stand-in with vLLM's fields."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kvx
from kvx.adapters.vllm import facts
from kvx.identity import has_identity

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def weights(folder: Path, content: bytes = b"w" * 5000) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(content)
    return folder


def config(model: Path | str, *, load_format: str = "auto", download_dir: Path | None = None, **changes):
    text = SimpleNamespace(
        model_type="llama", num_attention_heads=4, num_key_value_heads=2, head_dim=32, hidden_size=64, vocab_size=256,
        num_hidden_layers=2, rope_parameters=changes.pop("rope", {"rope_type": "default"}),
    )  # fmt: skip
    fields = {
        "model": str(model), "revision": None, "dtype": torch.bfloat16, "quantization": None, "hf_overrides": {},
        "hf_config_path": None, "max_model_len": 1024, "hf_text_config": text, "model_weights": "",
    }  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(**fields | changes),
        load_config=SimpleNamespace(load_format=load_format, download_dir=download_dir),
    )


def test_checkpoints_of_one_geometry_have_names_of_their_own(tmp_path):
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b", b"w" * 4999 + b"x")
    names = [facts.identity_of(config(folder)) for folder in (a, b, a)]
    assert names[0] == names[2] != names[1]
    assert all(map(has_identity, names))
    assert facts.name_of(config(a)) == facts.name_of(config(b))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float32},
        {"quantization": "fp8"},
        {"quantization_config": {"bits": 4}},
        {"hf_overrides": {"rope_theta": 5.0}},
        {"disable_sliding_window": True},
        {"rope": {"rope_type": "longrope"}},
    ],
    ids=str,
)
def test_what_vllm_makes_of_them_counts(tmp_path, change):
    folder = weights(tmp_path / "a")
    assert facts.identity_of(config(folder, **change)) != facts.identity_of(config(folder))


def test_a_longer_engine_counts_where_it_rotates_otherwise(tmp_path):
    folder = weights(tmp_path / "a")
    names = {
        facts.identity_of(config(folder, max_model_len=n, rope={"full": {"rope_type": kind}}))
        for n in (1024, 8192)
        for kind in ("default", "longrope")
    }
    assert len(names) == 3


def test_the_runner_has_the_same_name_for_the_same_files(tmp_path):
    from kvx.runner.identity import identity

    folder = weights(tmp_path / "a")
    same = SimpleNamespace(family="llama", num_layers=2, num_kv_heads=2, head_dim=32, hidden_size=64, vocab_size=256)
    assert identity(folder, same, "bf16") == facts.identity_of(config(folder))


def test_a_snapshot_in_the_hubs_cache_is_found(tmp_path):
    pytest.importorskip("huggingface_hub", reason="the hub's cache is read by the package huggingface_hub")
    repo = tmp_path / "hub" / "models--org--name"
    weights(repo / "snapshots" / COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    want = facts.identity_of(config(repo / "snapshots" / COMMIT))
    for revision in (None, "main", COMMIT):
        assert facts.identity_of(config("org/name", download_dir=tmp_path / "hub", revision=revision)) == want
    with pytest.raises(kvx.BadArgument, match="org/name is neither a path here nor a snapshot"):
        facts.identity_of(config("org/name", download_dir=tmp_path / "hub", revision="v2"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"load_format": "dummy"}, 'load_format is "dummy"'),
        ({"load_format": "runai_streamer"}, 'load_format is "runai_streamer"'),
        ({"model_weights": "s3://bucket/model"}, "the weights come from s3://bucket/model"),
        ({"hf_overrides": lambda c: c}, "hf_overrides is a function"),
        ({"hf_config_path": "/elsewhere"}, "the config comes from /elsewhere"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_what_cannot_be_found_out_is_refused(tmp_path, change, words):
    with pytest.raises(kvx.BadArgument) as error:
        facts.identity_of(config(weights(tmp_path / "a"), **change))
    assert words in str(error.value)
    assert 'Give "model" in kv_connector_extra_config' in str(error.value)


@pytest.mark.parametrize("name", ["lora_request", "mm_features", "cache_salt", "prompt_embeds", "pooling_params"])
def test_requests_whose_tokens_do_not_say_all_are_left_out(name):
    assert facts.has_plain_tokens(SimpleNamespace(lora_request=None, mm_features=[], cache_salt=None, prompt_embeds=None))
    assert not facts.has_plain_tokens(SimpleNamespace(**{name: ["x"]}))
