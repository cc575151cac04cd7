"""The requests that trace processes send while they run: one at a time for each job."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, Final

from app.engine.process_job import ProcessJob

_ANSWERED_S: Final = 5.0
"""How long a request may take to return after its answer was sent."""


class RequestTasks:
    def __init__(self) -> None:
        self._tasks: dict[ProcessJob, asyncio.Task[None]] = {}

    async def is_free(self, job: ProcessJob) -> bool:
        """Return whether the job's last request is over.

        The process may have its answer, and send the next one, before the task that sent it has returned.
        """
        task = self._tasks.get(job)
        if task is not None and not task.done():
            await asyncio.wait({task}, timeout=_ANSWERED_S)
        return task is None or task.done()

    def start(
        self, job: ProcessJob, request: Coroutine[Any, Any, None], context: contextvars.Context | None = None
    ) -> None:
        self._tasks[job] = asyncio.create_task(request, context=context)

    async def cancel(self, job: ProcessJob) -> None:
        task = self._tasks.pop(job, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
