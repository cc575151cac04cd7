"""Which kernels have functions for CPUs, and what those lack."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import vllm
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from nnsight_engine.vllm_backend.cpu_kernels.install import FUNCTIONS, CpuKernel, allow_v2, module_of
from nnsight_engine.vllm_backend.unsupported_options import REFUSALS

WORKER = Path(vllm.__file__).parent / "v1/worker"
NEVER_ON_CPUS = {
    "mamba_utils:batch_memcpy_kernel",  # vLLM replaces it itself
    "mamba_utils:get_aligned_state_indices_multi_group_kernel",  # vLLM asserts that the tensors are CUDA's
    "gpu.model_states.recoverssm:_postprocess_recoverssm_align_kernel",  # of Kimi K3 on NVIDIA's GPUs
}

MISSING = {
    "gpu.cp_utils:": "--decode-context-parallel-size above 1 on a CPU",
    "gpu.sample.batch_shard:": "--enable-batch-sharded-sampling",
    "gpu.sample.watermark:": "--watermark-config on a CPU",
    "gpu.spec_decode.acceptance_estimator:": "--speculative-config with enable_adaptive_verification",
    "gpu.spec_decode.dflash.speculator:": "--speculative-config with dflash or dspark on a CPU",
    "gpu.spec_decode.dflash2.speculator:": "--speculative-config with dflash or dspark on a CPU",
    "gpu.spec_decode.multi_module_mtp.speculator:": "--speculative-config with several mtp modules on a CPU",
    **dict.fromkeys(
        (
            "gpu.spec_decode.rejection_sampler_utils:_compute_cumulative_log_p_kernel",
            "gpu.spec_decode.rejection_sampler_utils:_compute_local_residual_mass_kernel",
        ),
        "--speculative-config with rejection_sample_method block on a CPU",
    ),
}
"""The refused option that alone launches a kernel without a function, or all of a module, on a CPU."""


def launched() -> Iterator[str]:
    """Yield each kernel that a module launches, ``name[grid](...)``."""
    for path in [*WORKER.glob("gpu/**/*.py"), WORKER / "utils.py", WORKER / "mamba_utils.py"]:
        module = ".".join(path.relative_to(WORKER).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Subscript(value=ast.Name(id=name))) if name.endswith("_kernel"):
                    yield f"{module}:{name}"


def test_all_launched_kernels_have_a_function_or_a_refused_option() -> None:
    names = set(launched()) - NEVER_ON_CPUS
    missing = {name for name in names if name.startswith(tuple(MISSING))}
    assert names == FUNCTIONS.keys() | missing
    assert not FUNCTIONS.keys() & missing
    assert all(any(name.startswith(start) for name in missing) for start in MISSING)
    assert set(MISSING.values()) <= {one.option for one in REFUSALS}


def test_functions_take_parameters_of_their_kernels() -> None:
    for name in FUNCTIONS:
        kernel = getattr(*module_of(name))
        assert isinstance(kernel, CpuKernel)
        assert kernel._wanted <= {*kernel._names.values(), "grid"}, name


def _scale_kernel(values_ptr: Any, factor: int, BLOCK_SIZE: int) -> None:  # noqa: N803 - as in Triton
    raise AssertionError


def test_functions_replace_kernels_of_a_triton_with_a_backend_for_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scale(*, values: torch.Tensor, factor: int) -> None:
        values *= factor

    values = torch.ones(3)
    CpuKernel("scale", triton.jit(_scale_kernel), scale)[1,](values, factor=2, BLOCK_SIZE=8, num_warps=4)
    assert values.tolist() == [2, 2, 2]
    monkeypatch.setattr("vllm.triton_utils.triton", triton)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", False)
    before = triton.next_power_of_2
    allow_v2()
    assert triton.next_power_of_2 is before


def test_options_without_a_function_are_refused() -> None:
    zeros = torch.zeros(1)
    with pytest.raises(
        NotImplementedError, match="_gumbel_sample_kernel has no function for CPUs with use_fp64 True"
    ):
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
