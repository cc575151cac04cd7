"""The answer of a training, of a vector or of a detector: its result, or a stream of its progress."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from api_schemas.training import LabelledPrompts, TrainingProgress
from app.admission.estimates import of_training
from app.admission.rates import INTERVENING
from app.auth.principal import Principal
from app.http.bodies import BodyLimits, read_object
from app.http.contexts import RequestContext
from app.http.deadlines import while_connected
from app.http.errors import DONE_FRAME, validated
from app.http.openapi import EVENTS_TYPE
from app.routes.context import Context
from app.services.streaming import (
    COMMENT,
    Begun,
    ClosingStream,
    LateStream,
    events,
    first_event,
    last_events,
    within,
)
from app.training import Report

ResultT = TypeVar("ResultT")


async def training_events(
    train: Callable[[Report], Coroutine[Any, Any, ResultT]], last: Callable[[ResultT], BaseModel]
) -> AsyncGenerator[str, None]:
    """Yield progress, then the result, as server-sent events; closing early cancels the training."""
    events: asyncio.Queue[TrainingProgress | None] = asyncio.Queue()
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
T = TypeVar("T", bound=BaseModel)


async def training_answer(
    request: Request,
    context: Context,
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
    settings = context.settings
    admitted, deadline = asked.admitted, asked.deadline
    if admitted is not None:
        await admitted.check(*INTERVENING)
    limits = BodyLimits(settings.max_body_bytes, settings.max_json_depth, settings.upload_idle_timeout_s)
    wanted = validated(wanted_type, await read_object(request, limits))
    if admitted is not None:
        await admitted.reserve(of_training(wanted))
    run = functools.partial(train, wanted, request, caller)
    if not wanted.stream:
        made = await while_connected(request.receive, run(lambda _: None), deadline)
        return Response(made.model_dump_json(), 201, media_type="application/json")
    source = training_events(run, last)
    # An error before the first event gets its own HTTP status, unless the training waits for long.
    begun = await while_connected(
        request.receive, within(_begun(source), settings.sse_keep_alive_s), deadline
    )
    stream = LateStream(begun) if isinstance(begun, asyncio.Task) else source
    return ClosingStream(
        events(COMMENT if isinstance(begun, asyncio.Task) else begun.first, stream, asked),
        media_type=EVENTS_TYPE,
        on_close=stream.aclose,
        stall_s=settings.client_stall_timeout_s,
        final_event=last_events,
        keep_alive_s=settings.sse_keep_alive_s,
    )


async def _begun(source: AsyncIterator[str]) -> Begun:
    return Begun(await first_event(source), source)
