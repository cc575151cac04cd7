"""The kernels for CPUs, in this process."""

from __future__ import annotations

import pytest

from nnsight_engine.vllm_backend.cpu_kernels.install import install


@pytest.fixture(autouse=True)
def kernels() -> None:
    """Put them in place."""
    install()
