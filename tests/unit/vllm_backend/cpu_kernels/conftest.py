"""vLLM's functions of a V2 step, with the kernels for CPUs in this process for the time of a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.triton_utils import triton
from vllm.utils.math_utils import next_power_of_2

from nnsight_engine.vllm_backend.cpu_kernels.install import FUNCTIONS, module_of
from nnsight_engine.vllm_backend.cpu_kernels.launches import CpuKernel


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Put the kernels in place; return a function that finds one by its name."""
    monkeypatch.setattr(triton, "next_power_of_2", next_power_of_2, raising=False)
    for name, function in FUNCTIONS.items():
        module, attribute = module_of(name)
        monkeypatch.setattr(module, attribute, CpuKernel(name, getattr(module, attribute), function))

    def find(name: str) -> Any:
        module, attribute = module_of(name)
        return getattr(module, attribute)

    return find
