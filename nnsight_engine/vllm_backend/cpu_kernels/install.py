"""Puts the functions for CPUs in the place of vLLM's kernels, in one process.

A platform plugin calls ``allow_v2`` for each configuration, and ``install`` in each worker's process before
workers exist.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from vllm.platforms.cpu import CpuPlatform

from nnsight_engine.vllm_backend.cpu_kernels import drafts, input_batch, logits, model_states, sampling

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUPPORTED: Final = types.MappingProxyType({"cp_size": 1, "use_fp64": False, "watermark": False})
"""Arguments of which functions here have one value alone; the options that set another are refused."""

_GRID: Final = "grid"
_POINTER: Final = "_ptr"


class CpuKernel:
    """Replaces a kernel by a function of some of its arguments, by name; it may take ``grid`` as well."""

    def __init__(self, name: str, kernel: Callable[..., Any], function: Callable[..., None]) -> None:
        """Replace vLLM's ``kernel`` by ``function``, which takes some of its arguments, without ``_ptr``."""
        parameters = inspect.signature(getattr(kernel, "fn", kernel)).parameters
        self._names: Final = {parameter: parameter.removesuffix(_POINTER).lower() for parameter in parameters}
        self._wanted: Final = frozenset(inspect.signature(function).parameters)
        self._name: Final = name
        self._function: Final = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *positional: object, **named: object) -> None:
        """Call the function with those arguments of the kernel that it takes; the grid may be one."""
        # Triton's own options, such as `num_warps`, are not among the names.
        arguments = dict(zip(self._names.values(), positional, strict=False))
        arguments |= {self._names[name]: value for name, value in named.items() if name in self._names}
        for name, value in SUPPORTED.items():
            if arguments.get(name, value) != value:
                raise NotImplementedError(
                    f"vLLM's kernel {self._name} has no function for CPUs with {name} {arguments[name]}"
                )
        arguments[_GRID] = grid
        self._function(**{name: value for name, value in arguments.items() if name in self._wanted})


_WORKER: Final = "vllm.v1.worker."
_THINKING: Final = "gpu.sample.thinking_budget"
_DEPENDENT: Final = "gpu.spec_decode.target_dependent_ar.speculator"
_UTILS: Final = "gpu.spec_decode.rejection_sampler_utils"


def _skip() -> None:
    """Stand for a kernel whose results the functions of other kernels do not read."""


FUNCTIONS: Final[Mapping[str, Callable[..., None]]] = {
    "gpu.input_batch:_prepare_prefill_inputs_kernel": input_batch.prepare_prefill_inputs,
    "gpu.input_batch:_prepare_pos_seq_lens_kernel": input_batch.prepare_pos_seq_lens,
    "gpu.input_batch:_combine_sampled_and_draft_tokens_kernel": input_batch.combine_sampled_and_draft_tokens,
    "gpu.input_batch:_get_num_sampled_and_rejected_kernel": input_batch.get_num_sampled_and_rejected,
    "gpu.input_batch:_post_update_kernel": input_batch.post_update,
    "gpu.input_batch:_post_update_num_computed_tokens_kernel": input_batch.post_update_num_computed_tokens,
    "gpu.input_batch:_expand_idx_mapping_kernel": input_batch.expand_idx_mapping,
    "gpu.buffer_utils:_apply_write_kernel": input_batch.apply_write,
    "gpu.block_table:_gather_block_tables_kernel": input_batch.gather_block_tables,
    "gpu.block_table:_compute_slot_mappings_kernel": input_batch.compute_slot_mappings,
    "utils:_zero_kv_blocks_kernel": input_batch.zero_kv_blocks,
    "gpu.mm.rope:_prepare_rope_positions_kernel": model_states.prepare_rope_positions,
    "gpu.model_states.prompt_embeds:_apply_prompt_embeds_kernel": model_states.apply_prompt_embeds,
    "gpu.model_states.mamba_hybrid:_scatter_num_accepted_kernel": model_states.scatter_num_accepted,
    "gpu.model_states.mamba_hybrid:_fill_num_accepted_kernel": model_states.fill_num_accepted,
    "gpu.model_states.mamba_hybrid:preprocess_mamba_align_fused_kernel": model_states.find_sources,
    "mamba_utils:precopy_mamba_align_fused_kernel": model_states.copy_before_step,
    "mamba_utils:postprocess_mamba_fused_kernel": model_states.copy_after_step,
    "gpu.sample.logit_bias:_bias_kernel": logits.apply_logit_bias,
    "gpu.structured_outputs:_apply_grammar_bitmask_kernel": logits.apply_grammar_bitmask,
    "gpu.sample.min_p:_min_p_kernel": logits.apply_min_p,
    "gpu.sample.penalties:_penalties_kernel": logits.apply_penalties,
    "gpu.sample.penalties:_bincount_kernel": logits.bincount,
    "gpu.sample.bad_words:_bad_words_kernel": logits.apply_bad_words,
    "gpu.sample.trace_replay:_trace_replay_kernel": logits.replay_trace,
    f"{_THINKING}:_update_committed_marker_cache_kernel": _skip,
    f"{_THINKING}:_thinking_budget_kernel": logits.end_thinking,
    "gpu.sample.gumbel:_temperature_kernel": sampling.apply_temperature,
    "gpu.sample.gumbel:_gumbel_sample_kernel": sampling.gumbel_sample,
    "gpu.sample.logprob:_topk_log_softmax_kernel": logits.topk_log_softmax,
    "gpu.sample.logprob:_ranks_kernel": logits.ranks,
    "gpu.sample.logprob:_fill_logprob_token_ids_kernel": logits.fill_logprob_token_ids,
    "gpu.sample.prompt_logprob:_prompt_logprobs_token_ids_kernel": logits.prompt_logprobs_token_ids,
    "gpu.metrics.logits:_num_nans_kernel": logits.num_nans,
    "gpu.sample.output:_compact_sampling_mask_kernel": logits.compact_sampling_mask,
    "gpu.spec_decode.ngram.speculator:_ngram_scan_kernel": drafts.ngram_scan,
    "gpu.spec_decode.ngram.speculator:_ngram_finalize_kernel": drafts.ngram_finalize,
    "gpu.spec_decode.standalone_ar.speculator:_prepare_prefill_inputs_kernel": drafts.prepare_own_prefill,
    f"{_DEPENDENT}:_prepare_prefill_inputs_kernel": drafts.prepare_dependent_prefill,
    f"{_DEPENDENT}:_prepare_decode_inputs_kernel": drafts.prepare_decode_inputs,
    f"{_DEPENDENT}:_update_draft_inputs_kernel": drafts.update_draft_inputs,
    "gpu.spec_decode.rejection_sampler:_flatten_sampled_kernel": sampling.flatten_sampled,
    "gpu.spec_decode.rejection_sampler:_gather_draft_sampled_kernel": sampling.gather_draft_sampled,
    f"{_UTILS}:_compute_local_logits_stats_kernel": _skip,
    f"{_UTILS}:_rejection_kernel": sampling.reject,
    f"{_UTILS}:_resample_kernel": sampling.resample,
    f"{_UTILS}:_insert_resampled_kernel": sampling.insert_resampled,
}
"""Functions by the kernel that each replaces, ``module:name``, the module below ``vllm.v1.worker``."""


def allow_v2() -> None:
    """Have vLLM accept model runner V2 in this process, although it finds no Triton."""
    # Not imported above, since both ask for the platform, whose plugin imports this module.
    config: Any = importlib.import_module("vllm.config.vllm")
    config.HAS_TRITON = True
    triton = importlib.import_module("vllm.triton_utils").triton
    if not hasattr(triton, "next_power_of_2"):  # vLLM's substitute for Triton lacks it
        triton.next_power_of_2 = importlib.import_module("vllm.utils.math_utils").next_power_of_2


def install() -> None:
    """Put the functions in place; idempotent."""
    allow_v2()
    importlib.import_module(_WORKER + "cpu.shm")  # changes what the modules of kernels import
    for name, function in FUNCTIONS.items():
        module, attribute = module_of(name)
        kernel = getattr(module, attribute)
        if not isinstance(kernel, CpuKernel):
            setattr(module, attribute, CpuKernel(name, kernel, function))
    module_of("gpu.spec_decode.ngram.speculator:")[0].HAS_TRITON = True
    module_of("gpu.block_table:")[0].BlockTables._make_ptr_tensor = _as_list  # noqa: SLF001 - of addresses


def module_of(name: str) -> tuple[Any, str]:
    module, _, attribute = name.partition(":")
    return importlib.import_module(_WORKER + module), attribute


def _as_list(_block_tables: object, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list(tensors)


@contextlib.contextmanager
def _foreign_objects() -> Iterator[None]:
    """In this block, vLLM's search for kernels passes objects whose ``__dict__`` is no mapping: numba's."""

    from vllm.triton_utils import dispatcher  # noqa: PLC0415 - it imports the platform

    def attributes(value: Any) -> Mapping[str, Any]:
        attributes_of: Any = vars(value)
        return attributes_of if isinstance(attributes_of, Mapping) else {}

    dispatcher.vars = attributes  # in place of the builtin
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of objects that are looked at
            yield
    finally:
        del dispatcher.vars


class V2CpuPlatform(CpuPlatform):
    ray_device_key = "GPU"
    """Ray's name of the device that each worker takes; vLLM's own platform has none."""

    _is_registered: ClassVar[bool] = False

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Change the configuration for a CPU as vLLM does, but leave asynchronous scheduling as it is."""
        scheduler = vllm_config.scheduler_config
        is_async = scheduler.async_scheduling
        super().check_and_update_config(vllm_config)
        scheduler.async_scheduling = is_async
        allow_v2()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Replace kernels as vLLM does, then by the functions here; once in a process."""
        if not cls._is_registered:
            with _foreign_objects():
                super().register_triton_kernel_overrides()
                install()
            cls._is_registered = True
