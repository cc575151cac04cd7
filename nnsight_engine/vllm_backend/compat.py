"""What this project gives to vLLM and needs from it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from api_schemas.points import ENCODER_BLOCK, VISION
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.core.model_spec import LeafSpec, ModelSpec
from nnsight_engine.core.operator_choices import ALL_TAPS, PROCESS, check_sandbox, chosen_taps, tap_of
from nnsight_engine.plans.records import StepResults
from nnsight_engine.vllm_backend.cpu_plugin import use_runner_v2

if TYPE_CHECKING:
    from vllm import EngineArgs

    from nnsight_engine.vllm_backend.model_points import ModelPoints

CONFIG_KEY: Final = "nnsight_engine"
"""Key of this project's entry in vLLM's ``additional_config``, which is part of the compile cache's key."""

WORKER_CLASS: Final = "nnsight_engine.vllm_backend.worker.InterventionWorker"
ANY: Final = "any"
STRICT: Final = "strict"
GRAPHS: Final = "decode"
_RAY_EXECUTOR: Final = "nnsight_engine.vllm_backend.ray_executor.ClusterExecutor"
SCHEDULER_CLASS: Final = "nnsight_engine.vllm_backend.scheduler.InterventionScheduler"
_RESULTS_ATTRIBUTE: Final = "nnsight_engine_results"
_FACTS_ATTRIBUTE: Final = "nnsight_engine_facts"
_MAMBA2: Final = frozenset({"falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"})


@dataclasses.dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits that the worker enforces.

    Attributes:
        max_capture_bytes_per_request: Limit on the captures of one declarative request.
        max_capture_bytes_engine: Limit on the captures that all declarative requests hold together.
        loaded_dictionary_bytes: Limit on the weights of all dictionaries that are loaded on the device.
        max_edits: Number of named edits that the engine keeps.
        max_edit_bytes: Limit on the encoded size of all named edits together.
        trace_step_s: Seconds that one block may compute within one step.
        max_trace_bytes: Limit on the memory of one traced request: its saved values, and what is kept for it.
        sandbox: ``process``: each untrusted trace in a process of its own; ``off``: in the worker, as the
            server does not mark any block as untrusted.
        sandbox_bytes: Memory limit of a sandbox process, including memory that it shares with the worker.
        sandbox_step_s: Seconds that all blocks of a sandbox together may compute within one step.
        sandbox_wait_s: Seconds that one step of the engine waits for all sandboxes of one tenant together.
        sandbox_cpu_s: CPU seconds that a sandbox may use in its lifetime.
        sandbox_blocks: Number of blocks and edits of one sandboxed trace that may wait at the same time.
        sandbox_needs_namespaces: Refuse sandboxes on a machine that cannot give them namespaces of their own.
        max_sandboxes: Number of sandboxes that may be in use at the same time.
        fair_window_s: Seconds for which a tenant without requests still counts among those that share; 0
            turns fair sharing off.
        fair_step: Maximum duration of a step, as a multiple of the shortest step's, while a tenant within its
            share is active beside one that is not.
        max_work: Limit on the work of a request's operations at one position, see ``plans.work``.
        max_step_work: Limit on the work of all operations in one step.
        taps: Points of the residual stream that have taps, see ``chosen_taps``.
        intervention_graphs: Steps with full CUDA graphs with interventions, ``decode`` or ``off``.
        points: Which models have points: ``any`` decoder, or ``strict`` for those of the tables.
    """

    max_capture_bytes_per_request: int = 256 * 1024 * 1024
    max_capture_bytes_engine: int = 1024 * 1024 * 1024
    loaded_dictionary_bytes: int = 2 * 1024 * 1024 * 1024
    max_edits: int = 64
    max_edit_bytes: int = 256 * 1024 * 1024
    trace_step_s: float = 10.0
    max_trace_bytes: int = 4 * 1024 * 1024 * 1024
    sandbox: str = PROCESS
    sandbox_bytes: int = 1024 * 1024 * 1024
    sandbox_step_s: float = 0.75
    sandbox_wait_s: float = 0.03
    sandbox_cpu_s: int = 300
    sandbox_blocks: int = 32
    sandbox_needs_namespaces: bool = False
    max_sandboxes: int = 16
    fair_window_s: float = 5.0
    fair_step: float = 1.25
    max_work: float = 64.0
    max_step_work: float = 256.0
    taps: str = ALL_TAPS
    intervention_graphs: str = GRAPHS
    points: str = ANY

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)

    @property
    def sandbox_message_bytes(self) -> int:
        """Limit on the size of one message to or from a sandbox, such as its saved values."""
        return min(self.max_trace_bytes, self.sandbox_bytes // 4)

    @classmethod
    def read(cls, config: VllmConfig) -> EngineLimits:
        """Read the limits that ``engine_options`` wrote; defaults if there is no entry."""
        entry = (config.additional_config or {}).get(CONFIG_KEY, {})
        return cls(**entry.get("limits", {}))


def engine_options(limits: EngineLimits) -> dict[str, Any]:
    """Return the engine arguments that add interventions, with runner V2; raise UnsupportedOptionError."""
    use_runner_v2()
    return {
        "worker_cls": WORKER_CLASS,
        "scheduler_cls": SCHEDULER_CLASS,
        "additional_config": {CONFIG_KEY: {"limits": dataclasses.asdict(limits)}},
    }


def caches_missing_states(config: VllmConfig) -> bool:
    """Return whether a prefix cache is on that needs states which the kernels of Mamba-2 on a CPU lack.

    vLLM turns the cache on by itself for hybrids.
    """
    return (
        current_platform.is_cpu()
        and bool(config.cache_config.enable_prefix_caching)
        and config.model_config.hf_text_config.model_type in _MAMBA2
    )


def engine_config(args: EngineArgs, **context: Any) -> VllmConfig:
    """Return the configuration, without a prefix cache that would need missing states; changes ``args``."""
    is_cache_chosen = args.enable_prefix_caching is not None
    config = args.create_engine_config(**context)
    if not is_cache_chosen and caches_missing_states(config):
        args.enable_prefix_caching = False
        config = args.create_engine_config(**context)
    return config


def ray_executor() -> Any:
    """Return this project's Ray executor, imported late, since importing Ray is slow.

    vLLM allows pipeline stages only for a class, not for a name.

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
    names = {
        "cpu": "vllm.v1.worker.cpu_worker.CPUWorker",
        "cuda": "vllm.v1.worker.gpu_worker.Worker",
        "rocm": "vllm.v1.worker.gpu_worker.Worker",
    }
    name = names.get(current_platform.device_type, names["cuda"])
    return resolve_obj_by_qualname(name)


def params_of(request: Any) -> Any:
    return request.pooling_params if request.sampling_params is None else request.sampling_params


def _extras_of(params: SamplingParams | PoolingParams | None) -> Mapping[str, Any]:
    extras = params.extra_kwargs if isinstance(params, PoolingParams) else params and params.extra_args
    return extras or {}


def entry_of(params: Any, key: str) -> Any:
    return _extras_of(params).get(key)


def brings(params: Any, key: str) -> bool:
    return key in _extras_of(params)


def add_entries(params: SamplingParams | PoolingParams, entries: Mapping[str, Any]) -> None:
    name = "extra_kwargs" if isinstance(params, PoolingParams) else "extra_args"
    setattr(params, name, {**_extras_of(params), **entries})


def attach_results(output: Any, results: StepResults) -> Any:
    """Attach results to a runner's output, which vLLM sends pickled between its own processes."""
    if output is EMPTY_MODEL_RUNNER_OUTPUT:
        # vLLM shares this object between all steps without tokens; it must not keep this step's results.
        output = copy.copy(output)
    setattr(output, _RESULTS_ATTRIBUTE, results)
    return output


def detach_results(output: Any) -> StepResults | None:
    return getattr(output, _RESULTS_ATTRIBUTE, None)


def mark_step(scheduled: Any, *, is_single_tenant: bool, is_alone: bool) -> None:
    """Record whether all requests are one tenant's, and whether no other step with tokens is under way."""
    setattr(scheduled, _FACTS_ATTRIBUTE, (is_single_tenant, is_alone))


def is_single_tenant(scheduled: Any) -> bool:
    return bool(getattr(scheduled, _FACTS_ATTRIBUTE, (False, True))[0])


def is_alone(scheduled: Any) -> bool:
    return bool(getattr(scheduled, _FACTS_ATTRIBUTE, (False, True))[1])


def record_allocated_blocks(manager: Any) -> None:
    """Make a KV cache manager record the blocks it allocates, even if vLLM does not need to zero any."""
    for group in manager.coordinator.single_type_managers:
        if not isinstance(group.kv_cache_spec, MambaSpec | CircularBufferSpec):
            group._record_new_block_ids = True  # noqa: SLF001 - vLLM sets it per model


def describe_model(points: ModelPoints, config: VllmConfig, limits: EngineLimits) -> ModelSpec:
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
        leaves=_with_tiers([*points.leaf_specs(), *_vision(points, config)], limits, len(points.layers)),
        max_capture_bytes=limits.max_capture_bytes_per_request,
        max_work=limits.max_work,
        num_stages=config.parallel_config.pipeline_parallel_size,
        max_dictionary_bytes=limits.loaded_dictionary_bytes,
    )


def _vision(points: ModelPoints, config: VllmConfig) -> list[LeafSpec]:
    """Return the points of images, if the model sees and its residual stream is known.

    Those in the encoder are left out where vLLM compiles it or divides images over ranks, and where another
    engine encodes them.
    """
    model = config.model_config
    embed = next((leaf for leaf in points.leaf_specs() if leaf.name == "embed.output"), None)
    if embed is None or not hasattr(model.hf_config, "vision_config"):
        return []
    merged = dataclasses.replace(embed, name=VISION)
    is_shared = config.parallel_config.world_size > 1 and model.multimodal_config.mm_encoder_tp_mode == "data"
    is_elsewhere = config.ec_transfer_config is not None or config.parallel_config.pipeline_parallel_size > 1
    if not points.encoder or is_shared or is_elsewhere or config.compilation_config.compile_mm_encoder:
        return [merged]
    width: int = model.hf_config.vision_config.hidden_size
    num_merged: int = getattr(model.hf_config, points.family.merged_patches)
    layers = tuple(range(len(points.encoder)))
    encoder = dataclasses.replace(
        embed, name=ENCODER_BLOCK, shape=(width,), layers=layers, num_patches=num_merged**2
    )
    return [merged, encoder]


def _with_tiers(leaves: Sequence[LeafSpec], limits: EngineLimits, num_layers: int) -> tuple[LeafSpec, ...]:
    """Return the leaves, with tier ``eager`` for leaves of the residual stream that lack a tap somewhere."""
    taps = chosen_taps(limits.taps, num_layers)

    def has_all(leaf: LeafSpec) -> bool:
        return {tap_of(leaf.name, layer) for layer in range(num_layers)} <= {None, *taps}

    return tuple(leaf if has_all(leaf) else dataclasses.replace(leaf, tier="eager") for leaf in leaves)
