"""Who may send blocks as pickles, which run code before any block does.

Two switches, both the operator's: the server takes such blocks at all, and takes them from those who hold one
of certain keys. ``services.trace_admission`` calls ``check_codec`` before anybody looks at a trace's parts.
"""

from __future__ import annotations

import hmac

from api_schemas.errors import ApiError, ErrorCode
from app.auth.secrets import bearer
from app.settings import Settings
from nnsight_engine.remote_backend.messages import TraceHead


def codecs_of(settings: Settings) -> list[str]:
    """Return what blocks may be written in here, by some client at least."""
    opened = settings.allow_cloudpickle and settings.cloudpickle_keys
    return ["wire", "cloudpickle"] if opened else ["wire"]


def check_codec(head: TraceHead, authorization: str | None, settings: Settings) -> None:
    """Let a trace pass whose codec its sender may use.

    Args:
        head: Names the codec.
        authorization: The request's ``Authorization`` header.
        settings: Say who may.

    Raises:
        ApiError: ``codec_not_allowed``.
    """
    if head.codec == "wire":
        return
    if not settings.allow_cloudpickle:
        raise _refused("this server does not take them from anybody (NNSIGHT_ENGINE_ALLOW_CLOUDPICKLE)")
    if not _holds_a_key(authorization, settings):
        raise _refused("the request's key, `Authorization: Bearer …`, is none of those that may send them")


def _holds_a_key(authorization: str | None, settings: Settings) -> bool:
    given = bearer(authorization).encode()
    if not given:
        return False
    # All of them are compared, and each in constant time: how long it takes says nothing.
    found = [hmac.compare_digest(given, one.get_secret_value().encode()) for one in settings.cloudpickle_keys]
    return any(found)


def _refused(why: str) -> ApiError:
    return ApiError(
        ErrorCode.CODEC_NOT_ALLOWED,
        f"Blocks written in 'cloudpickle' run any code of their sender's, and {why}. Send them in 'wire'.",
        "codec",
    )
