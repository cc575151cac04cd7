"""Authorizes blocks sent as pickles, which run code when they are unpickled.

Two switches of the operator must both allow it: the server accepts pickles at all, and the caller's key
permits them. ``services.traces.admission`` calls ``check_codec`` before any part of a trace is decoded.
"""

from __future__ import annotations

from api_schemas.errors import ApiError, ErrorCode
from app.auth.principal import Principal
from app.settings import Settings
from nnsight_engine.remote_backend.messages import TraceHead


def codecs_of(settings: Settings) -> list[str]:
    """Return the codecs of blocks that this server accepts from at least some clients."""
    return ["wire", "cloudpickle"] if settings.allow_cloudpickle else ["wire"]


def check_codec(head: TraceHead, caller: Principal, settings: Settings) -> None:
    """Check that the caller may use the codec of a trace.

    Args:
        head: The trace's head, which names the codec.
        caller: The caller.
        settings: The server's settings.

    Raises:
        ApiError: ``codec_not_allowed``.
    """
    if head.codec == "wire":
        return
    if not settings.allow_cloudpickle:
        raise _refused("this server accepts them from no client (NNSIGHT_ENGINE_ALLOW_CLOUDPICKLE)")
    if not caller.has_key:
        raise _refused(
            "this server has no keys: its operator can create one that may send them, `keys create "
            "--tier trusted --trusted-codecs`"
        )
    if not caller.trusted_codecs:
        raise _refused(
            f"the key {caller.key_id!r} may not send them: the server's operator can create one that may, "
            "`keys create --tier trusted --trusted-codecs`"
        )


def _refused(why: str) -> ApiError:
    return ApiError(
        ErrorCode.CODEC_NOT_ALLOWED,
        f"Blocks in the codec 'cloudpickle' can run any code, and {why}. Send them in the codec 'wire'.",
        "codec",
    )
