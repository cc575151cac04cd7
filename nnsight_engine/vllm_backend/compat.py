"""The one module that knows vLLM's version: where its classes are and what it can be started with.

Written for vLLM 0.32, model runner V1. Everything else in ``vllm_backend`` names vLLM's
stable parts only.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.core.model_spec import LeafSpec, ModelSpec
from nnsight_engine.core.tap_choice import ALL_TAPS, chosen_taps, tap_of
from nnsight_engine.plans.records import StepResults

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.families import ModelPoints

CONFIG_KEY: Final = "nnsight_engine"
"""Key of our entry in vLLM's ``additional_config``, which is part of the compile cache's key."""

WORKER_CLASS: Final = "nnsight_engine.vllm_backend.worker.InterventionWorker"
PROCESS: Final = "process"
RESTRICTED: Final = "restricted"
"""How strangers' blocks may run, see ``EngineLimits``."""
_RAY_EXECUTOR: Final = "nnsight_engine.vllm_backend.ray_executor.ClusterExecutor"
SCHEDULER_CLASS: Final = "nnsight_engine.vllm_backend.scheduler.InterventionScheduler"
_RESULTS_ATTRIBUTE: Final = "nnsight_engine_results"
_ALONE_ATTRIBUTE: Final = "nnsight_engine_alone"


@dataclasses.dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits that the worker enforces.

    Attributes:
        max_capture_bytes_per_request: Most that one declarative request may capture.
        max_capture_bytes_engine: Most that all of them may hold captured together.
        max_edits: How many edits the engine keeps under names.
        max_edit_bytes: Most that they may have together, as they are sent.
        trace_step_s: Seconds that one block may compute within one step.
        max_trace_bytes: Most that one traced request may hold: what its block saved, and what is kept for it.
        sandbox: How strangers' blocks run: each trace in a ``process`` of its own, ``restricted`` to harmless
            Python in the worker, or ``off``, like everybody's.
        sandbox_bytes: Memory that a sandboxed process may take, what it shares with the worker included.
        sandbox_compiles: Whether their Python is restricted in the process too, which gives better errors.
        sandbox_fuel: Steps of Python that restricted blocks of one trace may take: turns of loops, calls.
        sandbox_step_s: Seconds that one may compute within one step of the engine, all its blocks together.
        sandbox_wait_s: Seconds that one step of the engine waits for all sandboxes of one tenant together.
        sandbox_cpu_s: Seconds of computing that one may take in its life.
        sandbox_blocks: Blocks and edits of one sandboxed trace that may wait at once.
        sandbox_needs_namespaces: Whether there are none where they cannot have namespaces of their own.
        max_sandboxes: How many may be at work at once.
        fair_window_s: Seconds that a tenant without requests still counts among those who share; 0: none do.
        fair_step: How much longer than the shortest a step may take that a tenant within its share may meet.
        taps: At which points of the residual stream taps lie, see ``chosen_taps``.
    """

    max_capture_bytes_per_request: int = 256 * 1024 * 1024
    max_capture_bytes_engine: int = 1024 * 1024 * 1024
    max_edits: int = 64
    max_edit_bytes: int = 256 * 1024 * 1024
    trace_step_s: float = 10.0
    max_trace_bytes: int = 4 * 1024 * 1024 * 1024
    sandbox: str = PROCESS
    sandbox_bytes: int = 1024 * 1024 * 1024
    sandbox_compiles: bool = True
    sandbox_fuel: int = 10_000_000
    sandbox_step_s: float = 1.0
    sandbox_wait_s: float = 0.03
    sandbox_cpu_s: int = 300
    sandbox_blocks: int = 32
    sandbox_needs_namespaces: bool = False
    max_sandboxes: int = 16
    fair_window_s: float = 5.0
    fair_step: float = 1.25
    taps: str = ALL_TAPS

    @property
    def sandbox_message_bytes(self) -> int:
        """The most that crosses to or from a sandbox at once: what it saves, for one."""
        return min(self.max_trace_bytes, self.sandbox_bytes // 4)

    @classmethod
    def read(cls, config: VllmConfig) -> EngineLimits:
        """Read what ``engine_options`` wrote, defaults where it is missing."""
        entry = (config.additional_config or {}).get(CONFIG_KEY, {})
        return cls(**entry.get("limits", {}))


def engine_options(limits: EngineLimits) -> dict[str, Any]:
    """Return the engine arguments that make vLLM's engine able to intervene.

    Pass them to ``vllm.LLM`` or ``AsyncEngineArgs`` beside one's own.
    """
    return {
        "worker_cls": WORKER_CLASS,
        "scheduler_cls": SCHEDULER_CLASS,
        # Token ids must be known in bookkeeping, and results must leave with their step.
        "async_scheduling": False,
        "additional_config": {CONFIG_KEY: {"limits": dataclasses.asdict(limits)}},
    }


def own_environment() -> None:
    """Choose, where nothing was chosen, what vLLM reads from the environment: the runner that we extend."""
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")


def check_supported(config: VllmConfig, *, traces_only: bool = False) -> None:
    """Raise UnsupportedOptionError for options under which interventions could be silently wrong.

    Args:
        config: The engine's.
        traces_only: Whether blocks are the only interventions; they know of pipeline stages.
    """
    parallel = config.parallel_config
    has_stages = parallel.pipeline_parallel_size > 1
    refused = {
        "--pipeline-parallel-size": has_stages and not traces_only,
        "--tensor-parallel-size with --pipeline-parallel-size": (
            has_stages and parallel.tensor_parallel_size > 1
        ),
        # That executor starts a stage once the one before it has ended, and both would wait for each other.
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0": (
            has_stages and Executor.get_class(config).__name__ == "RayDistributedExecutor"
        ),
        "--data-parallel-size": parallel.data_parallel_size > 1,
        "--speculative-config": config.speculative_config is not None,
        "--async-scheduling": bool(config.scheduler_config.async_scheduling),
        "--kv-transfer-config": config.kv_transfer_config is not None,
        "VLLM_USE_V2_MODEL_RUNNER=1": config.use_v2_model_runner,
        "--enable-dbo": bool(getattr(parallel, "enable_dbo", False)),
    }
    if config.lora_config is not None:
        raise UnsupportedOptionError(
            "--enable-lora is not supported together with interventions yet: lenses and calls of the "
            "unembedding would go through other requests' adapters; start without it, with a checkpoint "
            "into which the adapter is merged"
        )
    for option, given in refused.items():
        if given:
            message = f"{option} is not supported together with interventions yet; start without it"
            raise UnsupportedOptionError(message)


def ray_executor() -> Any:
    """Return the class of our Ray executor: a class, since vLLM lets no other name run pipeline stages.

    It is looked up by name because Ray, which is slow to import, comes with it.

    Raises:
        UnsupportedOptionError: Ray is not installed.
    """
    try:
        return resolve_obj_by_qualname(_RAY_EXECUTOR)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise UnsupportedOptionError(
            'distributed_executor_backend="ray" needs Ray: pip install "nnsight-engine[ray]"'
        ) from error


def platform_worker_class() -> Any:
    """Return the worker class that vLLM would use on this platform."""
    names = {
        "cpu": "vllm.v1.worker.cpu_worker.CPUWorker",
        "cuda": "vllm.v1.worker.gpu_worker.Worker",
        "rocm": "vllm.v1.worker.gpu_worker.Worker",
    }
    name = names.get(current_platform.device_type, names["cuda"])
    return resolve_obj_by_qualname(name)


def brings(params: Any, key: str) -> bool:
    """Tell whether a request's sampling parameters, None for a pooling one, carry an entry of ours."""
    return params is not None and key in (params.extra_args or {})


def attach_results(output: Any, results: StepResults) -> Any:
    """Let results ride on a runner's output, which travels pickled between vLLM's own processes."""
    if output is EMPTY_MODEL_RUNNER_OUTPUT:
        # One object for every step without tokens, which must not carry this step's results for ever.
        output = copy.copy(output)
    setattr(output, _RESULTS_ATTRIBUTE, results)
    return output


def detach_results(output: Any) -> StepResults | None:
    """Return what rides on a runner's output, or None."""
    return getattr(output, _RESULTS_ATTRIBUTE, None)


def mark_alone(scheduled: Any, *, alone: bool) -> None:
    """Note on what a scheduler has scheduled whether all requests that it has are one tenant's."""
    setattr(scheduled, _ALONE_ATTRIBUTE, alone)


def is_alone(scheduled: Any) -> bool:
    """Tell what ``mark_alone`` has noted."""
    return bool(getattr(scheduled, _ALONE_ATTRIBUTE, False))


def record_allocated_blocks(manager: Any) -> None:
    """Have a manager of the KV cache record the blocks it allocates, also where vLLM needs none zeroed."""
    for group in manager.coordinator.single_type_managers:
        if not isinstance(group.kv_cache_spec, MambaSpec | CircularBufferSpec):
            group._record_new_block_ids = True  # noqa: SLF001 - vLLM sets it for whole models only


def zero_blocks(runner: Any, block_ids: list[int]) -> None:
    """Zero blocks of the KV cache on a CPU, where vLLM leaves out layers with a sliding window."""
    num_blocks = runner.kv_cache_config.num_blocks
    layers = runner.compilation_config.static_forward_context
    caches = {
        cache.data_ptr(): cache
        for group in runner.kv_cache_config.kv_cache_groups
        for name in group.layer_names
        if isinstance(cache := getattr(layers.get(name), "kv_cache", None), torch.Tensor)
    }
    for cache in caches.values():
        cache.unflatten(0, (num_blocks, -1))[block_ids] = 0


def describe_model(points: ModelPoints, config: VllmConfig, limits: EngineLimits) -> ModelSpec:
    """Return the model's description for admission and capabilities."""
    model = config.model_config
    served = model.served_model_name
    return ModelSpec(
        name=served if isinstance(served, str) else served[0],
        architecture=model.architectures[0],
        num_layers=len(points.layers),
        hidden_size=points.hidden_size,
        vocab_size=points.vocab_size,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=model.max_model_len,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        leaves=_with_tiers(points.leaf_specs(), limits, len(points.layers)),
        max_capture_bytes=limits.max_capture_bytes_per_request,
    )


def _with_tiers(leaves: Sequence[LeafSpec], limits: EngineLimits, num_layers: int) -> tuple[LeafSpec, ...]:
    """Return the leaves of the residual stream as ``eager`` where not all of their points have taps."""
    taps = chosen_taps(limits.taps, num_layers)

    def has_all(leaf: LeafSpec) -> bool:
        return {tap_of(leaf.name, layer) for layer in range(num_layers)} <= {None, *taps}

    return tuple(leaf if has_all(leaf) else dataclasses.replace(leaf, tier="eager") for leaf in leaves)
