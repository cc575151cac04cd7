"""Permission to send code, which outside a sandbox has the rights of the engine's process.

With keys, their scopes decide. Without keys, unless the operator has decided, only clients on the same
machine may; ``hosts`` rejects requests of a browser there on behalf of other sites.
"""

from __future__ import annotations

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.keys import Scope, Tier
from app.addresses import is_loopback
from app.auth.principal import Principal
from app.settings import Settings


def takes_code(settings: Settings) -> bool:
    """Return whether any client may send code: unless it is forbidden, a key can allow it on any address."""
    return settings.allow_code is not False


def check_code_allowed(settings: Settings, caller: Principal) -> None:
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


def sandbox_of(settings: Settings, caller: Principal) -> str | None:
    """Return the tenant in whose sandbox a caller's code runs; None if it runs in the engine's process."""
    is_stranger = caller.has_key and caller.tier is not Tier.TRUSTED
    return caller.tenant if is_stranger and settings.sandbox != "off" else None


def _refusal(message: str) -> ApiError:
    return ApiError(ErrorCode.CODE_NOT_ALLOWED, message)
