"""Parameters of routes: the server's components, the request's context, its caller, who is admitted."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Depends, Security
from fastapi.openapi.models import HTTPBearer as BearerModel
from fastapi.security import SecurityScopes
from fastapi.security.base import SecurityBase
from starlette.requests import HTTPConnection

from api_schemas.administration import Scope
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.presets import HEADER
from app.auth.principal import Principal
from app.components import Components
from app.http.contexts import RequestContext, context_of
from app.http.gate import is_cross_origin
from app.http.vllm_routes import WORKING
from app.services.jobs.runner import set_quotas

_RUN_AT_ONCE: Final = {
    "/v1/completions", "/v1/chat/completions", "/v1/traces", "/v1/vectors/train",
    "/v1/detectors/train", "/v1/sweeps", *WORKING,
}  # fmt: skip
"""Routes that count against the limit on concurrency."""
_WITHOUT_PRESETS: Final = frozenset(
    {"/v1/traces", "/v1/vectors/train", "/v1/detectors/train", "/v1/sweeps", "/v1/jobs"}
)
"""Routes that run the model as it is; a header with a preset would be ignored there."""
_FREE: Final = frozenset({Scope.INTERVENTIONS, Scope.CODE})
"""The scopes of routes that intervene, or change what does: not for keys that are limited to presets."""
_READS: Final = frozenset({"GET", "HEAD"})


async def _components_of(connection: HTTPConnection) -> Components:
    components: Components = connection.app.state.components
    return components


async def _context_of_request(connection: HTTPConnection) -> RequestContext:
    return context_of(connection.scope)


class _BearerKey(SecurityBase):
    """Documents in the OpenAPI document how a key is sent; ``auth.keys`` evaluates it."""

    def __init__(self) -> None:
        self.model = BearerModel(description="A key: `nnsight-engine keys create`. None on a server without.")
        self.scheme_name = "key"

    async def __call__(self, connection: HTTPConnection) -> str | None:
        return connection.headers.get("authorization")


async def caller_of(
    connection: HTTPConnection,
    scopes: SecurityScopes,
    authorization: Annotated[str | None, Security(_BearerKey())],
) -> Principal:
    """Authenticate the caller of a request, check its scopes and admit the request; a dependency."""
    components: Components = connection.app.state.components
    if connection.scope["type"] == "websocket":
        _check_origin(connection)
    address = "" if connection.client is None else connection.client.host
    principal = await components.keys.principal(authorization, address)
    request = context_of(connection.scope)
    request.identify(principal, connection)
    principal.check(*map(Scope, scopes.scopes))
    if not _FREE.isdisjoint(scopes.scopes) and connection.scope.get("method") not in _READS:
        principal.check_free(f"the route {connection.scope['route'].path}")
    if request.received is not None:  # a route's further scopes are checked by further calls
        return principal
    route = connection.scope["route"].path
    if (
        route in _WITHOUT_PRESETS
        and connection.scope.get("method") == "POST"
        and HEADER in connection.headers
    ):
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION, f"{route} takes no presets; leave out the header.", HEADER
        )
    request.received, request.bodies = components.received.spend(principal.tenant), components.bodies
    if principal.has_key:
        works = route in _RUN_AT_ONCE
        set_quotas(components.store.quotas, principal)
        request.admitted = await components.rates.admit(principal, request.meter, works=works)
    return principal


def _check_origin(connection: HTTPConnection) -> None:
    """Reject WebSockets from pages of other origins, with or without a key: browsers do not."""
    if is_cross_origin(connection):
        raise ApiError(ErrorCode.ORIGIN_NOT_ALLOWED, "Cross-origin WebSocket connections are not allowed.")


ServerComponents = Annotated[Components, Depends(_components_of)]
"""A route's parameter that receives the server's components."""
CurrentContext = Annotated[RequestContext, Depends(_context_of_request)]
"""A route's parameter that receives the request's context."""
ANY_CALLER: Final = Security(caller_of)
"""A route's dependency: a key with any scope, if the server has keys. The following ones require scopes."""
COMPLETER: Final = Security(caller_of, scopes=[Scope.COMPLETIONS])
INTERVENER: Final = Security(caller_of, scopes=[Scope.INTERVENTIONS])
TRAINER: Final = Security(caller_of, scopes=[Scope.INTERVENTIONS, Scope.COMPLETIONS])
CODER: Final = Security(caller_of, scopes=[Scope.CODE])
MONITOR: Final = Security(caller_of, scopes=[Scope.METRICS])
ADMIN: Final = Security(caller_of, scopes=[Scope.ADMIN])
Caller = Annotated[Principal, ANY_CALLER]
"""A route's parameter that receives the caller, as do the following ones."""
Completer = Annotated[Principal, COMPLETER]
Intervener = Annotated[Principal, INTERVENER]
Trainer = Annotated[Principal, TRAINER]
Coder = Annotated[Principal, CODER]
