"""Authorizes blocks sent as pickles, before any part of a trace is decoded: unpickling runs code."""

from __future__ import annotations

from api_schemas.errors import ApiError, ErrorCode
from app.auth.principal import Principal
from app.settings import Settings
from nnsight_engine.remote_backend.messages import TraceHead


def codecs_of(settings: Settings) -> list[str]:
    return ["wire", "cloudpickle"] if settings.allow_cloudpickle else ["wire"]


def check_codec(head: TraceHead, caller: Principal, settings: Settings) -> None:
    """Raise ``codec_not_allowed`` unless the server and the caller's key accept the trace's codec."""
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
