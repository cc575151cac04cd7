"""The traces of a worker, by its place among ranks and stages: one of them runs the blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed import get_pp_group, get_tp_group

from nnsight_engine.vllm_backend.traces.ranks import Ranks
from nnsight_engine.vllm_backend.traces.stages import EarlyStageDispatcher, LastStageTraces, StageLink
from nnsight_engine.vllm_backend.traces.tensor_parallel import FollowingDispatcher, LeadingDispatcher
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.model_points import ModelPoints
    from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher


def traces_of_worker(points: ModelPoints, config: VllmConfig, limits: EngineLimits) -> WorkerTraces:
    """Return the traces of this worker; all workers of a group must call this together."""
    last, stage = get_pp_group().world_size - 1, get_pp_group().rank_in_group
    dispatcher: TraceDispatcher | None = None
    if points.tensor_parallel_size > 1:  # and one stage: both together are refused at start
        ranks = Ranks(get_tp_group())
        dispatcher = (FollowingDispatcher if ranks.rank else LeadingDispatcher)(ranks, points)
    elif stage < last:
        dispatcher = EarlyStageDispatcher(StageLink(last), points)
    elif last:
        return LastStageTraces(points, config, list(map(StageLink, range(last))), limits)
    return WorkerTraces(points, config, limits, dispatcher=dispatcher)
