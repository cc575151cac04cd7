"""A trace for a process beside the server: its state, and the frames for its client."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator
from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobStatus
from app.engine.traces import event_frame
from nnsight_engine.core.work_context import current_work
from nnsight_engine.remote_backend.backpressure import Backpressure, SlowReaderError
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import TraceRequest

_MAX_UNREAD_BYTES: Final = 16 * 2**20
"""Unread events of one trace."""


class ProcessJob:
    """A trace that is queued or running.

    Attributes:
        frames: Frames for the client; an ApiError or None ends them.
        has_begun: Whether it has started to run; if not, another process may retry it.
        over: Resolved when it uses no resources any more.
    """

    def __init__(self, request: TraceRequest, engine: str, unread: Backpressure) -> None:
        self.request = request
        self.engine = engine
        self.frames: asyncio.Queue[Frame | ApiError | None] = asyncio.Queue()
        self.cancelled = asyncio.Event()
        self.is_late = False
        self.position = 0
        self.num_prints = 0
        self.has_begun = False
        self.context = contextvars.copy_context()
        work = current_work()
        self.meter = None if work is None else work.meter
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.meter is not None:
            self.meter.expect(self.over)
        self._share = unread.share(self._drop, _MAX_UNREAD_BYTES)

    def notify(self, status: JobStatus, message: str | None = None) -> None:
        frame = event_frame(status, message=message, engine=self.engine)
        self.frames.put_nowait(frame)
        self._share.add(len(frame.data))

    async def read_frames(self) -> AsyncGenerator[Frame, None]:
        try:
            while (item := await self.frames.get()) is not None:
                if isinstance(item, ApiError):
                    raise item
                if item.kind is FrameKind.EVENT:
                    self._share.take(len(item.data))
                yield item
        finally:
            self._share.close()

    def end(self) -> None:
        """Record that it uses no resources any more; idempotent."""
        if not self.over.done():
            self.over.set_result(None)

    def _drop(self, error: SlowReaderError) -> None:
        """Cancel the trace, discard its unread frames and leave the reason for the next read."""
        while not self.frames.empty():
            self.frames.get_nowait()
        self.frames.put_nowait(ApiError(ErrorCode.CAPTURE_TOO_LARGE, str(error)))
        self.cancelled.set()


__all__ = ["ProcessJob"]
