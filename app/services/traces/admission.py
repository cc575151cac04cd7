"""Admission of traces: first the sender, before the body is read; then the head, before its parts are."""

from __future__ import annotations

from starlette.requests import Request

from api_schemas.errors import ApiError, ErrorCode
from app.auth.code_policy import check_code_allowed
from app.auth.codecs import check_codec, codecs_of
from app.auth.principal import Principal
from app.body import check_media_type
from app.engine.served_model import ServedModel
from app.settings import Settings
from nnsight_engine.remote_backend.messages import MEDIA_TYPE, TraceHead


def check_sender(settings: Settings, http: Request, caller: Principal) -> None:
    """Raise ApiError ``code_not_allowed``, ``missing_scope`` or ``bad_request`` (wrong content type)."""
    check_code_allowed(settings, caller)
    # An HTML form cannot send this type: for it a browser makes a CORS preflight request first.
    check_media_type(http, MEDIA_TYPE)


def check_head(settings: Settings, caller: Principal, served: ServedModel, head: TraceHead) -> None:
    """Raise ApiError ``codec_not_allowed`` or ``model_not_found``."""
    check_codec(head, caller, settings)
    served.check(head)


def check_still_allowed(settings: Settings, head: TraceHead) -> None:
    """Raise ApiError if the settings no longer allow a trace that was accepted earlier."""
    if settings.allow_code is False:
        raise ApiError(
            ErrorCode.CODE_NOT_ALLOWED, "This server no longer accepts traces: allow_code is false."
        )
    if head.codec not in codecs_of(settings):
        raise ApiError(
            ErrorCode.CODEC_NOT_ALLOWED,
            f"This server no longer accepts blocks written in {head.codec!r}; send them in 'wire'.",
            "codec",
        )
