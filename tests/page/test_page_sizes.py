"""The page's reading of config.json and its sizes, in Node, beside the library's: the same numbers to the byte, or a refusal."""

from __future__ import annotations

import json
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest

from kvx.page.bundle import STATIC
from kvx.page.data import page_data
from kvx.spec.models import CHECKED_TYPES, MODELS
from kvx.spec.size_vectors import size_vectors
from tests import class_defaults

OPTIONS = [{"format": "bf16"}, {"format": "fp8_e4m3_per_block_head", "tp": 2, "block_size": 64}]
HERE = Path(__file__).parent


def in_node(script: str, tmp_path: Path, vectors: list[dict[str, Any]]) -> dict[str, Any]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not on the PATH; the page's code is then checked in the browser alone")
    facts, asked = tmp_path / "facts.json", tmp_path / "vectors.json"
    facts.write_text(json.dumps({name: page_data()[name] for name in ("size", "formats")}))
    asked.write_text(json.dumps(vectors))
    done = subprocess.run(
        [node, str(HERE / script), str(STATIC), str(facts), str(asked)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_known_model_has_the_librarys_numbers(tmp_path):
    vectors = size_vectors()
    result = in_node("check_sizes.mjs", tmp_path, vectors)
    assert not result["wrong"], json.dumps(result["wrong"][:3])
    assert not result["unanswered"]
    cases = [case for vector in vectors for case in vector["cases"]]
    assert result["answered"] == sum("size" in case for case in cases) > 800
    assert result["refused"] == sum("refused" in case for case in cases) > 100
    assert [vector["model"] for vector in vectors] == list(MODELS)


def test_configs_of_the_tests_have_the_librarys_numbers(tmp_path):
    pytest.importorskip("transformers", minversion="5.22", reason="families are those of transformers 5.22")
    from tests.spec.test_size_families import FAMILIES
    from tests.spec.test_size_states import HYBRIDS

    configs = {name: row[0] for name, row in FAMILIES.items()}
    configs |= {name: {"model_type": model_type, **fields} for name, (model_type, fields) in HYBRIDS.items()}
    result = in_node("check_sizes.mjs", tmp_path, size_vectors(configs, OPTIONS))
    assert not result["wrong"], json.dumps(result["wrong"][:3])
    assert result["answered"] > 80
    assert all("Add " in sentence and "kvx size" in sentence for sentence in result["unanswered"].values())
    assert len(result["unanswered"]) < len(configs) / 3, result["unanswered"]


@pytest.fixture(scope="module")
def trimmed() -> dict[str, dict[str, Any]]:
    pytest.importorskip("transformers", minversion="5.22", reason="families are those of transformers 5.22")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            f"{model_type} {i}": config
            for model_type in sorted(CHECKED_TYPES)
            for i, config in enumerate(class_defaults.trimmed(model_type, 3, seed=1))
        }


def test_what_a_config_leaves_out_is_as_transformers_has_it_or_asked_for(tmp_path, trimmed):
    """Configs of every checked class, with fields left out that were not seen when the table was written."""
    result = in_node("check_sizes.mjs", tmp_path, size_vectors(trimmed, OPTIONS[:1]))
    assert not result["wrong"], json.dumps(result["wrong"][:3])
    assert result["answered"] > 250, result["answered"]
    assert all("leaves out" in sentence for sentence in result["unanswered"].values()), result["unanswered"]
