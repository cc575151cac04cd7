"""The context of a request, or of a job's run: sender, rights, deadline and ids, in the ASGI scope.

The middleware of ``gate`` creates one; each layer completes the fields that it learns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from starlette.requests import HTTPConnection
from starlette.types import Scope

from app.admission.rates import Admitted
from app.audit import Record
from app.auth.principal import Principal
from app.http.deadlines import RequestDeadline
from app.http.large_bodies import LargeBodyReader
from app.limits.limit import Spending
from nnsight_engine.core.work_context import WorkContext

KEY: Final = "nnsight_engine.request"
"""The context's key in the scope."""


@dataclasses.dataclass(slots=True, kw_only=True)
class RequestContext(WorkContext):
    """Must be created inside the running event loop.

    ``principal``, ``received`` (the bytes of its body) and ``bodies`` are None before authentication,
    ``admitted`` if nothing is counted. ``sent_model`` is the name as it was sent, for the answer, if it names
    a preset. ``is_answered`` becomes true with the last byte of the response.
    """

    record: Record
    deadline: RequestDeadline = dataclasses.field(default_factory=RequestDeadline)
    principal: Principal | None = None
    admitted: Admitted | None = None
    received: Spending | None = None
    bodies: LargeBodyReader | None = None
    sent_model: str | None = None
    is_answered: bool = False

    def identify(self, caller: Principal, connection: HTTPConnection) -> None:
        self.principal, self.tenant = caller, caller.tenant
        self.meter.key_id = caller.key_id
        self.record.identify(caller, connection)

    def note_presets(self, presets: Sequence[str]) -> None:
        self.presets = tuple(presets)
        self.record.details["presets"] = list(presets)

    @property
    def caller(self) -> Principal:
        """The authenticated caller; RuntimeError if there is none, since nothing may be done for it."""
        if self.principal is None:
            raise RuntimeError("a request is served before its caller is authenticated")
        return self.principal

    @property
    def traceparent(self) -> str:
        """The W3C ``traceparent`` of its span; empty where no spans are recorded."""
        return (self.trace_headers or {}).get("traceparent", "")


def begin_context(scope: Scope) -> RequestContext:
    context = scope[KEY] = RequestContext(record=Record(str(scope.get("method", "WEBSOCKET"))))
    return context


def context_of(scope: Scope) -> RequestContext:
    context: RequestContext = scope[KEY]
    return context


def note_error(scope: Scope, code: str) -> None:
    """Record the error that a request ends with, if it is recorded: the thread of probes has no contexts."""
    context: RequestContext | None = scope.get(KEY)
    if context is not None:
        context.record.error = code
