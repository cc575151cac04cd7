"""An application as Ray Serve's own ingress, and a router that goes by prompts where it sees them.

Ray's processes import this, so that it has nothing of the tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

from ray import serve
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MARK: Final = "a beginning that many prompts have"
PIECE_BYTES: Final = 64 * 1024
NUM_PIECES: Final = 1024


class MarkRouter(RequestRouter):
    """Sends all requests in which it finds ``MARK`` to one replica, others to each in turn."""

    _num_chosen = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Look at all that a router is given of a request."""
        order = sorted(candidate_replicas, key=lambda one: one.replica_id.unique_id)
        if pending_request is None:
            return [order]
        found = pending_request.args, pending_request.kwargs, pending_request.metadata
        if MARK in repr(found):
            return [[one] for one in order]
        self._num_chosen += 1
        start = self._num_chosen % len(order)
        return [[one] for one in order[start:] + order[:start]]


class Counts:
    """What one replica has sent."""

    sent = 0


def _headers() -> dict[str, str]:
    return {"x-replica": serve.get_replica_context().replica_id.unique_id}


async def count(_request: Request) -> Response:
    """Answer with what was sent."""
    return JSONResponse({"sent": Counts.sent}, headers=_headers())


async def flood(_request: Request) -> Response:
    """Answer with more than sockets hold."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        for _ in range(NUM_PIECES):
            yield b"x" * PIECE_BYTES
            Counts.sent += PIECE_BYTES

    return StreamingResponse(pieces(), headers=_headers())


async def upload(_request: Request) -> Response:
    """Read nothing of the body."""
    await asyncio.Event().wait()
    return Response()


def _application() -> Starlette:
    any_method = ["GET", "POST"]
    return Starlette(
        routes=[
            Route("/", count, methods=any_method),
            Route("/flood", flood),
            Route("/upload", upload, methods=any_method),
        ]
    )


class Direct:
    """A replica that is an application."""


def deployment() -> Any:
    """Return replicas that Ray Serve's proxies lead to by themselves."""
    return serve.deployment(serve.ingress(_application)(Direct))
