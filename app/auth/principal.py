"""Authenticated callers, and their permission to send code.

Outside a sandbox code has the rights of the engine's process. With keys, their scopes decide. Without keys,
unless the operator has decided, only clients on the same machine may; ``http.gate`` rejects requests of a
browser there on behalf of other sites. Blocks sent as pickles are authorized before any part of a trace is
decoded: unpickling runs code.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from api_schemas.administration import Limits, Scope, Tier
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.fields import Reference
from app.addresses import is_loopback
from app.settings import Settings

if TYPE_CHECKING:  # commands check their options before torch is loaded
    from nnsight_engine.remote_backend.messages import TraceHead

_MAX_NAMED: Final = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated caller of a request; tenant and key are empty on a server without keys.

    ``presets`` are the only ones by which it may intervene, None for no such limit. ``trusted_codecs`` allow
    blocks as pickles, if the server accepts them.
    """

    tenant: str
    key_id: str
    scopes: frozenset[Scope]
    tier: Tier
    limits: Limits
    tenant_limits: Limits
    trusted_codecs: bool = False
    presets: frozenset[str] | None = None

    @property
    def has_key(self) -> bool:
        return bool(self.key_id)

    def may_use(self, preset: Reference, *, has_code: bool) -> bool:
        """Return whether the caller may use a version of a preset.

        A limit to a name is a limit to the operations of later versions, and code may do anything. So
        versions with code must be named.
        """
        names = {str(preset)} if has_code else {preset.name, str(preset)}
        return self.presets is None or not self.presets.isdisjoint(names)

    def check_free(self, other_means: str, param: str | None = None) -> None:
        """Raise ``preset_not_allowed`` unless the caller may intervene by other means than presets."""
        if self.presets is not None:
            allowed = ", ".join(sorted(self.presets)[:_MAX_NAMED])
            raise ApiError(
                ErrorCode.PRESET_NOT_ALLOWED,
                f"The key {self.key_id!r} may intervene by {len(self.presets)} presets only ({allowed}), and "
                f"this request has {other_means}.",
                param,
            )

    def check(self, *scopes: Scope) -> None:
        """Raise ``missing_scope``, or ``missing_api_key`` without a key, unless the caller has all scopes."""
        missing = [scope for scope in scopes if scope not in self.scopes]
        if missing and not self.has_key:
            raise ApiError(
                ErrorCode.NO_KEY,
                "Administration requires a key, and this server has none yet: its operator creates "
                "the first one with `nnsight-engine keys create --tenant NAME --scopes admin`.",
            )
        if missing:
            requested = ",".join(scope for scope in Scope if scope in self.scopes or scope in missing)
            raise ApiError(
                ErrorCode.MISSING_SCOPE,
                f"The key {self.key_id!r} lacks the scope {', '.join(missing)}: the server's operator "
                f"creates one with it by `nnsight-engine keys create --tenant {self.tenant} "
                f"--scopes {requested}`.",
            )


ANONYMOUS: Final = Principal(
    "", "", frozenset(Scope) - {Scope.ADMIN}, Tier.TRUSTED, limits=Limits(), tenant_limits=Limits()
)
"""The caller on a server without keys, which listens to this machine alone.

Not an administrator: otherwise a page in a browser on this machine, or a proxy, could create a key for
itself.
"""


def takes_code(settings: Settings) -> bool:
    """Return whether any client may send code: unless it is forbidden, a key can allow it on any address."""
    return settings.allow_code is not False


def check_code_allowed(settings: Settings, caller: Principal) -> None:
    """Raise ``code_not_allowed`` or ``missing_scope`` unless the caller may send code to this server."""
    if settings.allow_code is False:
        raise _code_refusal("This server takes no traces: allow_code is false (NNSIGHT_ENGINE_ALLOW_CODE).")
    if caller.has_key:
        caller.check(Scope.CODE)
        return
    if settings.allow_code:
        return
    if not is_loopback(settings.host):
        raise _code_refusal(
            f"Traces are code, and this server listens on {settings.host}, for other machines too: its "
            "operator has to allow them, allow_code=true (NNSIGHT_ENGINE_ALLOW_CODE=1)."
        )


def sandbox_of(settings: Settings, caller: Principal) -> str | None:
    """Return the tenant in whose sandbox a caller's code runs; None if it runs in the engine's process."""
    is_stranger = caller.has_key and caller.tier is not Tier.TRUSTED
    return caller.tenant if is_stranger and settings.sandbox != "off" else None


def _code_refusal(message: str) -> ApiError:
    return ApiError(ErrorCode.CODE_NOT_ALLOWED, message)


def codecs_of(settings: Settings) -> list[str]:
    return ["wire", "cloudpickle"] if settings.allow_cloudpickle else ["wire"]


def check_codec(head: TraceHead, caller: Principal, settings: Settings) -> None:
    """Raise ``codec_not_allowed`` unless the server and the caller's key accept the trace's codec."""
    if head.codec == "wire":
        return
    if not settings.allow_cloudpickle:
        raise _codec_refusal("this server accepts them from no client (NNSIGHT_ENGINE_ALLOW_CLOUDPICKLE)")
    if not caller.has_key:
        raise _codec_refusal(
            "this server has no keys: its operator can create one that may send them, `keys create "
            "--tier trusted --trusted-codecs`"
        )
    if not caller.trusted_codecs:
        raise _codec_refusal(
            f"the key {caller.key_id!r} may not send them: the server's operator can create one that may, "
            "`keys create --tier trusted --trusted-codecs`"
        )


def _codec_refusal(why: str) -> ApiError:
    return ApiError(
        ErrorCode.CODEC_NOT_ALLOWED,
        f"Blocks in the codec 'cloudpickle' can run any code, and {why}. Send them in the codec 'wire'.",
        "codec",
    )
