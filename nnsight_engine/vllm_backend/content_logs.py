"""vLLM's log lines without what clients sent or got.

Some of vLLM's errors quote a request: the text of a grammar, the tokens of an answer. Its serving classes and
its engine log them with their tracebacks. Here such a line keeps what happened, where, and the error's type.
Called once in each process that has vLLM: the server's, and the engine's.
"""

from __future__ import annotations

import logging
import traceback
from typing import Final

_LOGGERS: Final = (
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.structured_output",
    "vllm.v1.structured_output.backend_guidance",
    "vllm.v1.structured_output.backend_xgrammar",
)


class _WithoutContent(logging.Filter):
    """Replaces errors by their types and places, and lists by their lengths."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, changed where it may quote a request."""
        if isinstance(record.args, tuple):
            record.args = tuple(
                f"<{len(one)} values>" if isinstance(one, list | tuple | dict) else one for one in record.args
            )
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            *_, frame = traceback.extract_tb(error.__traceback__) or [None]
            where = "" if frame is None else f" at {frame.filename}:{frame.lineno}"
            record.msg, record.args = f"{record.getMessage()} {type(error).__name__}{where}", ()
            record.exc_info = record.exc_text = None
        return True


def leave_content_out() -> None:
    """Have vLLM log nothing of what clients send; idempotent."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, _WithoutContent) for one in logger.filters):
            logger.addFilter(_WithoutContent())


__all__ = ["leave_content_out"]
