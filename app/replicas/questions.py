"""Queries of the front to its replicas: metrics, models, readiness, and whether a caller is accepted.

Queries take no lease, so that they start no replica and wait for none. Each has a timeout, so that an
unresponsive replica delays other requests only briefly.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.replicas.merging import merged
from app.replicas.options import ModelOptions
from app.replicas.protocol import Place, Replicas, none_ready
from app.replicas.relay import Relay, Said

_METRICS_S: Final = 10.0
_FIRST_S: Final = 2.0
_OK: Final = 200
_UNAVAILABLE: Final = 503


class Questions:
    """The queries of one front.

    Args:
        models: The options of each model.
        replicas: Returns the replicas of each model, in that order; none before they are ready.
        relay: Returns the relay that opens connections to them.
    """

    def __init__(
        self,
        models: Sequence[ModelOptions],
        replicas: Callable[[], list[Replicas]],
        relay: Callable[[], Relay],
    ) -> None:
        """Ask nothing yet."""
        self._models = models
        self._replicas = replicas
        self._relay = relay

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of all replicas, if the caller may read them."""
        places = await self.places()
        found = await asyncio.gather(*(self._ask(one, "/metrics", request, _METRICS_S) for one in places))
        said = [one for one in found if one is not None]
        refused = next((one for one in said if one.status != _OK), None)
        if refused is not None:
            return refused.response()
        pages = {one.place.name: one.text for one in said}
        return Response(merged(pages), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def models(self, request: Request) -> Response:
        """Return the lists of all models as one; models without a ready replica are listed by name."""
        asking = (self._first(one, "/v1/models", request) for one in self._replicas())
        found = await asyncio.gather(*asking)
        said = [one for one in found if one is not None and one.status != _UNAVAILABLE]
        if not said:
            raise none_ready()
        refused = next((one for one in said if one.status != _OK), None)
        if refused is not None:
            return refused.response()
        data: list[Any] = []
        for model, one in zip(self._models, found, strict=True):
            is_there = one is not None and one.status == _OK
            data += msgspec.json.decode(one.text)["data"] if one and is_there else _cards(model)
        return JSONResponse({"object": "list", "data": data})

    async def ready(self, request: Request, wanted: Collection[int]) -> Response:
        """Return whether each of these models has a ready replica."""
        replicas = self._replicas()
        if not replicas:
            raise none_ready()
        asking = (self._first(replicas[index], "/health/ready", request) for index in sorted(wanted))
        found = await asyncio.gather(*asking)
        for one in found:
            if one is None:
                raise none_ready()
            if one.status != _OK:
                return one.response()
        first = next(iter(found), None)  # none where all models may have no replicas
        return JSONResponse({"status": "ready"}) if first is None else first.response()

    async def refusal(self, request: Request) -> Response | None:
        """Return the replicas' rejection of a caller; None if they accept the caller, or none is ready."""
        for one in self._replicas():
            said = await self._first(one, "/v1/models", request)
            if said is not None and said.status != _UNAVAILABLE:
                return None if said.status == _OK else said.response()
        return None

    async def place_of(self, name: str) -> Place | None:
        """Return the address of a replica; None if it has stopped.

        Raises:
            ApiError: ``starting``: there are no replicas at all.
        """
        places = await self.places()
        if not places:
            raise none_ready()
        return next((one for one in places if one.name == name), None)

    async def places(self) -> list[Place]:
        """Return the addresses of the replicas of all models."""
        found = await asyncio.gather(*(one.places() for one in self._replicas()))
        return [place for some in found for place in some]

    async def _first(self, replicas: Replicas, path: str, request: Request) -> Said | None:
        """Return the answer of the first ready replica; else that of an unavailable one, or None."""
        places = await replicas.places()
        unavailable: Said | None = None
        for place in random.sample(places, len(places)):
            said = await self._ask(place, path, request, _FIRST_S)
            if said is not None and said.status != _UNAVAILABLE:
                return said
            unavailable = said or unavailable
        return unavailable

    async def _ask(self, place: Place, path: str, request: Request, most_s: float) -> Said | None:
        try:
            async with asyncio.timeout(most_s):
                return await self._relay().ask(place, path, request)
        except TimeoutError:
            return None


def _cards(model: ModelOptions) -> list[dict[str, Any]]:
    return [
        {"id": name, "object": "model", "created": 0, "owned_by": "nnsight-engine"} for name in model.names
    ]


__all__ = ["Questions"]
