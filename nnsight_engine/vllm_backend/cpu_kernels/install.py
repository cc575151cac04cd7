"""Puts the functions for CPUs in the place of vLLM's kernels, in one process.

A platform plugin calls ``allow_v2`` for each configuration, and ``install`` in each worker's process before
workers exist, in ``Platform.register_triton_kernel_overrides``.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from nnsight_engine.vllm_backend.cpu_kernels import (
    block_tables,
    drafts,
    gumbel,
    input_batch,
    logit_masks,
    logprobs,
    mamba_states,
    model_states,
    penalties,
    rejection,
)
from nnsight_engine.vllm_backend.cpu_kernels.launches import CpuKernel, Functions, MissingKernel

_WORKER: Final = "vllm.v1.worker."
FUNCTIONS: Final[Functions] = {
    name: function
    for subject in (
        block_tables,
        drafts,
        gumbel,
        input_batch,
        logit_masks,
        logprobs,
        mamba_states,
        model_states,
        penalties,
        rejection,
    )
    for name, function in subject.FUNCTIONS.items()
}
_SPECULATION: Final = "--speculative-config with"
_MTP: Final = "gpu.spec_decode.multi_module_mtp.speculator"
MISSING: Final[Mapping[str, Sequence[str]]] = {
    "--decode-context-parallel-size above 1 on a CPU": ("gpu.cp_utils:_dcp_local_seq_lens_kernel",),
    "--enable-batch-sharded-sampling": (
        "gpu.sample.batch_shard:_build_shard_plan_kernel",
        "gpu.sample.batch_shard:_pack_logprobs_kernel",
        "gpu.sample.batch_shard:_pack_sampler_output_kernel",
        "gpu.sample.batch_shard:_unpack_gathered_output_kernel",
        "gpu.sample.batch_shard:_unpack_logprobs_kernel",
    ),
    "--watermark-config on a CPU": (
        "gpu.sample.watermark:_philox_gumbel_kernel",
        "gpu.sample.watermark:_repeated_context_mask_kernel",
    ),
    f"{_SPECULATION} enable_adaptive_verification": (
        "gpu.spec_decode.acceptance_estimator:_accumulate_kernel",
        "gpu.spec_decode.acceptance_estimator:_local_max_sumexp_kernel",
        "gpu.spec_decode.acceptance_estimator:_predict_kernel",
        "gpu.spec_decode.acceptance_estimator:_refit_kernel",
    ),
    f"{_SPECULATION} dflash or dspark on a CPU": (
        "gpu.spec_decode.dflash.speculator:_prepare_dflash_inputs_kernel",
        "gpu.spec_decode.dflash2.speculator:_cache_draft_logits_kernel",
        "gpu.spec_decode.dflash2.speculator:_selector_walk_kernel",
    ),
    f"{_SPECULATION} several modules of mtp on a CPU": (
        f"{_MTP}:_cache_inputs_kernel",
        f"{_MTP}:_pad_trailing_draft_slots_kernel",
        f"{_MTP}:_prepare_input_buffers_kernel",
        f"{_MTP}:_prepare_input_hidden_states_and_embeddings_kernel",
        f"{_MTP}:_shift_input_embeds_kernel",
        f"{_MTP}:_shift_input_ids_kernel",
    ),
    f"{_SPECULATION} rejection_sample_method block on a CPU": (
        "gpu.spec_decode.rejection_sampler_utils:_compute_cumulative_log_p_kernel",
        "gpu.spec_decode.rejection_sampler_utils:_compute_local_residual_mass_kernel",
    ),
}
"""Kernels without a function, by the option that alone launches them on a CPU, which the engine refuses."""


def allow_v2() -> None:
    """Have vLLM accept model runner V2 in this process, although it finds no Triton."""
    # Not imported above, since both ask for the platform, whose plugin imports this module.
    config: Any = importlib.import_module("vllm.config.vllm")
    config.HAS_TRITON = True
    triton = importlib.import_module("vllm.triton_utils").triton
    if not hasattr(triton, "next_power_of_2"):  # vLLM's substitute for Triton lacks it
        triton.next_power_of_2 = next_power_of_2


def install() -> None:
    """Put the functions in place in this process; idempotent.

    Raises:
        ValueError: A kernel has other parameters than in the version of vLLM that the functions are for.
    """
    allow_v2()
    importlib.import_module(_WORKER + "cpu.shm")  # changes what the modules of kernels import
    for name, function in FUNCTIONS.items():
        module, attribute = module_of(name)
        kernel = getattr(module, attribute)
        if not isinstance(kernel, CpuKernel):
            setattr(module, attribute, CpuKernel(name, kernel, function))
    for name in itertools.chain(*MISSING.values()):
        module, attribute = module_of(name)
        setattr(module, attribute, MissingKernel(name))
    module_of("gpu.spec_decode.ngram.speculator:")[0].HAS_TRITON = True
    module_of("gpu.block_table:")[0].BlockTables._make_ptr_tensor = _as_list  # noqa: SLF001 - of addresses


def module_of(name: str) -> tuple[Any, str]:
    """Return the module of a kernel, and the kernel's name there."""
    module, _, attribute = name.partition(":")
    return importlib.import_module(_WORKER + module), attribute


def _as_list(_block_tables: object, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors to give to kernels, where GPUs get their addresses."""
    return list(tensors)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least a number, as Triton's function does."""
    return 1 << max(number - 1, 0).bit_length()
