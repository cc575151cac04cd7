"""Replicas accessed through Ray Serve: a request holds a call of the replica's ``lease`` while it runs.

So Ray Serve counts the running requests, for scaling and for its router, while no byte of a request or
response passes through Ray. That router runs beside each handle, in the front, and chooses as ``routing``
does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Collection
from typing import Any, Final

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from app.replicas.protocol import ReplicaAddress, none_ready
from app.replicas.routing import ranked

logger = logging.getLogger(__name__)

_ADDRESSES_TIMEOUT_S: Final = 2.0
_RETRY_DELAY_S: Final = 0.1


class ServedReplicas:
    def __init__(self, handle: DeploymentHandle, wait_s: float) -> None:
        self._handle = handle
        self._leases = handle.options(method_name="lease", stream=True)
        self._wait_s = wait_s
        self._last_addresses: list[ReplicaAddress] = []

    @contextlib.asynccontextmanager
    async def acquire(
        self, key: bytes = b"", *, tried: Collection[str] = ()
    ) -> AsyncGenerator[ReplicaAddress, None]:
        """See ``Replicas``; the replica counts the request until the call of its ``lease`` is cancelled."""
        arguments = {"key": key, "tried": list(tried)}
        leases: list[Any] = []
        try:
            try:
                async with asyncio.timeout(self._wait_s):
                    name, url = await self._lease_replica(leases, arguments)
            except (TimeoutError, RayServeException) as error:
                logger.info("no replica was chosen: %r", error)
                raise none_ready() from error
            yield ReplicaAddress(name, url)
        finally:
            for lease in leases:
                _cancel(lease)

    async def addresses(self) -> list[ReplicaAddress]:
        """Return the last known ones if a replica does not answer in time."""
        try:
            answers = await self._handle.broadcast("address").results_async(
                timeout_s=_ADDRESSES_TIMEOUT_S, return_exceptions=True
            )
        except TimeoutError:
            return self._last_addresses
        except (RayError, RayServeException):
            return []
        self._last_addresses = [
            ReplicaAddress(*answer) for answer in answers if not isinstance(answer, BaseException)
        ]
        return self._last_addresses

    async def _lease_replica(self, leases: list[Any], arguments: dict[str, Any]) -> tuple[str, str]:
        """Retry until a replica answers; one may have died before the router noticed."""
        while True:
            leases.append(self._leases.remote(**arguments))
            try:
                address: tuple[str, str] = await anext(leases[-1])
            except (RayError, StopAsyncIteration) as error:
                logger.info("the chosen replica has stopped: %r", error)
                await asyncio.sleep(_RETRY_DELAY_S)
            else:
                return address


def _cancel(lease: Any) -> None:
    try:
        lease.cancel()
    except Exception as error:  # noqa: BLE001 - it has ended by itself, or its replica has
        logger.debug("a lease could not be cancelled: %r", error)


class PrefixRouter(RequestRouter):
    _slack = 8

    def initialize_state(self, **kwargs: Any) -> None:
        self._slack = int(kwargs.get("slack", self._slack))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in order of preference, each in a group of its own to fix the order."""
        arguments: dict[str, Any] = {}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if none of them has room
            arguments = pending_request.kwargs
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        cache = self.replica_queue_len_cache
        loads = {name: cache.get(replica.replica_id) or 0 for name, replica in replicas.items()}
        order = ranked(loads, arguments.get("key", b""), tried=arguments.get("tried", ()), slack=self._slack)
        return [[replicas[name]] for name in order]
