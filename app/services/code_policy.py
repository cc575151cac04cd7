"""Whether a client may send code. Traces are code, and it runs with the rights of the engine's process.

Unless the operator has decided, only whoever is on the same machine may. A browser is, and shows pages of
people who are not: such a page can make a name of its own stand for this machine, so the name that a request
came to must be one of the machine's own.
"""

from __future__ import annotations

import ipaddress

from starlette.requests import HTTPConnection, Request

from api_schemas.errors import ApiError, ErrorCode
from app.settings import Settings


def takes_code(settings: Settings) -> bool:
    """Tell whether some client may send code."""
    return _is_loopback(settings.host) if settings.allow_code is None else settings.allow_code


def check_code_allowed(settings: Settings, http: Request) -> None:
    """Raise ApiError unless the client may send code."""
    if settings.allow_code:
        return
    if settings.allow_code is False:
        raise _refusal("This server takes no traces: allow_code is false (NNSIGHT_ENGINE_ALLOW_CODE).")
    if not _is_loopback(settings.host):
        raise _refusal(
            f"Traces are code, and this server listens on {settings.host}, for other machines too: its "
            "operator has to allow them, allow_code=true (NNSIGHT_ENGINE_ALLOW_CODE=1)."
        )
    check_name(settings, http)


def check_name(settings: Settings, connection: HTTPConnection) -> None:
    """Raise ApiError for a connection to a name that a page of somebody else's may have made up."""
    name = connection.url.hostname or ""
    if settings.allow_code is None and _is_loopback(settings.host) and not _is_loopback(name):
        raise _refusal(
            f"Traces are code, and this request came to the name {name!r}, which is none of this machine's "
            "own: use http://localhost or http://127.0.0.1, or have the operator set allow_code=true "
            "(NNSIGHT_ENGINE_ALLOW_CODE=1)."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _refusal(message: str) -> ApiError:
    return ApiError(ErrorCode.CODE_NOT_ALLOWED, message)
