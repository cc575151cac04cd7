from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel

from api_schemas.training import TrainingProgress
from app.errors import DONE_FRAME
from app.training.activations import Report

T = TypeVar("T")


async def training_events(
    train: Callable[[Report], Coroutine[Any, Any, T]], last: Callable[[T], BaseModel]
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


__all__ = ["training_events"]
