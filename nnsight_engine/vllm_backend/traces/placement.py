"""Which part a worker has in tracing: of several ranks or pipeline stages, one runs the blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnsight_engine.vllm_backend.traces.following import FollowingTraces
from nnsight_engine.vllm_backend.traces.leading import LeadingTraces
from nnsight_engine.vllm_backend.traces.ranks import Ranks
from nnsight_engine.vllm_backend.traces.stages.links import Link, num_stages, own_stage
from nnsight_engine.vllm_backend.traces.stages.offering import StageTraces
from nnsight_engine.vllm_backend.traces.stages.serving import ServingTraces
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.families import ModelPoints


def traces_of_worker(
    points: ModelPoints, config: VllmConfig, limits: EngineLimits
) -> WorkerTraces | StageTraces:
    """Return this worker's traces; where there are several workers, all must make theirs together."""
    last = num_stages() - 1
    if points.tensor_parallel_size > 1:  # and one stage: both together are refused at start
        ranks = Ranks.of_this_worker()
        cls = LeadingTraces if ranks.leads else FollowingTraces
        return cls(points, config, ranks, limits)
    if own_stage() < last:
        return StageTraces(points, config, Link(last))
    if last:
        links = [Link(stage) for stage in range(last)]
        return ServingTraces(points, config, links, limits)
    return WorkerTraces(points, config, limits)
