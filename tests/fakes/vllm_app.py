"""A stand-in for vLLM's application: it stores responses as vLLM's does, and repeats all other bodies.

A body with ``wait`` is answered with events until the client leaves, one with ``fail`` with one that fails,
one with ``idle`` with two events and a pause between them.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from api_schemas.errors import ApiError, ErrorCode
from app.engine.stored_responses import StoredResponses

num_open: list[None] = []
"""An item for each stream that is open."""


async def _endless() -> AsyncIterator[str]:
    num_open.append(None)
    try:
        while True:
            yield "data: {}\n\n"
            await asyncio.sleep(0.01)
    finally:
        num_open.pop()


async def _idle() -> AsyncIterator[str]:
    yield "data: {}\n\n"
    await asyncio.sleep(0.3)
    yield "data: [DONE]\n\n"


async def _failing() -> AsyncIterator[str]:
    yield "data: {}\n\n"
    raise RuntimeError from ApiError(ErrorCode.QUEUE_FULL, "quota of mine")


def vllm_app() -> Starlette:
    """Return the application."""
    stored = StoredResponses()

    async def create(request: Request) -> Response:
        body = {"id": f"resp_{secrets.token_hex(8)}", "request": await request.json()}
        stored[body["id"]] = body
        return JSONResponse(body)

    async def find(request: Request) -> Response:
        if "fail" in request.query_params:
            return StreamingResponse(_failing(), media_type="text/event-stream")
        body = stored.get(request.path_params["response_id"])
        if body is None:
            return JSONResponse({"error": {"message": "There is none.", "code": 404}}, status_code=404)
        return JSONResponse(body)

    async def repeat(request: Request) -> Response:
        body = await request.body()
        if b'"fail"' in body:
            return StreamingResponse(_failing(), media_type="text/event-stream")
        if b'"idle"' in body:
            return StreamingResponse(_idle(), media_type="text/event-stream")
        if b'"wait"' in body:
            return StreamingResponse(_endless(), media_type="text/event-stream")
        headers = sorted({name.lower() for name in request.headers})
        is_json = request.headers.get("content-type") == "application/json"
        return JSONResponse({"body": json.loads(body) if is_json else len(body), "headers": headers})

    return Starlette(
        routes=[
            Route("/v1/responses", create, methods=["POST"]),
            Route("/v1/responses/{response_id}", find),
            Route("/v1/responses/{response_id}/cancel", find, methods=["POST"]),
            Route("/{path:path}", repeat, methods=["GET", "POST"]),
        ]
    )
