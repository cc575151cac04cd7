"""The server's log: text for people or one JSON object per line, also of uvicorn's and vLLM's loggers.

Content of clients is never logged: no prompts, keys, vectors or code.
"""

from __future__ import annotations

import importlib.resources
import logging
import logging.config
import sys
from collections.abc import Collection
from typing import Final

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from app.http.contexts import RequestContext
from app.process_environment import set_engine_log
from app.settings import Settings
from nnsight_engine.core.work_context import current_work

REQUEST_LOG: Final = "app.requests"
"""The logger of answered requests."""

REQUEST_FIELDS: Final = ("request_id", "tenant", "trace_id")
_VERBOSE_LOGGERS: Final = ("app", "nnsight_engine", "uvicorn")
"""Loggers whose level is the setting ``log_level``."""
_EXTRAS: Final = (
    *REQUEST_FIELDS, "method", "route", "status", "outcome", "error", "operations", "duration_s",
    "request_bytes", "response_bytes", "model", "models", "url",
)  # fmt: skip
"""Extra fields of our log lines. Only these are written, because libraries add fields of their own to all
records.
"""
_VLLM_CONFIG: Final = "vllm_logging.json"


def start_logs(settings: Settings) -> None:
    """Configure logging; must run before vLLM is imported, which configures its own loggers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter_of(settings))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # Not for all loggers: some libraries log their arguments at these levels, such as SQL statements with
    # values.
    for name in _VERBOSE_LOGGERS:
        logging.getLogger(name).setLevel(settings.log_level)
    # At DEBUG uvicorn logs the headers of WebSockets, which include keys.
    uvicorns = logging.getLogger("uvicorn")
    uvicorns.setLevel(max(uvicorns.level, logging.INFO))
    logging.captureWarnings(True)  # noqa: FBT003 - the library's
    set_engine_log(str(importlib.resources.files("app.observability") / _VLLM_CONFIG))


def engine_formatter() -> logging.Formatter:
    """Return the formatter of vLLM's processes, which vLLM's logging configuration names."""
    return _formatter_of(Settings())


def _formatter_of(settings: Settings) -> logging.Formatter:
    return json_formatter() if settings.log_format == "json" else text_formatter()


def json_formatter() -> logging.Formatter:
    # Local variables contain content of clients.
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return _formatter(structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer())


def text_formatter() -> logging.Formatter:
    plain = structlog.dev.plain_traceback
    return _formatter(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain))


def _formatter(*last: Processor) -> logging.Formatter:
    """Return a formatter of all log lines; the ``last`` processors make a line of its fields."""
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ExtraAdder(_EXTRAS),
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            add_request,
        ],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )


def add_request(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Add the ids of the current request or job to a log line; a processor of structlog."""
    work = current_work()
    if isinstance(work, RequestContext):
        for name in REQUEST_FIELDS:
            value = getattr(work.record, name)
            if value:
                event.setdefault(name, value)
    return event


def limit_logs(*, uvicorn_level: str, logs_requests: bool, excluded: Collection[str]) -> None:
    """Apply vLLM's options about logs; ``excluded`` are the routes whose requests are not logged."""
    uvicorns = logging.getLogger("uvicorn")
    uvicorns.setLevel(max(uvicorns.level, logging.getLevelNamesMapping()[uvicorn_level]))
    logging.getLogger(REQUEST_LOG).addFilter(
        lambda entry: logs_requests and getattr(entry, "route", "") not in excluded
    )
