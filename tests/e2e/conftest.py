"""What every end-to-end test needs: vLLM's environment, the bundled model, its Hugging Face twin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Before vLLM is imported: one process, so that a test can look inside, and little memory.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from nnsight_engine.modeling.bundled import bundled_model_path
from tests.e2e.reference import Reference
from tests.e2e.server import Server


@pytest.fixture(scope="session")
def bundled() -> Path:
    """Return the bundled model's folder."""
    return bundled_model_path()


@pytest.fixture(scope="module")
def reference(bundled: Path) -> Reference:
    """Return transformers' own float32 model."""
    return Reference(bundled)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Serve the bundled model over HTTP, in processes of its own."""
    with Server(arguments=["--max-model-len", "1024"]) as server:
        yield server
