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
from app.http.contexts import RequestContext, start_while_connected, while_connected
from app.http.errors import DONE_FRAME, validated
from app.http.openapi import EVENTS_TYPE, error_responses, json_body, json_events
from app.routes.catalog import catalog_of
from app.routes.parameters import CurrentContext, ServerComponents, Trainer
from app.services.streaming import event_stream, with_first_event
from app.storage.versions import Kind

ResultT = TypeVar("ResultT")
ProgressT = TypeVar("ProgressT", bound=BaseModel)


async def progress_events(
    work: Callable[[Callable[[ProgressT], None]], Coroutine[Any, Any, ResultT]],
    result_event: Callable[[ResultT], BaseModel],
) -> AsyncGenerator[str, None]:
    """Yield progress, then the result, as server-sent events; closing early cancels the work.

    ``work`` gets the function that reports progress.
    """
    events: asyncio.Queue[ProgressT | None] = asyncio.Queue()
    working = asyncio.create_task(work(events.put_nowait))
    working.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield _frame(event)
        yield _frame(result_event(await working))
        yield DONE_FRAME
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def _frame(event: BaseModel) -> str:
    # Without the event's own nulls, but with those of the result in it.
    given = {name for name in type(event).model_fields if getattr(event, name) is not None}
    return f"data: {event.model_dump_json(include=given)}\n\n"


WantedT = TypeVar("WantedT", bound=LabelledPrompts)
T = TypeVar("T", bound=Listed)
Train = Callable[[TrainingQueue, Any, WantedT, Request, Principal, Report], Coroutine[Any, Any, T]]


def add_training_route(
    router: APIRouter,
    kind: Kind[T],
    request_type: type[WantedT],
    event: type[BaseModel],
    train: Train[WantedT, T],
    *,
    summary: str,
    description: str,
) -> None:
    """Add the route that trains a thing of a kind.

    ``event`` is the type of its stream's events, of which the last has the result.
    """

    @router.post(
        "/train",
        name=f"train_{kind.name}",
        status_code=201,
        summary=summary,
        description=description,
        openapi_extra=json_body(request_type),
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
    async def train_thing(
        request: Request, components: ServerComponents, context: CurrentContext, caller: Trainer
    ) -> Response:
        train_named = functools.partial(train, components.trainings, catalog_of(components, kind))
        result_event = lambda result: event.model_validate({"type": kind.name, kind.name: result})  # noqa: E731
        return await training_answer(
            request, components, context, caller, request_type, train_named, result_event
        )


async def training_answer(
    request: Request,
    components: Components,
    context: RequestContext,
    caller: Principal,
    request_type: type[WantedT],
    train: Callable[[WantedT, Request, Principal, Report], Coroutine[Any, Any, T]],
    result_event: Callable[[T], BaseModel],
) -> Response:
    """Run the training of a request, whose body is not read yet.

    ``result_event`` returns the last event of a stream, with the result.

    Raises:
        ApiError: The request is invalid, or failed before the first event of a stream.
    """
    settings, admitted = components.settings, context.admitted
    if admitted is not None:
        await admitted.check(*INTERVENING)
    limits = BodyLimits(settings.max_body_bytes, settings.upload_idle_timeout_s)
    training_request = validated(request_type, await read_object(request, limits))
    if admitted is not None:
        await admitted.reserve(of_training(training_request))
    work = functools.partial(train, training_request, request, caller)
    events = progress_events(work, result_event) if training_request.stream else None
    return await progress_answer(request, components, context, work, events, 201)


async def progress_answer(
    request: Request,
    components: Components,
    context: RequestContext,
    work: Callable[[Callable[[Any], None]], Coroutine[Any, Any, BaseModel]],
    events: AsyncGenerator[str, None] | None,
    status: int,
) -> Response:
    """Return the result of work, or the stream of its progress if there are ``events``."""
    settings, deadline = components.settings, context.deadline
    if events is None:
        result = await while_connected(request.receive, work(lambda _: None), deadline)
        return Response(result.model_dump_json(), status, media_type="application/json")
    # An error before the first event gets its own HTTP status, unless the work waits for long.
    beginning = await start_while_connected(
        request.receive, with_first_event(events), deadline, settings.sse_keep_alive_s or None
    )
    return event_stream(beginning, context, settings)
