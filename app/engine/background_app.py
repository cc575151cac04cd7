"""vLLM's own application, for a response in the background, which vLLM makes in a task that nobody waits for.

Here the request lasts until that task has ended: it counts for its tenant's limits, is metered, and is waited
for at a shutdown.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.engine.vllm_errors import raised
from app.request_context import context_of, note_error
from app.stored_responses import is_under_way

logger = logging.getLogger(__name__)


class BackgroundApp:
    def __init__(self, app: ASGIApp, serving: Any) -> None:
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the application answer, then wait for the response; the request's deadline ends it."""
        content = bytearray()

        async def watched(message: Message) -> None:
            content.extend(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, watched)
        answer = json.loads(content)
        # Without an id it was refused.
        response_id = answer.get("id") if isinstance(answer, dict) else None
        task: asyncio.Task[None] | None = self._serving.background_tasks.get(response_id)
        if task is not None:
            await _ended(task, scope)
        stored = self._serving.response_store.get(response_id)
        if stored is not None and is_under_way(stored):
            stored.status = "failed"
            if task is None:  # it had ended before the answer
                note_error(scope, "internal_error")


async def _ended(task: asyncio.Task[None], scope: Scope) -> None:
    reached = context_of(scope).deadline.reached
    waited_for: set[asyncio.Future[Any]] = {task, reached}
    await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    (error,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(error, Exception):
        note_error(scope, getattr(raised(error), "code", "internal_error"))
        logger.warning("a response in the background has failed: %s", type(error).__name__)
    elif reached.done():
        note_error(scope, reached.result().code)


__all__ = ["BackgroundApp"]
