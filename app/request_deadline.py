"""What ends a request before its time: it took too long, its client takes nothing, the server stops.

The outermost middleware makes one for each request; whoever waits on a request's behalf waits for it too.
So a request that is ended does what one does whose client left; but its client is there, and is told why.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from starlette.types import Scope

from api_schemas.errors import ApiError, ErrorCode

CUTOFF: Final = "nnsight_engine.cutoff"
"""Where the scope of a request has its ``RequestDeadline``."""


class RequestDeadline:
    """The end of one request, which may come.

    Attributes:
        reached: Done once it has come; its result says why.
    """

    def __init__(self) -> None:
        """Begin without any; called inside the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._pause: asyncio.Timeout | None = None
        self.reached: asyncio.Future[ApiError] = self._loop.create_future()

    @property
    def error(self) -> ApiError | None:
        """Why the request was ended; None while it goes on."""
        return self.reached.result() if self.reached.done() else None

    def end(self, error: ApiError) -> None:
        """End the request now; only the first reason counts."""
        if self.reached.done():
            return
        self.reached.set_result(error)
        if self._pause is not None and not self._pause.expired():
            self._pause.reschedule(self._loop.time())

    def limit(self, limit_s: float) -> None:
        """End the request after some seconds, with ``request_timed_out``."""
        self._timer = self._loop.call_later(limit_s, self.end, _timed_out(limit_s))

    @contextlib.asynccontextmanager
    async def pause(self, most_s: float | None) -> AsyncIterator[None]:
        """Wait in the block for the request's client; one at a time.

        Raises:
            TimeoutError: It took more seconds than the most, or the end has come.
        """
        async with asyncio.timeout(0 if self.reached.done() else most_s) as pause:
            self._pause = pause
            try:
                yield
            finally:
                self._pause = None

    def close(self) -> None:
        """Count no more; the request is over."""
        if self._timer is not None:
            self._timer.cancel()


def cutoff_of(scope: Scope) -> RequestDeadline | None:
    """Return what may end a request; None for those that nothing ends."""
    cutoff: RequestDeadline | None = scope.get(CUTOFF)
    return cutoff


def _timed_out(limit_s: float) -> ApiError:
    return ApiError(
        ErrorCode.REQUEST_TIMED_OUT,
        f"The request took more than {limit_s:g} s, which is all that one may (request_timeout_s), and was "
        "ended; ask for less at once, or send a trace as a job.",
    )


__all__ = ["CUTOFF", "RequestDeadline", "cutoff_of"]
