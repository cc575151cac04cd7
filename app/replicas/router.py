"""Ray Serve's side of ``replica_ranking``: the router that runs beside each handle, in the front."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from app.replicas.replica_ranking import ranked


class PrefixRouter(RequestRouter):
    _slack = 8

    def initialize_state(self, **kwargs: Any) -> None:
        self._slack = int(kwargs.get("slack", self._slack))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in order of preference, each in a group of its own to fix the order."""
        given: dict[str, Any] = {}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if none of them has room
            given = pending_request.kwargs
        replicas = {one.replica_id.unique_id: one for one in candidate_replicas}
        cache = self.replica_queue_len_cache
        loads = {name: cache.get(one.replica_id) or 0 for name, one in replicas.items()}
        order = ranked(loads, given.get("key", b""), tried=given.get("tried", ()), slack=self._slack)
        return [[replicas[name]] for name in order]


__all__ = ["PrefixRouter"]
