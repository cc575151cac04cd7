"""The route of a training, of a vector or of a detector: its result, or a stream of its progress."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from api_schemas.fields import Listed
from api_schemas.training import LabelledPrompts
from app.admission.estimates import of_training
from app.admission.rates import INTERVENING
from app.auth.principal import Principal
from app.catalog.training import Report, TrainingQueue
from app.components import Components
from app.http.bodies import BodyLimits, read_object
from app.http.contexts import RequestContext
from app.http.deadlines import begin, while_connected
from app.http.errors import DONE_FRAME, validated
from app.http.openapi import EVENTS_TYPE, error_responses, json_body, json_events
from app.routes.catalog import catalog_of
from app.routes.context import Asked, Served, Trains
from app.services.streaming import begun, event_stream
from app.storage.versions import Kind

ResultT = TypeVar("ResultT")
ProgressT = TypeVar("ProgressT", bound=BaseModel)


async def progress_events(
    train: Callable[[Callable[[ProgressT], None]], Coroutine[Any, Any, ResultT]],
    last: Callable[[ResultT], BaseModel],
) -> AsyncGenerator[str, None]:
    """Yield progress, then the result, as server-sent events; closing early cancels the work."""
    events: asyncio.Queue[ProgressT | None] = asyncio.Queue()
    working = asyncio.create_task(train(events.put_nowait))
    working.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield _frame(event)
        yield _frame(last(await working))
        yield DONE_FRAME
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def _frame(event: BaseModel) -> str:
    return f"data: {event.model_dump_json(exclude_none=True)}\n\n"


WantedT = TypeVar("WantedT", bound=LabelledPrompts)
T = TypeVar("T", bound=Listed)
Train = Callable[[TrainingQueue, Any, WantedT, Request, Principal, Report], Coroutine[Any, Any, T]]


def add_training_route(
    router: APIRouter,
    kind: Kind[T],
    wanted: type[WantedT],
    event: type[BaseModel],
    train: Train[WantedT, T],
    *,
    summary: str,
    description: str,
) -> None:
    """Add the route that trains one; ``event`` is that of its stream, with the result in the last."""

    @router.post(
        "/train",
        name=f"train_{kind.name}",
        status_code=201,
        summary=summary,
        description=description,
        openapi_extra=json_body(wanted),
        responses={
            200: {
                "description": f"With `stream`: progress events, then the {kind.name}; ends with `[DONE]`.",
                "content": {EVENTS_TYPE: {"schema": json_events(event, last="[DONE]")}},
            },
            201: {"model": kind.shown, "description": f"The {kind.name}."},
            **error_responses(400, 404, 409, 413, 422, 429, 500, 503),
        },
        response_model=None,
    )
    async def train_thing(request: Request, context: Served, asked: Asked, caller: Trains) -> Response:
        run = functools.partial(train, context.trainings, catalog_of(context, kind))
        last = lambda made: event.model_validate({"type": kind.name, kind.name: made})  # noqa: E731
        return await training_answer(request, context, asked, caller, wanted, run, last)


async def training_answer(
    request: Request,
    context: Components,
    asked: RequestContext,
    caller: Principal,
    wanted_type: type[WantedT],
    train: Callable[[WantedT, Request, Principal, Report], Coroutine[Any, Any, T]],
    last: Callable[[T], BaseModel],
) -> Response:
    """Run the training of a request, whose body is not read yet.

    ``last`` returns the last event of a stream, with the result.

    Raises:
        ApiError: The request is invalid, or failed before the first event of a stream.
    """
    settings, admitted = context.settings, asked.admitted
    if admitted is not None:
        await admitted.check(*INTERVENING)
    limits = BodyLimits(settings.max_body_bytes, settings.max_json_depth, settings.upload_idle_timeout_s)
    wanted = validated(wanted_type, await read_object(request, limits))
    if admitted is not None:
        await admitted.reserve(of_training(wanted))
    run = functools.partial(train, wanted, request, caller)
    events = progress_events(run, last) if wanted.stream else None
    return await progress_answer(request, context, asked, run, events, 201)


async def progress_answer(
    request: Request,
    context: Components,
    asked: RequestContext,
    run: Callable[[Callable[[Any], None]], Coroutine[Any, Any, BaseModel]],
    events: AsyncGenerator[str, None] | None,
    status: int,
) -> Response:
    """Return the result of work, or the stream of its progress if there are ``events``."""
    settings, deadline = context.settings, asked.deadline
    if events is None:
        made = await while_connected(request.receive, run(lambda _: None), deadline)
        return Response(made.model_dump_json(), status, media_type="application/json")
    # An error before the first event gets its own HTTP status, unless the work waits for long.
    beginning = await begin(request.receive, begun(events), deadline, settings.sse_keep_alive_s or None)
    return event_stream(beginning, asked, settings)
