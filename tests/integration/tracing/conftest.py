"""A small model for each test, and a check that nothing is left on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from tests.integration.tracing.ways import Unmarked, network
from tests.small_models import Rows


@pytest.fixture
def module() -> torch.nn.Sequential:
    return network()


@pytest.fixture
def model(module: torch.nn.Sequential) -> Rows:
    return Rows(module)


@pytest.fixture
def unmarked(module: torch.nn.Sequential) -> Iterator[Unmarked]:
    unmarked = Unmarked(module)
    yield unmarked
    unmarked.check()


@pytest.fixture
def without_tracers() -> Iterator[None]:
    """No coverage and no debugger but the test's own."""
    tracer, profiler = sys.gettrace(), sys.getprofile()
    sys.settrace(None)
    sys.setprofile(None)
    yield
    sys.settrace(tracer)
    sys.setprofile(profiler)
