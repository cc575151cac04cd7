"""vLLM's functions of a V2 step, with the kernels for CPUs in this process for the time of a test."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from vllm.triton_utils import triton

from nnsight_engine.vllm_backend.cpu_kernels.install import FUNCTIONS, MISSING, module_of, next_power_of_2
from nnsight_engine.vllm_backend.cpu_kernels.launches import CpuKernel, MissingKernel


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Put the kernels in place; return a function that finds one by its name."""
    monkeypatch.setattr(triton, "next_power_of_2", next_power_of_2, raising=False)
    for name in [*FUNCTIONS, *chain(*MISSING.values())]:
        module, attribute = module_of(name)
        function, before = FUNCTIONS.get(name), getattr(module, attribute)
        replacement = MissingKernel(name) if function is None else CpuKernel(name, before, function)
        monkeypatch.setattr(module, attribute, replacement)

    def find(name: str) -> Any:
        module, attribute = module_of(name)
        return getattr(module, attribute)

    return find
