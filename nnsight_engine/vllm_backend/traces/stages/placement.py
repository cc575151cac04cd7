"""Which part a worker has in a pipeline: the last stage runs the blocks, the others offer it values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnsight_engine.vllm_backend.traces.stages.links import Link, num_stages, own_stage
from nnsight_engine.vllm_backend.traces.stages.offering import StageTraces
from nnsight_engine.vllm_backend.traces.stages.serving import ServingTraces
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.families import ModelPoints


def traces_of_stage(
    points: ModelPoints, config: VllmConfig, limits: EngineLimits
) -> WorkerTraces | StageTraces:
    """Return the worker's traces; with several stages, all workers must make theirs together."""
    last = num_stages() - 1
    if own_stage() < last:
        return StageTraces(points, config, Link(last))
    if last:
        links = [Link(stage) for stage in range(last)]
        return ServingTraces(points, config, links, limits)
    return WorkerTraces(points, config, limits)
