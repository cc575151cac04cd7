from __future__ import annotations

from typing import Final

from nnsight_engine.plans.records import StepResults
from nnsight_engine.vllm_backend.traces.peer_traces import PeerTraces
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

_IDLE_S: Final = 0.02
"""Seconds that a step without tokens waits for blocks; new requests may arrive meanwhile."""


class TraceReports:
    """Ends steps for traces, and reports what the scheduler has to know."""

    def __init__(self, traces: WorkerTraces | PeerTraces) -> None:
        self._traces = traces
        self._waiting: frozenset[str] = frozenset()
        self._throttled: frozenset[str] = frozenset()

    @property
    def is_due(self) -> bool:
        """Whether there are traces, or a throttled tenant of which the scheduler must hear again."""
        return bool(not self._traces.idle or self._throttled)

    def end_step(self) -> StepResults | None:
        if not self.is_due:
            return None
        traces = self._traces
        undone = list(traces.undone)
        ended, reports = traces.end(), traces.reports()
        waiting, throttled = traces.waiting, traces.throttled
        is_known = waiting == self._waiting and throttled == self._throttled
        if is_known and not (ended or reports or undone):
            return None
        self._waiting, self._throttled = waiting, throttled
        return StepResults(
            {}, {}, {}, ended=ended, reports=reports, undone=undone, waiting=waiting, throttled=throttled
        )

    def end_idle_step(self, *, is_alone: bool) -> StepResults | None:
        """End a step without tokens; if it is alone, there is time to wait for blocks. None without news."""
        if not self.is_due:
            return None
        if is_alone:
            self._traces.wait_for_any(_IDLE_S)
        return self.end_step()
