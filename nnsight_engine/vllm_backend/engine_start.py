"""Starting of vLLM's engine for ``VLLM``; imports vLLM, so it is imported only if an engine runs locally."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm import EngineArgs
from vllm.platforms import current_platform

from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.tracing.tracer import Backend
from nnsight_engine.vllm_backend.compat import (
    EngineLimits,
    engine_config,
    engine_options,
    ray_executor,
)
from nnsight_engine.vllm_backend.engines import AsyncEngine, SyncEngine
from nnsight_engine.vllm_backend.unsupported_options import check_supported
from nnsight_engine.vllm_backend.vllm_tracer import (
    RequestScanner,
    RequestTracer,
    StreamBackend,
    StreamTracer,
)

_HOSTS: Final[Mapping[str, type[SyncEngine | AsyncEngine]]] = {"sync": SyncEngine, "async": AsyncEngine}
_COMPILING: Final = frozenset({"enforce_eager", "compilation_config", "optimization_level"})
"""Arguments that say whether the model is compiled. On a CPU it is only if one does: it takes minutes."""
SCANNER: Final = RequestScanner


def start(
    engine_args: Mapping[str, Any], limits: EngineLimits | None, mode: str, *, has_envoys: bool
) -> SyncEngine | AsyncEngine:
    """Start the engine, and return this process's interface to it; ``mode`` is ``sync`` or ``async``."""
    arguments = dict(engine_args)
    ours = engine_options(limits or EngineLimits())
    ours["additional_config"] = {**arguments.pop("additional_config", {}), **ours["additional_config"]}
    if arguments.get("distributed_executor_backend") == "ray":
        arguments["distributed_executor_backend"] = ray_executor()
    if current_platform.is_cpu() and not _COMPILING & arguments.keys():
        arguments["enforce_eager"] = True
    args = EngineArgs(**arguments, **ours)
    config = engine_config(args)
    arguments["enable_prefix_caching"] = args.enable_prefix_caching  # ``engine_config`` may have changed it
    check_supported(config)
    if mode == "sync" and config.parallel_config.data_parallel_size > 1:
        raise UnsupportedOptionError(
            'data_parallel_size above 1 needs mode="async": vLLM\'s blocking class drives one engine only'
        )
    if has_envoys and config.parallel_config.world_size > 1:
        raise UnsupportedOptionError(
            "envoys= is not supported with tensor_parallel_size or pipeline_parallel_size above 1 "
            "yet: only the standard classes can combine the parts of modules; use one rank"
        )
    return _HOSTS[mode]({**arguments, **ours})


def tracing_with(
    host: SyncEngine | AsyncEngine, tracer_cls: type[RequestTracer] | None, backend: Backend | None
) -> tuple[type[RequestTracer], Backend | None]:
    """Return the tracer class and the backend; those that fit the engine if none are given."""
    tracer_cls = tracer_cls or (StreamTracer if isinstance(host, AsyncEngine) else RequestTracer)
    if backend is None and issubclass(tracer_cls, StreamTracer):
        backend = StreamBackend()
    return tracer_cls, backend
