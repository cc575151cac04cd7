"""Removal of clients' data from vLLM's log lines.

Hazard: some of vLLM's log lines quote requests: the text of a grammar, the tokens of an answer, a chat
template, a tool call. The modules that read requests and answers log such data as arguments and in
tracebacks. Safeguard: such a line keeps the event, its location, the error's type and the request's id.
``leave_content_out`` is called once in each process that runs vLLM: the server's and the engine's.
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
    "vllm.v1.structured_output",
)
"""Prefixes of the loggers of modules that read requests or answers."""

_REQUEST_ID: Final = re.compile(r"(?:chat)?cmpl-[\w.-]{1,200}")
_TOKEN: Final = re.compile(r"\btoken %s")
_Factory = Callable[..., logging.LogRecord]


class _WithoutContent:
    """A log record factory that removes quoted data from arguments and errors."""

    def __init__(self, make: _Factory) -> None:
        """Wrap the factory ``make``."""
        self._make = make

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        if not f"{record.name}.".startswith(_READERS):
            return record
        record.msg = _TOKEN.sub(
            "a token%.0s", record.msg if isinstance(record.msg, str) else _told(record.msg)
        )
        if isinstance(record.args, Mapping):
            record.args = {name: _told(one) for name, one in record.args.items()}
        elif record.args:
            record.args = tuple(map(_told, record.args))
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            *_, frame = traceback.extract_tb(error.__traceback__) or [None]
            where = "" if frame is None else f" at {frame.filename}:{frame.lineno}"
            record.msg, record.args = f"{record.getMessage()} {type(error).__name__}{where}", ()
            record.exc_info = record.exc_text = None
        return record


def _told(value: object) -> Any:
    """Return a loggable form of a value: a number, a request's id, or only the type or size of the value."""
    if value is None or isinstance(value, int | float | enum.Enum):
        return value
    if isinstance(value, str) and _REQUEST_ID.fullmatch(value):
        return value
    if isinstance(value, str | bytes):
        return f"<{len(value)} characters>"
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        return f"<{len(value)} values>"
    return f"<{type(value).__name__}>"


def leave_content_out() -> None:
    """Make vLLM log no data of clients; idempotent."""
    make = logging.getLogRecordFactory()
    if not isinstance(make, _WithoutContent):
        logging.setLogRecordFactory(_WithoutContent(make))


__all__ = ["leave_content_out"]
