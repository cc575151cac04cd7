"""Who may send blocks as pickles, which run code before any block does.

Two switches, both the operator's: the server takes such blocks at all, and takes them from those whose key
says so. ``services.trace_admission`` calls ``check_codec`` before anybody looks at a trace's parts.
"""

from __future__ import annotations

from api_schemas.errors import ApiError, ErrorCode
from app.auth.principal import Principal
from app.settings import Settings
from nnsight_engine.remote_backend.messages import TraceHead


def codecs_of(settings: Settings) -> list[str]:
    """Return what blocks may be written in here, by some client at least."""
    return ["wire", "cloudpickle"] if settings.allow_cloudpickle else ["wire"]


def check_codec(head: TraceHead, caller: Principal, settings: Settings) -> None:
    """Let a trace pass whose codec its sender may use.

    Args:
        head: Names the codec.
        caller: The sender.
        settings: Say whether anybody may.

    Raises:
        ApiError: ``codec_not_allowed``.
    """
    if head.codec == "wire":
        return
    if not settings.allow_cloudpickle:
        raise _refused("this server does not take them from anybody (NNSIGHT_ENGINE_ALLOW_CLOUDPICKLE)")
    if not caller.has_key:
        raise _refused("this server has no keys: its operator makes one that may, `--trusted-codecs`")
    if not caller.trusted_codecs:
        raise _refused(
            f"the key {caller.key_id!r} may not: its operator makes one that may, `keys create "
            "--tier trusted --trusted-codecs`"
        )


def _refused(why: str) -> ApiError:
    return ApiError(
        ErrorCode.CODEC_NOT_ALLOWED,
        f"Blocks written in 'cloudpickle' run any code of their sender's, and {why}. Send them in 'wire'.",
        "codec",
    )
