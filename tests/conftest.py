"""The backend fixture: the only switch between torch, cpu and cuda. A backend that is missing skips with its reason."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Two OpenMP pools in one process (torch's and ours) spin against each other on small machines.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import HealthCheck, settings

from kvx.ops import backend as backends
from tests.fast import few_cases, is_slow

settings.register_profile(
    "kvx",
    deadline=None,
    max_examples=int(os.environ.get("KVX_TEST_EXAMPLES", "60")),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("kvx")


@dataclass(frozen=True)
class Backend:
    name: str
    device: str

    def __str__(self) -> str:
        return self.name


def _backend(name: str) -> Backend:
    reason = backends.reason_missing(name)
    if reason is not None:
        pytest.skip(f"backend {name}: {reason}")
    return Backend(name, "cuda" if name == "cuda" else "cpu")


@pytest.fixture(params=["torch", "cpu", "cuda"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return _backend(request.param)


@pytest.fixture(params=["cpu", "cuda"])
def native_backend(request: pytest.FixtureRequest) -> Backend:
    return _backend(request.param)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="Leave out what is slow: tests/fast.py.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("--fast") and is_slow(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        items[:], left_out = few_cases(items)
        config.hook.pytest_deselected(items=left_out)
