"""Measures the time to the first token of a stream and between tokens, when events are sent to the client.

The first event with text counts as the first token, since a chat begins with an event without text. After
that each of vLLM's events is at least one token, possibly with empty text, except those that end a stream.
"""

from __future__ import annotations

import re
import time
from typing import Final

from app.audit.records import Record
from app.observability.metrics import Metrics, kind_of

_ERROR: Final = 'data: {"error"'
_DONE: Final = "data: [DONE]"
_USAGE: Final = re.compile(r'"choices": ?\[\]')
_TEXT: Final = re.compile(r'"(?:text|content|reasoning)": ?"[^"]|"tool_calls": ?\[ ?\{|"finish_reason": ?"')
_HEAD_LENGTH: Final = 512
"""The number of characters in which an event shows whether it has choices."""
_LARGE: Final = 8192
"""An event of more characters contains results of interventions, which come with tokens."""


class TokenTimes:
    """The token times of one stream; with several choices, which interleave, only the first token's."""

    def __init__(self, metrics: Metrics, record: Record, num_choices: int) -> None:
        kind = kind_of(record.operations)
        self._begun_s = record.begun_s
        self._first = metrics.first_token_s.labels(record.route, kind)
        between = metrics.between_tokens_s.labels(record.route, kind)
        self._between = between.observe if num_choices == 1 else None
        self._last_s = 0.0

    def record_event(self, event: str) -> None:
        if self._last_s:
            if self._between is not None and _has_token(event):
                now = time.perf_counter()
                self._between(now - self._last_s)
                self._last_s = now
        elif _has_text(event):
            self._last_s = time.perf_counter()
            self._first.observe(self._last_s - self._begun_s)


def _has_token(event: str) -> bool:
    if event.startswith((_DONE, _ERROR)):
        return False
    return _USAGE.search(event, 0, _HEAD_LENGTH) is None


def _has_text(event: str) -> bool:
    if not _has_token(event):
        return False
    if len(event) > _LARGE:
        return True
    return _TEXT.search(event) is not None


__all__ = ["TokenTimes"]
