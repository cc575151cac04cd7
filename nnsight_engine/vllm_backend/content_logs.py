"""Removal of clients' data from log lines and tracebacks of vLLM, in the server's and engine's processes.

Such a line keeps the event, its location, the error's type and the request's id. If that fails, it keeps only
its template: logging never raises in vLLM's code.
"""

from __future__ import annotations

import enum
import logging
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final

_READERS: Final = (
    "vllm.entrypoints.",
    "vllm.parser.",
    "vllm.reasoning.",
    "vllm.renderers.",
    "vllm.tokenizers.",
    "vllm.tool_parsers.",
    "vllm.v1.core.sched.",
    "vllm.v1.engine.",
    "vllm.v1.structured_output.",
)
"""Prefixes of the loggers of modules that read requests or answers."""

_REQUEST_ID: Final = re.compile(r"(?:chat)?cmpl-[\w.-]{1,200}")
_TOKEN: Final = re.compile(r"\btoken %s")
_Factory = Callable[..., logging.LogRecord]


class _WithoutContent:
    """Makes log records; those of ``_READERS`` get redacted arguments and no traceback."""

    def __init__(self, make: _Factory) -> None:
        self._make = make

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        """Make a log record; one of modules that read requests shows nothing of clients' data."""
        record = self._make(*args, **kwargs)
        if not f"{record.name}.".startswith(_READERS):
            return record
        error = record.exc_info[1] if record.exc_info else None
        record.exc_info = record.exc_text = None
        record.msg, record.args = _message(record) + _described(error), ()
        return record


def _message(record: logging.LogRecord) -> str:
    """Return the line with redacted arguments; only its template if it cannot be formatted."""
    template = record.msg if type(record.msg) is str else f"<{type(record.msg).__name__}>"
    if not record.args:
        return template
    try:
        # `%.0s` takes the argument, a token of an answer, and prints nothing.
        message: str = _TOKEN.sub("a token%.0s", template) % _redacted_args(record.args)
    except Exception:  # noqa: BLE001 - a replaced argument does not fit `%d`, or a value's own code fails
        return f"{template} (arguments left out)"
    return message


def _redacted_args(args: tuple[object, ...] | Mapping[str, object]) -> Any:
    if isinstance(args, Mapping):
        return {name: _redacted(value) for name, value in args.items()}
    return tuple(map(_redacted, args))


def _described(error: BaseException | None) -> str:
    """Return an error's type and where it was raised; its message may quote a client's data."""
    if error is None:
        return ""
    *_, frame = traceback.extract_tb(error.__traceback__) or [None]
    where = "" if frame is None else f" at {frame.filename}:{frame.lineno}"
    return f" {type(error).__name__}{where}"


def _redacted(value: object) -> Any:
    """Return an argument that shows nothing of a client's data: a number, a request's id, or a size."""
    if value is None or isinstance(value, int | float | enum.Enum):
        return value
    if isinstance(value, str) and _REQUEST_ID.fullmatch(value):
        return value
    if isinstance(value, str | bytes):
        return f"<{len(value)} characters>"
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        return f"<{len(value)} values>"
    return f"<{type(value).__name__}>"


def redact_content() -> None:
    make = logging.getLogRecordFactory()
    if not isinstance(make, _WithoutContent):
        logging.setLogRecordFactory(_WithoutContent(make))
