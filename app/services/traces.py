"""Traces on the engine that can run them, for ``/v1/traces`` and for jobs, and what their senders may do.

The sandbox takes ten seconds to start, and ends with its engine. So the lifecycle starts it early, each time
that an engine becomes ready, where keys exist whose code would wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Final

from starlette.requests import Request

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import JobStatus
from api_schemas.server import TraceOutline
from app.auth.keys import Keys
from app.auth.principal import Principal, check_code_allowed, check_codec, codecs_of, takes_code
from app.engine.client import EngineClient, TraceEngine, event_frame
from app.engine.served_model import ServedModel
from app.http.bodies import check_media_type
from app.http.errors import error_bytes
from app.settings import Settings
from nnsight_engine.core.work_context import UsageMeter
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import MEDIA_TYPE as TRACE_TYPE
from nnsight_engine.remote_backend.messages import TraceHead, TraceRequest


def check_sender(settings: Settings, http: Request, caller: Principal) -> None:
    """Raise ApiError ``code_not_allowed``, ``missing_scope`` or ``bad_request`` (wrong content type)."""
    check_code_allowed(settings, caller)
    # An HTML form cannot send this type: for it a browser makes a CORS preflight request first.
    check_media_type(http, TRACE_TYPE)


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


logger = logging.getLogger(__name__)


async def start_sandbox(settings: Settings, engine: EngineClient, keys: Keys) -> None:
    """Start the sandbox if some key's code needs one; errors are logged, and the first request gets them."""
    if settings.sandbox != "process" or not takes_code(settings):
        return
    try:
        if await keys.need_sandbox():
            await engine.prepare_sandbox()
    except ApiError as error:
        logger.warning("the sandbox could not be started ahead: %s", error.message)
    except Exception:
        logger.exception("the sandbox could not be started ahead")


_ENGINE_OF: Final = {"vllm": "vllm", "transformers": "local"}
"""The trace engine by the dialect of the blocks, if the client leaves the choice to the server."""

_SAVES: Final = frozenset({FrameKind.OUTPUT, FrameKind.RESULT})
"""Frames that contain saved values of blocks."""


class TraceService:
    def __init__(self, engines: Mapping[str, TraceEngine]) -> None:
        self._engines = dict(engines)

    @property
    def names(self) -> list[str]:
        return list(self._engines)

    def engine_for(self, head: TraceHead) -> TraceEngine:
        """Return the engine that runs the trace; raises ApiError if this server has none for it."""
        able_name = _ENGINE_OF[head.dialect]
        name = able_name if head.engine == "auto" else head.engine
        if name != able_name or name not in self._engines:
            raise _no_engine(name, able_name)
        return self._engines[name]

    async def run(self, request: TraceRequest, job_id: str, meter: UsageMeter) -> AsyncGenerator[Frame, None]:
        """Yield the frames for the client; raises ApiError before the first one if no engine here runs it."""
        engine = self.engine_for(request.head)
        yield event_frame(JobStatus.DISPATCHED, engine=engine.name)
        frames = engine.run_trace(request, job_id)
        try:
            async for frame in frames:
                if frame.kind in _SAVES:
                    meter.captured_bytes += len(frame.data)
                yield frame
        finally:
            await frames.aclose()


async def model_outline(engine: EngineClient, engines: Sequence[str]) -> TraceOutline:
    """Return the modules as vLLM has them, and the standard points, for clients that load no model."""
    served, described = engine.served(), await engine.describe_model()
    return TraceOutline(
        model=served.names[0],
        names=list(served.names),
        fingerprint=served.fingerprint,
        engines=list(engines),
        class_name=described.outline[0][1],
        outline=described.outline,
        spec=described.spec,
    )


def _no_engine(name: str, able_name: str) -> ApiError:
    """Return the error for a requested engine; ``able_name`` is the one that could run the blocks."""
    if name != able_name:
        model_class = "LanguageModel" if able_name == "local" else "VLLM"
        message = (
            f"The blocks name modules of {model_class}, which {able_name!r} runs, and ask for {name!r}: "
            "leave `engine` out, or write them against the other class."
        )
    elif name == "local":
        message = (
            "The blocks name modules of the transformers library, which this server does not keep: start it "
            "with `nnsight-engine serve --local-engine`, or write them against VLLM(...)."
        )
    else:
        message = "This server runs no traces on vLLM."
    return ApiError(ErrorCode.UNSUPPORTED_COMBINATION, message, "engine")


def last_frame(error: ApiError) -> bytes:
    """Return the only or last frame of a trace that ends with an error of the server."""
    return b"".join(Frame(FrameKind.ERROR, error_bytes(error)).pieces())
