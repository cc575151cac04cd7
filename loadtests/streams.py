"""Parses a streamed response line by line, and measures the time to first token and between tokens.

The first token is the first event with text, not the first byte: a server may send headers, a comment or a
role long before. Tokens that are available at once may arrive in one event, so gaps are measured between
events with text, and tokens are counted by the server's own ``usage``.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class _StreamChoice(msgspec.Struct):
    text: str = ""


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_StreamChoice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_DECODER: Final = msgspec.json.Decoder(_Event)


class Stream:
    """The state of one response.

    Attributes:
        first_s: Seconds from the request to the first token; None before it.
        gaps_s: Seconds between consecutive events with text.
        num_tokens: The number of tokens, as counted by the server.
        is_done: Whether the stream has ended properly.
        error: The code of the error that ended it, or empty.
    """

    def __init__(self, began: float) -> None:
        """``began`` is the time of the request, on the clock of ``take``."""
        self.first_s: float | None = None
        self.gaps_s: list[float] = []
        self.num_tokens = 0
        self.is_done = False
        self.error = ""
        self._began = began
        self._last = 0.0

    def take(self, line: bytes, now: float) -> None:
        """Parse a line received at time ``now``.

        Raises:
            msgspec.DecodeError: It is not an event of a completion.
        """
        if not line.startswith(_DATA):
            return
        data = line[len(_DATA) :].strip()
        if data == _DONE:
            self.is_done = True
            return
        event = _DECODER.decode(data)
        if event.error is not None:
            self.error = str(event.error.get("code"))
        if event.usage is not None:
            self.num_tokens = event.usage.completion_tokens
        if any(choice.text for choice in event.choices):
            self._token(now)

    def _token(self, now: float) -> None:
        if self.first_s is None:
            self.first_s = now - self._began
        else:
            self.gaps_s.append(now - self._last)
        self._last = now

    def failure(self) -> str:
        """Return the fault of the complete response; empty if there is none."""
        if self.error:
            return self.error
        if not self.is_done:
            return "the stream ended early"
        return "" if self.first_s is not None and self.num_tokens else "the stream had no token"


__all__ = ["Stream"]
