"""Options of vLLM that are refused, because interventions could be silently wrong with them.

``docs/correctness.md`` has the same options, each with its reason in words for users.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor import Executor

from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.vllm_backend.compat import caches_missing_states

_REPLICAS: Final = "start several servers instead, --replicas N"
_ONE_MACHINE: Final = "the server that places traces starts all engines on its own machine, as processes"


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    option: str
    reason: str
    is_given: Callable[[VllmConfig], bool]
    instead: str = "start without it"


def _has_stages(config: VllmConfig) -> bool:
    return bool(config.parallel_config.pipeline_parallel_size > 1)


def _has_engines(config: VllmConfig) -> bool:
    return bool(config.parallel_config.data_parallel_size > 1)


def _drafts(config: VllmConfig, matches: Callable[[SpeculativeConfig], bool]) -> bool:
    return config.speculative_config is not None and matches(config.speculative_config)


def _has_old_ray_executor(config: VllmConfig) -> bool:
    return bool(Executor.get_class(config).__name__ == "RayDistributedExecutor")


def _classifies_tokens(config: VllmConfig) -> bool:
    pooler = config.model_config.pooler_config
    return pooler is not None and pooler.task == "token_classify"


def _on_cpu(option: str, is_given: Callable[[VllmConfig], bool]) -> Refusal:
    """Return the refusal of an option on machines without GPUs only."""
    return Refusal(
        f"{option} on a CPU",
        "vLLM's model runner has its kernels for GPUs only",
        lambda config: current_platform.is_cpu() and is_given(config),
    )


REFUSALS: Final = (
    Refusal(
        "--tensor-parallel-size with --pipeline-parallel-size",
        "traces exchange values between ranks or between stages, not both",
        lambda config: _has_stages(config) and config.parallel_config.tensor_parallel_size > 1,
    ),
    Refusal(
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 with --pipeline-parallel-size",
        "vLLM's older Ray executor starts a stage when the one before has ended, and a trace on several "
        "stages would wait forever",
        lambda config: _has_stages(config) and _has_old_ray_executor(config),
    ),
    Refusal(
        "--speculative-config with --pipeline-parallel-size",
        "vLLM fails with both on a CPU, where they could be tested",
        lambda config: _has_stages(config) and config.speculative_config is not None,
    ),
    Refusal(
        "--pipeline-parallel-size with a model that has inputs per layer (Gemma 4)",
        "vLLM computes these on the first stage and drops them on the others, so that answers are wrong",
        lambda config: (
            _has_stages(config)
            and bool(getattr(config.model_config.hf_text_config, "hidden_size_per_layer_input", 0))
        ),
    ),
    Refusal(
        "--speculative-config with extract_hidden_states",
        "it stores hidden states and makes no drafts, so that the rules for rows of drafts are wrong",
        lambda config: _drafts(config, lambda drafts: drafts.method == "extract_hidden_states"),
    ),
    Refusal(
        "--speculative-config with enable_adaptive_verification",
        "the device decides how many rows a request has",
        lambda config: _drafts(config, lambda drafts: drafts.enable_adaptive_verification),
    ),
    _on_cpu(
        "--speculative-config with dflash or dspark",
        lambda config: _drafts(config, lambda drafts: drafts.method in {"dflash", "dspark"}),
    ),
    _on_cpu(
        "--speculative-config with several mtp modules",
        lambda config: _drafts(config, lambda drafts: drafts.use_multi_module_mtp()),
    ),
    _on_cpu(
        "--speculative-config with rejection_sample_method block",
        lambda config: _drafts(config, lambda drafts: drafts.rejection_sample_method == "block"),
    ),
    Refusal(
        "--kv-sharing-fast-prefill",
        "layers that use the keys of others (Gemma 3n, Gemma 4) would run for the sampled positions only",
        lambda config: config.cache_config.kv_sharing_fast_prefill,
    ),
    Refusal(
        "--prefill-context-parallel-size above 1",
        "each rank has rows of its own",
        lambda config: config.parallel_config.prefill_context_parallel_size > 1,
    ),
    _on_cpu(
        "--decode-context-parallel-size above 1",
        lambda config: config.parallel_config.decode_context_parallel_size > 1,
    ),
    _on_cpu("--watermark-config", lambda config: config.watermark_config is not None),
    _on_cpu("--use-fp64-gumbel", lambda config: config.model_config.use_fp64_gumbel),
    Refusal(
        "--enable-batch-sharded-sampling",
        "each rank has the logits of its own requests only",
        lambda config: config.parallel_config.enable_batch_sharded_sampling,
    ),
    Refusal(
        "--enable-prefix-caching with a model of Mamba-2 on a CPU",
        "vLLM's kernels return no states to keep, and the first request would end the engine",
        caches_missing_states,
    ),
    Refusal(
        "--kv-transfer-config",
        "received keys and values carry no record of the writes in them",
        lambda config: config.kv_transfer_config is not None,
    ),
    Refusal(
        "--enable-dbo, or --ubatch-size above 1",
        "a step that vLLM divides would be planned as one",
        lambda config: config.parallel_config.use_ubatching,
    ),
    Refusal(
        "--diffusion-config, or a model that generates by diffusion",
        "vLLM schedules it with a class of its own, in whose place ours would be",
        lambda config: config.diffusion_config is not None,
    ),
    Refusal(
        "--enable-lora with a model of experts",
        "adapters are for dense models",
        lambda config: config.lora_config is not None and config.model_config.is_moe,
        "start without it, with a checkpoint into which the adapter is merged",
    ),
    Refusal(
        "--enable-lora with --pooler-config.task token_classify",
        "vLLM gives such models the adapter's projections, but not its head",
        lambda config: config.lora_config is not None and _classifies_tokens(config),
    ),
    Refusal(
        "--data-parallel-size with a model of experts",
        "its engines divide the experts and compute each step together",
        lambda config: _has_engines(config) and config.model_config.is_moe,
        _REPLICAS,
    ),
    Refusal(
        "--data-parallel-external-lb, or --data-parallel-hybrid-lb",
        _ONE_MACHINE,
        lambda config: (
            config.parallel_config.data_parallel_external_lb or config.parallel_config.data_parallel_hybrid_lb
        ),
        _REPLICAS,
    ),
    Refusal(
        "--data-parallel-size-local below --data-parallel-size",
        _ONE_MACHINE,
        lambda config: (
            config.parallel_config.data_parallel_size_local != config.parallel_config.data_parallel_size
        ),
        _REPLICAS,
    ),
    Refusal(
        "--data-parallel-size with Ray",
        _ONE_MACHINE,
        lambda config: (
            _has_engines(config)
            and (config.parallel_config.use_ray or config.parallel_config.data_parallel_backend != "mp")
        ),
        _REPLICAS,
    ),
)


def check_supported(config: VllmConfig) -> None:
    for refusal in REFUSALS:
        if refusal.is_given(config):
            raise UnsupportedOptionError(
                f"{refusal.option} is not supported together with interventions: {refusal.reason}; "
                f"{refusal.instead}"
            )
