"""The bench that all tests of the runner share."""

from __future__ import annotations

import pytest

from tests.families.checkpoints import write_checkpoint
from tests.unit.local_engine.bench import Bench


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(write_checkpoint("llama", tmp_path_factory.mktemp("llama")))
