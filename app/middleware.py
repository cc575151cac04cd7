"""The gate in front of the routes: rejects requests while not ready, counts them, handles escaped errors.

``BaseHTTPMiddleware`` would cost a task group per request and hide disconnects from the routes below.
"""

from __future__ import annotations

import logging
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_schemas.errors import ApiError
from app.admission.rates import Admitted
from app.errors import error_response, internal_error, refuse
from app.lifecycle import Lifecycle, Phase
from app.request_context import context_of
from app.vllm_routes import OUTSIDE_V1

logger = logging.getLogger(__name__)

API_PREFIX: Final = "/v1/"
RESULTS_PREFIX: Final = "/v1/results/"
STATUS_PATH: Final = "/v1/status"
JOBS_PATH: Final = "/v1/jobs"
_EVENTS: Final = "/events"
_RERUN: Final = "/rerun"
_TRY_AGAIN_LATER: Final = 1013


class GateMiddleware:
    """Admits API requests while the server can serve them, and counts them until their last byte.

    ``request_timeout_s`` applies to POST requests only.
    """

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, request_timeout_s: float) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._request_timeout_s = request_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        if path == STATUS_PATH or not (path.startswith(API_PREFIX) or path in OUTSIDE_V1):
            await self._answer(scope, receive, send)
            return
        refusal = self._refusal(path, scope.get("method", "GET"))
        if refusal is not None:
            await refuse(refusal, scope, receive, send, code=_TRY_AGAIN_LATER)
            return
        if path.startswith(JOBS_PATH) and path.endswith(_EVENTS):
            # A client that follows a job is not counted, or the drain would wait for it while it waits for
            # the job; it reconnects to the next server.
            await self._answer(scope, receive, send)
            return
        deadline = context_of(scope).deadline
        with self._lifecycle.serving(deadline):
            if scope.get("method") == "POST":  # other methods only look things up or fetch stored content
                deadline.limit(self._request_timeout_s)
            await self._answer(scope, receive, send)

    def _refusal(self, path: str, method: str) -> ApiError | None:
        # Jobs outlive engines: job requests that start no work are served in every phase.
        if f"{path}/".startswith(f"{JOBS_PATH}/"):
            begins_work = method == "POST" and (path == JOBS_PATH or path.endswith(_RERUN))
            return self._lifecycle.refusal() if begins_work else None
        # A result outlives its request: a client served just before the drain may still fetch it.
        if path.startswith(RESULTS_PREFIX) and self._lifecycle.phase is not Phase.STARTING:
            return None
        return self._lifecycle.refusal()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, has_started = context_of(scope), False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                _add_headers(message, context.admitted)
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            logger.info("client disconnected: %s %s", scope.get("method", "WEBSOCKET"), scope["path"])
        except Exception:
            # After the status was sent, no error can be reported; the server closes the connection.
            if has_started or scope["type"] == "websocket":
                raise
            logger.exception("unhandled error: %s %s", scope["method"], scope["path"])
            await error_response(internal_error())(scope, receive, send)
        finally:
            if context.admitted is not None:
                context.admitted.release()
            if context.intake is not None:
                context.intake.close()


def _add_headers(start: Message, admitted: Admitted | None) -> None:
    if admitted is not None:
        sent = [(name.encode(), value.encode()) for name, value in admitted.headers.items()]
        start["headers"] = [*start.get("headers", []), *sent]
