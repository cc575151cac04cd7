"""The role of a worker in tracing: one rank or stage runs the blocks, the others serve its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnsight_engine.vllm_backend.traces.peer_traces import PeerTraces
from nnsight_engine.vllm_backend.traces.ranks import Ranks
from nnsight_engine.vllm_backend.traces.stages import (
    EarlyStageTraces,
    LastStageTraces,
    StageLink,
    num_stages,
    own_stage,
)
from nnsight_engine.vllm_backend.traces.tensor_parallel import TpFollowerTraces, TpLeaderTraces
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.model_points import ModelPoints


def traces_of_worker(
    points: ModelPoints, config: VllmConfig, limits: EngineLimits
) -> WorkerTraces | PeerTraces:
    """Return the traces of this worker, by its role; all workers of a group must call this together."""
    last = num_stages() - 1
    if points.tensor_parallel_size > 1:  # and one stage: both together are refused at start
        ranks = Ranks.of_this_worker()
        if ranks.is_leader:
            return TpLeaderTraces(points, config, ranks, limits)
        return TpFollowerTraces(points, config, ranks)
    if own_stage() < last:
        return EarlyStageTraces(points, config, StageLink(last))
    if last:
        links = [StageLink(stage) for stage in range(last)]
        return LastStageTraces(points, config, links, limits)
    return WorkerTraces(points, config, limits)
