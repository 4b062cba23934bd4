"""The Size tab in a browser, used as a person would: a model, sliders, a config.json of one's own, links, keys, a phone."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

import pytest

import kvx
from kvx.page.size_data import GPUS


def shown_bytes(page, fact: str) -> int:
    text = page.locator(".size-fact", has_text=fact).locator(".note").inner_text()
    return int(text.removesuffix(" bytes").replace(",", ""))


def control(page, words: str):
    """The control under this label."""
    name = page.locator(".field-name", has_text=re.compile(f"^{re.escape(words)}$"))
    return page.locator("label", has=name).locator("input, select, textarea")


def test_a_model_its_sliders_and_a_link_to_what_is_shown(visit, picture):
    page = visit("#size")
    control(page, "Model").select_option("Gemma-3-27B")
    control(page, "Format").select_option("fp8_e4m3")
    control(page, "Context, tokens").fill("128K")
    control(page, "Context, tokens").press("Enter")
    control(page, "Requests").fill("8")
    control(page, "Requests").press("Tab")
    size = kvx.size("Gemma-3-27B", "fp8_e4m3")
    assert shown_bytes(page, "8 requests") == size.total_bytes(131072, 8)
    assert shown_bytes(page, "fixed, per request") == size.fixed_bytes
    link = page.url
    assert "model=Gemma-3-27B" in link
    assert "context=128K" in link
    picture(page, "size-desktop")
    # The slider moves by keys, and says what it means.
    slider = page.get_by_label("Tensor parallel size, powers of two")
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert control(page, "Tensor parallel size").input_value() == "2"
    assert slider.get_attribute("aria-valuetext") == "2"
    assert shown_bytes(page, "8 requests") == kvx.size("Gemma-3-27B", "fp8_e4m3", tp=2).total_bytes(131072, 8)
    # Another reader sees the same from the link; Back and other links are followed.
    other = visit("#" + link.split("#", 1)[1], dark=True, width=390, height=844)
    assert shown_bytes(other, "8 requests") == size.total_bytes(131072, 8)
    assert other.evaluate("document.documentElement.scrollWidth") <= 390
    picture(other, "size-phone-dark")
    other.evaluate("location.hash = '#size?model=DeepSeek-V3'")
    other.get_by_text("DeepSeek-V3, bf16").wait_for()


def test_every_gpu_has_the_librarys_answer(visit):
    page = visit("#size?model=Qwen3-Next-80B-A3B&format=bf16&context=32K&requests=4&shared=1000&tp=2&weights=20GB")
    size = kvx.size("Qwen3-Next-80B-A3B", "bf16", tp=2)
    for name, memory in GPUS.items():
        cells = page.locator(".size-gpus tr", has=page.get_by_role("rowheader", name=name)).locator("td").all_inner_texts()
        left = memory - 20 * 10**9
        fit = size.fit_requests(left, 32768, 1000)
        assert cells[2:] == [f"{fit:,}", f"{fit * 32768:,}", f"{size.fit_context(left, 4, 1000):,}"]
        assert cells[1] == ("fits" if size.total_bytes(32768, 4, 1000) <= left else "too large")


@pytest.mark.parametrize("model", ["DeepSeek-V4-Flash", "Llama-4-Scout", "RecurrentGemma-2B", "Kimi-Linear-48B-A3B"])
def test_kinds_of_layers_stand_in_the_bar_and_the_table(visit, model):
    page = visit(f"#size?model={model}")
    size = kvx.size(model)
    assert page.locator(".size-kinds tbody th").all_inner_texts() == [g.name for g in size.groups]
    bar = page.locator(".size-bar").first.get_attribute("aria-label")
    assert all(g.name in bar for g in size.groups)
    assert shown_bytes(page, "a request of 8,192") == size.request_bytes(8192)


def test_a_config_of_ones_own_dropped_pasted_and_linked(visit, tmp_path):
    config = {
        "model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "use_sliding_window": False,
        "_name_or_path": "mine/<img src=x onerror=alert(1)>", "time_step_limit": [0.0, float("inf")],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = visit("#size")
    page.get_by_text("Your own config.json").click()
    control(page, "config.json").set_input_files(tmp_path / "config.json")
    page.get_by_text("mine/<img src=x onerror=alert(1)>, bf16").wait_for()
    assert page.locator("main img").count() == 0
    assert shown_bytes(page, "per token") == kvx.size(config).token_bytes
    again = visit("#" + page.url.split("#", 1)[1])
    assert shown_bytes(again, "per token") == kvx.size(config).token_bytes
    again.get_by_text("Your own config.json").click()
    control(again, "Text of a config.json").fill(json.dumps({**config, "num_hidden_layers": 5}))
    again.get_by_role("button", name="Read it").click()
    assert shown_bytes(again, "per token") == kvx.size({**config, "num_hidden_layers": 5}).token_bytes


REFUSED = {
    "{": "is not JSON",
    "[1, 2]": "holds no object",
    '{"model_type": "llama"}': "has no num_hidden_layers",
    '{"model_type": "newest", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}': "not say num_key_value_heads",
    '{"model_type": "gemma4_text", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}': "leaves out layer_types",
    '{"model_type": "t5", "num_hidden_layers": 2, "is_encoder_decoder": true}': "is an encoder and a decoder",
    "[" * 200_000: "is not JSON",
    " ": "There is no text",
}


def test_what_cannot_be_read_is_told_by_field_and_changes_nothing(visit):
    page = visit("#size?model=Qwen3-8B")
    page.get_by_text("Your own config.json").click()
    before = shown_bytes(page, "per token")
    for text, sentence in REFUSED.items():
        control(page, "Text of a config.json").fill(text)
        page.get_by_role("button", name="Read it").click()
        assert sentence in page.get_by_role("alert").inner_text()
        assert sentence in page.get_by_role("status").inner_text()
        assert shown_bytes(page, "per token") == before


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("model=Nobody%3Cimg%3E", '"Nobody<img>" is not among the known models'),
        ("model=SmolLM2-135M&tp=2", "neither divides the other"),
        ("model=Qwen3-8B&context=lots", 'The context is "lots"'),
        ("model=Qwen3-8B&format=fp1", 'does not take the format "fp1"'),
        ("model=Qwen3-8B&context=8K&shared=8192", "A context has one token more"),
        ("model=Qwen3-8B&requests=999999999999999", "more than 2**53 bytes"),
        ("model=DeepSeek-V4-Pro&block=64", "a multiple of 128"),
        (f"config={quote('{')}", "is not JSON"),
    ],
)
def test_wrong_values_of_a_link_are_told(visit, address, sentence):
    page = visit(f"#size?{address}")
    assert sentence in page.get_by_role("alert").inner_text()
    assert page.locator(".size-facts").count() == 0
