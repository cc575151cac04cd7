"""Each kernel that vLLM's V2 runner can launch has a function for CPUs or says that it has none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import vllm
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from nnsight_engine.vllm_backend.cpu_kernels.install import FUNCTIONS, MISSING
from nnsight_engine.vllm_backend.cpu_kernels.launches import MissingKernel

WORKER = Path(vllm.__file__).parent / "v1/worker"
OWN_ON_CPUS = {"mamba_utils:batch_memcpy_kernel"}
"""Which vLLM itself replaces on CPUs."""


def launched() -> Iterator[str]:
    """Yield each kernel that a module launches, ``name[grid](...)``."""
    for path in [*WORKER.glob("gpu/**/*.py"), WORKER / "utils.py", WORKER / "mamba_utils.py"]:
        module = ".".join(path.relative_to(WORKER).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Subscript(value=ast.Name(id=name))) if name.endswith("_kernel"):
                    yield f"{module}:{name}"


def test_all_launched_kernels_are_known() -> None:
    assert set(launched()) - OWN_ON_CPUS == FUNCTIONS.keys() | set(MISSING)
    assert not FUNCTIONS.keys() & set(MISSING)


def test_a_missing_kernel_says_its_name() -> None:
    with pytest.raises(NotImplementedError, match=r"gpu\.cp_utils:_dcp.* has no function for CPUs"):
        MissingKernel(MISSING[0])[1,]


def test_options_without_a_function_are_refused() -> None:
    zeros = torch.zeros(1)
    with pytest.raises(NotImplementedError, match="_gumbel_sample_kernel has no function for CPUs with fp64"):
        gumbel_sample(
            torch.zeros(1, 4),
            zeros.int(),
            zeros,
            zeros.long(),
            zeros.long(),
            apply_temperature=True,
            is_drafting=False,
            use_fp64=True,
        )
