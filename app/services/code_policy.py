"""Whether a client may send code. Traces are code, and it runs with the rights of the engine's process.

On a server with keys, those may whose key says so. On one without, unless the operator has decided, only
whoever is on the same machine may; ``hosts`` keeps out what a browser there sends for others.
"""

from __future__ import annotations

from typing import Final

from starlette.requests import Request

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.keys import Scope, Tier
from app.auth.principal import Principal
from app.hosts import is_loopback
from app.settings import Settings

SANDBOX_OF: Final = "nnsight_engine.sandbox_of"
"""Where a request's ASGI scope keeps in whose sandbox its code runs."""


def takes_code(settings: Settings) -> bool:
    """Tell whether some client may send code: with keys, which every other address asks for, some may."""
    return settings.allow_code is not False


def check_code_allowed(settings: Settings, http: Request, caller: Principal) -> None:
    """Raise ApiError unless the client may send code; notes with the request where it runs."""
    http.scope[SANDBOX_OF] = sandbox_of(settings, caller)
    if settings.allow_code is False:
        raise _refusal("This server takes no traces: allow_code is false (NNSIGHT_ENGINE_ALLOW_CODE).")
    if caller.has_key:
        caller.check(Scope.CODE)
        return
    if settings.allow_code:
        return
    if not is_loopback(settings.host):
        raise _refusal(
            f"Traces are code, and this server listens on {settings.host}, for other machines too: its "
            "operator has to allow them, allow_code=true (NNSIGHT_ENGINE_ALLOW_CODE=1)."
        )


def sandbox_of(settings: Settings, caller: Principal) -> str:
    """Return in whose sandbox a caller's code runs, a tenant's; nothing where it runs as the engine's own."""
    is_stranger = caller.has_key and caller.tier is not Tier.TRUSTED
    return caller.tenant if is_stranger and settings.sandbox != "off" else ""


def has_process(settings: Settings, sandbox_of: str) -> bool:
    """Tell whether code in a sandbox has a process to itself, of which there are only so many."""
    return bool(sandbox_of) and settings.sandbox == "process"


def _refusal(message: str) -> ApiError:
    return ApiError(ErrorCode.CODE_NOT_ALLOWED, message)
