"""Passes a request on to another ASGI application in this process, with this server's limits on clients.

The application is told that the client has left also at the request's deadline, and for a client that reads
nothing; messages that it sends after that are dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_schemas.errors import ApiError
from app.disconnect import disconnected
from app.errors import internal_error
from app.request_context import KEY, context_of, note_error
from app.services.streaming import Sending, send_final

logger = logging.getLogger(__name__)

_DISCONNECT: Final[Message] = {"type": "http.disconnect"}
_HIDDEN: Final = {b"authorization", b"x-api-key", b"content-length"}
_KEPT: Final = (
    "type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "client",
    "server", "extensions", KEY,
)  # fmt: skip


class PassedOn(Response):
    """``final_event`` returns the last bytes of an answer that an error ends, given the last ones sent."""

    def __init__(
        self,
        app: ASGIApp,
        body: bytes,
        *,
        stall_s: float,
        final_event: Callable[[ApiError, bytes], bytes],
        keep_alive_s: float = 0.0,
    ) -> None:
        super().__init__()
        self._app = app
        self._content = body
        self._stall_s = stall_s
        self._final_event = final_event
        self._keep_alive_s = keep_alive_s
        self._is_whole = False
        self._last_sent = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = context_of(scope).deadline
        sending = Sending(send, deadline, self._stall_s, self._keep_alive_s)
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            error = await self._answered(scope, sending, gone, deadline.reached)
            error = deadline.error or error
            if self._is_whole:
                return
            if sending.is_stalled or (error is None and gone.done()):
                raise ClientDisconnect
            if error is None:
                error = internal_error()  # the application has ended without an answer
            if not sending.has_started:
                raise error
            note_error(scope, error.code)
            sending.close()
            await send_final(self._final_event(error, self._last_sent), send)
        finally:
            sending.close()
            gone.cancel()

    async def _answered(
        self, scope: Scope, sending: Sending, gone: asyncio.Future[Any], reached: asyncio.Future[Any]
    ) -> ApiError | None:
        unread = [{"type": "http.request", "body": self._content, "more_body": False}]

        async def received() -> Message:
            if unread:
                return unread.pop()
            await asyncio.wait({gone, reached}, return_when=asyncio.FIRST_COMPLETED)
            return _DISCONNECT

        async def sent(message: Message) -> None:
            if not (gone.done() or reached.done()):
                await sending.send(message)
                is_body = message["type"] == "http.response.body"
                self._last_sent = message.get("body", b"") or self._last_sent
                self._is_whole = is_body and not message.get("more_body", False)

        try:
            await self._app(_scope_of(scope), received, sent)
        except Exception as error:
            # Starlette raises again what it has answered.
            found = next((one for one in _causes(error) if isinstance(one, ApiError)), None)
            if found is None:
                logger.exception("a route of vLLM failed: %s", scope["path"])
            return found or internal_error()
        return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _scope_of(scope: Scope) -> Scope:
    """Return the connection as the application sees it: without the caller's key and this server's route."""
    headers = [(name, value) for name, value in scope["headers"] if name not in _HIDDEN]
    # With a newer version of ASGI, starlette notices a client that has left only when it sends.
    asgi = {"version": "3.0", "spec_version": "2.3"}
    return {name: scope[name] for name in _KEPT if name in scope} | {"asgi": asgi, "headers": headers}


__all__ = ["PassedOn"]
